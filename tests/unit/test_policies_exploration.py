"""How GraVAC explores: its send rule, its statistics of candidates, and its way up the ladder."""

from __future__ import annotations

import json
from collections import Counter
from math import isnan, nan

import pytest

from policies.base import DENSE, Context, Measurement, Plan, StepReport
from policies.candidates import CandidateStatistics
from policies.gravac import GraVAC
from policies.send_rule import MAX_DOUBLINGS, Level, SendRule
from tests.unit.gravac_world import FALLING, GOOD, RANGE, bare, world
from tests.unit.plans import reasons, sends

# The send rule


def rule_at(level, epsilon=0.5, hysteresis=0.1, cooldown=10):
    rule = SendRule(epsilon, hysteresis, cooldown)
    rule.enter(level)
    return rule


@pytest.mark.parametrize(
    ("level", "floor", "candidate", "new", "why"),
    [
        (Level.CANDIDATE, 0.9, 0.5, Level.CANDIDATE, ""),
        (Level.CANDIDATE, 0.9, None, Level.CANDIDATE, ""),
        (Level.CANDIDATE, 0.5, 0.49, Level.FLOOR, "gain 0.49 < epsilon 0.5"),
        (Level.CANDIDATE, None, 0.49, Level.FLOOR, "gain 0.49 < epsilon 0.5"),
        (Level.CANDIDATE, 0.48, 0.49, Level.DENSE, "gain 0.49 < epsilon 0.5"),
        (Level.FLOOR, 0.5, 0.2, Level.FLOOR, ""),
        (Level.FLOOR, None, None, Level.FLOOR, ""),
        (Level.FLOOR, 0.49, 0.2, Level.DENSE, "gain 0.49 < epsilon 0.5"),
        (Level.FLOOR, 0.9, 0.54, Level.FLOOR, ""),
        (Level.FLOOR, 0.9, 0.56, Level.CANDIDATE, "gain 0.56 >= 0.55 (epsilon 0.5, hysteresis)"),
        (Level.DENSE, 0.54, 0.2, Level.DENSE, ""),
        (Level.DENSE, None, None, Level.DENSE, ""),
        (Level.DENSE, 0.56, 0.2, Level.FLOOR, "gain 0.56 >= 0.55 (epsilon 0.5, hysteresis)"),
        (Level.DENSE, 0.9, 0.9, Level.FLOOR, "gain 0.9 >= 0.55 (epsilon 0.5, hysteresis)"),
        (Level.DENSE, 0.2, 0.9, Level.CANDIDATE, "gain 0.9 >= 0.55 (epsilon 0.5, hysteresis)"),
    ],
)
def test_each_branch_of_the_send_rule(level, floor, candidate, new, why):
    rule = rule_at(level)
    assert rule.step(floor, candidate) == why
    assert rule.level == new


def test_hysteresis_asks_for_no_more_than_1():
    rule = rule_at(Level.DENSE, epsilon=0.95)
    assert rule.step(0.999, None) == ""
    assert rule.step(1.0, None) != ""
    assert rule.level == Level.FLOOR


def steps_until_up(rule, limit=10_000):
    for n in range(1, limit):
        if rule.step(0.9, None):
            assert rule.level == Level.FLOOR
            return n
    raise AssertionError("never went up")


def test_going_up_waits_for_the_cooldown_and_down_does_not():
    rule = rule_at(Level.FLOOR)
    rule.step(0.1, None)
    assert rule.level == Level.DENSE
    assert steps_until_up(rule) == 10
    rule.step(0.1, None)
    assert rule.level == Level.DENSE


def test_one_level_up_waits_for_the_next():
    rule = rule_at(Level.DENSE)
    levels = [(rule.step(0.9, 0.9), rule.level)[1] for _ in range(12)]
    assert levels == [Level.FLOOR] * 10 + [Level.CANDIDATE] * 2


def test_the_cooldown_doubles_with_each_mistake_up_to_a_bound():
    rule = rule_at(Level.FLOOR)
    waits = []
    for _ in range(MAX_DOUBLINGS + 3):
        rule.step(0.1, None)
        waits.append(steps_until_up(rule))
    assert waits == [10, 20, 40, 80, 160, 320, 640, 640, 640]


@pytest.mark.parametrize(("lasted", "wait"), [(1, 80), (100, 80), (160, 80), (161, 10)])
def test_an_up_move_that_lasted_makes_the_cooldown_what_it_was(lasted, wait):
    rule = rule_at(Level.FLOOR)
    for earlier in (10, 20, 40):
        rule.step(0.1, None)
        assert steps_until_up(rule) == earlier
    for _ in range(lasted - 1):
        assert rule.step(0.9, None) == ""
    rule.step(0.1, None)
    assert steps_until_up(rule) == wait


