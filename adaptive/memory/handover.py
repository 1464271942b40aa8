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

from compressors.kernels.blocks import is_host

Group = Mapping[str, Any]
"""A parameter group of an optimizer."""


def learning_rate(optimizer: Optimizer | None) -> float:
    """Of the first parameter group; nan without an optimizer, or where a device holds it."""
    lr = optimizer.param_groups[0]["lr"] if optimizer else nan
    return nan if isinstance(lr, Tensor) and not is_host(lr.device) else float(lr)


def loss_scale(scaler: GradScaler | None, device: torch.device) -> Tensor | None:
    """The loss scale as a tensor, never read on the host; None without an active scaler."""
    if scaler is None or not scaler.is_enabled():
        return None
    return scaler.scale(torch.ones((), device=device))


def describe(optimizer: Optimizer | None) -> str:
    """What must be alike on all ranks."""
    if optimizer is None:
        return "none"
    settings = ("momentum", "betas", "amsgrad", "centered")
    kept = [
        {name: group[name] for name in settings if name in group}
        for group in optimizer.param_groups
    ]
    return f"{type(optimizer).__name__} with {kept}, stepped before: {bool(optimizer.state)}"


def when_gradients_are_there(act: Callable[[bool], object], args: Any, kwargs: Any) -> Any:
    """For a hook before an optimizer's step: call `act` now, or if the step has a closure, which
    runs backward, after that; it is told whether the step is under way already.

    args, kwargs: as torch hands them to the hook, the optimizer first. Returns what it wants back.
    """
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        act(False)
        return None

    def then_act() -> Any:
        loss = closure()
        act(True)
        return loss

    return args[:1], {**kwargs, "closure": then_act}


def steps_as(optimizer: Optimizer | None, kind: type[Optimizer]) -> bool:
    """Whether the optimizer is of this kind, and its `step` torch's own. A subclass with another
    `step` (LARS, for instance) may do anything."""
    if not isinstance(optimizer, kind):
        return False
    return inspect.unwrap(type(optimizer).step) is inspect.unwrap(kind.step)


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


class Handover:
    """Neutralises settings of an optimizer while its `step()` runs, by torch's step hooks.

    neutral: the settings that a parameter group has meanwhile. taken: whether a group gets them.
    prepare: called for each of these groups before, when all gradients are there. after: once the
    optimizer has stepped.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        neutral: Group,
        taken: Callable[[Group], bool],
        prepare: Callable[[Group], None],
        after: Callable[[], None] = lambda: None,
    ) -> None:
        self._optimizer = optimizer
        self._neutral = neutral
        self._taken = taken
        self._prepare = prepare
        self._after = after
        self._own: list[dict[str, Any]] | None = None  # the groups' settings, during a step
        self._index: dict[Tensor, int] = {}
        self._indexed = 0
        self._hooks = [
            optimizer.register_step_pre_hook(
                lambda _, args, kwargs: when_gradients_are_there(self._before_step, args, kwargs)
            ),
            optimizer.register_step_post_hook(lambda *_: self._restore()),
        ]

    def settings(self, p: Tensor) -> Group | None:
        """Those of the user for this parameter as they stand now; None if it is not optimized."""
        groups = self._optimizer.param_groups
        if self._indexed != len(groups):  # built late, and again after add_param_group
            self._index = {p: i for i, group in enumerate(groups) for p in group["params"]}
            self._indexed = len(groups)
        index = self._index.get(p)
        return None if index is None else (self._own or groups)[index]

    def unhook(self) -> None:
        self._restore()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def begin(self) -> None:
        """The optimizer is to do its own part of the step now."""
        self._restore()  # a step that raised never came to its post-hook
        groups = self._optimizer.param_groups
        taken = [group for group in groups if self._taken(group)]
        for group in taken:
            self._prepare(group)
        self._own = [dict(group) for group in groups]
        for group in taken:
            group.update(self._neutral)

    def _before_step(self, under_way: bool) -> None:
        if self._hooks:  # or the step's own backward has put something else in its place
            self.begin()

    def _restore(self) -> None:
        if self._own is not None:
            for group, own in zip(self._optimizer.param_groups, self._own, strict=True):
                group.update({name: own[name] for name in self._neutral})
            self._own = None
            self._after()
