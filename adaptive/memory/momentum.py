"""Momentum correction: the velocity is accumulated locally, and the residual is the velocity's.

Deep Gradient Compression (Lin and others 2018), section 3: with momentum in the optimizer, a
coordinate that is sent rarely loses its momentum's discount; accumulating u = m u + g before
compression keeps it. Momentum factor masking clears the velocity of what was sent.

A residual delays gradients, and so does a velocity: delay acts as momentum (Mitliagkas and others,
"Asynchrony begets momentum", 2016). So while gradients are compressed, the velocity moves with a
smaller momentum and a larger gain, and the two delays do not add up (measured:
docs/research/defaults.md). When the momentum changes, the velocity is scaled: the sum of its future
contributions stays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from torch import Tensor

from adaptive.memory.error_feedback import MomentumRule, Residual
from adaptive.memory.sgd import SGDHandover
from adaptive.model.parameters import ModelParameter
from compressors.kernels.blocks import Flag, Scalar, add_if, fill_if, scale_if


class MomentumMemory(Residual):
    """A velocity and its residual for each parameter.

    handover: in the place of an SGD, whose momentum settings are the velocities'. masking: see
    `NoMemory`. share_at: (CF) -> the momentum share in a compressed step, in (0, 1].
    """

    name = "momentum"
    keeps = ("residual", "velocity")

    def __init__(
        self,
        handover: SGDHandover,
        masking: float,
        share_at: Callable[[float], float],
        maybe_unused: Callable[[], bool],
    ) -> None:
        super().__init__(maybe_unused, handover)
        self._of = handover
        self.masking = masking
        self._share_at = cache(share_at)

    def open(
        self, parameter: ModelParameter, grad: Tensor, cf: float, nonfinite: Flag = False
    ) -> Tensor | None:
        velocity, rule = self._move(parameter, grad, self._share_at(cf), nonfinite)
        if velocity is None:
            return super().open(parameter, grad, cf)
        residual = parameter.open_residual()
        if rule.nesterov or nonfinite is not False:
            add_if(nonfinite ^ True, residual, velocity, rule.sent_share)
        if not rule.nesterov:
            return velocity if nonfinite is False else None
        if rule.gain != 1:
            residual.add_(grad, alpha=rule.gain - 1)
        return grad

    def flush_into(self, parameter: ModelParameter, grad: Tensor, nonfinite: Flag = False) -> None:
        if self._of.rests:
            return
        velocity, rule = self._move(parameter, grad, 1.0, nonfinite)
        if velocity is not None and rule.nesterov:
            add_if(nonfinite ^ True, grad, velocity, rule.momentum)
        elif velocity is not None:
            grad.copy_(velocity)
            fill_if(nonfinite, grad, 0.0)
        super().flush_into(parameter, grad, nonfinite)

    def skipped(
        self, parameters: Sequence[ModelParameter], grad_energies: Sequence[Scalar]
    ) -> Sequence[Flag]:
        """SGD moves a parameter with a gradient of zeros by its momentum, and leaves one without a
        gradient alone: here only the latter keeps its velocity to itself."""
        found = super().skipped(parameters, grad_energies)
        pairs = zip(parameters, found, strict=True)
        return [flag if p.tensor.grad is None or p.sharded else False for p, flag in pairs]

    def is_empty(self, parameter: ModelParameter) -> bool:
        return self._of.rests

    def update_key(self, parameter: ModelParameter) -> tuple[object, ...]:
        begun = (parameter.started, parameter.stepped, self._of.has_buffer(parameter))
        return (
            *super().update_key(parameter),
            *begun,
            parameter.momentum_share,
            self._of.rule(parameter),
        )

    def momentum(self, parameter: ModelParameter, cf: float) -> tuple[MomentumRule, float] | None:
        rule, share = self._of.rule(parameter), self._share_at(cf)
        if not rule.momentum:
            return None
        return rule.with_share(share), rule.velocity_scale(parameter.momentum_share, share)

    def state_dict(self, parameter: ModelParameter) -> dict[str, Any]:
        state = super().state_dict(parameter)
        if parameter.started and parameter.velocity is not None:
            share = parameter.momentum_share
            state |= {"velocity": parameter.velocity.clone(), "momentum_share": share}
            # For `adaptive.reshard_states`.
            state["to_full_momentum"] = self._of.rule(parameter).velocity_scale(share, 1.0)
        return {**state, "stepped": True} if parameter.stepped else state

    def load_state_dict(self, parameter: ModelParameter, state: Mapping[str, Any]) -> None:
        super().load_state_dict(parameter, state)
        saved = state.get("velocity")
        parameter.started = saved is not None
        parameter.stepped = bool(state.get("stepped", False))
        parameter.velocity, parameter.momentum_share = None, state.get("momentum_share", 1.0)
        if saved is not None:
            parameter.velocity = parameter.zeros().copy_(saved)

    def _move(
        self, parameter: ModelParameter, grad: Tensor, share: float, nonfinite: Flag
    ) -> tuple[Tensor | None, MomentumRule]:
        """The velocity after a step, if there is momentum, and the rule by which it has moved."""
        full = self._of.rule(parameter)
        # SGD's first step, which it does not dampen, is over on all ranks or on none. A backward
        # whose step was left out is none.
        first = not (parameter.stepped or self._of.has_buffer(parameter))
        if not full.momentum:
            return None, full
        if parameter.velocity is None:
            parameter.velocity = parameter.zeros()
        scale = full.velocity_scale(parameter.momentum_share, share)
        if scale != 1:
            parameter.velocity.mul_(scale)
        parameter.momentum_share = share
        rule = full.with_share(share)
        scale_if(nonfinite ^ True, parameter.velocity, rule.momentum)
        parameter.velocity.add_(grad, alpha=rule.rate(first))
        parameter.started = True
        return parameter.velocity, rule
