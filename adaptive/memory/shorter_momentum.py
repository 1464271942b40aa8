"""A shorter momentum for an SGD that applies its momentum itself, beside plain error feedback.

What waits in a residual is delayed, and delay acts as momentum (see momentum.py). Where `p.grad`
must hold gradients, since the script clips them, velocities cannot take the optimizer's place. But
the optimizer can step with a smaller momentum and a larger learning rate while gradients are
compressed, so that the two delays do not add up. Every gradient still moves the parameters as far.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch.optim import SGD, Optimizer

from adaptive.memory.error_feedback import MomentumRule
from adaptive.memory.handover import Group, Handover, steps_as, with_settings
from adaptive.model.parameters import ModelParameters, local
from adaptive.network.collectives import Exchange
from policies.state import Stateful, require, saved


@dataclass(eq=False)
class MomentumShare(Stateful):
    """The momentum share with which the optimizer's buffers have moved."""

    share: float = saved(1.0)

    def _check_loaded(self) -> None:
        require(isfinite(self.share) and 0 < self.share <= 1, "'share' must be in (0, 1]")


class ShorterMomentum(Handover):
    """Steps of an SGD with a momentum share. One that a script makes anew takes the
    first one's place.

    share_at: (CF) -> the momentum share in a compressed step, in (0, 1]. In a dense step it is 1.
    The pending momentum stays when the share changes."""

    def __init__(
        self, optimizer: Optimizer, share_at: Callable[[float], float], parameters: ModelParameters
    ) -> None:
        self._optimizer, self._share_at, self._parameters = optimizer, share_at, parameters
        self._now, self._wanted = MomentumShare(), 1.0

    def begin_step(self, exchange: Exchange, cf: float | None, may_rest: bool = True) -> None:
        self._wanted = 1.0 if cf is None else self._share_at(cf)

    def before_step(
        self, optimizer: Optimizer, groups: list[dict[str, Any]]
    ) -> list[dict[str, Any]] | None:
        if optimizer is not self._optimizer:
            if not steps_as(optimizer, SGD) or not _tensors(optimizer) & _tensors(self._optimizer):
                return None
            self._optimizer, self._now = optimizer, MomentumShare()  # made anew, with new buffers
        self._move_to(self._wanted, groups)
        if self._now.share == 1:
            return None
        return [changed for group in groups for changed in self._with_share(group)]

    def _with_share(self, group: Group) -> list[dict[str, Any]]:
        rule = MomentumRule.of(group).with_share(self._now.share)
        shorter = {"momentum": rule.momentum, "lr": group["lr"] * rule.gain}
        return with_settings([group], shorter, lambda _: True, self._parameters)

    @torch.no_grad()
    def _move_to(self, share: float, groups: list[dict[str, Any]]) -> None:
        """A buffer holds the velocity divided by what the learning rate is multiplied by."""
        before, self._now.share = self._now.share, share
        if share == before:
            return
        for group in groups:
            rule = MomentumRule.of(group)
            gains = rule.with_share(before).gain / rule.with_share(share).gain
            ours = (p for p in group["params"] if p in self._parameters)
            found = [self._optimizer.state.get(p, {}).get("momentum_buffer") for p in ours]
            buffers = [local(buffer) for buffer in found if buffer is not None]
            if buffers:
                torch._foreach_mul_(buffers, gains * rule.velocity_scale(before, share))

    def hand_back(self, exchange: Exchange | None) -> None:
        self._move_to(1.0, self._optimizer.param_groups)

    def state_dict(self) -> dict[str, Any]:
        return self._now.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The optimizer's state is loaded by the script."""
        self._now = MomentumShare()
        if state:
            self._now.load_state_dict(state)


def _tensors(optimizer: Optimizer) -> set[torch.Tensor]:
    return {p for group in optimizer.param_groups for p in group["params"]}