def test_both_steps_down_count_as_one_mistake():
    rule = rule_at(Level.DENSE)
    rule.step(0.1, None)
    rule.enter(Level.FLOOR)
    rule.step(0.1, None)
    assert steps_until_up(rule) == 10
    while rule.level != Level.CANDIDATE:
        rule.step(0.9, 0.9)
    rule.step(0.9, 0.1)
    assert rule.level == Level.FLOOR
    rule.step(0.1, 0.1)
    assert rule.level == Level.DENSE
    assert steps_until_up(rule) == 20


def test_the_first_move_after_enter_is_free_and_no_mistake():
    rule = rule_at(Level.FLOOR)
    rule.step(0.9, 0.9)
    assert rule.level == Level.CANDIDATE
    rule.step(0.9, 0.1)
    waited = 0
    while rule.level != Level.CANDIDATE:
        rule.step(0.9, 0.9)
        waited += 1
    assert waited == 10  # not 20


def test_the_send_rule_is_saved():
    rule = rule_at(Level.FLOOR)
    for gain in (0.1, *[0.9] * 12, 0.1, 0.9, 0.9):
        rule.step(gain, None)
    copy = SendRule(0.5, 0.1, 10)
    copy.load_state_dict(json.loads(json.dumps(rule.state_dict())))
    waited = steps_until_up(copy)
    assert waited == steps_until_up(rule) == 18  # in the middle of a doubled cooldown


# Statistics of the candidates


def statistics_of(gains, times):
    """Of one measurement and one step each; times in seconds."""
    seen = CandidateStatistics("gradient", 0.5, 1, lambda cf: 1e6 / cf, {})
    for cf, gain in gains.items():
        measured = {cf: Measurement(sample_error=1 - gain, sample_total=1)}
        seen.observe(StepReport(0, cf, measured))
    for cf, seconds in times.items():
        times = {"seconds": seconds, "exchange_seconds": seconds, "compress_seconds": 0.0}
        seen.observe(StepReport(0, 77.0, timed_cf=cf, **times))
    return seen


def test_an_average_goes_on_where_its_cf_is_measured_again():
    seen = statistics_of({10.0: 0.75, 20.0: 0.5, 40.0: 0.3}, {DENSE: 1.0, 10.0: 0.5, 20.0: 0.25})
    assert seen.t_comp((10.0, 20.0, 40.0), 0.1) == {10.0: 1.5, 20.0: 2.0}
    assert seen.t_comp((10.0, 20.0, 40.0), 0.6) == {10.0: 1.5}
    seen.observe(StepReport(0, 20.0, {20.0: Measurement(sample_error=0.75, sample_total=1)}))
    assert seen.gain(20.0) == pytest.approx((0.5 / 2 + 0.25) / 1.5)  # a gain, half as old, and one
    copy = CandidateStatistics("gradient", 0.5, 1, lambda cf: 1e6 / cf, {})
    copy.load_state_dict(json.loads(json.dumps(seen.state_dict())))
    assert [copy.gain(cf) for cf in (10.0, 20.0, 40.0)] == [0.75, seen.gain(20.0), seen.gain(40.0)]
    seen.keep_only((20.0,))
    seen.forget_times()
    assert [seen.gain(cf) for cf in (10.0, 20.0, 40.0)] == [None, copy.gain(20.0), None]
    assert (seen.t_sys(20.0), seen.t_comp((20.0,), 0.1)) == (None, {})


# The way up the ladder


def test_opening_dense_then_floor_then_first_candidate():
    plans = world(FALLING).run(10 + 20 + 20)
    assert {bare(plan) for plan in plans[:10]} == {(DENSE, (10.0, 20.0))}
    assert plans[10].reason == ("dense is measured, gain at CF 10 0.9\n90% fewer bytes")
    assert {bare(plan) for plan in plans[10:31]} == {(10.0, (20.0,))}  # 31: the rule's turn
    assert plans[31].reason.startswith("gain 0.75 >= 0.33")
    assert {bare(plan) for plan in plans[31:]} == {(20.0, (10.0,))}
    assert len(reasons(plans)) == 2


