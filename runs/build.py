"""From a configuration to the objects that it names."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from math import cos, pi
from pathlib import Path
from typing import Any

import torch
from torch import nn, optim

from adaptive import (
    AdaptiveCompressor,
    Fixed,
    Ladder,
    LinkSpec,
    Network,
    Policy,
    Schedule,
    Timeline,
)
from adaptive.step.synchronisation import EveryStep, Synchronisation
from policies import DENSE
from runs.config import TrainConfig
from runs.expression import PLAIN, made_from, policy_from
from runs.modelled_clock import ModelledClock, ServerSpec
from runs.options import check_optimizer
from runs.parser import UsageError, option
from runs.settings import ADAGRAD_LR, BETAS, DECAY, DEFAULT_CF, LR, WITH_BETAS
from runs.tasks import Task, make_task, trainable

CF_RANGE = (10.0, 1000.0)
_WRITTEN = ("sync", "memory", "exchange")
"""Options that may be objects of the library, as Python writes them."""

_CLASSES = (optim.SGD, optim.AdamW, optim.Adam, optim.NAdam, optim.RAdam, optim.RMSprop)
OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {
    each.__name__.lower(): each for each in (*_CLASSES, optim.Adagrad)
}
MUON = "muon"
"""Two optimizers: see `make_optimizers`."""


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
    return policy_from(config.policy)


def cf_range(config: TrainConfig, policy: Policy) -> tuple[float, float]:
    """Smallest and largest CF beside dense and a ladder's rungs: those that were given, else the
    policy's own."""
    if config.cf_range is not None:
        return config.cf_range
    if isinstance(policy, Fixed):
        cfs = [DENSE if config.base == "none" else DEFAULT_CF if policy.cf is None else policy.cf]
    elif isinstance(policy, Schedule):
        cfs = [float(cf) for cf in policy.pieces.values() if cf != DENSE] or [DENSE]
    else:
        return CF_RANGE
    cfs = [cf for cf in cfs if cf not in _rungs(config)]
    return (min(cfs), max(cfs)) if cfs else CF_RANGE


def _rungs(config: TrainConfig) -> Collection[float]:
    """CFs below the range, at which a ladder has compressors of their own."""
    base = made_from(config.base or "none", "base")
    return base.rungs.keys() if isinstance(base, Ladder) else ()


def sends_dense(config: TrainConfig) -> bool:
    """It sends everything uncompressed, all along and on purpose."""
    if config.policy == PLAIN or config.base == "none":
        return True
    try:
        policy = policy_from(config.policy)
    except ValueError:
        return False
    return isinstance(policy, Fixed) and policy.cf == DENSE


def build_compressor(
    config: TrainConfig, timeline: Sequence[Timeline] = (), numel: int = 1
) -> AdaptiveCompressor:
    """The compressor, not attached yet. numel: elements of the model's gradients.

    ValueError or TypeError for settings out of range.
    """
    clock = modelled_clock(config, numel)
    arguments = compressor_arguments(config)
    if clock is not None:  # it counts the link's time, too, which is not waited for
        arguments["network"] = Network(clock=clock)
    return AdaptiveCompressor(**arguments, timeline=list(timeline))


def compressor_arguments(config: TrainConfig) -> dict[str, Any]:
    """The arguments of `AdaptiveCompressor` that a configuration names, made anew: a policy belongs
    to one model. ValueError or TypeError for settings out of range."""
    policy = build_policy(config)
    _check_pieces(config, policy)
    given = {name: getattr(config, name) for name in (*_WRITTEN, "granularity", "dense_below")}
    settings = {name: value for name, value in given.items() if value is not None}
    settings |= {name: made_from(settings[name], name) for name in _WRITTEN if name in settings}
    if config.cf_range is not None or cf_range(config, policy) != CF_RANGE:
        settings["cf_range"] = cf_range(config, policy)
    if config.network is not None:
        settings["network"] = config.network
    if config.base is not None:  # else that of the user's script
        settings["base"] = made_from(config.base, "base")
    return {**settings, "policy": policy}


def synchronisation(config: TrainConfig) -> Synchronisation:
    """How the workers keep their models together. ValueError if it cannot be read."""
    if config.sync == "auto":
        return EveryStep()  # a clock need not know more of it
    made: Synchronisation = made_from(config.sync or "EveryStep()", "sync")
    return made


def modelled_clock(config: TrainConfig, numel: int) -> ModelledClock | None:
    """A new clock for step times that are modelled; None if they are measured. numel: elements of
    the model's gradients."""
    if config.fixed_clock is None:
        return None
    link = None if config.network is None else LinkSpec.parse(config.network)
    scale = 1.0 if config.model_mb is None else config.model_mb * 1e6 / (4 * numel)
    sync = synchronisation(config)
    server = None if config.server is None else ServerSpec.parse(config.server, config.workers)
    coded = {cf: 1e-9 * ns * numel * scale for cf, ns in config.coding_by_cf}
    return ModelledClock(
        config.fixed_clock, link, scale, sync.overlap, sync.delays[0], server, coded
    )


def _check_pieces(config: TrainConfig, policy: Policy) -> None:
    """ValueError for a schedule that leaves the CF range; it would be refused in training."""
    low, high = cf_range(config, policy)
    for step, cf in policy.pieces.items() if isinstance(policy, Schedule) else ():
        if cf not in (DENSE, *_rungs(config)) and not low <= cf <= high:
            raise ValueError(
                f"policy {config.policy}: CF {cf:g} from step {step} must be 1 or inside "
                f"--cf-range {low:g} {high:g}"
            )


