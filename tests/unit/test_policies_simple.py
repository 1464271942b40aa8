"""Policies that look at no statistics: one CF, a table of CFs, and a warm-up."""

from __future__ import annotations

import json
from math import inf, nan

import pytest

from policies import (
    DENSE,
    Accordion,
    Context,
    Fixed,
    GraVAC,
    Plan,
    Schedule,
    StepReport,
    Warmup,
    make_policy,
)


@pytest.mark.parametrize(("cf", "sent"), [(None, 10.0), (1, 1.0), (10, 10.0), (33.3, 33.3)])
def test_fixed_sends_its_cf_for_ever(cf, sent):
    policy = Fixed(cf)
    policy.start(Context(RANGE, 4))
    for step in range(5):
        assert policy.plan() == Plan(send=sent, skip_gains=True)
        policy.observe(StepReport(step, sent, median_seconds=1.0, timed_cf=sent))
    policy.load_state_dict(json.loads(json.dumps(policy.state_dict())))
    assert policy.plan() == Plan(send=sent, skip_gains=True)
    assert (dict(policy.status()), policy.verdict()) == ({}, "")


@pytest.mark.parametrize("cf", [0, 0.99, -3, nan, inf])
def test_fixed_refuses_what_is_no_cf(cf):
    with pytest.raises(ValueError, match="cf="):
        Fixed(cf)


@pytest.mark.parametrize("cf", ["10", True, [10]])
def test_fixed_refuses_what_is_no_number(cf):
    with pytest.raises(TypeError, match="cf="):
        Fixed(cf)


@pytest.mark.parametrize("cf", [9, 1001])
def test_fixed_keeps_to_the_range(cf):
    with pytest.raises(ValueError, match=rf"cf={cf}: must be 1 \(dense\) or inside cf_range"):
        Fixed(cf).start(Context(RANGE, 2))


def test_fixed_refuses_the_state_of_another_cf():
    one, other = Fixed(20), Fixed(30)
    for policy in (one, other):
        policy.start(Context(RANGE, 2))
    with pytest.raises(ValueError, match=r"send=20\.0.*30\.0"):
        other.load_state_dict(one.state_dict())


def test_fixed_probes_other_cfs_than_the_one_it_sends():
    policy = Fixed(10.0, probe=(1000.0, 10.0, 20.0, 20.0))
    policy.start(Context((10.0, 10.0), 2))
    assert policy.plan() == Plan(10.0, probe=(20.0, 1000.0), skip_gains=True)
    with pytest.raises(ValueError, match="probe"):
        Fixed(10.0, probe=(1.0,))


# Schedule


RANGE = (10.0, 1000.0)


def started(pieces, **context):
    policy = Schedule(pieces)
    policy.start(Context(RANGE, 2, **context))
    return policy


def drive(policy, steps):
    plans = []
    for step in range(steps):
        plan = policy.plan()
        assert policy.plan() == plan
        plans.append(plan)
        policy.observe(StepReport(step, plan.send))
    return plans


def test_constant_pieces_with_a_reason_at_each_change():
    plans = drive(started({0: 10, 3: 100, 5: 1, 6: 40.5}), 8)
    assert [plan.send for plan in plans] == [10, 10, 10, 100, 100, 1, 40.5, 40.5]
    assert [bool(plan.reason) for plan in plans] == [n in (3, 5, 6) for n in range(8)]


def test_dense_before_the_first_piece_and_any_order():
    assert [plan.send for plan in drive(started({4: 20, 2: 10}), 6)] == [1, 1, 10, 10, 20, 20]


def test_a_piece_like_the_one_before_is_no_change():
    assert {plan.reason for plan in drive(started({0: 10, 2: 10}), 4)} == {""}


def test_what_the_compressor_can_do():
    policy = started({0: 10, 2: 33, 3: 1}, supported=lambda cf: 32.0)
    assert [plan.send for plan in drive(policy, 4)] == [32, 32, 32, DENSE]
    assert policy.candidates() == (DENSE, 32.0)


def test_steps_are_counted_from_where_it_begins():
    policy = Warmup(Schedule({0: 10, 2: 100}), steps=1, stages=1, factor=20)
    policy.start(Context(RANGE, 2))
    assert [plan.send for plan in drive(policy, 4)] == [20, 10, 10, 100]


@pytest.mark.parametrize("at", [0, 2, 3, 7])
def test_goes_on_from_its_state(at):
    pieces = {1: 10, 3: 100, 6: 1}
    straight, saved, loaded = started(pieces), started(pieces), started(pieces)
    drive(saved, at)
    loaded.load_state_dict(json.loads(json.dumps(saved.state_dict())))
    assert drive(loaded, 5) == drive(straight, at + 5)[at:]


def test_refuses_the_state_of_another():
    with pytest.raises(ValueError, match=r"'schedule'.*cfs"):
        started({0: 10}).load_state_dict(started({0: 20}).state_dict())


