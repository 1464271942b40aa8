"""GraVAC's send rule, with its hysteresis and cooldown."""

from __future__ import annotations

import json

import pytest

from policies.estimators import Backoff
from policies.exploration import MAX_DOUBLINGS, Level, SendRule


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
        (Level.FLOOR, 0.9, 0.56, Level.CANDIDATE, "gain 0.56 >= 0.55 (epsilon 0.5 and hysteresis)"),
        (Level.DENSE, 0.54, 0.2, Level.DENSE, ""),
        (Level.DENSE, None, None, Level.DENSE, ""),
        (Level.DENSE, 0.56, 0.2, Level.FLOOR, "gain 0.56 >= 0.55 (epsilon 0.5 and hysteresis)"),
        (Level.DENSE, 0.9, 0.9, Level.FLOOR, "gain 0.9 >= 0.55 (epsilon 0.5 and hysteresis)"),
        (Level.DENSE, 0.2, 0.9, Level.CANDIDATE, "gain 0.9 >= 0.55 (epsilon 0.5 and hysteresis)"),
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
    assert Backoff.SOON * 40 == 160
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
