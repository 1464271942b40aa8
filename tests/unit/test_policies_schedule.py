"""Constant pieces from a table."""

from __future__ import annotations

import json
from math import nan

import pytest

from policies.base import DENSE, Context, StepReport
from policies.baselines import Schedule, Warmup

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
    assert [plan.reason for plan in plans] == [
        "",
        "",
        "",
        "scale up 10 -> 100: the schedule has CF 100 from step 3",
        "",
        "dense: 100 -> 1, the schedule has CF 1 from step 5",
        "scale up 1 -> 40.5: the schedule has CF 40.5 from step 6",
        "",
    ]


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


def test_before_start():
    for use in (Schedule({0: 10}).plan, lambda: Schedule({0: 10}).load_state_dict({})):
        with pytest.raises(RuntimeError, match="start"):
            use()


def test_what_comes_next():
    policy = started({2: 10})
    assert policy.next_move() == "the schedule has CF 10 from step 2"
    drive(policy, 3)
    assert policy.next_move() == "the schedule has no later piece"
