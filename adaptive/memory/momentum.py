"""Momentum correction: the velocity is accumulated locally, and the residual is the velocity's.

Deep Gradient Compression (Lin and others 2018), section 3: with momentum in the optimizer, a
coordinate that is sent rarely loses its momentum's discount; accumulating u = m u + g before
compression keeps it. Momentum factor masking clears the velocity of what was sent.

What waits in a residual is late, as what waits in a velocity is: delay acts as momentum (Mitliagkas
and others, "Asynchrony begets momentum", 2016). So while gradients are compressed the velocity may
move with a smaller momentum, in proportion to a larger gain, and the two delays do not add up
(measured: docs/defaults.md). In dense steps it is the optimizer's own. What a velocity has yet to
deliver stays the same when the momentum changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adaptive.memory.error_feedback import Addition, Residual
from adaptive.parameters import Slot


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


class MomentumMemory(Residual):
    """A velocity and its residual for each parameter.

    rule: the momentum settings of a slot, asked anew each step, so schedulers keep working.
    has_buffer: True if the optimizer already holds a velocity for the slot.
    masking: smallest CF at which the velocity of what was sent is cleared; inf for never.
    lag: share of the momentum's lag in a step at a CF, compressed, in (0, 1].
    maybe_unused: a parameter may be unused on all ranks in a step (find_unused_parameters).
    """

    name = "momentum"
    keeps_velocity = True

    def __init__(
        self,
        rule: Callable[[Slot], MomentumRule],
        has_buffer: Callable[[Slot], bool],
        masking: float,
        lag: Callable[[float], float],
        maybe_unused: Callable[[], bool],
    ) -> None:
        super().__init__(maybe_unused)
        self._rule = rule
        self._has_buffer = has_buffer
        self._masking = masking
        self._lag = lag
        self._undo: dict[Slot, _Before] = {}
        self._asked: tuple[MomentumRule | None, Sequence[float], Sequence[MomentumRule]]
        self._asked = None, (), ()  # what `rules` was asked last, and its answer

    def rules(self, slot: Slot, cfs: Sequence[float]) -> Sequence[MomentumRule]:
        rule = self._rule(slot)
        if (rule, cfs) != self._asked[:2]:  # most slots have the same
            rules = [rule.with_lag(self._lag(cf)) for cf in cfs] if rule.momentum else []
            self._asked = rule, cfs, rules
        return self._asked[2]

    def entering(self, slot: Slot, cfs: Sequence[float]) -> Sequence[float]:
        rule = self._rule(slot)
        return [rule.change_of_lag(slot.lag, self._lag(cf)) for cf in cfs]

    def masks(self, cf: float) -> bool:
        return cf >= self._masking

    def open(self, slot: Slot, grad: Tensor, cf: float) -> Addition:
        rule = self._rule(slot)
        self._undo[slot] = _Before(rule, slot.started, slot.lag)
        if not rule.momentum:
            return super().open(slot, grad, cf)
        velocity = self._step(slot, grad, rule, self._lag(cf))
        rule = rule.with_lag(slot.lag)
        residual = slot.open_residual()
        if rule.nesterov:  # the direction is g + m u
            residual.add_(velocity, alpha=rule.momentum)
            if rule.gain != 1:
                residual.add_(grad, alpha=rule.gain - 1)
            return Addition(residual, grad)
        return Addition(residual, velocity)

    def undo_open(self, slot: Slot, grad: Tensor) -> None:
        before = self._undo.pop(slot)
        rule = before.rule.with_lag(slot.lag)
        assert slot.residual is not None
        if not rule.momentum or rule.nesterov:
            slot.residual.sub_(grad, alpha=rule.gain)
        if rule.momentum:
            assert slot.velocity is not None
            slot.residual.sub_(slot.velocity, alpha=rule.momentum if rule.nesterov else 1.0)
            self._step_back(slot, grad, before)

    def settle(self, slot: Slot, cf: float, sent: Sequence[Tensor] | None) -> None:
        self._undo.pop(slot, None)
        if slot.velocity is not None and sent is not None and self.masks(cf):
            for indices in sent:
                slot.velocity[indices] = 0

    def fold(self, slot: Slot, grad: Tensor) -> None:
        rule = self._rule(slot)
        if not rule.momentum:
            self._undo[slot] = _Before(rule, slot.started, slot.lag)
            super().fold(slot, grad)
            return
        # Undoing needs the gradient, and the collective will overwrite it: an empty residual has
        # room for it; only in the step that empties a residual does it cost an allocation.
        if slot.filled:
            saved = grad.clone()
        else:
            slot.residual = saved = slot.open_residual().copy_(grad)
            slot.filled = False
        self._undo[slot] = _Before(rule, slot.started, slot.lag, saved)
        velocity = self._step(slot, grad, rule, 1.0)
        if rule.nesterov:
            grad.add_(velocity, alpha=rule.momentum)
        else:
            grad.copy_(velocity)
        super().fold(slot, grad)

    def undo_fold(self, slot: Slot) -> None:
        before = self._undo.pop(slot)
        if before.rule.momentum:
            assert before.grad is not None
            self._step_back(slot, before.grad, before)

    def commit_dense(self, slot: Slot) -> None:
        super().commit_dense(slot)
        self._undo.pop(slot, None)

    def idle(self, slot: Slot) -> bool:
        return False

    def skips(self, slot: Slot, grad_energy: float) -> bool:
        # A zero gradient still moves by its velocity, as in SGD; only a parameter that DDP may
        # treat as unused keeps everything to itself.
        return super().skips(slot, grad_energy) or (grad_energy == 0.0 and slot.velocity is None)

    def state_dict(self, slot: Slot) -> dict[str, Any]:
        state = super().state_dict(slot)
        if slot.started and slot.velocity is not None:
            full = self._rule(slot).change_of_lag(slot.lag, 1.0)  # for `adaptive.reshard_states`
            state |= {"velocity": slot.velocity.clone(), "lag": slot.lag, "to_full_lag": full}
        return {**state, "stepped": True} if slot.stepped else state

    def load_state_dict(self, slot: Slot, state: Mapping[str, Any]) -> None:
        super().load_state_dict(slot, state)
        saved = state.get("velocity")
        slot.fresh = False
        slot.started = saved is not None
        slot.stepped = bool(state.get("stepped", False))
        slot.velocity, slot.lag = None, state.get("lag", 1.0)
        if saved is not None:
            slot.velocity = slot.zeros("velocity").copy_(saved)

    def _step(self, slot: Slot, grad: Tensor, rule: MomentumRule, lag: float) -> Tensor:
        if slot.velocity is None:
            slot.velocity = slot.zeros("velocity")
        _change_lag(slot, rule, lag)
        rule = rule.with_lag(lag)
        # Where another rank was the first to use the parameter, its first step is not this one.
        slot.fresh = not (slot.started or slot.stepped or self._has_buffer(slot))
        if slot.fresh:
            torch.mul(grad, rule.gain, out=slot.velocity)
        else:
            slot.velocity.mul_(rule.momentum).add_(grad, alpha=rule.gain * (1 - rule.dampening))
        slot.started = True
        return slot.velocity

    def _step_back(self, slot: Slot, grad: Tensor, before: _Before) -> None:
        assert slot.velocity is not None
        rule = before.rule.with_lag(slot.lag)
        if slot.fresh:
            slot.velocity.zero_()
        else:
            slot.velocity.sub_(grad, alpha=rule.gain * (1 - rule.dampening)).div_(rule.momentum)
        _change_lag(slot, before.rule, before.lag)
        slot.started = before.started


class _Before(NamedTuple):
    """What it takes to undo a step. rule: the optimizer's, then. started, lag: of the slot, before.
    grad: what the collective overwrites."""

    rule: MomentumRule
    started: bool
    lag: float
    grad: Tensor | None = None


def _change_lag(slot: Slot, rule: MomentumRule, lag: float) -> None:
    """From now on the velocity moves with this share of the momentum's lag."""
    factor = rule.change_of_lag(slot.lag, lag)
    if slot.velocity is not None and factor != 1:
        slot.velocity.mul_(factor)
    slot.lag = lag
