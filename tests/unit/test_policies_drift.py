"""What GraVAC watches after its choice, part by part, and that it explores again when it must."""

from __future__ import annotations

import json
from collections import deque
from math import nan
from random import Random
from statistics import median

import pytest

from policies.base import DENSE, Context, Measurement, StepReport
from policies.drift import (
    MAX_COOLDOWN_DOUBLINGS,
    REFERENCE_WINDOWS,
    ChangeTest,
    Drift,
    DriftMonitor,
)
from policies.exploration import CandidateStatistics, SendRule
from policies.gravac import GraVAC
from tests.unit.plans import reasons, switches

# The parts


def windows(test, values, least=0.0):
    """Whether each of these windows of one step at CF 10 proves a change."""
    told = []
    for value in values:
        test.add(value)
        told.append(bool(test.end_window(10.0, least)))
    return told


@pytest.mark.parametrize(
    ("values", "drifts"),
    [
        ([1.3, 1.3], [False, True]),
        ([1.3, 1.2, 1.3], [False, False, True]),  # between the thresholds the count stands
        ([1.3, 1.1, 1.3], [False, False, False]),
        ([1.3, 0.7, 1.3, 0.7, 0.7], [False] * 4 + [True]),  # both sides of it: noise
        ([1.29, 1.29, 1.29], [False] * 3),
    ],
)
def test_a_change_takes_patience_and_hysteresis(values, drifts):
    test = ChangeTest("time", 0.299, 2)
    windows(test, [1.0] * REFERENCE_WINDOWS)
    assert windows(test, values) == drifts


def test_a_difference_too_small_to_matter_does_not_count():
    test = ChangeTest("time", 1.0, 1)
    windows(test, [0.01] * REFERENCE_WINDOWS)
    assert windows(test, [0.04, 0.07], least=0.05) == [False, True]


def timed(cf, seconds, timed_cf=None):
    """All of it is time on the network."""
    times = {"seconds": seconds, "exchange_seconds": seconds, "compress_seconds": 0.0}
    return StepReport(0, cf, timed_cf=cf if timed_cf is None else timed_cf, **times)


def monitor_of(seconds, **settings):
    """A monitor of candidates of which these step times are known."""
    statistics = CandidateStatistics("gradient", 0.5, 1, lambda cf: 1e6 / cf, {})
    for cf, each in seconds.items():
        statistics.observe(timed(cf, each), ())
    given = {"drift": 0.3, "patience": 1, "steps": 1, "retry": None, "cooldown": 1, **settings}
    return DriftMonitor(statistics, SendRule(0.3, 0.1, 20), omega=0.1, **given)


def test_each_cf_is_compared_with_itself():
    monitor = monitor_of({40.0: 1.0, 10.0: 3.0}, steps=2)
    monitor.begin(40.0, (10.0,))
    for report in [timed(40.0, 1.0), timed(10.0, 3.0), timed(10.0, 3.0), timed(40.0, 1.0)]:
        assert monitor.observe(report) is None
    assert monitor.observe(timed(40.0, 9.0, timed_cf=10.0)) is None  # 10's time
    assert monitor.observe(timed(40.0, 2.0)) is None
    drift, why = monitor.observe(timed(40.0, 2.0))
    assert drift == Drift.TIMES
    assert why == (
        "step time without compression at CF 40 went from 1 s to 2 s, a change of "
        "100% (30% counts), 1 "
        "windows in a row"
    )


def test_the_first_window_is_the_reference_where_there_is_none():
    monitor = monitor_of({})
    monitor.begin(40.0, (10.0,))
    for seconds in (5.0, 5.1, nan):
        assert monitor.observe(timed(40.0, seconds)) is None
    assert monitor.observe(timed(40.0, 50.0))[0] == Drift.TIMES


def test_cooldowns_double_when_conclusions_do_not_last():
    monitor = monitor_of({40.0: 1.0}, cooldown=10)

    def lasts():
        """Steps for which a choice stands although times have changed from the first step on."""
        monitor.begin(40.0, (10.0,))
        steps = 0
        while monitor.observe(timed(40.0, 2.0)) is None:
            steps += 1
        return steps

    assert [lasts() for _ in range(MAX_COOLDOWN_DOUBLINGS + 2)] == [10, 20, 40, 80, 160, 160]
    for _ in range(4 * 160):
        monitor.observe(timed(40.0, 1.0))
    assert lasts() == 10