@pytest.mark.parametrize(
    ("pieces", "error", "message"),
    [
        ({}, ValueError, "pieces={}: must have at least one"),
        (10, TypeError, "pieces=10: must be a mapping"),
        ({-1: 10}, ValueError, "pieces: step=-1: must be an int >= 0"),
        ({0.5: 10}, TypeError, "pieces: step=0.5"),
        ({0: 0.5}, ValueError, r"pieces\[0\]=0.5: must be a finite number >= 1"),
        ({0: nan}, ValueError, r"pieces\[0\]=nan"),
        ({0: "10"}, TypeError, r"pieces\[0\]='10'"),
    ],
)
def test_pieces_are_checked(pieces, error, message):
    with pytest.raises(error, match=message):
        Schedule(pieces)


@pytest.mark.parametrize("cf", [5, 1001])
def test_pieces_must_fit_the_range(cf):
    with pytest.raises(ValueError, match=rf"pieces\[3\]={cf}: must be 1 \(dense\) or inside"):
        started({0: 10, 3: cf})


# Warm-up


def cfs(policy, steps):
    sent = []
    for step in range(steps):
        plan = policy.plan()
        sent.append(plan.send)
        policy.observe(StepReport(step, plan.send))
    return sent


def test_the_papers_stages_then_the_largest_cf():
    policy = make_policy("dgc-paper", steps=2)
    policy.start(Context((4, 1000), 2))
    assert cfs(policy, 11) == [4, 4, 16, 16, 64, 64, 256, 256, 1000, 1000, 1000]


def test_stages_stay_inside_the_range_and_are_such_that_the_compressor_can_do():
    policy = Warmup(steps=1)
    policy.start(Context((10, 100), 2, supported=lambda cf: float(round(cf / 10) * 10)))
    assert cfs(policy, 5) == [10, 20, 60, 100, 100]


def test_hands_over_to_the_policy_that_follows_and_says_so():
    policy = Warmup(GraVAC(window=8), steps=3, stages=2)
    alone = GraVAC(window=8)
    for each in (policy, alone):
        each.start(Context((10, 1000), 2))
    assert policy.gain == alone.gain
    assert cfs(policy, 6) == [10] * 3 + [16] * 3
    for _ in range(20):
        theirs, ours = alone.plan(), policy.plan()
        assert (ours.send, ours.probe) == (theirs.send, theirs.probe)
        for each in (policy, alone):
            each.observe(StepReport(0, theirs.send))


def test_reasons_at_each_change_only():
    policy = Warmup(Fixed(cf=500.0), steps=2, stages=2)
    policy.start(Context((4, 1000), 2))
    reasons = []
    for step in range(7):
        plan = policy.plan()
        reasons.append(plan.reason)
        policy.observe(StepReport(step, plan.send))
    assert reasons == ["", "", "scheduled", "", "warm-up is over", "", ""]


@pytest.mark.parametrize("saved_after", [0, 1, 4, 7])
def test_a_warm_up_goes_on_from_its_state(saved_after):
    def make():
        policy = Warmup(Accordion(interval=2), steps=2, stages=3)
        policy.start(Context((10, 1000), 2))
        return policy

    first, second = make(), make()
    cfs(first, saved_after)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert cfs(second, 9) == cfs(first, 9)


def test_refuses_a_state_of_other_settings():
    policy, other = Warmup(steps=2), Warmup(steps=3)
    for each in (policy, other):
        each.start(Context((10, 1000), 2))
    with pytest.raises(ValueError, match="steps=2"):
        other.load_state_dict(policy.state_dict())
    third = Warmup(Fixed(cf=10.0), steps=2)
    third.start(Context((4, 1000), 2))
    with pytest.raises(ValueError, match="candidates"):
        third.load_state_dict(policy.state_dict())


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"steps": 0}, "steps=0"),
        ({"stages": 0}, "stages=0"),
        ({"factor": 1.0}, "factor=1.0"),
        ({"then": "gravac"}, "then"),
    ],
)
def test_errors_name_the_argument(settings, named):
    with pytest.raises((ValueError, TypeError), match=named):
        Warmup(**settings)


class Certain(Fixed):
    def status(self):
        return {"exploring": 1.0}

    def verdict(self):
        return "certain"


def test_while_it_warms_up_nothing_explores_and_nothing_is_concluded():
    policy = Warmup(Certain(), steps=2, stages=1)
    policy.start(Context((4, 1000), 2))
    for step, told in enumerate([({}, ""), ({}, ""), ({"exploring": 1.0}, "certain")]):
        assert (dict(policy.status()), policy.verdict()) == told
        policy.observe(StepReport(step, policy.plan().send))


def test_a_warm_up_after_another_says_where_the_cf_comes_from():
    policy = Warmup(Warmup(steps=1, stages=1), steps=1, stages=2)
    policy.start(Context((4, 1000), 2))
    cfs(policy, 2)
    assert policy.plan().reason == "warm-up is over"
