"""What is not sent must not wait too long beside the steps done at about the same learning rate."""

from __future__ import annotations

import json
from math import cos, nan, pi

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import DENSE, Context, Goodput
from policies.goodput import HASTE
from policies.lateness import ALIKE, MOST, NOTED, SHARE, Lateness
from tests.unit.test_policies_goodput import OPENING, nbytes, report

RATE = 1e4
"""Bytes a second: of all CFs the largest promises most."""

LATER = 15
"""Steps after a bound has fallen in which a CF above it may still be sent: a cooldown and some."""


def observed(rates):
    lateness = Lateness()
    for lr in rates:
        lateness.observe(lr)
    return lateness


def steps_within(rates, factor):
    """Steps up to the last since one had another learning rate, by more than a factor."""
    count = 0
    for lr in reversed(rates):
        if not rates[-1] / factor <= lr <= rates[-1] * factor:
            break
        count += 1
    return count


@given(st.lists(st.floats(-3, 3).map(lambda x: 2**x), min_size=1, max_size=60), st.booleans())
def test_steps_count_from_when_the_learning_rate_was_another(rates, falling):
    """A rate that was not noted is within NOTED of one that was. Where rates rise and fall, a phase
    that has ended stays so, whatever rate comes after."""
    alike = observed(rates).alike
    assert 1 <= alike <= steps_within(rates, ALIKE * NOTED**2)
    rates.sort(reverse=falling)
    alike = observed(rates).alike
    assert steps_within(rates, ALIKE / NOTED**2) <= alike <= steps_within(rates, ALIKE * NOTED**2)


@pytest.mark.parametrize("noise", [(1.0, 0.9), (1.0, 0.8, 0.6, 0.8), (1.0, 0.5)])
def test_a_rate_that_changes_in_every_step_is_noted_a_bounded_number_of_times(noise):
    """The rate of a batch of another size, say. The phase begins about when it would without a
    bound: up to NOTED of the schedule later."""
    rates = [0.1 * (1 + cos(pi * step / 4000)) * noise[step % len(noise)] for step in range(3000)]
    lateness = observed(rates)
    assert len(lateness.state_dict()["rates"]) <= MOST
    lowest = min(rates[-len(noise) :])
    least = steps_within([*rates[:-1], lowest], ALIKE / NOTED**3)
    assert least <= lateness.alike <= steps_within(rates, ALIKE * NOTED**2)
    again = Lateness()
    again.load_state_dict(json.loads(json.dumps(lateness.state_dict())))
    assert (again.alike, again.largest) == (lateness.alike, lateness.largest)


def test_with_a_constant_or_unknown_learning_rate_all_steps_count():
    assert observed([0.1] * 300).largest == pytest.approx(SHARE * 300)
    assert observed([nan] * 300).alike == 300
    assert observed([0.1] * 100 + [0.0]).alike == 101  # the last step of a cosine


def test_a_drop_begins_anew_and_a_cosine_ends_in_small_cfs():
    dropped = observed([0.1] * 200 + [0.01] * 30)
    assert dropped.alike == 30
    rates = [0.5 * (1 + cos(pi * step / 1000)) for step in range(1000)]
    alike = [observed(rates[: step + 1]).alike for step in (400, 600, 950, 995)]
    assert alike == [401, 601, pytest.approx(50, rel=0.2), pytest.approx(5, rel=0.4)]
    assert len(observed(rates)._rates) < 40  # of the present phase only


def test_the_learning_rate_is_high_until_it_has_fallen_to_less_than_a_fourth():
    assert observed([]).rate_is_high
    assert observed([nan] * 9).rate_is_high
    assert observed([1e-4 * (step + 1) for step in range(99)]).rate_is_high  # a warm-up
    assert observed([0.1, 0.3, 0.08]).rate_is_high
    assert not observed([0.1, 0.3, 0.07]).rate_is_high


@given(st.lists(st.floats(1e-6, 1), max_size=30), st.lists(st.floats(1e-6, 1), max_size=30))
def test_a_state_goes_on_as_if_it_had_never_stopped(before, after):
    whole, resumed = observed(before), Lateness()
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    for lr in after:
        whole.observe(lr)
        resumed.observe(lr)
    assert (resumed.alike, resumed.largest) == (whole.alike, whole.largest)
    assert resumed.rate_is_high == whole.rate_is_high