def test_a_probe_comes_after_a_wait_that_grows():
    monitor = monitor_of({40.0: 1.0}, retry=4, steps=2, drift=None)
    monitor.begin(40.0, (10.0,))

    def cycle(steps):
        seen = []
        for _ in range(steps):
            seen.append(monitor.probed == (10.0,))
            assert monitor.observe(timed(40.0, 1.0)) is None
        return seen

    assert cycle(6) == [False] * 4 + [True] * 2
    assert cycle(10) == [False] * 8 + [True] * 2
    monitor.begin(10.0, (40.0,))  # another choice
    monitor.begin(40.0, (10.0,))
    cycle(5)
    monitor.observe(timed(10.0, 1.0))  # a probe that was cut short begins again
    assert cycle(2) == [True] * 2
    assert monitor.probed == ()


@pytest.mark.parametrize(
    ("gain", "seconds", "why"),
    [
        (
            0.6,
            {20.0: 0.4},
            "CF 20 promises 50% more progress a second than CF 10 (0.40 s a step, gain 0.6)",
        ),
        (0.42, {20.0: 0.4}, ""),  # 1.05, within omega
        (0.32, {20.0: 0.1}, ""),  # fast, but below what is sent again
        (0.6, {}, "CF 20 has not been sent and has gain 0.6 >= 0.33"),
        (0.32, {}, ""),
    ],
)
def test_what_promises_to_be_better(gain, seconds, why):
    gains = {10.0: 0.5, 20.0: gain}
    statistics = CandidateStatistics("gradient", 0.5, 1, lambda cf: 1e6 / cf, {})
    for cf, each in {10.0: 0.5, **seconds}.items():
        statistics.observe(timed(cf, each), ())
    measured = {cf: Measurement(sample_error=1 - g, sample_total=1) for cf, g in gains.items()}
    monitor = DriftMonitor(
        statistics,
        SendRule(0.3, 0.1, 20),
        omega=0.1,
        drift=None,
        patience=1,
        steps=1,
        retry=1,
        cooldown=1,
    )
    monitor.begin(10.0, (20.0, 40.0))
    report = StepReport(0, 10.0, measured)
    for _ in range(2):
        statistics.observe(report, gains)
        found = monitor.observe(report)
    assert found == ((Drift.GAINS, why) if why else None)


# The policy


RANGE = (10.0, 1000.0)
GAINS = {10.0: 0.8, 20.0: 0.7, 40.0: 0.68, 160.0: 0.45, 1000.0: 0.2}
SLOW, MIDDLING, FAST = 1.0, 0.1, 0.002
"""Seconds that a dense exchange takes; the rest of a step takes 0.1 s, compression 0.01 s."""


class Network:
    """Reports as the controller makes them: medians over the last 32 steps at a CF, so that they
    remember a network that is no more; times one report late."""

    def __init__(self, policy, dense_seconds, gains=GAINS, *, noise=None, cf_range=RANGE):
        self.policy, self.dense_seconds, self.gains = policy, dense_seconds, dict(gains)
        self.compute, self.compress, self.noise = 0.1, 0.01, noise
        self.plans, self.last = [], None
        self.times = {}
        policy.start(Context(cf_range, 2))

    def measure(self, cf):
        gain = self.gains[cf]
        return Measurement(gain, 1 - gain, 1, 1, 1 - gain, 1)

    def timing(self):
        if self.last is None:
            return {}
        cf, probed = self.last.send, len(self.last.probe)
        factor = self.noise() if self.noise else 1.0
        exchange = self.dense_seconds / cf * factor
        compress = self.compress * ((cf != DENSE) + 0.5 * bool(probed))
        seconds = self.compute * factor + compress + exchange
        self.times.setdefault(cf, deque(maxlen=32)).append(seconds)
        return {
            "timed_cf": cf,
            "seconds": seconds,
            "median_seconds": median(self.times[cf]),
            "compress_seconds": compress,
            "exchange_seconds": exchange,
            "timed_bytes": 1e6 / cf,
        }

    def step(self):
        plan = self.policy.plan()
        self.plans.append(plan)
        measured = {cf: self.measure(cf) for cf in {plan.send, *plan.probe} - {DENSE}}
        timing = self.timing()
        self.last = plan
        self.policy.observe(StepReport(len(self.plans) - 1, plan.send, measured, **timing))
        return plan

    def run(self, steps):
        return [self.step() for _ in range(steps)]

    def settle(self):
        for _ in range(1000):
            if self.policy.verdict():
                return self.policy.plan().send
            self.step()
        raise AssertionError("no verdict")

    def steps_until(self, sent, limit=1000):
        """Steps until the policy has chosen again, which must be this CF."""
        for steps in range(limit):
            if f"CF {sent:g}:" in self.policy.verdict() or (
                sent == DENSE and "stays dense" in self.policy.verdict()
            ):
                return steps
            self.step()
        raise AssertionError(f"not {sent}: {self.policy.verdict()}")


