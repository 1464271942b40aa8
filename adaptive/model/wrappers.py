"""Wrappers that frameworks put around a model and an optimizer. This module looks through them by
their attributes alone, so no framework needs to be installed."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

AROUND_MODELS = ("_forward_module", "_orig_mod")
"""Attributes in which the wrappers of Fabric and torch.compile hold the wrapped module. Fabric's
attribute is first, because Fabric's wrapper also has the attributes of the module inside."""

PREPARED = "_is_accelerate_prepared"
"""An attribute that Accelerate gives to the models that it has prepared. Accelerate uses torch's
own DDP, without a wrapper."""

FRAMEWORKS = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning")
"""Packages whose checkpoints hold rank 0's state only, and are loaded by all ranks."""


class Unwrapped(NamedTuple):
    """A model and its optimizers without wrappers.

    scaler: the `GradScaler` of an optimizer's wrapper; None without one. by_framework: some wrapper
    is of one of FRAMEWORKS, or the model is PREPARED."""

    model: Any
    optimizers: tuple[Any, ...]
    scaler: Any
    by_framework: bool


def unwrap(model: Any, optimizer: Any) -> Unwrapped:
    """The DDP model inside the wrappers of `torch.compile`, Accelerate or Fabric, and the innermost
    optimizers. A model or an optimizer without wrappers is returned unchanged. optimizer: one
    optimizer, several, or None."""
    scaler, by_framework = None, False
    while not isinstance(model, DistributedDataParallel):
        inside = (getattr(model, name, None) for name in AROUND_MODELS)
        inner = next((each for each in inside if isinstance(each, nn.Module)), None)
        if inner is None:
            break
        by_framework = by_framework or _is_of_framework(model)
        model = inner
    by_framework = by_framework or bool(getattr(model, PREPARED, False))
    given = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
    optimizers = []
    for each in given if optimizer is not None else ():
        while not isinstance(each, LRScheduler) and isinstance(
            inner := getattr(each, "optimizer", None), Optimizer
        ):
            by_framework = by_framework or _is_of_framework(each)
            scaler = scaler or getattr(each, "scaler", None)
            each = inner
        optimizers.append(each)
    return Unwrapped(model, tuple(optimizers), scaler, by_framework)


def steps_a_part(optimizer: Optimizer) -> bool:
    """Whether each rank steps only some of the parameters, for all ranks (torch's
    `ZeroRedundancyOptimizer`)."""
    # Importing this class takes long. If nobody has imported it, no optimizer can be of this class.
    module = sys.modules.get("torch.distributed.optim")
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)


def advice(optimizer: Optimizer) -> str:
    """Advice on what to hand over in place of an optimizer that no memory can serve; "" if there is
    none."""
    name = type(optimizer).__name__
    if steps_a_part(optimizer):
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
