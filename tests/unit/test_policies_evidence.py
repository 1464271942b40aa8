"""What GraVAC has seen: what stays known when times or gains have changed."""

from __future__ import annotations

import json

import pytest

from policies.base import DENSE, Measurement, StepReport
from policies.exploration import CandidateStatistics


def evidence(gains, times):
    """Of one measurement and one step each; times in seconds."""
    seen = CandidateStatistics("gradient", 0.5, 1)
    for cf, gain in gains.items():
        measured = {cf: Measurement(sample_error=1 - gain, sample_total=1)}
        seen.observe(StepReport(0, cf, measured), {cf})
    for cf, seconds in times.items():
        seen.observe(StepReport(0, 77.0, timed_cf=cf, median_seconds=seconds), ())
    return seen


def test_a_network_that_changed_leaves_the_gains_known_until_they_are_measured():
    seen = evidence({10.0: 0.75, 20.0: 0.5}, {DENSE: 1.0, 10.0: 0.5})
    seen.judge(10.0, 20.0)
    seen.keep_only(())
    assert seen.gain(20.0) is None
    seen.forget_times()
    assert (seen.gain(10.0), seen.gain(20.0), seen.gain(40.0)) == (0.75, 0.5, None)
    assert (seen.t_sys(10.0), seen.t_comp(0.1)) == (None, {})
    measured = {20.0: Measurement(sample_error=0.75, sample_total=1)}
    seen.observe(StepReport(0, 20.0, measured), {20.0})
    assert seen.gain(20.0) == 0.25
    copy = CandidateStatistics("gradient", 0.5, 1)
    copy.load_state_dict(json.loads(json.dumps(seen.state_dict())))
    assert (copy.gain(10.0), copy.gain(20.0)) == (0.75, 0.25)


def test_gains_that_changed_leave_the_times_known():
    seen = evidence({10.0: 0.75}, {DENSE: 1.0, 10.0: 0.5})
    seen.judge(10.0)
    seen.forget_gains()
    assert (seen.gain(10.0), seen.t_comp(0.1)) == (None, {})
    assert (seen.t_sys(10.0), seen.t_sys(DENSE)) == (2.0, 1.0)


@pytest.mark.parametrize(
    ("gain", "seconds", "why"),
    [
        (0.6, {20.0: 0.4}, "CF 20 has gain 0.6 now, T_comp 1.5 > 1.1 x 1 of CF 10"),
        (0.42, {20.0: 0.4}, ""),  # 1.05, within omega
        (0.4, {20.0: 0.1}, ""),  # fast, but below what is sent again
        (0.6, {}, "CF 20 has not been sent and has gain 0.6 >= 0.41 now"),
        (0.4, {}, ""),
    ],
)
def test_what_promises_to_be_better(gain, seconds, why):
    seen = evidence({10.0: 0.5, 20.0: gain}, {10.0: 0.5, **seconds})
    assert seen.promising((20.0, 40.0), 10.0, 0.41, 0.1) == why
