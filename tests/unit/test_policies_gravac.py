"""GraVAC: its choice, how it goes on after it, its settings, and that it does not flap."""

from __future__ import annotations

from itertools import pairwise
from math import isnan, nan

import pytest

from policies.base import DENSE, Context, Measurement, StepReport
from policies.candidates import choose
from policies.gravac import GraVAC
from tests.unit.gravac_world import FALLING, FASTER, GOOD, LADDER, bare, world
from tests.unit.plans import reasons, sends


@pytest.mark.parametrize(
    ("t_comp", "omega", "kept", "why"),
    [
        ({10: 1.0, 20: 2.0, 40: 3.0}, 0.1, 40, "the most progress"),
        ({40: 1.0, 20: 2.0, 10: 3.0}, 0.1, 10, "the most progress"),
        ({10: 1.0, 20: 3.0, 40: 2.0}, 0.1, 20, "the most progress"),
        ({10: 1.0, 20: 2.0, 40: 2.1}, 0.1, 20, "CF 40 makes 5% more progress a second than CF 20"),
        ({10: 1.0, 20: 2.0, 40: 1.9}, 0.1, 20, "CF 40 makes 5% less progress a second than CF 20"),
        ({10: 1.0, 20: 2.0, 40: 2.1}, 0.01, 40, "the most progress"),
        (
            {10: 1.0, 20: 1.05, 40: 9.0},
            0.1,
            40,
            "the most progress",
        ),  # a plateau is not the end
        (
            {10: 1.0, 20: 1.08, 40: 1.16},
            0.1,
            40,
            "the most progress",
        ),  # small steps add up
        ({10: 1.0, 20: 1.05, 40: 0.1}, 0.1, 10, "CF 20 makes 5% more progress a second than CF 10"),
        ({10: 1.0, 20: 1.5}, 0.5, 10, "CF 20 makes 50% more progress a second than CF 10"),
        ({64: 1.0}, 0.1, 64, "the most progress"),
    ],
)
def test_saturation(t_comp, omega, kept, why):
    chosen, reason = choose(t_comp, None, omega)
    assert chosen == kept
    assert why in reason


def test_choice_against_dense():
    t_comp = {10.0: 0.98, 20.0: 1.05}
    assert choose(t_comp, None, 0.1)[0] == 10.0
    assert choose({10.0: 1.0, 20.0: 2.0}, 1.0, 1.0)[0] == 20.0  # as good as dense is not better
    # 10 is within omega of 20, but it does not beat dense
    assert choose(t_comp, 1.0, 0.1)[0] == 20.0
    assert choose(t_comp, 1.05, 0.1) == (
        1.0,
        "CF 20, the best, makes as much progress a second as dense",
    )


def test_choice_of_the_largest_t_comp():
    run = world(FALLING)
    plan = run.settle()
    # 1000 was never sent (0.31 < 0.33), so it has no time; 0.45 / 0.3 s is the most of the others
    assert bare(plan) == (160.0, ())
    why = "the most progress a second"
    assert plan.reason == f"settled; {why}\n0.30 s a step, dense 4.0 s"
    assert run.policy.verdict() == f"GraVAC settled on CF 160: {why}"


def test_choice_where_t_comp_saturates():
    seconds = {DENSE: 4.0, 10.0: 1.0, 20.0: 0.7, 40.0: 0.4, 160.0: 0.395, 1000.0: 0.39}
    plan = world(GOOD, seconds).settle()
    assert plan.send == 40.0
    assert "CF 1000 makes 2.6% more progress a second than CF 40, and up to 10%" in plan.reason


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
    assert "0.10 s a step" in plan.reason


def test_choice_without_any_times_keeps_the_floor():
    run = world(GOOD, {})
    plan = run.settle()
    assert plan.send == 1000.0  # promoted all the way
    assert "settled; no CF has both gain >= epsilon 0.3 and a step time" in plan.reason
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
    why = "CF 1000, the best, makes 0.32% less progress a second than dense"
    assert plan.reason.startswith(f"settled; {why}\n")
    assert run.policy.verdict().startswith(f"GraVAC stays dense: {why}")
    later = run.run(200)
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
        "settled; even with nothing on the wire no CF makes more progress a second\n"
        "a step would take 1.2 s, at a gain of 0.9: 17% less progress a second than "
        "dense, 1.1 s a step"
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
    assert reasons(plans) == [
        "gain 0.275 < epsilon 0.3\n1.0 s a step instead of 0.30 s, 16 times the bytes"
    ]
    assert plans[-1].probe == (160.0,)

    run.gain[10.0] = 0.1  # the floor fails too
    plans = run.run(10)
    assert sends(plans) == [10.0, DENSE]
    assert plans[-1].probe == (10.0, 160.0)

    run.gain.update({10.0: 0.9, 160.0: 0.31})  # the floor is good again, 160 only just
    plans = run.run(100)
    assert sends(plans) == [DENSE, 10.0]

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
    assert reasons(plans)[-1] == (
        "gain 0.1 < epsilon 0.3\n4.0 s a step instead of 1.0 s, 10 times the bytes"
    )


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


