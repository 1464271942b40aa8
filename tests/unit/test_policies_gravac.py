"""GraVAC's decisions, branch by branch, from hand-made gains and step times."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from math import isnan, nan

import pytest

from policies.base import DENSE, Context, Measurement, Plan, StepReport
from policies.gravac import GraVAC

RANGE = (10.0, 1000.0)
LADDER = (10.0, 20.0, 40.0, 160.0, 1000.0)
GOOD = dict.fromkeys(LADDER, 0.9)
"""No candidate loses anything against the floor."""
FALLING = {10.0: 0.9, 20.0: 0.75, 40.0: 0.6, 160.0: 0.45, 1000.0: 0.31}
"""Each candidate loses more than omega = 0.1."""
FASTER = {DENSE: 4.0, 10.0: 1.0, 20.0: 0.9, 40.0: 0.8, 160.0: 0.3, 1000.0: 0.29}
"""Seconds a step."""


class World:
    """Feeds a policy: gain[cf] and seconds[cf] can be changed while it runs.

    Step times come one report late, under timed_cf, as from the controller. probe_seconds: what a
    dense step that probes takes more, and reports as compression.
    """

    def __init__(self, policy, gain, seconds=FASTER, *, cf_range=RANGE, ranks=50):
        self.policy, self.gain, self.seconds = policy, dict(gain), dict(seconds)
        self.probe_seconds = 0.0
        self.compress = 0.0
        self.plans: list[Plan] = []
        self.last: Plan | None = None
        policy.start(Context(cf_range, ranks))

    def measurement(self, cf):
        g = self.gain[cf]
        if isnan(g):
            return Measurement()
        return Measurement(kept=g, error=1 - g, total=1, grad=1, sample_error=1 - g, sample_total=1)

    def step(self):
        plan = self.policy.plan()
        timed = self.last.send if self.last else nan
        seconds = self.seconds.get(timed, nan)
        compress = 0.0 if timed == DENSE else self.compress
        if timed == DENSE and self.last.probe:
            seconds, compress = seconds + self.probe_seconds, self.probe_seconds
        self.plans.append(plan)
        self.last = plan
        self.policy.observe(
            StepReport(
                step=len(self.plans) - 1,
                cf=plan.send,
                measurements={
                    cf: self.measurement(cf) for cf in {plan.send, *plan.probe} - {DENSE}
                },
                timed_cf=timed,
                seconds=seconds,
                median_seconds=seconds,
                compress_seconds=compress,
                timed_bytes=1e6 / timed,
            )
        )
        return plan

    def run(self, steps):
        return [self.step() for _ in range(steps)]

    def settle(self, limit=1000):
        """Run until there is a verdict; the plan that follows it is the next one."""
        for _ in range(limit):
            if self.policy.verdict():
                return self.policy.plan()
            self.step()
        raise AssertionError("no verdict")


def world(gain, seconds=FASTER, *, cf_range=RANGE, ranks=50, **settings):
    settings = {
        "epsilon": 0.3,
        "omega": 0.1,
        "window": 20,
        "dense_window": 10,
        "hysteresis": 0.1,
        "cooldown": 20,
        **settings,
    }
    return World(GraVAC(**settings), gain, seconds, cf_range=cf_range, ranks=ranks)


def bare(plan):
    return plan.send, plan.probe


def reasons(plans):
    return [plan.reason for plan in plans if plan.reason]


def sends(plans):
    """The CFs in the order they were sent, without repetitions."""
    return [plans[0].send, *(b.send for a, b in pairwise(plans) if a.send != b.send)]


# Opening


def test_opening_dense_then_floor_then_first_candidate():
    plans = world(FALLING).run(10 + 20 + 20)
    assert {bare(plan) for plan in plans[:10]} == {(DENSE, (10.0, 20.0))}
    assert plans[10].reason == "scale up 1 -> 10: 10 dense steps done, gain 0.9"
    assert {bare(plan) for plan in plans[10:31]} == {(10.0, (20.0,))}  # 31: the rule's turn
    assert plans[31].reason.startswith("scale up 10 -> 20: gain 0.75 >= 0.33")
    assert {bare(plan) for plan in plans[31:]} == {(20.0, (10.0,))}
    assert len(reasons(plans)) == 2


def test_opening_with_a_floor_that_loses_too_much_stays_dense_for_now():
    run = world({**FALLING, 10.0: 0.29})
    plans = run.run(300)
    assert {bare(plan) for plan in plans} == {(DENSE, (10.0, 20.0))}
    assert reasons(plans) == ["gain 0.29 at CF 10 < epsilon 0.3"]
    assert run.policy.verdict() == "GraVAC sends dense: no gain reaches epsilon 0.3"
    run.gain[10.0] = 0.34
    plans = run.run(40)
    assert sends(plans)[:2] == [DENSE, 10.0]
    assert "scale up 1 -> 10: gain 0.33" in reasons(plans)[0]
    run.gain[10.0] = 0.9
    assert "settled" in run.settle().reason  # dense steps did not use up the windows


def test_opening_shorter_than_a_gain_takes_to_be_believed():
    plans = world(FALLING, dense_window=2).run(10)
    assert sends(plans) == [DENSE, 10.0]
    assert plans[2].reason == "scale up 1 -> 10: 2 dense steps done, gain not known yet"


@pytest.mark.parametrize("settings", [{"dense_window": 0}, {"allow_dense": False}])
def test_opening_without_dense(settings):
    plans = world(FALLING, **settings).run(30)
    assert plans[0] == Plan(send=10.0, probe=(20.0,))
    assert sends(plans) == [10.0, 20.0]


def test_a_floor_without_gain_is_left_as_soon_as_that_is_known():
    run = world({**FALLING, 10.0: 0.2}, allow_dense=False)
    plans = run.run(8)
    assert [plan.send for plan in plans] == [10.0] * 5 + [DENSE] * 3
    assert reasons(plans) == ["dense: 10 -> 1, gain 0.2 < epsilon 0.3"]
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
        "|0.9 - 0.29| / 0.9 = 0.678 > omega 0.1, floor stays 10, next candidate 40"
    )


def test_a_candidate_that_loses_its_gain_is_left_at_once():
    run = world(FALLING, ranks=50)
    run.run(40)
    assert run.last.send == 20.0
    run.gain[20.0] = 0.0
    plans = run.run(4)
    assert sends(plans) == [20.0, 10.0]
    assert "scale down 20 -> 10: gain 0.18" in reasons(plans)[0]
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
        "scale down 20 -> 10: |0.9 - 0.75| / 0.9 = 0.167 > omega 0.1, floor stays 10, "
        "next candidate 40"
    )
    assert [bare(plan) for plan in plans[50:]] == [(10.0, (40.0,))] * 5 + [(40.0, (10.0,))] * 3


def test_promotion_of_the_candidate_that_is_sent():
    run = world({**GOOD, 10.0: 0.912, 20.0: 0.906}, omega=0.01)
    plans = run.run(10 + 20 + 20 + 8)
    assert plans[50].reason == (
        "|0.912 - 0.906| / 0.912 = 0.007 <= omega 0.01, floor 10 -> 20, next candidate 40"
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
        "scale up 10 -> 20: |0.32 - 0.31| / 0.32 = 0.031 <= omega 0.1, floor 10 -> 20, "
        "next candidate 40"
    )


def test_no_promotion_to_a_candidate_that_cannot_be_sent():
    run = world({**FALLING, 10.0: 0.31, 20.0: 0.295})
    run.run(10 + 20 + 20)
    assert run.policy.plan().send == 10.0
    assert "<= omega 0.1 but gain < epsilon 0.3, floor stays 10" in run.policy.plan().reason


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
    measured = Measurement(kept=4, grad=10, error=5, total=10, sample_error=3, sample_total=10)
    for step in range(10):
        assert policy.plan().send == DENSE
        policy.observe(StepReport(step, DENSE, {10.0: measured, 20.0: measured}))
    assert policy.status()["gain_floor"] == pytest.approx(known)
    assert policy.plan().send == 10.0


def test_a_raw_gain_above_1_counts_as_1():
    policy = GraVAC(gain="raw")
    policy.start(Context(RANGE, 2))
    for step in range(10):
        policy.observe(StepReport(step, DENSE, {10.0: Measurement(kept=26, grad=10)}))
    assert policy.status()["gain_floor"] == 1.0


def test_measurements_that_were_not_asked_for_do_not_count():
    policy = GraVAC()
    policy.start(Context(RANGE, 2))
    one = Measurement(sample_error=0.1, sample_total=1)
    for step in range(9):
        policy.observe(StepReport(step, DENSE, dict.fromkeys((10.0, 20.0, 40.0, 999.0), one)))
    assert [cf for cf, _ in policy.state_dict()["seen"]["averages"]] == [10.0, 20.0]


# Choosing


def test_choice_of_the_largest_t_comp():
    run = world(FALLING)
    plan = run.settle()
    # 1000 was never sent (0.31 < 0.33), so it has no time; 0.45 / 0.3 s is the most of the others
    assert bare(plan) == (160.0, ())
    why = "T_comp 0.9 at 10, 0.8333 at 20, 0.75 at 40, 1.5 at 160: largest at 160"
    assert plan.reason == f"scale up 10 -> 160: settled, {why}"
    assert run.policy.verdict() == f"GraVAC settled on CF 160: {why}"


def test_choice_where_t_comp_saturates():
    seconds = {DENSE: 4.0, 10.0: 1.0, 20.0: 0.7, 40.0: 0.4, 160.0: 0.395, 1000.0: 0.39}
    plan = world(GOOD, seconds).settle()
    assert plan.send == 40.0
    assert "saturates at 40, |2.308 - 2.25| / 2.25 = 0.026 <= omega 0.1" in plan.reason


def test_a_gain_of_just_epsilon_is_enough():
    run = world({**FALLING, 10.0: 0.5, 20.0: 0.5}, epsilon=0.5, hysteresis=0, omega=0.01)
    run.seconds[20.0] = 0.1
    assert run.settle().send == 20.0
    assert len(run.plans) == 10 + 5 * 20


def test_a_cf_below_epsilon_is_not_chosen_however_fast():
    run = world({**FALLING, 160.0: 0.29, 1000.0: 0.28}, {**FASTER, 160.0: 1e-3, 1000.0: 1e-3})
    plan = run.settle()
    assert plan.send == 10.0
    assert 160.0 not in sends(run.plans)
    assert " at 160" not in plan.reason


def test_the_choice_uses_times_under_the_cf_they_belong_to():
    # Were times booked under the CF sent when they arrive, 20 would get 10's and so on.
    seconds = {DENSE: 4.0, 10.0: 1.0, 20.0: 0.1, 40.0: 1.0, 160.0: 1.0, 1000.0: 1.0}
    run = world(GOOD, seconds, window=6, allow_dense=False)
    plan = run.settle()
    assert plan.send == 20.0
    assert "9 at 20" in plan.reason


def test_choice_without_any_times_keeps_the_floor():
    run = world(GOOD, {})
    plan = run.settle()
    assert plan.send == 1000.0  # promoted all the way
    assert "settled, no CF has both gain >= epsilon 0.3 and a step time" in plan.reason
    run = world(FALLING, {})
    assert run.settle().send == 10.0


def test_choice_where_only_the_floor_serves():
    gain = {**dict.fromkeys(LADDER, 0.1), 10.0: 0.9}
    run = world(gain)
    assert run.settle().send == 10.0
    assert sends(run.plans) == [DENSE, 10.0]
    assert {bare(plan) for plan in run.run(50)} == {(10.0, ())}
    run.gain[10.0] = 0.0
    plans = run.run(5)
    assert sends(plans) == [10.0, DENSE]
    assert plans[-1].probe == (10.0,)
    run.gain[10.0] = 0.9
    assert sends(run.run(60)) == [DENSE, 10.0]


def test_a_range_of_one_cf():
    run = world({64.0: 0.9}, {DENSE: 4.0, 64.0: 1.0}, cf_range=(64.0, 64.0))
    assert run.settle().send == 64.0
    assert sends(run.plans) == [DENSE, 64.0]
    assert {plan.probe for plan in run.plans} == {(64.0,), ()}


def test_a_range_that_begins_with_dense():
    gain = {2.0: 0.9, 4.0: 0.8, 10.0: 0.2}
    run = world(gain, {DENSE: 1.0, 2.0: 0.9, 4.0: 0.4}, cf_range=(1.0, 10.0))
    plans = run.run(25)
    assert bare(plans[0]) == (DENSE, (2.0,))  # the floor is dense: its window measures both
    assert run.settle().send == 4.0
    run.gain[4.0] = 0.0
    plans = run.run(10)
    assert sends(plans) == [4.0, DENSE]
    assert plans[-1].probe == (4.0,)  # nothing to learn about dense


# Dense


def near_dense(gain_of_1000):
    """Nothing so far beats dense, but with no bytes on the wire the best gain would."""
    gain = {**FALLING, 10.0: 0.93, 1000.0: gain_of_1000}
    seconds = {DENSE: 10.0} | {cf: 9 + 5 / cf for cf in LADDER}  # 5 + 5 / cf + compression
    run = world(gain, seconds)
    run.compress = 4.0
    return run


def test_dense_is_kept_where_no_cf_beats_it():
    run = near_dense(0.9)
    plan = run.settle()
    assert len(run.plans) == 10 + 5 * 20  # the whole ladder was tried
    assert bare(plan) == (DENSE, ())
    why = "best T_comp 0.09994 (CF 1000) <= 0.1 of dense"
    assert plan.reason == f"dense: 1000 -> 1, {why}"
    assert run.policy.verdict() == f"GraVAC stays dense: {why}"
    later = run.run(200)  # then it looks at the gains again
    assert {bare(plan) for plan in later} == {(DENSE, ())}
    assert not reasons(later[1:])
    status = run.policy.status()
    assert isnan(status["candidate"])
    assert status["t_sys"] == status["t_comp"] == pytest.approx(0.1)


def test_dense_is_left_where_one_cf_beats_it():
    assert near_dense(0.91).settle().send == 1000.0


def test_probing_is_not_counted_against_dense():
    seconds = {DENSE: 0.5, 10.0: 0.6, 20.0: 0.5, 40.0: 0.5, 160.0: 0.5, 1000.0: 0.5}
    run = world(GOOD, seconds)
    run.probe_seconds = 3.0
    assert run.settle().send == DENSE


def test_dense_at_once_where_nothing_on_the_wire_would_not_be_enough():
    # a = 1 s, b = 1e-7 s a byte, compression 0.2 s: at best 0.9 / 1.2 s against 1 / 1.1 s
    seconds = {DENSE: 1.1} | {cf: 1.2 + 0.1 / cf for cf in LADDER}
    run = world(FALLING, seconds)
    run.compress = 0.2
    plan = run.settle()
    assert len(run.plans) == 10 + 20 + 20  # one candidate was enough
    assert bare(plan) == (DENSE, ())
    assert plan.reason == (
        "dense: 20 -> 1, even with nothing on the wire a step would take 1.2 s and T_comp be "
        "0.75 at the best gain, 0.9, <= 0.9091 of dense"
    )
    assert "even with nothing" in run.policy.verdict()


def test_no_early_exit_while_a_larger_cf_could_still_win():
    # the wire dominates: nothing tried first beats dense, but the limit does
    seconds = {DENSE: 1.2} | {cf: 0.2 + 9.0 / cf for cf in LADDER}
    run = world(dict.fromkeys(LADDER, 0.8), seconds)
    run.run(10 + 20 + 20)
    assert not run.policy.verdict()
    assert run.settle().send == 1000.0


def test_no_early_exit_if_a_measured_step_refutes_the_model():
    # the line through these points is flat at 0.93 s, though a step at 10 takes 0.5 s
    seconds = {DENSE: 0.8, 10.0: 0.5, 20.0: 1.5, 40.0: 1.5, 160.0: 1.5, 1000.0: 1.5}
    run = world(FALLING, seconds)
    run.run(10 + 20 + 20 + 1)
    assert not run.policy.verdict()
    assert run.settle().send == 10.0


def test_without_allow_dense_it_stays_compressed():
    seconds = {DENSE: 0.1} | {cf: 1.2 + 1 / cf for cf in LADDER}
    run = world(FALLING, seconds, allow_dense=False)
    run.compress = 0.2
    run.settle()
    plans = run.run(100)
    assert DENSE not in sends(run.plans)
    assert {bare(plan) for plan in plans} == {(10.0, ())}
    run.gain[10.0] = 0.0  # ... except where epsilon asks for dense
    assert sends(run.run(10)) == [10.0, DENSE]


# Settled


def test_settled_steps_are_cheap_and_silent():
    run = world(FALLING)
    run.settle()
    plans = run.run(200)
    assert {bare(plan) for plan in plans} == {(160.0, ())}
    assert not reasons(plans[1:])


def test_scale_down_after_settling_and_up_again():
    run = world(FALLING)
    run.settle()
    run.run(100)
    run.gain[160.0] = 0.1
    plans = run.run(10)
    assert sends(plans) == [160.0, 10.0]
    assert reasons(plans) == ["scale down 160 -> 10: gain 0.275 < epsilon 0.3"]
    assert plans[-1].probe == (160.0,)

    run.gain[10.0] = 0.1  # the floor fails too
    plans = run.run(10)
    assert sends(plans) == [10.0, DENSE]
    assert plans[-1].probe == (10.0, 160.0)

    run.gain.update({10.0: 0.9, 160.0: 0.31})  # the floor is good again, 160 only just
    plans = run.run(100)
    assert sends(plans) == [DENSE, 10.0]
    assert "20 steps after the last move" in reasons(plans)[0]

    run.gain[160.0] = 0.5
    plans = run.run(30)
    assert sends(plans) == [10.0, 160.0]
    assert plans[-1].probe == ()


def test_both_fail_at_once():
    run = world(FALLING)
    run.settle()
    run.gain.update({10.0: 0.1, 160.0: 0.1})
    plans = run.run(20)
    # The floor was not measured of late: it is sent until its gain is known.
    assert sends(plans) == [160.0, 10.0, DENSE]
    assert [plan.send for plan in plans].count(10.0) == 5
    assert reasons(plans)[-1] == "dense: 10 -> 1, gain 0.1 < epsilon 0.3"


def test_after_a_promoted_floor_it_falls_to_the_bottom_of_the_ladder():
    run = world(GOOD, {DENSE: 4.0} | {cf: 10 / cf for cf in LADDER})
    assert run.settle().send == 1000.0
    run.gain[1000.0] = 0.0
    assert sends(run.run(10)) == [1000.0, 10.0]


def test_non_finite_steps_change_nothing():
    run = world(FALLING)
    run.settle()
    run.gain[160.0] = nan
    run.seconds = {}
    assert {bare(plan) for plan in run.run(100)} == {(160.0, ())}


def test_a_gain_that_hovers_around_epsilon_does_not_flap():
    run = world({**FALLING, 160.0: 0.55}, epsilon=0.45)
    assert run.settle().send == 160.0
    moves = 0
    for step in range(2000):
        run.gain[160.0] = 0.45 + (0.1 if step // 7 % 2 else -0.1)
        before = run.last.send
        run.step()
        moves += run.last.send != before
    assert 2 <= moves <= 14  # waits of 20, 40, ..., 640, 1280 steps; the gain crossed 285 times


# Status


def test_status_numbers():
    run = world(FALLING)
    run.run(10 + 20 + 20)
    expected = {
        "candidate": 40.0,
        "floor": 10.0,
        "gain_floor": 0.9,
        "gain_candidate": nan,
        "t_sys": 1.0,
        "t_comp": 0.9,
        "epsilon": 0.3,
        "exploring": 1.0,
    }
    assert dict(run.policy.status()) == pytest.approx(expected, nan_ok=True)
