"""The rule that GraVAC's released code calls Accordion, from hand-made norms."""

from __future__ import annotations

import json
from math import nan

import pytest

from policies import Context, Measurement, StepReport
from runs.papers.norm_change import NormChange

CONTEXT = Context((100.0, 1000.0), 2)


def sent(policy: NormChange, norms: list[float]) -> list[float]:
    """The CFs of the steps after each of these norms."""
    found = []
    for step, norm in enumerate(norms):
        cf = policy.plan().send
        policy.observe(StepReport(step, cf, {cf: Measurement(grad_norms=norm)}))
        found.append(policy.plan().send)
    return found


def started(**settings) -> NormChange:
    policy = NormChange(**settings)
    policy.start(CONTEXT)
    return policy


def test_it_sends_the_high_cf_unless_the_average_moves_by_the_threshold() -> None:
    norms = [5.0] * 10 + [5.5, 4.5, nan, 500.0] + [5.0] * 3
    cfs = sent(started(window=10, weight=0.1), norms)
    assert cfs[:13] == [1000.0] * 13
    assert cfs[13] == 100.0  # after the norm of 500
    # 500 leaves the average by a weight of 0.9 a step: less than the threshold
    assert cfs[14:] == [1000.0] * 3


def test_before_the_window_is_full_no_change_is_seen() -> None:
    assert set(sent(started(window=10), [1.0, 1000.0] * 5)) == {1000.0}


def test_the_average_is_that_of_the_released_code() -> None:
    """There it is pandas' `ewm(alpha=0.5).mean()` of the last norms."""
    policy = started(window=3, weight=0.5)
    sent(policy, [9.0, 1.0, 2.0, 4.0])
    assert policy.status()["average_norm"] == pytest.approx(
        (4 + 2 / 2 + 1 / 4) / (1 + 1 / 2 + 1 / 4)
    )


def test_it_goes_on_from_a_state() -> None:
    first, then = [5.0] * 12, [500.0, 5.0, 5.0]
    policy, again = started(window=10), started(window=10)
    sent(policy, first)
    again.load_state_dict(json.loads(json.dumps(policy.state_dict())))
    assert sent(again, then) == sent(policy, then)


def test_low_may_not_exceed_high() -> None:
    with pytest.raises(ValueError, match="low=500: must not exceed high=200"):
        started(low=500, high=200)