# Settings


RANGE = (10.0, 1000.0)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"epsilon": 0}, ValueError, r"epsilon=0: must be in \(0, 1\]"),
        ({"epsilon": nan}, ValueError, "epsilon=nan"),
        ({"epsilon": "0.5"}, TypeError, "epsilon='0.5'"),
        ({"omega": -0.1}, ValueError, "omega=-0.1"),
        ({"window": 0}, ValueError, "window=0: must be an int >= 1"),
        ({"window": 2.5}, TypeError, "window=2.5"),
        ({"scaling": "linear"}, ValueError, "scaling='linear'.*'exponential', 'geometric'"),
        ({"step_size": 1}, ValueError, "step_size=1: must be a finite number > 1"),
        ({"step_size": float("inf")}, ValueError, "step_size=inf"),
        ({"gain": "best"}, ValueError, "gain='best'.*'error_fed', 'gradient', 'raw'"),
        ({"allow_dense": 1}, TypeError, "allow_dense=1"),
        ({"dense_window": -1}, ValueError, "dense_window=-1"),
        ({"hysteresis": -0.1}, ValueError, "hysteresis=-0.1: must be a finite number >= 0"),
        ({"cooldown": 0}, ValueError, "cooldown=0"),
    ],
)
def test_settings_are_checked(settings, error, message):
    with pytest.raises(error, match=message):
        GraVAC(**settings)


def test_settings_are_by_keyword():
    with pytest.raises(TypeError):
        GraVAC(0.5)


@pytest.mark.parametrize(
    "cf_range", [(1000.0, 10.0), (0.5, 10.0), (10.0,), (nan, 10.0), (10.0, float("inf")), 10.0]
)
def test_a_range_that_is_none(cf_range):
    with pytest.raises(ValueError, match="cf_range"):
        GraVAC().start(Context(cf_range, 2))


def test_a_step_size_that_does_not_fit_the_range():
    with pytest.raises(ValueError, match="step_size"):
        GraVAC(step_size=1.0001).start(Context(RANGE, 2))


def test_the_ends_of_what_is_accepted():
    policy = GraVAC(epsilon=1, omega=1, window=1, step_size=1.5, cooldown=1, dense_window=0)
    policy.start(Context(RANGE, 1))
    assert policy.plan().send == 10.0
    assert policy.status()["epsilon"] == 1


# Flapping


class ErrorFeedback:
    """A toy: the error-fed gain is good right after a dense step.

    Of the gradient's energy 1 a CF sends `kept`, of the residual's energy only a tenth.
    """

    def __init__(self):
        self.kept = {10.0: 0.8, 20.0: 0.6}
        self.residual = 0.0

    def measure(self, cf):
        total = 1 + self.residual
        energy = self.kept[cf] + 0.1 * self.residual
        return Measurement(kept=energy, error=total - energy, total=total, grad=1)

    def send(self, cf):
        self.residual = 0.0 if cf == DENSE else self.measure(cf).error


def switches_of(run_step, steps=600):
    sent = [run_step() for _ in range(steps)]
    return sum(a != b for a, b in pairwise(sent))


def test_the_bare_send_rule_flaps_on_the_toy():
    toy = ErrorFeedback()

    def step():
        gain = toy.measure(10.0).gain("error_fed")
        cf = 10.0 if gain >= 0.7 else DENSE
        toy.send(cf)
        return cf

    assert switches_of(step) > 100


@pytest.mark.parametrize("allow_dense", [True, False])
@pytest.mark.parametrize("ranks", [2, 50])
@pytest.mark.parametrize(("steps", "most"), [(600, 12), (4000, 60)])
def test_gravac_switches_a_handful_of_times_on_the_toy(allow_dense, ranks, steps, most):
    toy = ErrorFeedback()
    policy = GraVAC(epsilon=0.7, gain="error_fed", allow_dense=allow_dense)
    policy.start(Context((10.0, 20.0), ranks))

    def step():
        plan = policy.plan()
        measured = {cf: toy.measure(cf) for cf in {plan.send, *plan.probe} - {DENSE}}
        toy.send(plan.send)
        timing = {"timed_cf": plan.send, "seconds": 1.0, "median_seconds": 1.0}
        timing |= {"exchange_seconds": 0.5, "compress_seconds": 0.0}
        policy.observe(StepReport(0, plan.send, measured, **timing))
        return plan.send

    assert 2 <= switches_of(step, steps) <= most
