"""Momentum correction: each rank accumulates a velocity before compression, and the residual is the
part of the velocities that was not sent.

Deep Gradient Compression (Lin and others 2018), section 3: if the optimizer applies momentum after
compression, gradients of an element that is sent rarely add up undiscounted, since the factor m of
the steps between is lost. A velocity u = m u + g, accumulated before compression, keeps the factor.
Momentum factor masking clears the velocity of sent elements.

A residual delays gradients, and so does a velocity: delay acts as momentum (Mitliagkas and others,
"Asynchrony begets momentum", 2016). To avoid delaying gradients twice, the velocity moves with a
smaller momentum and a larger gain while gradients are compressed (measured:
docs/research/defaults.md). The *momentum share*, at most 1, says how much smaller
(`MomentumRule.with_share`). When the share changes, the velocity is scaled, so that the sum of its
future contributions stays the same.

Two handovers take over work of the user's SGD. `SGDHandover`, with momentum correction, applies the
SGD's momentum and weight decay. `ShorterMomentum`, with error feedback, makes its momentum smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import isfinite
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from adaptive.memory.error_feedback import MomentumRule, Residual
from adaptive.memory.handover import Group, Groups, Handover, steps_as, with_settings
from adaptive.model.chunks import chunks
from adaptive.model.parameters import (
    ModelParameter,
    ModelParameters,
    like,
    local,
    parameters_of,
    shaped,
)
from adaptive.network.collectives import Exchange
from compressors.kernels.blocks import Flag, Scalar, add_if, fill_if, scale_if
from policies import state as saved

_NEUTRAL: Group = {"momentum": 0.0, "dampening": 0.0, "nesterov": False, "weight_decay": 0.0}
"""Settings with which SGD steps by `p.grad` itself, and does nothing else."""


RESTING = 8
"""Number of dense steps in a row after which SGD gets its momentum back. The return costs one
all-reduce of velocities. A policy that is dense for fewer steps never pays this cost."""


@dataclass(eq=False)
class DenseSteps(saved.Stateful):
    """The number of dense steps in a row, and whether SGD has its momentum back (`rests`)."""

    count: int = saved.saved(0)
    rests: bool = saved.saved(False)


class SGDHandover(Handover):
    """Applies momentum and weight decay in the place of an SGD. It reads the SGD's parameter groups
    in each step, so that schedulers keep working.

    torch adds weight decay to the gradient before momentum. The decay term is the same on every
    rank. So it has a velocity of its own, which is never compressed, and which is added to the
    decoded mean. This velocity is in SGD's own `optimizer.state[p]["momentum_buffer"]`. Momentum is
    linear, so a momentum that was in the buffer before goes on decaying there.

    After `RESTING` dense steps in a row SGD gets its momentum back, and a dense step costs no more
    than without compression. Velocities start from zero in the next compressed step.

    optimizer: the SGD. Another SGD of torch's over the same parameters replaces it when the other
    SGD first steps, and the velocities are kept. other_optimizer: the name of an optimizer that has
    stepped these parameters and cannot replace the SGD.
    """

    def __init__(self, optimizer: SGD, parameters: ModelParameters) -> None:
        self.optimizer = optimizer
        self._parameters = parameters
        self._dense = DenseSteps()
        self._decayed: set[Tensor] = set()  # since the last backward
        self._index: dict[Tensor, int] = {}
        self._indexed: list[int] = []

    @property
    def rests(self) -> bool:
        """SGD has its momentum back: a dense step adds nothing to the gradients."""
        return self._dense.rests

    @property
    def leaves_gradients(self) -> bool:
        return self.rests

    def begin_step(
        self, exchange: Exchange, cf: float | None, may_leave_momentum: bool = True
    ) -> None:
        self._decayed.clear()
        self._indexed = []  # the script may have put other parameters into the groups
        if cf is not None:
            self._dense.count, self._dense.rests = 0, False
            return
        self._dense.count = self._dense.count + 1 if may_leave_momentum else 0
        parameters = self._parameters.values()
        if self.rests or self._dense.count <= RESTING or self._parameters.maybe_unused():
            return
        # `has_residual` is the same on all ranks after so many dense steps with finite gradients.
        if any(parameter.has_residual for parameter in parameters):
            return
        self._add_to_buffers(exchange)
        for parameter in parameters:
            parameter.velocity, parameter.started = None, False
            parameter.momentum_share = 1.0
        self._dense.rests = True

    def rule(self, parameter: ModelParameter) -> MomentumRule:
        """The present momentum settings of a parameter; no momentum if it is not optimized."""
        return self.rules([parameter])[0]

    def rules(self, parameters: Sequence[ModelParameter]) -> list[MomentumRule]:
        """The `rule` of each parameter."""
        index, of_groups = self._indices(), [*map(MomentumRule.of, self.optimizer.param_groups)]
        of_groups.append(MomentumRule(0.0))
        return [of_groups[index.get(parameter.tensor, -1)] for parameter in parameters]

    def before_step(self, optimizer: Optimizer, groups: Groups) -> Groups | None:
        if optimizer is not self.optimizer:
            of = [self._parameters[p] for p in parameters_of(optimizer) if p in self._parameters]
            moved = [parameter for parameter in of if self.rule(parameter).momentum]
            if not moved:
                return None
            if not steps_as(optimizer, SGD):
                if self.rests:
                    return None
                self._show_gradients(moved)
                self.other_optimizer = type(optimizer).__name__
                return None
            assert isinstance(optimizer, SGD)
            self.optimizer, self._indexed = optimizer, []
        if self.rests:
            return None
        changed: Groups = []
        for group in groups:
            if group["momentum"] != 0:
                self._add_decay(group)
                changed += with_settings(group, _NEUTRAL, self._parameters)
            else:
                changed.append(group)
        return changed

    @torch.no_grad()
    def _show_gradients(self, of: Sequence[ModelParameter]) -> None:
        """Scale `p.grad`, which holds velocities, to the size of gradients."""
        for parameter in of:
            if parameter.tensor.grad is not None:
                local(parameter.tensor.grad).div_(self._gradient_to_velocity(parameter))

    def _indices(self) -> Mapping[Tensor, int]:
        """The index of each optimized parameter's group."""
        groups = self.optimizer.param_groups
        sizes = [len(group["params"]) for group in groups]
        if sizes != self._indexed:  # at the first call, and after add_param_group
            self._index = {p: i for i, group in enumerate(groups) for p in group["params"]}
            self._indexed = sizes
        return self._index

    def _group(self, p: Tensor) -> Group | None:
        """The SGD's parameter group of a parameter; None if it is not optimized."""
        index = self._indices().get(p)
        return None if index is None else self.optimizer.param_groups[index]

    def show_gradients(self) -> None:
        self._show_gradients([of for of in self._parameters.values() if self.rule(of).momentum])

    def has_buffer(self, parameter: ModelParameter) -> bool:
        """Whether SGD has a momentum buffer for this parameter."""
        state = self.optimizer.state.get(parameter.tensor, {})
        return state.get("momentum_buffer") is not None

    def hand_back(self, exchange: Exchange | None) -> None:
        if exchange is not None:
            self._add_to_buffers(exchange)
            exchange.take_traffic()  # these bytes belong to no step
        for parameter in self._parameters.values():
            if exchange is None and parameter.started and parameter.velocity is not None:
                rule = self.rule(parameter)
                ahead = rule.momentum / (1 - rule.momentum) if rule.momentum < 1 else 0.0
                ahead = ahead * rule.velocity_scale(parameter.momentum_share, 1.0) * rule.sent_share
                parameter.open_residual().add_(parameter.velocity, alpha=ahead)
            if parameter.unsent is not None:
                parameter.unsent.mul_(1 / self._gradient_to_velocity(parameter))

    def state_dict(self) -> dict[str, Any]:
        return self._dense.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._dense.load_state_dict(state)

    def _gradient_to_velocity(self, parameter: ModelParameter) -> float:
        """The sum of a gradient's contributions to all velocities, divided by the gradient."""
        rule = self.rule(parameter)
        if rule.dampening == 1 or not 0 < rule.momentum < 1:
            return 1.0
        return (1 - rule.dampening) / (1 - rule.momentum)

    def _add_to_buffers(self, exchange: Exchange) -> None:
        """Add the ranks' mean velocities to SGD's momentum buffers (collectives)."""
        for chunk in chunks(self._parameters.values()):
            velocities = [p.zeros() if p.velocity is None else p.velocity for p in chunk]
            scales = [self.rule(p).velocity_scale(p.momentum_share, 1.0) for p in chunk]
            weights = [scale / exchange.world_size for scale in scales]
            own = torch.cat(torch._foreach_mul(velocities, weights))
            flags = [float(p.started) for p in chunk]
            started = torch.tensor(flags, dtype=own.dtype, device="cpu")
            started = started.to(own.device, non_blocking=True)
            total = exchange.total(torch.cat([own, started])).wait()
            *means, ranks = total.split([*map(len, velocities), len(chunk)])
            # How many ranks have started each velocity. The host waits for these numbers only if
            # SGD has never stepped some parameter here.
            unstepped = any(self.rule(p).momentum and not p.stepped for p in chunk)
            started_on = ranks.tolist() if unstepped else [0.0] * len(chunk)
            for parameter, mean, any_started in zip(chunk, means, started_on, strict=True):
                if parameter.stepped or (self.rule(parameter).momentum and any_started):
                    self._add_to_buffer(parameter, mean)
        # An empty shard is in no chunk. Other ranks have shards of the same parameter, and buffers.
        for parameter in self._parameters.values():
            if parameter.stepped and not parameter.numel:
                self._add_to_buffer(parameter, parameter.zeros())

    def _add_to_buffer(self, parameter: ModelParameter, mean: Tensor) -> None:
        p = parameter.tensor
        group, state = self._group(p), self.optimizer.state[p]
        if group is not None and group["maximize"]:
            mean = -mean
        velocity = shaped(mean.to(p.dtype, copy=True), parameter.local)
        buffer = state.get("momentum_buffer")
        if buffer is None:
            state["momentum_buffer"] = like(velocity, p)
        else:
            local(buffer).add_(velocity)

    @torch.no_grad()
    def _add_decay(self, group: Group) -> None:
        """Add the velocity of weight decay to the gradients of a group, before a step."""
        decay, momentum, rate = group["weight_decay"], group["momentum"], 1 - group["dampening"]
        sign = -1.0 if group["maximize"] else 1.0  # SGD negates the gradient first
        # A fused SGD unscales gradients itself, and skips the step if they are not finite.
        scale = getattr(self.optimizer, "grad_scale", None)
        skips = getattr(self.optimizer, "found_inf", None)
        made: list[tuple[Tensor, Tensor, Tensor]] = []  # gradients, parameters, buffers
        moved: list[tuple[Tensor, Tensor, Tensor]] = []
        for p in group["params"]:
            if p.grad is None or p not in self._parameters:
                continue
            if p in self._decayed:  # the step has raised after this, and is taken again
                continue
            self._decayed.add(p)
            parameter, state = self._parameters[p], self.optimizer.state[p]
            new, parameter.stepped = not parameter.stepped, True
            here, grad = parameter.local, local(p.grad)
            buffer = state.get("momentum_buffer")
            if buffer is not None:
                moved.append((grad, here, local(buffer)))
            elif decay:
                first = here * (decay if new else rate * decay)
                state["momentum_buffer"] = like(first, p)
                made.append((grad, here, first))
        if not made and not moved:
            return
        _, heres, buffers = map(list, zip(*moved, strict=True)) if moved else ([], [], [])
        before = [] if skips is None else [buffer.clone() for buffer in buffers]
        if moved:
            torch._foreach_mul_(buffers, momentum)
            torch._foreach_add_(buffers, heres, alpha=rate * decay)
        if skips is not None:
            for buffer, old in zip(buffers, before, strict=True):
                buffer.lerp_(old, skips.to(buffer.dtype))
            for *_, buffer in made:
                buffer.mul_(1 - skips.to(buffer.dtype))
        grads, heres, buffers = map(list, zip(*made, *moved, strict=True))
        nesterov = [(heres, sign * decay), (buffers, sign * momentum)]
        for tensors, factor in nesterov if group["nesterov"] else [(buffers, sign)]:
            if scale is None:
                torch._foreach_add_(grads, tensors, alpha=factor)
            else:
                torch._foreach_add_(grads, torch._foreach_mul(tensors, scale * factor))