def test_opening_with_a_floor_that_loses_too_much_stays_dense_for_now():
    run = world({**FALLING, 10.0: 0.29})
    plans = run.run(300)
    assert {bare(plan) for plan in plans} == {(DENSE, (10.0, 20.0))}
    assert reasons(plans) == ["gain 0.29 at CF 10 < epsilon 0.3"]
    assert run.policy.verdict() == ("no gain reaches GraVAC's epsilon 0.3, so it sends dense")
    run.gain[10.0] = 0.34
    plans = run.run(40)
    assert sends(plans)[:2] == [DENSE, 10.0]
    assert "gain 0.33" in reasons(plans)[0]
    run.gain[10.0] = 0.9
    assert "settled" in run.settle().reason  # dense steps did not use up the windows


def test_opening_shorter_than_a_gain_takes_to_be_believed():
    plans = world(FALLING, dense_window=2).run(10)
    assert sends(plans) == [DENSE, 10.0]
    assert plans[2].reason == ("dense is measured, gain at CF 10 not known yet\n90% fewer bytes")


@pytest.mark.parametrize("settings", [{"dense_window": 0}, {"allow_dense": False}])
def test_opening_without_dense(settings):
    plans = world(FALLING, **settings).run(30)
    assert plans[0] == Plan(send=10.0, probe=(20.0,))
    assert sends(plans) == [10.0, 20.0]


def test_a_floor_without_gain_is_left_as_soon_as_that_is_known():
    run = world({**FALLING, 10.0: 0.2}, allow_dense=False)
    plans = run.run(8)
    assert [plan.send for plan in plans] == [10.0] * 5 + [DENSE] * 3
    assert reasons(plans) == ["gain 0.2 < epsilon 0.3\n10 times the bytes"]
    assert plans[-1].probe == (10.0, 20.0)


# Exploring


@pytest.mark.parametrize(
    ("scaling", "candidates"),
    [
        ("exponential", [20.0, 40.0, 160.0, 1000.0]),
        ("geometric", [20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 1000.0]),
    ],
)
def test_the_candidates_are_the_ladder(scaling, candidates):
    gain = {10.0: 0.9} | dict.fromkeys(candidates, 0.5)
    run = world(gain, dict.fromkeys(gain, 1.0), scaling=scaling, allow_dense=False)
    seen = []
    while not run.policy.verdict():
        run.step()
        seen.append(run.policy.status()["candidate"])
    windows = Counter(seen[:-1])  # the last one is the choice
    assert list(windows) == candidates
    assert windows[candidates[1]] == 20


def test_a_candidate_below_epsilon_is_only_probed():
    run = world({**FALLING, 20.0: 0.29})
    plans = run.run(10 + 20 + 20)
    assert {bare(plan) for plan in plans[10:]} == {(10.0, (20.0,))}
    assert run.policy.plan().reason == (
        "gain falls by 68% (0.9 to 0.29), more than omega 10%, floor stays 10, next candidate 40"
    )


def test_a_candidate_that_loses_its_gain_is_left_at_once():
    run = world(FALLING, ranks=50)
    run.run(40)
    assert run.last.send == 20.0
    run.gain[20.0] = 0.0
    plans = run.run(4)
    assert sends(plans) == [20.0, 10.0]
    assert "gain 0.18" in reasons(plans)[0]
    assert plans[-1].probe == (20.0,)
    run.gain[10.0] = 0.0
    run.gain[20.0] = 0.9
    plans = run.run(6)
    assert sends(plans)[-2:] == [10.0, DENSE]
    assert plans[-1].probe == (10.0, 20.0)


@pytest.mark.parametrize(("window", "believed_after"), [(4, 1), (8, 2), (12, 3), (100, 5)])
def test_short_windows_leave_steps_for_the_candidate(window, believed_after):
    run = world(FALLING, window=window, dense_window=1)
    plans = run.run(1 + 3 * window)
    last_window = [plan.send for plan in plans[-window:]]  # 40's, never probed before
    assert last_window == [10.0] * believed_after + [40.0] * (window - believed_after)


def test_no_promotion_goes_back_to_the_floor_until_the_next_gain_is_known():
    plans = world(FALLING).run(10 + 20 + 20 + 8)
    assert plans[50].reason == (
        "gain falls by 17% (0.9 to 0.75), more than omega 10%, floor "
        "stays 10, next candidate 40\n1.0 s a step instead of 0.90 s, 2 times the bytes"
    )
    assert [bare(plan) for plan in plans[50:]] == [(10.0, (40.0,))] * 5 + [(40.0, (10.0,))] * 3


def test_promotion_of_the_candidate_that_is_sent():
    run = world({**GOOD, 10.0: 0.912, 20.0: 0.906}, omega=0.01)
    plans = run.run(10 + 20 + 20 + 8)
    assert plans[50].reason == (
        "gain falls by 0.66% (0.912 to 0.906), no more than omega 1%, floor 10 -> 20, next "
        "candidate 40"
    )
    assert [bare(plan) for plan in plans[49:]] == (
        [(20.0, (10.0,))] + [(20.0, (40.0,))] * 5 + [(40.0, (20.0,))] * 3
    )
    assert run.policy.status()["floor"] == 20.0


