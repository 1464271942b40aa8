"""How fast a run's steps were, and dense steps in their place: replayed from step times."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace
from math import exp, inf, isfinite, log, nan
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptive.network.link import LinkCost, LinkSpec
from adaptive.network.pace import NOT_TIMED, Contrast, DenseStep, DenseTimer, Pace, network_in_words
from adaptive.timeline.summary import Summary, headline
from policies import DENSE, StepReport
from policies.step_time import LAST
from runs.modelled_clock import ModelledClock

NBYTES = 1e6  # of a dense step


def timer(clock=lambda: 0.0, spec=None, cost=None):
    return DenseTimer(lambda cf: NBYTES / cf, 2, clock, spec, lambda: cost)


def timed(cf, exposed, work=0.1, steps=1):
    """A step, or a round of local steps, that waits so long for the network."""
    seconds = work * steps + exposed
    times = {"seconds": seconds, "median_seconds": seconds, "exchange_seconds": exposed}
    return StepReport(0, cf, timed_cf=cf, timed_steps=steps, compress_seconds=0.0, **times)


def fed(made, *reports):
    """The dense step in place of the last."""
    return [made.observe(report) for report in reports][-1]


def replayed(cfs, seconds, dense_timer=None, exposed=0.3):
    """The pace of a run whose steps at these CFs took so long, and waited so much of that."""
    pace, dense_timer, times = Pace(), dense_timer or timer(), {}
    for cf, took in zip(cfs, seconds, strict=True):
        recent = times.setdefault(cf, deque(maxlen=LAST))
        recent.append(took)
        report = timed(cf, exposed * took, (1 - exposed) * took)
        report = replace(report, median_seconds=median(recent))
        pace.add(report.median_seconds, 1, dense_timer.observe(report))
    return pace


# -- totals --------------------------------------------------------------------------------------


def test_seconds_a_step_are_of_all_that_was_timed():
    pace = Pace()
    pace.add(nan)
    pace.add(0.5, dense=DenseStep(1.0, measured=True))
    pace.add(1.2, 2)  # a round of two local steps, with nothing to compare with
    assert (pace.steps, pace.untimed) == (3, 1)
    assert pace.step_seconds == pytest.approx(1.7 / 3)
    assert pace.steps_per_second * pace.step_seconds == pytest.approx(1)
    assert pace.all_seconds == pytest.approx(1.7 * 4 / 3)
    assert pace.speedup == pytest.approx(2)  # of the one step that can be compared
    assert pace.dense_seconds == pytest.approx(2 * pace.step_seconds)
    assert not isfinite(Pace().step_seconds)
    assert not isfinite(Pace().speedup)
    assert Pace().all_seconds == 0


def test_a_pause_does_not_count():
    seconds = [0.5] * 100
    seconds[40] = seconds[80] = 60.0
    assert replayed([10.0] * 100, seconds).step_seconds == pytest.approx(0.5)


def test_what_is_saved_goes_on_and_parts_make_the_whole():
    cfs = [DENSE] * 30 + [10.0] * 60
    seconds = [1.0] * 30 + [0.25] * 60
    whole = replayed(cfs, seconds)
    half = replayed(cfs[:45], seconds[:45])
    loaded = Pace()
    loaded.load_state_dict(half.state_dict())
    assert loaded == half
    rest = whole.since(half)
    assert rest.steps == 45
    assert rest.seconds + half.seconds == pytest.approx(whole.seconds)


@pytest.mark.parametrize(
    "damage", [{"dense": 0.0}, {"compared": 0.0}, {"steps": 0}, {"seconds": -1.0}], ids=str
)
def test_totals_that_contradict_each_other_are_refused(damage):
    pace = Pace()
    pace.add(0.5, dense=DenseStep(1.0))
    with pytest.raises(ValueError, match="pace"):
        Pace().load_state_dict({**pace.state_dict(), **damage})
    assert headline(replace(pace, **damage), 0.5)  # and no arithmetic fails


@pytest.mark.parametrize(
    "damage",
    [{"gains": [[10.0, [0, 0.5]]]}, {"steps": 3}, {"local_steps": 0}, {"bytes_sent": -1.0}],
)
def test_a_damaged_summary_is_refused(damage):
    state = {**Summary().state_dict(), "steps": 2, "local_steps": 2, "bytes_sent": 1.0}
    state |= {"steps_at_cf": [[10.0, 2]], "gains": [[10.0, [2, 0.5]]]}
    whole = Summary()
    whole.load_state_dict(state)
    assert str(whole)
    with pytest.raises(ValueError, match="state"):
        Summary().load_state_dict({**state, **damage})


# -- steps of the same stretch of time -----------------------------------------------------------


def test_the_run_of_the_issue_is_not_called_faster():
    """400 steps, 98% of them dense, on a machine that grew slower: the median of all is faster
    than a dense step of the second half. It was "1.3x faster than dense"."""
    cfs = [10.0] * 8 + [DENSE] * 392
    slower = [0.055 * exp(0.5 * step / 400) for step in range(400)]
    pace = replayed(cfs, slower)
    said = headline(pace, 0.03, cf=DENSE, dense_share=0.98)
    assert said.startswith("mostly dense on this network")
    assert headline(pace, 0.03).startswith("about as fast as dense")
    verdict = "dense is right: no CF promises more progress a second"
    said = headline(pace, 0.03, cf=DENSE, dense_share=0.98, verdict=verdict)
    assert said.startswith("dense is right on this network: 0.0")


@st.composite
def drifting(draw):
    """CFs in stretches, and seconds that are the same at all of them at any time: the machine
    drifts, to four times its speed or a quarter, single steps vary, and some have a pause."""
    cfs, steps = [], draw(st.integers(60, 300))
    while len(cfs) < steps:
        stretch = draw(st.integers(1, 150))
        cfs += [draw(st.sampled_from([DENSE, 10.0, 100.0]))] * stretch
    clock, rate, seconds = 0.0, 0.0, []
    noise = draw(st.sampled_from([0.0, 0.02, 0.1]))
    numbers = random.Random(draw(st.integers(0, 10**6)))
    while len(seconds) < len(cfs):
        rate = draw(st.floats(-0.005, 0.005))
        for _ in range(draw(st.integers(96, 300))):
            clock = max(-log(4), min(log(4), clock + rate))
            pause = 20 if numbers.random() < 0.01 else 1
            seconds.append(0.1 * pause * exp(clock + noise * numbers.uniform(-1, 1)))
    return cfs, seconds[: len(cfs)]


@given(drifting(), st.sampled_from([0.0, 0.3, 0.6]), st.sampled_from([None, LinkCost(0.0, inf)]))
def test_a_machine_that_drifts_is_no_gain_and_no_loss(run, exposed, cost):
    cfs, seconds = run
    pace = replayed(cfs, seconds, timer(cost=cost), exposed)
    assert not pace.is_faster
    assert not pace.is_slower
    said = headline(pace, 0.5)
    assert "faster" not in said
    assert "slower" not in said


@pytest.mark.parametrize("times", [0.25, 0.7, 1.5, 3.0])
@pytest.mark.parametrize("drift", [-0.003, 0.0, 0.003])
def test_a_true_difference_shows_in_the_same_drift(times, drift):
    cfs = [DENSE] * 40 + [10.0] * 260
    seconds = [exp(drift * step) * (1 if cf == DENSE else times) for step, cf in enumerate(cfs)]
    pace = replayed(cfs, seconds, exposed=0.0)
    assert (pace.is_faster, pace.is_slower) == (times < 1, times > 1)


def test_a_cf_that_was_not_beside_dense_is_compared_by_way_of_another():
    cfs = [DENSE] * 30 + [10.0] * 70 + [100.0] * 70
    seconds = [1.0] * 30 + [0.5] * 70 + [0.25] * 70
    contrast = Contrast()
    for cf, took in zip(cfs, seconds, strict=True):
        contrast.observe(cf, took)
    assert contrast.step(100.0, 0.25).seconds == pytest.approx(1.0)
    assert contrast.step(100.0, 0.25).measured
    assert contrast.step(50.0, 0.25) == NOT_TIMED
    contrast.pause()
    assert contrast.step(10.0, 0.5).seconds == pytest.approx(1.0)
    assert contrast.step(10.0, 0.9) == NOT_TIMED  # the network, or the machine, is another one


def test_on_another_network_dense_has_not_been_timed():
    made = timer()
    steps = [timed(DENSE, 0.9)] * 40 + [timed(10.0, 0.09)] * 100
    assert fed(made, *steps).measured
    assert fed(made, *[timed(10.0, 0.9)] * 40) == NOT_TIMED
    assert fed(made, *[timed(10.0, 0.0)] * 40) == NOT_TIMED
    assert fed(made, *[timed(10.0, 0.1)] * 40).measured  # as it was again


def test_after_other_ranks_have_saved_it_dense_has_not_been_timed():
    made = timer()
    fed(made, *[timed(DENSE, 0.9)] * 40, *[timed(10.0, 0.09)] * 40)
    made.contrast = Contrast()
    assert fed(made, timed(10.0, 0.09)) == NOT_TIMED


# -- a dense step that was not run ---------------------------------------------------------------


def test_a_dense_step_that_was_run_is_measured():
    steps = [timed(DENSE, 0.9)] * 5 + [timed(10.0, 0.09)] * 5
    step = fed(timer(spec=LinkSpec(1e9)), *steps)
    assert step.measured
    assert step.seconds == pytest.approx(1.0)


def test_one_that_was_not_is_modelled_by_the_emulated_link_and_never_too_long():
    step = fed(timer(spec=LinkSpec(8e6)), *[timed(10.0, 0.1)] * 4)
    assert not step.measured
    assert 1.0 <= step.seconds <= 1.1  # 1 s for the bytes, of which backward may hide some


def test_one_on_the_measured_link_is_modelled_unless_steps_contradict_it():
    slow = LinkCost(0.0, 1e6)
    assert fed(timer(cost=slow), *[timed(10.0, 0.1)] * 4).seconds > 1.0
    # They wait for less than this link takes: the network must have become faster.
    assert fed(timer(cost=slow), *[timed(10.0, 0.0)] * 4) == NOT_TIMED


@pytest.mark.parametrize("cost", [None, LinkCost(0.0, inf)])
def test_where_nothing_is_known_nothing_is_said(cost):
    pace = replayed([10.0] * 10, [0.2] * 10, timer(cost=cost))
    assert "dense was not timed" in headline(pace, 0.9)


def test_a_dense_round_of_local_steps_is_no_dense_step():
    """It exchanges once in eight steps: a dense step, which does in each, is modelled by it."""
    rounds = [timed(DENSE, 0.8, steps=8)] * 8 + [timed(10.0, 0.08, steps=8)] * 8
    step = fed(timer(spec=LinkSpec(8e6)), *rounds)
    assert not step.measured
    assert step.seconds == pytest.approx(0.1 + 1.0 - 2 / 3 * 0.1)


def test_a_modelled_clock_knows_exactly():
    clock = ModelledClock(0.25, LinkSpec(8e6))
    made = timer(clock)
    assert fed(made, timed(10.0, 0.1)) == DenseStep(clock.step(NBYTES))
    assert network_in_words(clock, None) == "modelled 8 Mbit/s link"