@dataclass(eq=False)
class MomentumShare(saved.Stateful):
    """The momentum share with which the optimizer's momentum buffers have moved."""

    share: float = saved.saved(1.0)

    def _check_loaded(self) -> None:
        saved.require(isfinite(self.share) and 0 < self.share <= 1, "'share' must be in (0, 1]")


class ShorterMomentum(Handover):
    """A shorter momentum for an SGD that applies its momentum itself, with plain error feedback.

    A residual delays gradients, and delay acts as momentum (see above). If `p.grad` must hold
    gradients, because the script clips them, momentum correction is impossible. But the optimizer
    can step with a smaller momentum and a larger learning rate while gradients are compressed, so
    that gradients are not delayed twice. The sum of all moves that a gradient causes stays the
    same. Another SGD of torch's over the same parameters replaces the first one.

    share_at: (CF) -> the momentum share in a compressed step, in (0, 1]. In a dense step the share
    is 1. When the share changes, the moves that past gradients have yet to cause stay the same."""

    def __init__(
        self, optimizer: Optimizer, share_at: Callable[[float], float], parameters: ModelParameters
    ) -> None:
        self._optimizer, self._share_at, self._parameters = optimizer, share_at, parameters
        self._now, self._wanted = MomentumShare(), 1.0

    def begin_step(
        self, exchange: Exchange, cf: float | None, may_leave_momentum: bool = True
    ) -> None:
        self._wanted = 1.0 if cf is None else self._share_at(cf)

    def before_step(self, optimizer: Optimizer, groups: Groups) -> Groups | None:
        if optimizer is not self._optimizer:
            known = {*parameters_of(self._optimizer)}
            if not steps_as(optimizer, SGD) or known.isdisjoint(parameters_of(optimizer)):
                return None
            self._optimizer, self._now = optimizer, MomentumShare()  # its buffers are new
        self._move_to(self._wanted, groups)
        if self._now.share == 1:
            return None
        changed: Groups = []
        for group in groups:
            rule = MomentumRule.of(group).with_share(self._now.share)
            shorter = {"momentum": rule.momentum, "lr": group["lr"] * rule.gain}
            changed += with_settings(group, shorter, self._parameters)
        return changed

    @torch.no_grad()
    def _move_to(self, share: float, groups: Groups) -> None:
        """Scale the momentum buffers to another momentum share. A buffer holds velocity / gain: the
        learning rate has the gain as a factor instead."""
        before, self._now.share = self._now.share, share
        if share == before:
            return
        for group in groups:
            rule = MomentumRule.of(group)
            gains = rule.with_share(before).gain / rule.with_share(share).gain
            managed = (p for p in group["params"] if p in self._parameters)
            found = [self._optimizer.state.get(p, {}).get("momentum_buffer") for p in managed]
            buffers = [local(buffer) for buffer in found if buffer is not None]
            if buffers:
                torch._foreach_mul_(buffers, gains * rule.velocity_scale(before, share))

    def hand_back(self, exchange: Exchange | None) -> None:
        self._move_to(1.0, self._optimizer.param_groups)

    def state_dict(self) -> dict[str, Any]:
        return self._now.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a `state_dict()`. The script loads the optimizer's state itself."""
        self._now = MomentumShare()
        if state:
            self._now.load_state_dict(state)