def network(dense_seconds, gains=GAINS, **settings):
    return Network(GraVAC(**settings), dense_seconds, gains)


# What it is for: networks that change (windows of 40 steps: two are 80)


@pytest.mark.parametrize("offset", [0, 3, 6])
@pytest.mark.parametrize("lasted", [50, 1500])
def test_dense_is_left_within_two_windows_when_the_network_slows_down(offset, lasted):
    run = network(FAST, retry=None)
    assert run.settle() == DENSE
    run.run(lasted + offset)
    run.dense_seconds = SLOW
    run.run(30)
    assert not run.policy.verdict()  # it explores
    assert 30 + run.steps_until(40.0) <= 80
    assert {plan.send for plan in run.run(100)} == {40.0}


@pytest.mark.parametrize("offset", [0, 3, 6])
def test_compression_is_left_within_two_windows_when_the_network_becomes_fast(offset):
    run = network(SLOW, retry=None)
    assert run.settle() == 40.0
    run.run(200 + offset)
    run.dense_seconds = FAST
    assert run.steps_until(40.0) == 0
    plans = run.run(30)
    assert not run.policy.verdict()
    assert "explores again, " in reasons(plans)[0]
    assert 30 + run.steps_until(DENSE) <= 80


def test_both_ways_and_back_again():
    run = network(FAST, retry=None)
    assert run.settle() == DENSE
    for dense_seconds, chosen in [(SLOW, 40.0), (FAST, DENSE)] * 3:
        run.run(300)
        run.dense_seconds = dense_seconds
        run.run(30)
        assert 30 + run.steps_until(chosen) <= 80


def test_the_wait_for_the_network_shows_what_the_step_time_does_not():
    gains = {**GAINS, 160.0: 0.66}
    run = network(SLOW, gains, retry=None)
    run.compute = 0.05
    assert run.settle() == 160.0
    run.run(100)
    before = run.times[160.0][-1]
    run.dense_seconds = FAST
    plan = next(plan for plan in run.run(40) if plan.reason)
    assert before / run.times[160.0][-1] < 1.3
    assert plan.reason.startswith(
        "back to dense from CF 160: explores again, wait for the network at CF 160 went from "
        "0.00625 s to "
    )
    assert run.steps_until(DENSE) < 80


def test_the_step_time_shows_what_the_wait_does_not():
    run = network(SLOW, retry=None)
    run.settle()
    run.run(100)
    run.compute *= 1.5
    plan = next(plan for plan in run.run(40) if plan.reason)
    assert plan.reason == (
        "back to dense from CF 40: explores again, step time without compression at CF 40 went "
        "from 0.125 s to 0.175 s, a change of 40% (30% counts), 2 windows in a row; "
        "40 times the bytes"
    )


def test_after_a_change_of_the_network_gains_are_known_and_times_are_not():
    run = network(SLOW, retry=None)
    run.settle()
    run.run(100)
    run.dense_seconds = 5 * SLOW
    while run.policy.verdict():
        run.step()
    plans = run.run(8 + 5 * 8)
    sent = [plan.send for plan in plans]
    assert sent[:8] == [DENSE] * 8  # again: its time is another one now
    assert [sent.count(cf) for cf in (20.0, 40.0, 160.0)] == [7, 7, 7]
    assert sent.count(1000.0) == 0
    # the times are of the present network, though the controller's medians are not
    assert "progress a second" in run.policy.verdict()
    last = dict(run.policy.state_dict()["statistics"]["time"]["last"])
    assert last == {cf: pytest.approx(5 * SLOW / cf) for cf in (DENSE, 10.0, 20.0, 40.0, 160.0)}


