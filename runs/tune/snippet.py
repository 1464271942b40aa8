"""The settings of a trial as Python to paste into a training script."""

from __future__ import annotations

import json
from typing import Any

from runs.build import build_policy, compressor_settings, policy_settings
from runs.config import TrainConfig

NOT_PASTED = ("link", "cf_range")
"""Settings of the emulation; and what comes first anyway."""
WIDTH = 88


def make_snippet(config: TrainConfig) -> str:
    """Imports and an `AdaptiveCompressor`; the learning rate as a comment, if it was searched."""
    policy = type(build_policy(config)).__name__
    arguments = ", ".join(_assignments(policy_settings(config)))
    settings = compressor_settings(config)
    given: dict[str, Any] = {"base": config.base}
    if "cf_range" in settings:
        given["cf_range"] = settings["cf_range"]
    lines = _assignments(given)
    lines.append(f"policy={policy}({arguments})")
    lines += _assignments({k: v for k, v in settings.items() if k not in NOT_PASTED})
    text = [f"from adaptive import AdaptiveCompressor, {policy}", ""]
    if config.lr is not None:
        text.append(f"# with a learning rate of {config.lr:g}")
    joined = f"compressor = AdaptiveCompressor({', '.join(lines)})"
    if len(joined) > WIDTH:
        joined = "\n".join(
            ["compressor = AdaptiveCompressor(", *(f"    {line}," for line in lines), ")"]
        )
    return "\n".join([*text, joined])


def _assignments(values: dict[str, Any]) -> list[str]:
    return [f"{name}={_literal(value)}" for name, value in values.items()]


def _literal(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_literal, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return json.dumps(value) if isinstance(value, str) else repr(value)