def test_promotion_of_a_candidate_that_was_only_probed():
    # good enough to send, not good enough to move up to (hysteresis)
    run = world({**FALLING, 10.0: 0.32, 20.0: 0.31})
    run.run(10 + 20 + 20)
    assert run.last.send == 10.0
    assert run.policy.plan().reason == (
        "gain falls by 3.1% (0.32 to 0.31), no more than omega 10%, floor 10 -> "
        "20, next candidate 40\n50% fewer bytes"
    )


def test_no_promotion_to_a_candidate_that_cannot_be_sent():
    run = world({**FALLING, 10.0: 0.31, 20.0: 0.295})
    run.run(10 + 20 + 20)
    assert run.policy.plan().send == 10.0
    assert (
        "no more than omega 10% but gain < epsilon 0.3, floor stays 10" in run.policy.plan().reason
    )


def test_no_promotion_without_gains():
    run = world({**FALLING, 20.0: nan})
    run.run(10 + 20 + 20)
    assert run.policy.plan().reason == "gains not known, floor stays 10, next candidate 40"


def test_averages_start_afresh_for_a_candidate_and_go_on_for_the_floor():
    run = world(FALLING, ranks=2)
    run.run(10 + 20 + 20)
    assert isnan(run.policy.status()["gain_candidate"])  # 40 was never measured
    run.gain.update({10.0: 0.8, 40.0: 0.5})
    run.run(5)
    status = run.policy.status()
    assert status["gain_candidate"] == pytest.approx(0.5)
    # 50 steps of 0.9 and 5 of 0.8, weight 0.02
    old, new = (1 - 0.98**50) * 0.98**5, 1 - 0.98**5
    assert status["gain_floor"] == pytest.approx((0.9 * old + 0.8 * new) / (old + new))


def test_a_promoted_candidates_average_goes_on_as_the_floors():
    run = world({**GOOD, 20.0: 0.85}, ranks=2)
    run.run(10 + 20 + 20)
    assert run.policy.status()["floor"] == 20.0
    run.gain[20.0] = 0.4
    run.run(1)
    assert 0.8 < run.policy.status()["gain_floor"] < 0.85


@pytest.mark.parametrize(("gain", "known"), [("gradient", 0.7), ("error_fed", 0.5), ("raw", 0.4)])
def test_the_gain_that_decides(gain, known):
    policy = GraVAC(gain=gain)
    policy.start(Context(RANGE, 2))
    measured = Measurement(
        kept=9,
        grad=10,
        error=5,
        total=10,
        sample_error=3,
        sample_total=10,
        kept_norms=4,
        grad_norms=10,
    )
    for step in range(10):
        assert policy.plan().send == DENSE
        policy.observe(StepReport(step, DENSE, {10.0: measured, 20.0: measured}))
    assert policy.status()["gain_floor"] == pytest.approx(known)
    assert policy.plan().send == 10.0


def test_a_raw_gain_above_1_counts_as_1():
    policy = GraVAC(gain="raw")
    policy.start(Context(RANGE, 2))
    for step in range(10):
        policy.observe(StepReport(step, DENSE, {10.0: Measurement(kept_norms=26, grad_norms=10)}))
    assert policy.status()["gain_floor"] == 1.0


def test_the_chosen_cf_is_judged_on_its_window_too():
    run = world(FALLING, ranks=2)
    assert run.settle().send == 160.0
    before = run.policy.gain_at(160.0)
    run.gain[160.0] = 0.0
    run.run(1)
    assert 0.9 * before < run.policy.gain_at(160.0) < before
    assert run.policy.gain_at(40.0) is None  # what is not measured any more is forgotten


def test_a_hooks_coding_is_not_taken_for_the_sparsifiers():
    seen = CandidateStatistics("gradient", 0.5, 1, lambda cf: 1e6 / cf, {8.0: 0.9})
    for step in range(60):
        cf, coding = (8.0, 0.05) if step < 20 else (40.0, 0.005)
        seen.observe(
            StepReport(
                step,
                cf,
                timed_cf=cf,
                seconds=0.1 + coding,
                median_seconds=0.1 + coding,
                exchange_seconds=0.0,
                compress_seconds=coding,
            )
        )
    assert seen.t_sys(8.0) == pytest.approx(1 / 0.15)
    assert seen.t_sys(40.0) == pytest.approx(1 / 0.105)
