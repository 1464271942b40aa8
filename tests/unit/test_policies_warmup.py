"""DGC's warm-up: stages of exponentially growing CFs, then whatever is to follow."""

from __future__ import annotations

import json

import pytest

from policies import Accordion, Context, Fixed, GraVAC, StepReport, Warmup, make_policy
from policies.baselines import Schedule


def cfs(policy, steps):
    sent = []
    for step in range(steps):
        plan = policy.plan()
        sent.append(plan.send)
        policy.observe(StepReport(step, plan.send))
    return sent


def test_the_papers_stages_then_the_largest_cf():
    policy = make_policy("warmup", steps=2)
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
    assert reasons[0] == "scale up 1 -> 4: warm-up, stage 1 of 2, 2 steps each"
    assert reasons[2] == "scale up 4 -> 16: warm-up, stage 2 of 2, 2 steps each"
    assert reasons[4] == "scale up 16 -> 500: warm-up is over"
    assert [bool(reason) for reason in reasons] == [True, False, True, False, True, False, False]


@pytest.mark.parametrize("saved_after", [0, 1, 4, 7])
def test_goes_on_from_its_state(saved_after):
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
    with pytest.raises(ValueError, match="cfs"):
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


def test_before_start_it_has_nothing_to_tell():
    policy = Warmup(GraVAC())
    assert (dict(policy.status()), policy.verdict(), policy.next_move()) == ({}, "", "")
    assert policy.candidates() == ()
    with pytest.raises(RuntimeError, match="start"):
        policy.load_state_dict({})


@pytest.mark.parametrize(
    ("cf_range", "then", "outlooks"),
    [
        (
            (4, 1000),
            None,
            [
                "the next stage begins in 2 steps, with CF 16",
                "the next stage begins in 1 step, with CF 16",
                "it goes to CF 1000 in 2 steps, and stays there",
                "it goes to CF 1000 in 1 step, and stays there",
                "nothing would change it",
            ],
        ),
        (
            (4, 16),
            None,
            [
                "the next stage begins in 2 steps, with CF 16",
                "the next stage begins in 1 step, with CF 16",
                "it stays at CF 16, where warm-up ends in 2 steps",
                "it stays at CF 16, where warm-up ends in 1 step",
                "nothing would change it",
            ],
        ),
        (
            (4, 1000),
            Schedule({0: 50, 9: 100}),
            [
                "the next stage begins in 2 steps, with CF 16",
                "the next stage begins in 1 step, with CF 16",
                "schedule takes over in 2 steps, with CF 50",
                "schedule takes over in 1 step, with CF 50",
                "the schedule has CF 100 from step 9",
            ],
        ),
    ],
    ids=["none", "none, and there already", "schedule"],
)
def test_what_comes_next(cf_range, then, outlooks):
    policy = Warmup(then, steps=2, stages=2)
    policy.start(Context(cf_range, 2))
    told = []
    for step in range(5):
        told.append(policy.next_move())
        policy.observe(StepReport(step, policy.plan().send))
    assert told == outlooks


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
    assert policy.plan().reason == "scale down 16 -> 4: warm-up is over"
