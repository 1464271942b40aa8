"""How a memory shares the work of the user's optimizers: momentum, steps, optimizer states.

An optimizer must not repeat what a memory has done in its place. The user's hyper-parameters stay
in the parameter groups, where schedulers and checkpoints expect them.
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
from policies import DENSE

FEW_RANKS = 8
"""The largest number of ranks among which voted indices, and every CF, were seen to keep dense's
quality (docs/research/defaults.md)."""

TRIED = 16
"""The largest number of ranks with which CFs of sparsifiers were tried."""

Group = Mapping[str, Any]
"""A parameter group of an optimizer."""

Groups = list[dict[str, Any]]
"""The parameter groups of an optimizer."""


class Handover:
    """The contract of all handovers. This class leaves all work to the optimizers.

    sends_updates: some compressed steps exchange updates, not gradients. power: see `Context`.
    leaves_gradients: `p.grad` holds gradients, as with DDP alone, and a script may change it.
    other_optimizer: the name of an optimizer that has stepped the parameters, and that no
    memory can take work from. dense_because: why the next step must be dense; "": it need not
    be."""

    sends_updates = False
    power = 0.5
    other_optimizer = ""
    dense_because = ""

    @property
    def leaves_gradients(self) -> bool:
        return self.sends_updates

    def early(self, ranks: int) -> float:
        """`Context.early`. The first gradients are the largest: at a large CF they would wait in
        the residual, and set training back later."""
        return DENSE

    def proven(self, ranks: int) -> float:
        """`Context.proven` among more than a few ranks. SGD keeps dense's quality at CF 10 among 16
        (docs/research/defaults.md)."""
        return 10.0 if ranks <= TRIED else DENSE

    def begin_step(
        self, exchange: Exchange, cf: float | None, may_leave_momentum: bool = True
    ) -> None:
        """Called on all ranks before the first bucket of an exchange. If the step needs equal
        optimizer states, the ranks average them here (collectives).

        cf: the CF of the step; None for a dense step. may_leave_momentum: the memory may leave
        momentum to the optimizer, because the step measures no CF, and all gradients of the last
        agreed step were finite."""

    def agree(self, exchange: Exchange) -> bool:
        """Optimizer-state sync between steps (a collective): the states become equal on all ranks,
        and undelivered updates move the parameters now. Returns whether states may have differed,
        or updates may have been undelivered."""
        return False

    def before_step(self, optimizer: Optimizer, groups: Groups) -> Groups | None:
        """An optimizer is about to step with these parameter groups. Returns the groups to step
        with instead; None: `groups`."""
        return None

    def preview(
        self, parameters: Sequence[ModelParameter], grads: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        """The updates that a step with these gradients would make, both flat. If gradients are
        exchanged, the gradients themselves."""
        return grads

    def show_gradients(self) -> None:
        """Called before `hand_back` if no optimizer has stepped since the last backward: `p.grad`
        must hold what the optimizers need to step by themselves."""

    def hand_back(self, exchange: Exchange | None) -> None:
        """Return all work to the optimizers, and leave residuals in units of gradients. Pending
        momentum goes to the optimizers' momentum buffers (a collective), or to the residuals."""

    def forget_moments(self) -> None:
        """Drop copies of optimizer states, since a script has loaded other states."""

    def state_dict(self) -> dict[str, Any]:
        """The handover's state, between steps. Called before the states of parameters are saved."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a `state_dict()`. Called before the states of parameters are loaded."""


def rate_of(group: Group) -> Any:
    """The learning rate of a parameter group, a tensor or Python's own number; 1 if the group has
    none (Adafactor)."""
    lr = group.get("lr")
    if isinstance(lr, Tensor):
        return lr
    # A scheduler that computes with NumPy sets NumPy's numbers. `torch.load` refuses a state with
    # such a number.
    return 1.0 if lr is None else float(lr)


def learning_rate(optimizer: Optimizer | None) -> float:
    """The first parameter group's learning rate; nan if there is none, or if it is on a device."""
    lr = optimizer.param_groups[0].get("lr") if optimizer and optimizer.param_groups else None
    lr = nan if lr is None else lr
    return kernels_for(lr).look(lambda: float(lr), nan) if isinstance(lr, Tensor) else float(lr)


def loss_scale(scaler: GradScaler | None, device: torch.device) -> Tensor | None:
    """The loss scale as a tensor, never read on the host; None without an active scaler."""
    if scaler is None or not scaler.is_enabled():
        return None
    return scaler.scale(torch.ones((), device=device))


def describe(optimizers: Sequence[Optimizer]) -> str:
    """The optimizers' classes and settings that must be equal on all ranks, as text."""
    settings = ("momentum", "betas", "amsgrad", "centered")
    described = []
    for optimizer in optimizers:
        groups = optimizer.param_groups
        kept = [{name: group[name] for name in settings if name in group} for group in groups]
        stepped = f"stepped before: {bool(optimizer.state)}"
        described.append(f"{type(optimizer).__name__} with {kept}, {stepped}")
    return ", ".join(described) or "none"


def closure_of(args: Any, kwargs: Any) -> Any:
    """The closure of an optimizer's step, or None. args, kwargs: as torch passes them to hooks."""
    return args[1] if len(args) > 1 else kwargs.get("closure")


def when_gradients_are_there(act: Callable[[], object], args: Any, kwargs: Any) -> Any:
    """For a hook before an optimizer's step: call `act` now; if the step has a closure, which runs
    backward, call `act` after the closure.

    args, kwargs: as torch passes them to the hook, the optimizer first. Returns the hook's result:
    None, or new (args, kwargs)."""
    closure = closure_of(args, kwargs)
    if closure is None:
        act()
        return None

    def then_act() -> Any:
        loss = closure()
        act()
        return loss

    return args[:1], {**kwargs, "closure": then_act}


def steps_as(optimizer: Optimizer | None, kind: type[Optimizer]) -> bool:
    """Whether the optimizer is of this kind, and has the `step` of this kind. A subclass with
    another `step` (LARS, for instance) may do anything."""
    if not isinstance(optimizer, kind):
        return False
    return inspect.unwrap(type(optimizer).step) is inspect.unwrap(kind.step)


def is_torchs_own(optimizer: Optimizer) -> bool:
    """Whether the optimizer's `step` is that of an optimizer in `torch.optim`."""
    step = inspect.unwrap(type(optimizer).step)
    return bool(step.__module__.startswith("torch.optim."))


def stand_in_for(optimizer: Optimizer) -> Optimizer:
    """A shallow copy of an optimizer, to take one step in its place with the same state.

    A hook before `step()` may replace the step's arguments, of which the first is the optimizer.
    Groups are replaced in the copy's `param_groups`. The user's groups never change, so nothing
    must be restored, even if the step raises or adds a parameter group."""
    other = object.__new__(type(optimizer))
    vars(other).update(vars(optimizer))
    return other


def with_settings(group: Group, settings: Group, managed: Collection[Tensor]) -> Groups:
    """Copies of a parameter group: the `managed` parameters with these settings, the others with
    the user's."""
    inside = [p for p in group["params"] if p in managed]
    outside = [p for p in group["params"] if p not in managed]
    copies = [{**group, **settings, "params": inside}, {**group, "params": outside}]
    return [each for each in copies if each["params"]]
