"""The settings of a trial as Python to paste into a training script."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from runs.build import build_policy, compressor_settings, policy_settings
from runs.config import TrainConfig
from runs.policy_options import schedule_pieces

NOT_PASTED = ("link", "cf_range")
"""Settings of the emulation; and what comes first anyway."""
WIDTH = 88


def make_snippet(config: TrainConfig) -> str:
    """Imports and an `AdaptiveCompressor`; the learning rate as a comment, if it was searched."""
    policy, names = _policy(config)
    settings = compressor_settings(config)
    given: dict[str, Any] = {"base": config.base}
    if "cf_range" in settings:
        given["cf_range"] = settings["cf_range"]
    lines = _assignments(given)
    lines.append(f"policy={policy}")
    lines += _assignments({k: v for k, v in settings.items() if k not in NOT_PASTED})
    text = [f"from adaptive import {', '.join(sorted(['AdaptiveCompressor', *names]))}", ""]
    if config.lr is not None:
        text.append(f"# with a learning rate of {config.lr:g}")
    joined = f"compressor = AdaptiveCompressor({', '.join(lines)})"
    if len(joined) > WIDTH:
        joined = "\n".join(
            ["compressor = AdaptiveCompressor(", *(f"    {line}," for line in lines), ")"]
        )
    return "\n".join([*text, joined])


def _policy(config: TrainConfig) -> tuple[str, list[str]]:
    """The policy as an expression, and the classes in it."""
    made = build_policy(replace(config, layerwise=None))
    name = type(made).__name__
    arguments = ", ".join(_assignments(policy_settings(config)))
    if config.schedule is not None:
        arguments = repr(schedule_pieces(config.schedule))
    text = f"{name}({arguments})"
    return (f"Layerwise({text})", ["Layerwise", name]) if config.layerwise else (text, [name])


def _assignments(values: dict[str, Any]) -> list[str]:
    return [f"{name}={_literal(value)}" for name, value in values.items()]


def _literal(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_literal, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return json.dumps(value) if isinstance(value, str) else repr(value)
