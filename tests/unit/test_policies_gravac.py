"""What GraVAC chooses and how it goes on, from hand-made gains and step times."""

from __future__ import annotations

from math import isnan, nan

import pytest

from policies.base import DENSE
from tests.unit.gravac_world import FALLING, FASTER, GOOD, LADDER, bare, world
from tests.unit.plans import reasons, sends

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
