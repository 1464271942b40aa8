"""A momentum with less lag: what a gradient adds up to stays the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptive.memory.momentum import MomentumRule

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
    sent = _delivered(rule.with_lag(share), 0.0, 1.0)
    assert sum(sent) == pytest.approx(1 / (1 - m), rel=1e-6)
    if not nesterov:
        age = sum(step * value for step, value in enumerate(sent)) / sum(sent)
        assert age == pytest.approx(share * m / (1 - m), rel=1e-5)


@given(MOMENTA, SHARES, SHARES, st.booleans())
def test_a_velocity_delivers_the_same_when_its_lag_changes(
    m: float, share: float, other: float, nesterov: bool
) -> None:
    rule = MomentumRule(m, nesterov=nesterov)
    carried = rule.change_of_lag(share, other)
    before = sum(_delivered(rule.with_lag(share), 1.0, 0.0))
    after = sum(_delivered(rule.with_lag(other), carried, 0.0))
    assert after == pytest.approx(before, rel=1e-6)


@pytest.mark.parametrize("rule", [MomentumRule(0.0), MomentumRule(0.9), MomentumRule(1.0)])
def test_the_whole_lag_changes_nothing(rule: MomentumRule) -> None:
    assert rule.with_lag(1.0) == rule
    assert rule.change_of_lag(1.0, 1.0) == 1.0


@pytest.mark.parametrize("m", [0.0, 1.0])
def test_no_lag_to_share(m: float) -> None:
    assert MomentumRule(m).with_lag(0.5) == MomentumRule(m)
    assert MomentumRule(m).change_of_lag(1.0, 0.5) == 1.0