def test_a_slower_machine_is_drift_too():
    run = network(SLOW, retry=None)
    run.settle()
    run.run(100)
    run.compute = 2.0
    run.run(30)
    assert not run.policy.verdict()
    assert run.steps_until(10.0) < 60  # the network hardly matters now, and CF 10 keeps most


def test_a_dense_run_that_may_not_be_dense_is_not_measured_dense_again():
    run = network(SLOW, retry=None, allow_dense=False)
    run.settle()
    run.dense_seconds = 9 * SLOW
    assert DENSE not in {plan.send for plan in run.run(300)}
    assert any("explores again" in why for why in reasons(run.plans))


# Gains


def test_a_gain_that_drifts_opens_exploration_and_keeps_the_times():
    run = network(SLOW, retry=None)
    run.settle()
    run.run(60)
    run.gains = {cf: min(1.0, 1.5 * gain) for cf, gain in GAINS.items()}
    plans = run.run(40)
    assert reasons(plans)[0] == (
        "scale down 40 -> 10: explores again, gain at CF 40 went from 0.68 to 1, a change of "
        "47% (30% counts), 2 windows in a row; 0.22 s a step instead of 0.14 s, 4 times the bytes"
    )
    plans += run.run(300)
    assert DENSE not in {plan.send for plan in plans}  # its time is still good
    assert run.policy.verdict().startswith("GraVAC settled on CF")


def test_a_chosen_cf_that_stays_below_epsilon_is_given_up_for_one_between():
    run = network(SLOW, {**GAINS, 160.0: 0.7}, drift=None, retry=3)
    assert run.settle() == 160.0
    run.run(50)
    run.gains[160.0] = 0.1
    plans = run.run(170)  # its average falls slowly below epsilon, then 3 windows of 40 steps
    assert next(why for why in reasons(plans) if "looks again" not in why).startswith(
        "scale down 160 -> 10: gain 0.2"
    )
    assert "explores again, the gain of CF 160 is" in reasons(plans)[-1]
    assert "< epsilon 0.3 for 120 steps" in reasons(plans)[-1]
    run.steps_until(40.0)


def test_a_chosen_floor_that_fails_is_only_found_again_through_epsilon():
    run = network(SLOW, {**dict.fromkeys(GAINS, 0.1), 10.0: 0.8}, drift=None, retry=3)
    assert run.settle() == 10.0
    run.gains[10.0] = 0.1
    run.run(600)
    assert run.last.send == DENSE
    assert not any("explores again" in why for why in reasons(run.plans))


# Looking again


def test_a_candidate_below_epsilon_is_looked_at_again_and_tried():
    run = network(SLOW, retry=3)
    assert run.settle() == 40.0
    plans = run.run(3 * 40 + 8 + 1)
    assert [plan.probe for plan in plans] == [()] * 120 + [(10.0, 20.0, 160.0, 1000.0)] * 8 + [()]
    assert reasons(plans[1:]) == [
        "looks again at the gains of CF 10, 20, 160, 1000",
        "looks no longer at the gains of CF 10, 20, 160, 1000",
    ]
    run.gains[1000.0] = 0.7
    plans = run.run(2 * 120 + 8)  # the wait has doubled
    assert reasons(plans[:-1])[-1].startswith("looks again")
    assert plans[-1].reason == (
        "scale down 40 -> 10: explores again, CF 1000 has not been sent and has gain 0.7 >= 0.33; "
        "0.22 s a step instead of 0.14 s, 4 times the bytes"
    )
    run.steps_until(1000.0)


def test_a_timed_cf_must_promise_more_t_comp():
    run = network(SLOW, retry=3)
    assert run.settle() == 40.0
    run.gains[160.0] = 0.69  # before: 0.45
    run.run(3 * 40 + 8)
    assert "CF 160 promises 13% more progress a second than CF 40" in run.policy.plan().reason
    assert "a step, gain 0.69)" in run.policy.plan().reason


