"""A momentum with less delay: what a gradient adds up to stays the same."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor
from adaptive.memory.momentum import MomentumRule
from tests.distributed.setting import Scripted, flat_parameters
from tests.unit.in_one_process import Given, one_rank

MOMENTA = st.floats(0.05, 0.99)
SHARES = st.floats(0.05, 1.0)
STEPS = 2000


def _delivered(rule: MomentumRule, velocity: float, gradient: float) -> list[float]:
    """What each step sends, if only the first one has a gradient."""
    sent = []
    for step in range(STEPS):
        g = gradient if step == 0 else 0.0
        velocity = rule.momentum * velocity + (1 - rule.dampening) * rule.gain * g
        sent.append(rule.gain * g + rule.momentum * velocity if rule.nesterov else velocity)
    return sent


@given(MOMENTA, SHARES, st.booleans())
def test_a_gradient_adds_up_to_the_same_and_sooner(m: float, share: float, nesterov: bool) -> None:
    rule = MomentumRule(m, nesterov=nesterov)
    sent = _delivered(rule.with_share(share), 0.0, 1.0)
    assert sum(sent) == pytest.approx(1 / (1 - m), rel=1e-6)
    if not nesterov:
        age = sum(step * value for step, value in enumerate(sent)) / sum(sent)
        assert age == pytest.approx(share * m / (1 - m), rel=1e-5)


@given(MOMENTA, SHARES, SHARES, st.booleans())
def test_a_velocity_delivers_the_same_when_its_lag_changes(
    m: float, share: float, other: float, nesterov: bool
) -> None:
    rule = MomentumRule(m, nesterov=nesterov)
    carried = rule.velocity_scale(share, other)
    before = sum(_delivered(rule.with_share(share), 1.0, 0.0))
    after = sum(_delivered(rule.with_share(other), carried, 0.0))
    assert after == pytest.approx(before, rel=1e-6)


@pytest.mark.parametrize("rule", [MomentumRule(0.0), MomentumRule(0.9), MomentumRule(1.0)])
def test_the_whole_lag_changes_nothing(rule: MomentumRule) -> None:
    assert rule.with_share(1.0) == rule
    assert rule.velocity_scale(1.0, 1.0) == 1.0


@pytest.mark.parametrize("m", [0.0, 1.0])
def test_no_lag_to_share(m: float) -> None:
    assert MomentumRule(m).with_share(0.5) == MomentumRule(m)
    assert MomentumRule(m).velocity_scale(1.0, 0.5) == 1.0


def test_an_sgd_whose_momentum_is_1_gets_it_back() -> None:
    """Its gradients add up to no end, so what waits is sent as it is."""
    with one_rank():
        model = DDP(Given([(8, 12)]))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=1.0)
        compressor = AdaptiveCompressor(cf_range=(1, 20), policy=Scripted([10.0]))
        compressor.attach(model, optimizer=optimizer)
        for step in range(4):
            if step == 3:
                compressor.detach()
            optimizer.zero_grad()
            model([torch.randn(8, 12)]).backward()
            optimizer.step()
        assert flat_parameters(model).isfinite().all()
