"""The optimizer of a run, and its learning rate in each step, as the configuration has them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import cos, pi
from typing import Any

from torch import nn, optim

from runs.config import TrainConfig
from runs.settings import ADAGRAD_LR, ADAMW_DECAY, BETAS, LR, WITH_BETAS
from runs.tasks import Task, trainable

OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {
    "sgd": optim.SGD,
    "adamw": optim.AdamW,
    "adam": optim.Adam,
    "nadam": optim.NAdam,
    "radam": optim.RAdam,
    "rmsprop": optim.RMSprop,
    "adagrad": optim.Adagrad,
}


def learning_rate(config: TrainConfig) -> float | None:
    """The learning rate that schedules start from; None for the task's own, which is for SGD."""
    if config.lr is not None or config.optimizer == "sgd":
        return config.lr
    return ADAGRAD_LR if config.optimizer == "adagrad" else LR


def make_optimizer(config: TrainConfig, task: Task, model: nn.Module) -> optim.Optimizer:
    """The optimizer of the model's parameters that are not frozen, with the task's learning rate.

    Settings that the configuration leaves out are the task's for SGD. For the others they are those
    above and otherwise torch's own.
    """
    if config.optimizer == "sgd":
        return _sgd(config, task, model)
    decay = ADAMW_DECAY if config.optimizer == "adamw" else 0.0
    if config.weight_decay is not None:
        decay = config.weight_decay
    settings: dict[str, Any] = {"lr": task.lr, "weight_decay": decay}
    if config.optimizer in WITH_BETAS:
        settings["betas"] = BETAS if config.betas is None else config.betas
    parameters: Iterable[Any] = trainable(model)
    if config.optimizer == "adamw":
        parameters = _decayed_and_others(model)
    return OPTIMIZERS[config.optimizer](parameters, **settings)


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


def _decayed_and_others(model: nn.Module) -> list[dict[str, Any]]:
    """Two parameter groups: biases and the scales of norms, which have fewer than two dimensions,
    are not decayed."""
    parameters = trainable(model)
    return [
        {"params": [p for p in parameters if p.dim() >= 2]},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