def test_a_damaged_state_is_refused():
    with pytest.raises(ValueError, match="rates"):
        Lateness().load_state_dict({"steps": 5, "highest": 0.1, "rates": [[7, 0.1]]})
    for rate in (-0.1, 0.2):
        with pytest.raises(ValueError, match="rates"):
            Lateness().load_state_dict({"steps": 5, "highest": 0.1, "rates": [[2, rate]]})


def sent_by(policy, rates, early=DENSE):
    """(CF, reason, learning rate's phase in steps) of each step on a slow network."""
    policy.start(Context((10, 1000), 2, wire_bytes=nbytes, early=early))
    found = []
    for step, lr in enumerate(rates):
        plan = policy.plan()
        found.append((plan.send, plan.reason, steps_within(rates[: step + 1], ALIKE)))
        policy.observe(report(step, plan.send, RATE, lr=lr))
    return found


SCHEDULES = {
    "constant": [0.1] * 1500,
    "drops": [0.1] * 701 + [0.01] * 400 + [0.001] * 400,
    "cosine": [0.1 * 0.5 * (1 + cos(pi * step / 1500)) for step in range(1500)],
    "warm": [0.1 * min(1, (step + 1) / 200) for step in range(1500)],
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_for_quality_no_cf_is_sent_that_waits_too_long(schedule):
    found = sent_by(Goodput(), SCHEDULES[schedule])
    bounds = [max(OPENING, SHARE * NOTED**2 * alike) for *_, alike in found]
    for step, (cf, *_) in enumerate(found):
        assert cf <= max(bounds[max(0, step - LATER) : step + 1])
    assert max(cf for cf, *_ in found) >= 80  # it is a bound in time, not for good


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_up_to_the_early_cf_no_step_waits_while_the_learning_rate_is_high(schedule):
    rates = SCHEDULES[schedule]
    early = [cf for cf, *_ in sent_by(Goodput(), rates, early=40.0)]
    late = [cf for cf, *_ in sent_by(Goodput(), rates)]
    assert max(early[:LATER]) == 40
    assert max(late[:LATER]) == OPENING
    fallen = [step for step, lr in enumerate(rates) if lr < max(rates[: step + 1]) / ALIKE]
    settled = [step for step in fallen if step - LATER in fallen]
    assert all(early[step] == late[step] for step in settled)
    assert bool(settled) == (schedule in ("drops", "cosine"))


@pytest.mark.parametrize("early", [DENSE, 40.0])
def test_a_run_sends_no_cf_before_the_step_that_is_foretold(early):
    policy = Goodput()
    found = [cf for cf, *_ in sent_by(policy, SCHEDULES["constant"], early)]
    for cf in {*found}:
        assert policy.allowed_from(cf) <= found.index(cf) + 1 <= policy.allowed_from(cf) + LATER


def test_the_bound_is_named_where_it_moves_the_cf():
    found = sent_by(Goodput(), SCHEDULES["drops"])
    down = next(reason for cf, reason, _ in found[701:] if reason)
    assert "what CF 160 does not send would wait too long beside 1 step" in down


def test_for_time_the_bound_is_a_loose_one():
    found = sent_by(Goodput(goal="time"), SCHEDULES["constant"])
    assert found[100][0] > SHARE * 100
    for step, (cf, *_) in enumerate(found):
        assert cf <= max(OPENING, HASTE * step)


def test_a_cf_that_sends_every_element_is_always_allowed():
    policy = Goodput()
    policy.start(Context((2, 1000), 2, wire_bytes=nbytes, assumed={80: 0.95}))
    sent = []
    for step in range(30):
        sent.append(policy.plan().send)
        policy.observe(report(step, sent[-1], RATE, lr=0.1))
    assert 80 in sent
    assert max(sent) == 80


def test_only_quality_and_time_are_goals():
    with pytest.raises(ValueError, match=r"goal='speed'.*quality"):
        Goodput(goal="speed")


def test_with_local_steps_an_element_waits_for_all_of_them():
    policy = Goodput()
    policy.start(Context((10, 100), 2, wire_bytes=nbytes, local_steps=(1, 2, 4, 8, 16, 32)))
    taken, steps = 1, 0
    for step in range(3000):
        plan = policy.plan()
        bound = max(OPENING, SHARE * steps)
        assert plan.send * plan.local_steps <= bound
        values = {"timed_steps": taken, "lr": 0.1}
        policy.observe(report(step, plan.send, RATE, **values))
        taken, steps = plan.local_steps, steps + plan.local_steps
    assert taken > 1