def test_dense_is_left_when_gains_have_grown():
    run = network(FAST, retry=3)
    run.compute = 0.1
    run.dense_seconds = 0.05
    assert run.settle() == DENSE
    plans = run.run(3 * 40 + 8)
    assert plans[-1].send == DENSE
    assert plans[-1].probe
    run.gains = dict.fromkeys(GAINS, 0.95)
    run.run(2 * 3 * 40 + 8 + 400)
    assert run.policy.plan().send != DENSE


def test_looks_for_nothing_become_rare():
    run = network(SLOW, retry=3)
    run.settle()
    run.run(5000)
    looks = [why for why in reasons(run.plans) if why.startswith("looks again")]
    assert len(looks) == 5  # after 120, 240, 480, 960, 1920 steps
    assert not any("explores again" in why for why in reasons(run.plans))


def test_none_never_looks_and_never_reopens():
    run = network(SLOW, retry=None, drift=None)
    run.settle()
    run.dense_seconds = FAST
    run.gains = {cf: gain * 1.2 for cf, gain in GAINS.items()}
    assert {(plan.send, plan.probe) for plan in run.run(2000)} == {(40.0, ())}


# No flapping


def noisy(sigma, seed=0):
    dice = Random(seed)
    return lambda: dice.lognormvariate(0, sigma)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("dense_seconds", [SLOW, FAST])
@pytest.mark.parametrize(("sigma", "most"), [(0.1, 0), (0.2, 2)])
def test_stationary_noise_is_not_drift(dense_seconds, seed, sigma, most):
    run = network(dense_seconds)
    run.noise = noisy(sigma, seed)
    run.settle()
    plans = run.run(2500)
    opened = sum("explores again" in why for why in reasons(plans))
    assert opened <= most
    assert switches(plans) <= 12 * opened


def test_switches_are_bounded_however_noisy_the_times():
    run = network(SLOW)
    run.noise = noisy(1.0)
    run.run(8_000)
    opened = sum("explores again" in why for why in reasons(run.plans))
    longest = 40 * 2**MAX_COOLDOWN_DOUBLINGS
    assert opened <= MAX_COOLDOWN_DOUBLINGS + 1 + 8_000 / longest
    assert switches(run.plans) <= 14 * (opened + 1)


def test_a_pause_is_not_drift():
    run = network(SLOW, retry=None)
    run.settle()
    step = iter(range(100_000))
    run.noise = lambda: 100.0 if next(step) % 5 == 0 else 1.0
    assert {plan.send for plan in run.run(2000)} == {40.0}


def test_a_choice_stands_for_the_cooldown():
    run = network(FAST, retry=None, cooldown=200)
    run.settle()
    run.dense_seconds = SLOW
    plans = run.run(199)
    assert {plan.send for plan in plans} == {DENSE}
    run.run(12)
    assert not run.policy.verdict()


# Saved in the middle of anything


@pytest.mark.parametrize("at", [60, 330, 345, 380, 455])
def test_goes_on_exactly_from_its_state(at):
    def history(reload_at):
        run = network(FAST, retry=3)
        for step in range(600):
            run.dense_seconds = SLOW if step >= 320 else FAST
            if step == reload_at:
                state = json.dumps(run.policy.state_dict(), allow_nan=False)
                run.policy = GraVAC(retry=3)
                run.policy.start(Context(RANGE, 2))
                run.policy.load_state_dict(json.loads(state))
            run.step()
        return run.plans

    assert history(at) == history(None)


# Words


def test_what_would_make_it_move():
    run = network(SLOW)
    assert run.policy.next_move() == "dense is judged, 0 steps of its window so far"
    run.run(60)
    assert run.policy.next_move() == "CF 20 is judged, 10 steps of its window so far"
    run.settle()
    assert run.policy.next_move() == (
        "it explores again when its step time or gain changes by 30%, or a probe of CFs "
        "that are not sent promises more"
    )
    run = network(SLOW, drift=None, retry=None)
    run.settle()
    assert run.policy.next_move() == "nothing but epsilon changes it any more"
    run = network(FAST, drift=None, retry=None)
    run.settle()
    assert run.policy.next_move() == "nothing but epsilon changes it any more"
