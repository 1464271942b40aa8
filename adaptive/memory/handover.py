"""What a memory and the user's optimizer have to do with each other.

A memory that does part of an optimizer's work must keep the optimizer from doing it again. The
user's hyper-parameters stay in the parameter groups, where schedulers and checkpoints expect them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from math import nan
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from adaptive.model.parameters import ModelParameter
from adaptive.network.collectives import Exchange
from compressors.kernels import kernels_for

Group = Mapping[str, Any]
"""A parameter group of an optimizer."""


class Handover:
    """What is done in the place of the user's optimizers, and the contract of it: here nothing.

    sends_updates: in some compressed steps updates are exchanged, and not gradients.
    keeps_momentum: see `Context`.
    leaves_gradients: `p.grad` is as DDP without a compressor leaves it, or the script's to change.
    other_optimizer: the name of an optimizer that has stepped our parameters, and in whose place
    nothing can be done. dense_because: why the next step must be dense; "": it need not."""

    sends_updates = False
    other_optimizer = ""
    dense_because = ""

    @property
    def keeps_momentum(self) -> bool:
        return False

    @property
    def leaves_gradients(self) -> bool:
        return self.sends_updates

    def begin_step(self, exchange: Exchange, cf: float | None, may_rest: bool = True) -> None:
        """Called on all ranks before the first bucket of a backward that is exchanged. Where the
        step needs it the ranks agree on what their optimizers keep (collectives).

        cf: at which the step is compressed; None: it is dense. may_rest: the step measures no CF,
        and no rank had a bad gradient in the step before."""

    def agree(self, exchange: Exchange) -> bool:
        """Between steps (a collective): what the ranks' optimizers keep becomes the same on all of
        them, and what waits for the optimizer's next step moves the parameters now. Returns whether
        there may have been something of either."""
        return False

    def before_step(
        self, optimizer: Optimizer, groups: list[dict[str, Any]]
    ) -> list[dict[str, Any]] | None:
        """An optimizer is to step by gradients that a memory has made, with these parameter groups.
        Returns groups to step with instead, or None."""
        return None

    def preview(
        self, parameters: Sequence[ModelParameter], grads: Sequence[Tensor], strides: Sequence[int]
    ) -> Sequence[Tensor]:
        """The updates that would be made of samples of gradients, every stride-th element of each
        (flat), if updates are what is sent."""
        return grads

    def hand_back(self, exchange: Exchange | None) -> None:
        """Make residuals ones of gradients, and let the optimizers do all their work themselves
        again. What velocities have yet to deliver goes to them (a collective), or to residuals."""

    def forget_moments(self) -> None:
        """The optimizers' states were loaded: what was kept of them is of before."""

    def state_dict(self) -> dict[str, Any]:
        """Between steps, before what a memory keeps of each parameter is saved."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict()`, before what the memory keeps is loaded."""


def rate_of(group: Group) -> Any:
    """The learning rate of a parameter group; 1 for one without, as of an optimizer that sizes its
    steps itself."""
    lr = group.get("lr")
    return 1.0 if lr is None else lr


def learning_rate(optimizer: Optimizer | None) -> float:
    """Of the first parameter group; nan without one, or where a device holds it."""
    lr = optimizer.param_groups[0].get("lr") if optimizer else None
    lr = nan if lr is None else lr
    return kernels_for(lr).look(lambda: float(lr), nan) if isinstance(lr, Tensor) else float(lr)


def loss_scale(scaler: GradScaler | None, device: torch.device) -> Tensor | None:
    """The loss scale as a tensor, never read on the host; None without an active scaler."""
    if scaler is None or not scaler.is_enabled():
        return None
    return scaler.scale(torch.ones((), device=device))


def describe(optimizers: Sequence[Optimizer]) -> str:
    """What must be alike on all ranks."""
    settings = ("momentum", "betas", "amsgrad", "centered")
    told = []
    for optimizer in optimizers:
        groups = optimizer.param_groups
        kept = [{name: group[name] for name in settings if name in group} for group in groups]
        stepped = f"stepped before: {bool(optimizer.state)}"
        told.append(f"{type(optimizer).__name__} with {kept}, {stepped}")
    return ", ".join(told) or "none"


def has_closure(args: Any, kwargs: Any) -> bool:
    """Of an optimizer's step, with arguments as torch hands them to its hooks."""
    return (args[1] if len(args) > 1 else kwargs.get("closure")) is not None


def when_gradients_are_there(act: Callable[[], object], args: Any, kwargs: Any) -> Any:
    """For a hook before an optimizer's step: call `act` now, or if the step has a closure, which
    runs backward, after that.

    args, kwargs: as torch hands them to the hook, the optimizer first. Returns what it wants back.
    """
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        act()
        return None

    def then_act() -> Any:
        loss = closure()
        act()
        return loss

    return args[:1], {**kwargs, "closure": then_act}


def steps_as(optimizer: Optimizer | None, kind: type[Optimizer]) -> bool:
    """Whether the optimizer is of this kind, and its `step` torch's own. A subclass with another
    `step` (LARS, for instance) may do anything."""
    if not isinstance(optimizer, kind):
        return False
    return inspect.unwrap(type(optimizer).step) is inspect.unwrap(kind.step)


def is_torchs_own(optimizer: Optimizer) -> bool:
    """Whether its `step` is one of torch's optimizers."""
    step = inspect.unwrap(type(optimizer).step)
    return bool(step.__module__.startswith("torch.optim."))


def stand_in_for(optimizer: Optimizer) -> Optimizer:
    """An optimizer that takes one step in the place of another, with the same state.

    A hook before `step()` may replace the step's arguments, and the first is the optimizer. The
    stand-in's `param_groups` can be replaced, and the user's are never touched: there is nothing to
    put back, even if the step raises or adds a parameter group."""
    other = object.__new__(type(optimizer))
    vars(other).update(vars(optimizer))
    return other


def with_settings(
    groups: Sequence[Group],
    settings: Group,
    taken: Callable[[Group], bool],
    ours: Collection[Tensor],
) -> list[dict[str, Any]]:
    """Copies of parameter groups: the parameters in `ours` of a `taken` group have these settings,
    all others those of the user."""
    changed: list[dict[str, Any]] = []
    for group in groups:
        inside: list[Tensor] = []
        outside: list[Tensor] = []
        for p in group["params"]:
            (inside if taken(group) and p in ours else outside).append(p)
        changed += [{**group, **settings, "params": inside}, {**group, "params": outside}]
    return [group for group in changed if group["params"]]
