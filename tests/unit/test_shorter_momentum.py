"""An SGD whose own momentum has less delay while gradients are compressed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.optim import SGD

from adaptive.memory.error_feedback import MomentumRule
from adaptive.memory.handover import stand_in_for
from adaptive.memory.model_memory import MemoryChoice
from adaptive.memory.momentum import ShorterMomentum
from adaptive.memory.options import NAMED, Momentum
from adaptive.model.parameters import ModelParameter
from compressors import make_compressor
from tests.unit.model_parameters import Parameters

EXCHANGE: Any = None
SHARES = st.lists(st.sampled_from([None, 0.2, 0.5, 0.9]), min_size=1, max_size=8)
RULES = st.sampled_from([(0.9, 0.0, False), (0.9, 0.1, False), (0.5, 0.0, True)])


class Steps:
    """One parameter that SGD steps, by the momentum shares of its steps; None: a dense step."""

    def __init__(self, rule: tuple[float, float, bool]) -> None:
        momentum, dampening, nesterov = rule
        p = torch.zeros(3, dtype=torch.float64)
        self.p = p
        self.optimizer = SGD([p], 0.1, momentum, dampening, nesterov=nesterov)
        of = Parameters([ModelParameter("p", p)], False)
        self.handover = ShorterMomentum(self.optimizer, lambda share: share, of)

    def step(self, grad: Tensor, share: float | None) -> None:
        self.p.grad = grad.clone()
        self.handover.begin_step(EXCHANGE, share)
        groups = self.handover.before_step(self.optimizer, self.optimizer.param_groups)
        stands_in = stand_in_for(self.optimizer)
        stands_in.param_groups = groups or self.optimizer.param_groups
        stands_in.step()

    @property
    def buffer(self) -> Tensor:
        buffer: Tensor = self.optimizer.state[self.p]["momentum_buffer"]
        return buffer


def by_hand(grads: Sequence[Tensor], shares: Sequence[float | None], rule: MomentumRule) -> Tensor:
    """Where a parameter comes to whose velocity moves as momentum correction's does."""
    p, u, before = torch.zeros_like(grads[0]), torch.zeros_like(grads[0]), 1.0
    for i, (g, share) in enumerate(zip(grads, shares, strict=True)):
        now = share or 1.0
        moved = rule.with_share(now)
        u = moved.momentum * u * rule.velocity_scale(before, now) + moved.rate(i == 0) * g
        p = p - 0.1 * (moved.gain * g + moved.momentum * u if rule.nesterov else u)
        before = now
    return p


@given(SHARES, RULES)
def test_it_steps_as_a_velocity_with_that_momentum_share(
    shares: list[float | None], rule: tuple[float, float, bool]
) -> None:
    grads = list(torch.randn(len(shares), 3, generator=torch.Generator().manual_seed(0)).double())
    steps = Steps(rule)
    for grad, share in zip(grads, shares, strict=True):
        steps.step(grad, share)
    torch.testing.assert_close(
        steps.p, by_hand(grads, shares, MomentumRule(*rule)), rtol=1e-12, atol=1e-12
    )
    assert steps.optimizer.param_groups[0]["momentum"] == rule[0]
    assert steps.optimizer.param_groups[0]["lr"] == 0.1


@settings(max_examples=30)
@given(SHARES, st.sampled_from([0.0, 0.5]))
def test_every_gradient_moves_the_parameter_as_far_as_without(
    shares: list[float | None], dampening: float
) -> None:
    ends = []
    for taken in (shares, [None] * len(shares)):
        steps = Steps((0.8, dampening, False))
        for i, share in enumerate([*taken, *[taken[-1]] * 400]):
            steps.step(torch.tensor([1.0, -2.0, 0.5]).double() * (i == 0), share)
        ends.append(steps.p.clone())
    # SGD does not dampen the first gradient.
    torch.testing.assert_close(*ends, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("nesterov", [False, True])
def test_handed_back_a_buffer_delivers_what_it_had_yet_to_deliver(nesterov: bool) -> None:
    steps = Steps((0.9, 0.0, nesterov))
    for _ in range(3):
        steps.step(torch.ones(3).double(), 0.3)
    shorter = MomentumRule(0.9, 0.0, nesterov).with_share(0.3)
    ahead = 0.1 * shorter.gain * steps.buffer * shorter.momentum / (1 - shorter.momentum)
    steps.handover.hand_back(None)
    left = 0.1 * steps.buffer * 0.9 / (1 - 0.9)
    both = (ahead * shorter.momentum, left * 0.9) if nesterov else (ahead, left)
    torch.testing.assert_close(*both, rtol=1e-12, atol=1e-12)


def test_a_state_that_is_damaged_is_refused() -> None:
    steps = Steps((0.9, 0.0, False))
    steps.step(torch.ones(3).double(), 0.3)
    assert steps.handover.state_dict() == {"share": 0.3}
    with pytest.raises(ValueError, match="share"):
        steps.handover.load_state_dict({"share": 0.0})


def test_beside_a_plain_residual_the_momentum_share_is_half_of_momentum_corrections() -> None:
    topk = make_compressor("topk")
    choice = MemoryChoice(topk, NAMED["auto"])
    assert choice.share_beside_residual(10.0) == pytest.approx(0.5 * 1.2 / 10 ** (1 / 3))
    assert choice.share_beside_residual(1.0) == 1.0  # a dense step
    assert MemoryChoice(topk, Momentum(share=0.7)).share_beside_residual(10.0) == 0.7
