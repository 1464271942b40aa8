"""From a configuration to the objects that it names."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from adaptive import (
    Accordion,
    AccordionPaper,
    AdaptiveCompressor,
    Budget,
    Fixed,
    Goodput,
    GraVAC,
    GraVACPaper,
    Layerwise,
    LinkSpec,
    ModelledClock,
    Policy,
    Schedule,
    Timeline,
    Warmup,
)
from adaptive.exchange.link import ServerSpec
from runs.config import TrainConfig
from runs.initial import initial_model
from runs.optimizers import learning_rate
from runs.option_rules import HOOK_OPTIONS, check_optimizer
from runs.parser import UsageError, option
from runs.policy_expression import policy_from
from runs.policy_options import DEFAULT_CF, POLICY_OPTIONS, schedule_pieces
from runs.tasks import Task, make_task

_POLICIES: dict[str, Callable[..., Policy]] = {
    "gravac": GraVAC,
    "gravac-paper": GraVACPaper,
    "accordion": Accordion,
    "accordion-paper": AccordionPaper,
    "fixed": Fixed,
    "warmup": Warmup,
    "goodput": Goodput,
    "budget": Budget,
    "layerwise": Layerwise,
    "expression": policy_from,
    "schedule": lambda schedule, **gain: Schedule(schedule_pieces(schedule), **gain),
}
_ARGUMENTS = {"warmup_steps": "steps"}
_ELSEWHERE = ("layerwise", "base", "cf_range", "rungs", "fixed_clock", "model_mb", "server")
_OPTIONAL = tuple(name for name in HOOK_OPTIONS if name not in _ELSEWHERE)


def build_task(config: TrainConfig) -> Task:
    """The task, its data read. ValueError or FileNotFoundError if it cannot be."""
    return make_task(
        config.task,
        model=config.model,
        data=Path(config.data) if config.data is not None else None,
        batch_size=config.batch_size,
        seed=config.seed,
        lr=learning_rate(config),
    )


def build_policy(config: TrainConfig) -> Policy:
    """The policy with the settings that were given, its own defaults otherwise."""
    settings = policy_settings(config)
    policy = _POLICIES[config.policy](**settings)
    return Layerwise(policy) if config.layerwise else policy


def policy_settings(config: TrainConfig) -> dict[str, Any]:
    """The arguments of the policy's class that were given. ValueError if there is no such policy,
    as a configuration that was read from a file may have it."""
    if config.policy not in POLICY_OPTIONS:
        raise ValueError(
            f"policy={config.policy!r} is unknown; accepted: {', '.join(POLICY_OPTIONS)}"
        )
    names = POLICY_OPTIONS[config.policy]
    given = {n: getattr(config, n) for n in names if getattr(config, n) is not None}
    return {_ARGUMENTS.get(name, name): value for name, value in given.items()}


def build_compressor(
    config: TrainConfig,
    samples_per_step: int,
    timeline: Sequence[Timeline] = (),
    numel: int = 1,
) -> AdaptiveCompressor:
    """The compressor, not attached yet. numel: elements of the model's gradients.

    ValueError or TypeError for settings out of range.
    """
    assert config.base is not None, "policy off has no compressor"
    settings = compressor_settings(config)
    clock = modelled_clock(config, numel)
    if clock is not None:  # the link's time is modelled too, not waited for
        settings.pop("link", None)
        settings["clock"] = clock
    return AdaptiveCompressor(
        config.base,
        policy=build_policy(config),
        samples_per_step=samples_per_step,
        timeline=list(timeline),
        **settings,
    )


def modelled_clock(config: TrainConfig, numel: int) -> ModelledClock | None:
    """A new clock for step times that are modelled; None if they are measured. numel: elements of
    the model's gradients."""
    if config.fixed_clock is None:
        return None
    link = None if config.link is None else LinkSpec.parse(config.link)
    scale = 1.0 if config.model_mb is None else config.model_mb * 1e6 / (4 * numel)
    delay = config.delay or 0
    server = None if config.server is None else ServerSpec.parse(config.server, config.workers)
    return ModelledClock(config.fixed_clock, link, scale, config.overlap, delay, server)


def compressor_settings(config: TrainConfig) -> dict[str, Any]:
    """The arguments of `AdaptiveCompressor` that were given, beside base and policy."""
    settings = {n: getattr(config, n) for n in _OPTIONAL if getattr(config, n) is not None}
    if config.policy == "fixed" and not config.layerwise:
        cf = 1.0 if config.base == "none" else DEFAULT_CF if config.cf is None else config.cf
        settings["cf_range"] = (cf, cf)
    elif config.cf_range is not None:
        settings["cf_range"] = config.cf_range
    if config.rungs is False:
        settings["rungs"] = None
    if config.residual_dtype is not None:
        given = config.residual_dtype
        settings["residual_dtype"] = getattr(torch, given, given)  # an unknown one is refused
    return settings


def check(config: TrainConfig, resumed: bool = False) -> None:
    """Build everything once, to have its errors before workers start.

    resumed: the run goes on from a checkpoint, and so does without the weights of --init.
    UsageError names the option, its value and what is accepted.
    """
    check_optimizer(config)
    check_compression(config)
    try:
        task = build_task(config)
        task.steps_per_epoch(config.workers)
    except (ValueError, TypeError, OSError) as error:
        raise UsageError(_with_option(str(error))) from error
    if config.init is not None or config.lora is not None:
        initial_model(config, task, read_weights=not resumed)


def check_compression(config: TrainConfig) -> None:
    """The part of `check` that reads no data."""
    try:
        if config.policy != "off":
            build_compressor(config, samples_per_step=1)
    except (ValueError, TypeError) as error:
        raise UsageError(_with_option(str(error))) from error


def _with_option(message: str) -> str:
    """The library names its argument first; on the command line that is an option."""
    word = re.match(r"\w*", message)
    name = word[0] if word else ""
    if name not in {field.name for field in fields(TrainConfig)}:
        return message
    return option(name) + message[len(name) :]