# -- the optimizer ---------------------------------------------------------------------------------


def learning_rate(config: TrainConfig) -> float | None:
    """The learning rate that schedules start from; None for the task's own, which is for SGD."""
    if config.lr is not None or config.optimizer == "sgd":
        return config.lr
    return ADAGRAD_LR if config.optimizer == "adagrad" else LR


def make_optimizers(config: TrainConfig, task: Task, model: nn.Module) -> list[optim.Optimizer]:
    """The optimizers of the model's parameters that are not frozen, with the task's learning rate:
    one, or Muon and an AdamW.

    Settings that the configuration leaves out are the task's for SGD. For the others they are those
    above and otherwise torch's own. UsageError for a model without matrices for Muon.
    """
    if config.optimizer == "sgd":
        return [_sgd(config, task, model)]
    decay = DECAY if config.optimizer in ("adamw", MUON) else 0.0
    if config.weight_decay is not None:
        decay = config.weight_decay
    settings: dict[str, Any] = {"lr": task.lr, "weight_decay": decay}
    with_betas = settings | {"betas": BETAS if config.betas is None else config.betas}
    if config.optimizer == MUON:
        matrices = _matrices(model)
        groups = _decayed_and_others(model, without=matrices)
        return [_muon(matrices, config, settings), optim.AdamW(groups, **with_betas)]
    if config.optimizer in WITH_BETAS:
        settings = with_betas
    parameters: Iterable[Any] = trainable(model)
    if config.optimizer == "adamw":
        parameters = _decayed_and_others(model)
    return [OPTIMIZERS[config.optimizer](parameters, **settings)]


def lr_factor(config: TrainConfig, step: int) -> float:
    """What the learning rate is multiplied by in a step, the first of which is 0.

    It depends on nothing but the step, so a resumed run goes on with the learning rates of one that
    was never stopped.
    """
    drops = (config.lr_drop,) if isinstance(config.lr_drop, int) else config.lr_drop or ()
    drop: float = 0.1 ** sum(step >= first for first in drops)
    count = step + 1
    if count <= config.warmup:
        return drop * (count / config.warmup)
    if config.lr_schedule == "constant":
        return drop
    passed = (count - config.warmup) / (config.steps - config.warmup)
    if config.lr_schedule == "cosine":
        return drop * (0.5 * (1 + cos(pi * passed)))
    return drop * (1 - passed)


def _sgd(config: TrainConfig, task: Task, model: nn.Module) -> optim.Optimizer:
    """The task's SGD, with the settings of the configuration where it has any."""
    optimizer = task.optimizer(model)
    for name in ("momentum", "weight_decay"):
        value = getattr(config, name)
        if value is not None:
            for group in optimizer.param_groups:
                group[name] = value
    return optimizer


def _muon(
    matrices: Sequence[nn.Parameter], config: TrainConfig, settings: Mapping[str, Any]
) -> optim.Optimizer:
    """With the learning rate of an AdamW, whose steps are as large."""
    if not hasattr(optim, "Muon"):
        raise UsageError(f"--optimizer muon: needs torch 2.9 or later, this is {torch.__version__}")
    if not matrices:
        raise UsageError("--optimizer muon: needs a matrix that is neither an embedding nor last")
    own = settings if config.momentum is None else {**settings, "momentum": config.momentum}
    return optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **own)


def _matrices(model: nn.Module) -> list[nn.Parameter]:
    """For Muon: all but embeddings and the last matrix, which makes the model's output."""
    modules = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    embeddings = {id(p) for module in modules for p in module.parameters()}
    matrices = [p for p in trainable(model) if p.dim() == 2]
    return [p for p in matrices[:-1] if id(p) not in embeddings]


def _decayed_and_others(
    model: nn.Module, without: Sequence[nn.Parameter] = ()
) -> list[dict[str, Any]]:
    """Two parameter groups of all but some parameters: biases and the scales of norms, which have
    fewer than two dimensions, are not decayed."""
    left_out = set(map(id, without))
    parameters = [p for p in trainable(model) if id(p) not in left_out]
    return [
        {"params": [p for p in parameters if p.dim() >= 2]},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


# -- all of it, to see whether it can be built -----------------------------------------------------


def check(config: TrainConfig) -> None:
    """Build everything once, to have its errors before workers start.

    UsageError names the option, its value and what is accepted.
    """
    check_optimizer(config)
    check_compression(config)
    try:
        task = build_task(config)
        task.steps_per_epoch(config.workers)
    except (ValueError, TypeError, OSError) as error:
        raise UsageError(_with_option(str(error))) from error


def check_compression(config: TrainConfig) -> None:
    """The part of `check` that reads no data."""
    try:
        if config.policy != PLAIN:
            build_compressor(config)
    except (ValueError, TypeError) as error:
        raise UsageError(_with_option(str(error))) from error


def _with_option(message: str) -> str:
    """The library names its argument first; on the command line that is an option."""
    word = re.match(r"\w*", message)
    name = word[0] if word else ""
    known = {each.name for each in fields(TrainConfig)}
    return option(name) + message[len(name) :] if name in known else message
