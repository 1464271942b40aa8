"""Taking SGD's momentum over into the compressor's memory, and leaving the optimizer its settings.

The memory sends velocities, so the optimizer must not apply momentum a second time. The user's
hyper-parameters stay in the parameter groups, where schedulers and checkpoints expect them; they
are neutralised only while `optimizer.step()` runs, by torch's step pre- and post-hooks.

torch adds weight decay to the gradient before momentum. The decay term is the same on every rank,
so it is filtered by the same momentum here, uncompressed, and added to the decoded mean. Its
velocity lives where SGD keeps its own, in `optimizer.state[p]["momentum_buffer"]`: since all of
this is linear, a buffer that was there before simply goes on decaying.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import nan
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from adaptive.exchange.collectives import Exchange
from adaptive.memory.momentum import MomentumRule
from adaptive.parameters import ModelParameter
from compressors.kernels import is_host

if TYPE_CHECKING:
    from torch.amp import GradScaler


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
    momenta = [group.get("momentum") for group in optimizer.param_groups]
    return f"{type(optimizer).__name__} with momentum {momenta}"


_NEUTRAL = {"momentum": 0.0, "dampening": 0.0, "nesterov": False, "weight_decay": 0.0}


def has_momentum(optimizer: Optimizer | None) -> bool:
    """True for an SGD with momentum in some parameter group: what can be handed over."""
    return isinstance(optimizer, SGD) and any(g["momentum"] != 0 for g in optimizer.param_groups)


class MomentumHandover:
    """Watches one SGD optimizer whose momentum a `MomentumMemory` applies instead.

    ValueError if a group with momentum holds parameters that the model does not have: their
    momentum would be lost.
    """

    def __init__(
        self, optimizer: SGD, parameters: Mapping[Tensor, ModelParameter], own: set[Tensor]
    ) -> None:
        self._optimizer = optimizer
        self._parameters = parameters
        self._saved: list[dict[str, Any]] | None = None
        self._index: dict[Tensor, int] = {}
        self._indexed = 0
        for index, group in enumerate(optimizer.param_groups):
            if group["momentum"] and not all(p in own for p in group["params"]):
                raise ValueError(
                    f"optimizer: parameter group {index} has momentum and parameters that are not "
                    f"in the model; give those a group or an optimizer of their own"
                )
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    def rule(self, parameter: ModelParameter) -> MomentumRule:
        """Its momentum settings as they stand now; no momentum if it is not optimized."""
        index = self._group_index(parameter)
        if index is None:
            return MomentumRule(0.0)
        settings = (self._saved or self._optimizer.param_groups)[index]
        return MomentumRule(settings["momentum"], settings["dampening"], settings["nesterov"])

    def has_buffer(self, parameter: ModelParameter) -> bool:
        """True if SGD has a velocity for this parameter already."""
        state = self._optimizer.state.get(parameter.tensor, {})
        return state.get("momentum_buffer") is not None

    def unhook(self) -> None:
        """Stop watching; the optimizer applies its own momentum again."""
        self._restore()
        for hook in self._hooks:
            hook.remove()

    def give_back(self, exchange: Exchange) -> None:
        """Add the ranks' mean velocities to SGD's own buffers, and turn each residual from a sum
        of velocities into a gradient. A collective."""
        parameters = list(self._parameters.values())
        device = parameters[0].tensor.device
        own = torch.tensor([float(parameter.started) for parameter in parameters], device=device)
        started = exchange.sum_later(own).wait().tolist()  # on how many ranks
        for parameter, ranks in zip(parameters, started, strict=True):
            if parameter.residual is not None:
                parameter.residual.mul_(1 / self._gradient_to_velocity(parameter))
            velocity = parameter.velocity if parameter.velocity is not None else parameter.zeros()
            share = self.rule(parameter).change_of_lag(parameter.lag, 1.0) / exchange.world_size
            mean = exchange.sum_later(velocity * share).wait()
            exchange.take_traffic()  # no step's
            if ranks or parameter.stepped:
                self._add_to_buffer(parameter, mean)

    def to_velocity(self, parameter: ModelParameter) -> None:
        """Turn a residual that was kept as a gradient into a sum of velocities."""
        if parameter.filled and parameter.residual is not None:
            parameter.residual.mul_(self._gradient_to_velocity(parameter))

    def to_gradient(self, parameter: ModelParameter) -> None:
        """Turn a sum of velocities, and what the velocity has yet to deliver, into a residual of
        gradients, on which the optimizer's own momentum is to work."""
        rule = self.rule(parameter)
        if parameter.velocity is not None and rule.momentum != 1:
            ahead = rule.momentum / (1 - rule.momentum) * rule.change_of_lag(parameter.lag, 1.0)
            parameter.open_residual().add_(
                parameter.velocity, alpha=ahead * (rule.momentum if rule.nesterov else 1.0)
            )
        if parameter.filled and parameter.residual is not None:
            parameter.residual.mul_(1 / self._gradient_to_velocity(parameter))

    def _gradient_to_velocity(self, parameter: ModelParameter) -> float:
        """What a gradient adds up to once momentum is through with it."""
        rule = self.rule(parameter)
        if rule.dampening == 1:
            return 1.0
        return (1 - rule.dampening) / (1 - rule.momentum) if rule.momentum else 1.0

    def _add_to_buffer(self, parameter: ModelParameter, mean: Tensor) -> None:
        p, state = parameter.tensor, self._optimizer.state[parameter.tensor]
        index = self._group_index(parameter)
        if index is not None and self._optimizer.param_groups[index].get("maximize"):
            mean = -mean
        # DDP's buckets hold a parameter's elements in the order of memory.
        shaped = mean.to(p.dtype).as_strided(p.size(), p.stride())
        buffer = state.get("momentum_buffer")
        state["momentum_buffer"] = shaped if buffer is None else buffer.add_(shaped)

    def _group_index(self, parameter: ModelParameter) -> int | None:
        groups = self._optimizer.param_groups
        if self._indexed != len(groups):  # built late, and again after add_param_group
            self._index = {p: i for i, group in enumerate(groups) for p in group["params"]}
            self._indexed = len(groups)
        return self._index.get(parameter.tensor)

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._restore()  # a step that raised never came to its post-hook
        args, kwargs = _run_closure(args, kwargs)
        for group in optimizer.param_groups:
            if group["momentum"]:
                for p in group["params"]:
                    if p.grad is not None and p in self._parameters:
                        self._add_decay(p, group, self._parameters[p])
        self._saved = [{k: group[k] for k in _NEUTRAL} for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            if group["momentum"]:
                group.update(_NEUTRAL)
        return args, kwargs

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._restore()

    def _restore(self) -> None:
        if self._saved is not None:
            for group, settings in zip(self._optimizer.param_groups, self._saved, strict=True):
                group.update(settings)
            self._saved = None

    @torch.no_grad()
    def _add_decay(self, p: Tensor, group: Mapping[str, Any], parameter: ModelParameter) -> None:
        decay, momentum, rate = group["weight_decay"], group["momentum"], 1 - group["dampening"]
        # A fused SGD unscales gradients itself, and skips the step if they are not finite.
        scale = getattr(self._optimizer, "grad_scale", None)
        skips = getattr(self._optimizer, "found_inf", None)
        state = self._optimizer.state[p]
        buffer = state.get("momentum_buffer")
        fresh, parameter.stepped = not parameter.stepped, True
        if buffer is None:
            if not decay:
                return
            buffer = p * (decay if fresh else rate * decay)
            state["momentum_buffer"] = buffer if skips is None else buffer.mul_(1 - skips)
        elif skips is None:
            buffer.mul_(momentum).add_(p, alpha=rate * decay)
        else:
            moved = (buffer * momentum).add_(p, alpha=rate * decay)
            buffer.lerp_(moved, (1 - skips).to(buffer.dtype))
        assert p.grad is not None
        sign = -1.0 if group.get("maximize") else 1.0  # SGD turns the gradient round first
        added = [(p, sign * decay), (buffer, sign * momentum)]
        for tensor, factor in added if group["nesterov"] else [(buffer, sign)]:
            if scale is None:
                p.grad.add_(tensor, alpha=factor)
            else:
                p.grad.addcmul_(tensor, scale, value=factor)


def _run_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """SGD calls its closure first; do so here, before the gradients are read.

    args: as torch hands them to step hooks, the optimizer first."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        return args, kwargs
    with torch.enable_grad():
        loss = closure()
    return (args[0],), {"closure": lambda: loss}