class MomentumMemory(Residual):
    """A velocity and a residual of velocities for each parameter.

    handover: the SGD's; velocities move by this SGD's momentum settings. masking: see `NoMemory`.
    share_at: (CF) -> the momentum share in a compressed step, in (0, 1].
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
    ) -> Mapping[ModelParameter, Flag]:
        """As in `NoMemory`, but a parameter with a zero gradient is skipped only if `p.grad` is
        None or the parameter is sharded. (With a `p.grad` of zeros SGD goes on by momentum.)"""
        found = super().skipped(parameters, grad_energies).items()
        return {p: flag for p, flag in found if p.tensor.grad is None or p.sharded}

    def is_empty(self, parameter: ModelParameter) -> bool:
        return self._of.rests

    def update_keys(self, parameters: Sequence[ModelParameter]) -> list[Any]:
        stepped = [p.stepped or self._of.has_buffer(p) for p in parameters]
        started = [(p.started, p.momentum_share) for p in parameters]
        keys = super().update_keys(parameters)
        return [*zip(keys, stepped, started, self._of.rules(parameters), strict=True)]

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
        """Add a gradient to the velocity. Returns the new velocity (None without momentum), and the
        rule by which it has moved."""
        full = self._of.rule(parameter)
        # SGD does not dampen the gradient of its first step. `first` is the same on all ranks, and
        # stays True after a backward without a step.
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
