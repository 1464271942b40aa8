"""From a configuration to the objects that it names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from adaptive import (
    AdaptiveCompressor,
    Fixed,
    Layerwise,
    LinkSpec,
    ModelledClock,
    Policy,
    Schedule,
    Timeline,
)
from adaptive.exchange.link import ServerSpec
from policies import DENSE
from runs.config import TrainConfig
from runs.initial import initial_model
from runs.optimizers import learning_rate
from runs.options import HOOK_OPTIONS, check_optimizer
from runs.parser import UsageError, option
from runs.policy_expression import OFF, policy_from
from runs.settings import DEFAULT_CF
from runs.tasks import Task, make_task

CF_RANGE = (10.0, 1000.0)
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
    """The policy of the library's hook. ValueError if it cannot be read, or its settings are out
    of range; an UntrustedPolicyError if a file names a class that is not the library's."""
    policy = policy_from(config.policy)
    return Layerwise(policy) if config.layerwise else policy


def cf_range(config: TrainConfig, policy: Policy) -> tuple[float, float]:
    """Smallest and largest CF beside dense: those that were given, else the policy's own."""
    if config.cf_range is not None:
        return config.cf_range
    if isinstance(policy, Fixed):
        cf = DENSE if config.base == "none" else DEFAULT_CF if policy.cf is None else policy.cf
        return cf, cf
    if isinstance(policy, Schedule):
        cfs = [float(cf) for cf in policy.pieces.values() if cf != DENSE] or [DENSE]
        return min(cfs), max(cfs)
    return CF_RANGE


def sends_dense(config: TrainConfig) -> bool:
    """It sends everything uncompressed, all along and on purpose."""
    if config.policy == OFF or config.base == "none":
        return True
    try:
        policy = policy_from(config.policy)
    except ValueError:
        return False
    return isinstance(policy, Fixed) and policy.cf == DENSE


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
    policy = build_policy(config)
    settings = compressor_settings(config, policy)
    clock = modelled_clock(config, numel)
    if clock is not None:  # the link's time is modelled too, not waited for
        settings.pop("link", None)
        settings["clock"] = clock
    return AdaptiveCompressor(
        config.base,
        policy=policy,
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


def compressor_settings(config: TrainConfig, policy: Policy) -> dict[str, Any]:
    """The arguments of `AdaptiveCompressor` that were given, beside base and policy."""
    settings = {n: getattr(config, n) for n in _OPTIONAL if getattr(config, n) is not None}
    if config.cf_range is not None or cf_range(config, policy) != CF_RANGE:
        settings["cf_range"] = cf_range(config, policy)
    _check_pieces(config, policy)
    if config.rungs is False:
        settings["rungs"] = None
    if config.residual_dtype is not None:
        given = config.residual_dtype
        settings["residual_dtype"] = getattr(torch, given, given)  # an unknown one is refused
    return settings


def _check_pieces(config: TrainConfig, policy: Policy) -> None:
    """ValueError for a schedule that leaves the CF range; it would be refused in training."""
    low, high = cf_range(config, policy)
    for step, cf in policy.pieces.items() if isinstance(policy, Schedule) else ():
        if cf != DENSE and not low <= cf <= high:
            raise ValueError(
                f"policy {config.policy}: CF {cf:g} from step {step} must be 1 or inside "
                f"--cf-range {low:g} {high:g}"
            )


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
        if config.policy != OFF:
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
