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
from adaptive.parameters import ModelParameter
from compressors.kernels.blocks import Flag, Scalar, add_if, fill_if, scale_if


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

    rule: the momentum settings of a parameter, asked anew each step, so schedulers keep working.
    has_buffer: True if the optimizer already holds a velocity for the parameter.
    masking: smallest CF at which the velocity of what was sent is cleared; inf for never.
    lag: share of the momentum's lag in a step at a CF, compressed, in (0, 1].
    maybe_unused: a parameter may be unused on all ranks in a step (find_unused_parameters).
    """

    name = "momentum"
    keeps_velocity = True

    def __init__(
        self,
        rule: Callable[[ModelParameter], MomentumRule],
        has_buffer: Callable[[ModelParameter], bool],
        masking: float,
        lag: Callable[[float], float],
        maybe_unused: Callable[[], bool],
    ) -> None:
        super().__init__(maybe_unused)
        self._rule = rule
        self._has_buffer = has_buffer
        self._masking = masking
        self._lag = lag
        self._undo: dict[ModelParameter, _Before] = {}
        self._asked: tuple[MomentumRule | None, Sequence[float], Sequence[MomentumRule]]
        self._asked = None, (), ()  # what `rules` was asked last, and its answer

    def alike(self, parameters: Sequence[ModelParameter]) -> bool:
        if parameters[0].velocity is None:
            return False
        settings = {(self._rule(p), self._has_buffer(p)) for p in parameters}
        return len(settings) == 1

    def rules(self, parameter: ModelParameter, cfs: Sequence[float]) -> Sequence[MomentumRule]:
        rule = self._rule(parameter)
        if (rule, cfs) != self._asked[:2]:  # most parameters have the same
            rules = [rule.with_lag(self._lag(cf)) for cf in cfs] if rule.momentum else []
            self._asked = rule, cfs, rules
        return self._asked[2]

    def entering(self, parameter: ModelParameter, cfs: Sequence[float]) -> Sequence[float]:
        rule = self._rule(parameter)
        return [rule.change_of_lag(parameter.lag, self._lag(cf)) for cf in cfs]

    def masks(self, cf: float) -> bool:
        return cf >= self._masking

    def open(
        self, parameter: ModelParameter, grad: Tensor, cf: float, poisoned: Flag = False
    ) -> Addition:
        rule = self._rule(parameter)
        self._undo[parameter] = _Before(rule, parameter.started, parameter.lag)
        if not rule.momentum:
            return super().open(parameter, grad, cf)
        velocity = self._step(parameter, grad, rule, self._lag(cf), poisoned)
        rule = rule.with_lag(parameter.lag)
        residual = parameter.open_residual()
        if isinstance(poisoned, Tensor):
            add_if(poisoned ^ True, residual, velocity, rule.momentum if rule.nesterov else 1.0)
        if rule.nesterov:  # the direction is g + m u
            if poisoned is False:
                residual.add_(velocity, alpha=rule.momentum)
            if rule.gain != 1:
                residual.add_(grad, alpha=rule.gain - 1)
            return Addition(residual, grad)
        return Addition(residual, velocity if poisoned is False else None)

    def undo_open(self, parameter: ModelParameter, grad: Tensor, flag: Flag) -> None:
        before = self._undo[parameter]
        rule = before.rule.with_lag(parameter.lag)
        assert parameter.residual is not None
        if not rule.momentum or rule.nesterov:
            add_if(flag, parameter.residual, grad, -rule.gain)
        if rule.momentum:
            assert parameter.velocity is not None
            share = rule.momentum if rule.nesterov else 1.0
            add_if(flag, parameter.residual, parameter.velocity, -share)
            self._step_back(parameter, grad, before, flag)

    def settle(self, parameter: ModelParameter) -> None:
        self._undo.pop(parameter, None)

    def fold(self, parameter: ModelParameter, grad: Tensor, poisoned: Flag = False) -> None:
        rule = self._rule(parameter)
        before = _Before(rule, parameter.started, parameter.lag)
        if not rule.momentum:
            self._undo[parameter] = before
            super().fold(parameter, grad, poisoned)
            return
        # Undoing needs the gradient, and the collective will overwrite it: an empty residual has
        # room for it; only in the step that empties a residual does it cost an allocation.
        if parameter.filled:
            saved = grad.clone()
        else:
            parameter.residual = saved = parameter.open_residual().copy_(grad)
            parameter.filled = False
        self._undo[parameter] = before._replace(grad=saved)
        velocity = self._step(parameter, grad, rule, 1.0, poisoned)
        if rule.nesterov:
            add_if(poisoned ^ True, grad, velocity, rule.momentum)
        else:
            grad.copy_(velocity)
            fill_if(poisoned, grad, 0.0)
        super().fold(parameter, grad, poisoned)

    def undo_fold(self, parameter: ModelParameter, flag: Flag) -> None:
        before = self._undo[parameter]
        if before.rule.momentum:
            assert before.grad is not None
            self._step_back(parameter, before.grad, before, flag)

    def end_dense(self, parameter: ModelParameter, poisoned: Flag) -> None:
        super().end_dense(parameter, poisoned)
        self._undo.pop(parameter, None)

    def idle(self, parameter: ModelParameter) -> bool:
        return False

    def skips(self, parameter: ModelParameter, grad_energy: Scalar) -> Flag:
        # A zero gradient still moves by its velocity, as in SGD; only a parameter that DDP may
        # treat as unused keeps everything to itself. On the host one without a velocity needs none.
        if (
            not isinstance(grad_energy, Tensor)
            and grad_energy == 0.0
            and parameter.velocity is None
        ):
            return True
        return super().skips(parameter, grad_energy)

    def state_dict(self, parameter: ModelParameter) -> dict[str, Any]:
        state = super().state_dict(parameter)
        if parameter.started and parameter.velocity is not None:
            full = self._rule(parameter).change_of_lag(
                parameter.lag, 1.0
            )  # for `adaptive.reshard_states`
            state |= {
                "velocity": parameter.velocity.clone(),
                "lag": parameter.lag,
                "to_full_lag": full,
            }
        return {**state, "stepped": True} if parameter.stepped else state

    def load_state_dict(self, parameter: ModelParameter, state: Mapping[str, Any]) -> None:
        super().load_state_dict(parameter, state)
        saved = state.get("velocity")
        parameter.fresh = False
        parameter.started = saved is not None
        parameter.stepped = bool(state.get("stepped", False))
        parameter.velocity, parameter.lag = None, state.get("lag", 1.0)
        if saved is not None:
            parameter.velocity = parameter.zeros("velocity").copy_(saved)

    def _step(
        self,
        parameter: ModelParameter,
        grad: Tensor,
        rule: MomentumRule,
        lag: float,
        poisoned: Flag,
    ) -> Tensor:
        if parameter.velocity is None:
            parameter.velocity = parameter.zeros("velocity")
        _change_lag(parameter, rule, lag)
        rule = rule.with_lag(lag)
        # Where another rank was the first to use the parameter, its first step is not this one. On
        # a device a poisoned first step leaves a velocity of zeros, and the next is the first.
        began = parameter.started and not isinstance(poisoned, Tensor)
        parameter.fresh = not (began or parameter.stepped or self._has_buffer(parameter))
        if parameter.fresh and not parameter.started:
            torch.mul(grad, rule.gain, out=parameter.velocity)
        else:
            scale_if(poisoned ^ True, parameter.velocity, rule.momentum)
            parameter.velocity.add_(grad, alpha=_rate(parameter, rule))
        parameter.started = True
        return parameter.velocity

    def _step_back(
        self, parameter: ModelParameter, grad: Tensor, before: _Before, flag: Flag
    ) -> None:
        assert parameter.velocity is not None
        rule = before.rule.with_lag(parameter.lag)
        if isinstance(flag, Tensor) or not parameter.fresh:
            add_if(flag, parameter.velocity, grad, -_rate(parameter, rule))
            if isinstance(flag, Tensor):
                scale_if(flag, parameter.velocity, 1 / rule.momentum)
            elif flag:
                parameter.velocity.div_(rule.momentum)
        else:
            fill_if(flag, parameter.velocity, 0.0)
        if flag is True:
            _change_lag(parameter, before.rule, before.lag)
            parameter.started = before.started


def _rate(parameter: ModelParameter, rule: MomentumRule) -> float:
    """What a gradient is multiplied by before it is added to the velocity."""
    return rule.gain * (1.0 if parameter.fresh else 1 - rule.dampening)


class _Before(NamedTuple):
    """What it takes to undo a step. rule: the optimizer's, then. started, lag: of the parameter,
    before. grad: what the collective overwrites."""

    rule: MomentumRule
    started: bool
    lag: float
    grad: Tensor | None = None


def _change_lag(parameter: ModelParameter, rule: MomentumRule, lag: float) -> None:
    """From now on the velocity moves with this share of the momentum's lag."""
    factor = rule.change_of_lag(parameter.lag, lag)
    if parameter.velocity is not None and factor != 1:
        parameter.velocity.mul_(factor)
    parameter.lag = lag
