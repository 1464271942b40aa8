"""Error feedback: what was not sent in one step is added to the gradient of the next.

r' = a - c with a = g + r and c what was *sent* (Karimireddy and others 2019; DESIGN: one memory,
keyed by parameter). A memory changes in two stages. While the hook runs, the gradient is
accumulated; once the payloads of all ranks are there and finite, what was sent is taken off
(`settle`). If any rank's gradient was not finite, the accumulation is undone instead, so that the
memory is as it was before the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor


@dataclass(eq=False)
class Slot:
    """What is kept for one parameter, flat. Half-precision parameters are kept in float32.

    residual: allocated at the first compressed step; meaningless unless `filled`.
    velocity: with momentum correction only. started: the velocity has had its first step.
    fresh: that first step was this one (SGD does not dampen it). Both are this rank's own: a rank
    that has not used the parameter has no velocity. stepped: the optimizer has stepped with a mean
    gradient of it, which is so on all ranks or on none. lag: the share of the momentum's lag that
    the velocity moves with (`MomentumRule.with_lag`).
    arrived: when its gradient was ready in the first backward, among all. places: where residual
    and velocity go, if they are to lie next to others'.
    """

    name: str
    param: Tensor
    residual: Tensor | None = None
    filled: bool = False
    velocity: Tensor | None = None
    started: bool = False
    fresh: bool = False
    stepped: bool = False
    lag: float = 1.0
    arrived: float = inf
    places: dict[str, Tensor] = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.param.dtype == torch.float64 else torch.float32

    def zeros(self, what: str = "") -> Tensor:
        """what: "residual" or "velocity", if it is to be that."""
        place = self.places.get(what)
        if place is not None:
            return place.zero_()
        return torch.zeros(self.param.numel(), dtype=self.dtype, device=self.param.device)

    def open_residual(self) -> Tensor:
        """The residual, zero if it was empty."""
        if self.residual is None:
            self.residual = self.zeros("residual")
        elif not self.filled:
            self.residual.zero_()
        self.filled = True
        return self.residual


class MomentumRule(NamedTuple):
    """How torch's SGD moves its velocity: u = momentum * u + (1 - dampening) * gain * g, with
    gain 1."""

    momentum: float
    dampening: float = 0.0
    nesterov: bool = False
    gain: float = 1.0

    def with_lag(self, share: float) -> MomentumRule:
        """A momentum with this share of the lag m / (1 - m), the mean age in steps of what a
        velocity holds, by which every gradient still adds up to the same."""
        m = self.momentum
        if share == 1 or not 0 < m < 1:
            return self
        lag = share * m / (1 - m)
        return self._replace(momentum=lag / (1 + lag), gain=1 / (1 + lag) / (1 - m))

    def change_of_lag(self, share: float, other: float) -> float:
        """What a velocity is multiplied by when it moves with the `other` share from now on: what
        it has yet to deliver, m / (1 - m) times itself (m times that with Nesterov), stays."""
        if share == other or not 0 < self.momentum < 1:
            return 1.0
        now, then = self.with_lag(share).momentum, self.with_lag(other).momentum
        return share / other * (now / then if self.nesterov else 1.0)


class Addition(NamedTuple):
    """The error-fed gradient a = target + addend; whoever compresses adds it in place.

    addend: None if `target` holds it all."""

    target: Tensor
    addend: Tensor | None


class NoMemory:
    """Nothing is remembered: what is not sent is lost (for unbiased compressors). A residual that
    another memory has left behind goes with the next dense step.

    maybe_unused: a parameter may be unused on all ranks in a step (find_unused_parameters).
    """

    name = "none"
    keeps_residual = False
    keeps_velocity = False

    def __init__(self, maybe_unused: Callable[[], bool]) -> None:
        self._maybe_unused = maybe_unused

    def holds(self, slots: Iterable[Slot]) -> bool:
        """Something is remembered of earlier steps."""
        return any(slot.filled or slot.velocity is not None for slot in slots)

    def open(self, slot: Slot, grad: Tensor, cf: float) -> Addition:
        """What a step at `cf`, compressed, has to compress."""
        return Addition(grad, None)

    def undo_open(self, slot: Slot, grad: Tensor) -> None:
        """Take back what `open` and the addition did to the memory (to rounding)."""

    def remainder(self, slot: Slot) -> Tensor | None:
        """Where the error-fed gradient is (flat), for what is sent to be taken off; None if what
        is not sent is lost."""
        return None

    def rules(self, slot: Slot, cfs: Sequence[float]) -> Sequence[MomentumRule]:
        """How the velocity moves in a compressed step at each of the CFs; none without one."""
        return ()

    def entering(self, slot: Slot, cfs: Sequence[float]) -> Sequence[float]:
        """What a compressed step at each of the CFs multiplies the velocity by before it moves."""
        return [1.0] * len(cfs)

    def masks(self, cf: float) -> bool:
        """The velocity of what is sent at this CF is cleared."""
        return False

    def settle(self, slot: Slot, cf: float, sent: Sequence[Tensor] | None) -> None:
        """What was sent at `cf` has been taken off the remainder.

        sent: the indices of what was sent (int64), in several tensors; None if that is all."""

    def fold(self, slot: Slot, grad: Tensor) -> None:
        """Turn `grad`, in place, into all that a dense step has to send."""
        if slot.filled:
            assert slot.residual is not None
            grad.add_(slot.residual)

    def undo_fold(self, slot: Slot) -> None:
        """Take back what `fold` did to the memory."""

    def commit_dense(self, slot: Slot) -> None:
        """What `fold` made was sent: nothing remains."""
        slot.filled = False

    def idle(self, slot: Slot) -> bool:
        """True if a dense step has nothing to fold in, now and for this slot."""
        return not slot.filled

    def holds_back(self, slot: Slot, grad_energy: float) -> bool:
        """True if this slot sends nothing this step and keeps its memory to itself.

        DDP throws away what arrives for a globally unused parameter, so where there may be such, a
        slice that is exactly zero must not spend its residual."""
        return grad_energy == 0.0 and self._maybe_unused()

    def state_dict(self, slot: Slot) -> dict[str, Any]:
        return {}

    def load_state_dict(self, slot: Slot, state: Mapping[str, Any]) -> None:
        return


class Residual(NoMemory):
    """Plain error feedback: one residual a parameter."""

    name = "residual"
    keeps_residual = True

    def open(self, slot: Slot, grad: Tensor, cf: float) -> Addition:
        return Addition(slot.open_residual(), grad)

    def undo_open(self, slot: Slot, grad: Tensor) -> None:
        assert slot.residual is not None
        slot.residual.sub_(grad)

    def remainder(self, slot: Slot) -> Tensor | None:
        return slot.open_residual()

    def state_dict(self, slot: Slot) -> dict[str, Any]:
        if not slot.filled:
            return {}
        assert slot.residual is not None
        return {"residual": slot.residual.clone()}

    def load_state_dict(self, slot: Slot, state: Mapping[str, Any]) -> None:
        saved = state.get("residual")
        slot.filled = saved is not None
        if saved is not None:
            slot.open_residual().copy_(saved)
