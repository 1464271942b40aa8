"""What frameworks put around a model and an optimizer, looked through by their attributes alone, so
that none of them has to be there."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

AROUND_MODELS = ("_forward_module", "_orig_mod")
"""Where Fabric's module and torch.compile's have the one inside, in the order to look: Fabric's
also answers for the module that the user has given it."""

FRAMEWORKS = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning")
"""Packages whose checkpoints hold what rank 0 has, and are read by all ranks."""


class Unwrapped(NamedTuple):
    """A model and its optimizers without what frameworks have put around them.

    model, optimizers: those inside, or what was given where nothing is. scaler: the `GradScaler`
    that a wrapper of an optimizer has. by_framework: one of FRAMEWORKS has made a wrapper."""

    model: Any
    optimizers: tuple[Any, ...]
    scaler: Any
    by_framework: bool


def unwrap(model: Any, optimizer: Any) -> Unwrapped:
    """The DDP model inside of what `torch.compile`, Accelerate or Fabric have made of it, and the
    innermost optimizers. optimizer: one, several, or None."""
    scaler, by_framework = None, False
    while not isinstance(model, DistributedDataParallel):
        inside = (getattr(model, name, None) for name in AROUND_MODELS)
        inner = next((each for each in inside if isinstance(each, nn.Module)), None)
        if inner is None:
            break
        by_framework = by_framework or _is_of_framework(model)
        model = inner
    given = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
    optimizers = []
    for each in given if optimizer is not None else ():
        while isinstance(inner := getattr(each, "optimizer", None), Optimizer):
            by_framework = by_framework or _is_of_framework(each)
            scaler = scaler or getattr(each, "scaler", None)
            each = inner
        optimizers.append(each)
    return Unwrapped(model, tuple(optimizers), scaler, by_framework)


def steps_a_part(optimizer: Optimizer) -> bool:
    """Each rank steps some of the parameters, for all ranks."""
    return isinstance(optimizer, ZeroRedundancyOptimizer)


def advice(optimizer: Optimizer) -> str:
    """What to hand over instead of an optimizer whose work no memory takes over; "" if nothing is
    known."""
    name = type(optimizer).__name__
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        return (
            f"{name} keeps the state of other parameters on every rank, so that neither momentum "
            f"nor moments can be taken over: use the optimizer itself, without it"
        )
    within = [what for what, value in vars(optimizer).items() if isinstance(value, Optimizer)]
    if within:
        return (
            f"{name} has an optimizer as its .{within[0]}: hand that over, "
            f"attach(model, optimizer=optimizer.{within[0]}), if it is the one that steps"
        )
    return ""


def _is_of_framework(wrapper: object) -> bool:
    return type(wrapper).__module__.split(".")[0] in FRAMEWORKS
