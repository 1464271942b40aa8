"""States as declared lists of fields: written, read back, and refused where they are damaged."""

from __future__ import annotations

import json
from enum import Enum
from math import inf, nan

import pytest

from policies import state
from policies.state import CHILD, OPTIONAL_CHILD, Stateful, declare, saved_as, saved_enum


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Part(Stateful):
    _fields = declare(size=saved_as(state.count, least=1))

    def __init__(self, size=1):
        self.size = size


class Whole(Stateful):
    _fields = declare(
        _cf=saved_as(state.maybe_cf),
        _times=saved_as(state.lists_by_cf),
        _names=saved_as(state.values),
        colour=saved_enum(Colour),
        part=CHILD,
        _other=OPTIONAL_CHILD,
    )

    def __init__(self, other=None):
        self._cf, self._times, self._names = None, {}, ()
        self.colour, self.part, self._other = Colour.RED, Part(), other
        self.not_saved = 7

    def _check_loaded(self):
        state.together(self._cf is None or self._cf in self._times, "'cf' has no times")


def filled():
    whole = Whole(Part(5))
    whole._cf, whole._times, whole._names = 10.0, {10.0: [1.0, 2.0]}, ("a", "b")
    whole.colour, whole.part.size = Colour.BLUE, 3
    return whole


SAVED = {
    "cf": 10.0,
    "times": [[10.0, [1.0, 2.0]]],
    "names": ["a", "b"],
    "colour": "blue",
    "part": {"size": 3},
    "other": {"size": 5},
}


def test_what_is_declared_is_saved_and_goes_on():
    assert filled().state_dict() == SAVED
    again = Whole(Part())
    part = again.part
    again.load_state_dict(json.loads(json.dumps(SAVED)))
    assert again.state_dict() == SAVED
    assert again._times == {10.0: [1.0, 2.0]}
    assert again.part is part  # others may hold it too
    assert Whole().state_dict()["other"] is None


def test_a_saved_state_does_not_change_with_the_object():
    whole = filled()
    saved = whole.state_dict()
    whole._times[10.0].append(3.0)
    whole.part.size = 9
    assert saved == SAVED


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"cf": 0.5}, "state: 'cf' must be a number >= 1, got 0.5"),
        ({"cf": True}, "'cf' must be a finite number"),
        ({"cf": inf}, "'cf' must be a finite number"),
        ({"cf": 20.0}, "state: 'cf' has no times"),
        ({"times": [[10.0, [nan]]]}, "'times' must be a finite number"),
        ({"times": [[10.0, [1.0]], [10.0, [2.0]]]}, "'times' has a CF twice"),
        ({"times": [[10.0]]}, "'times' must be a list of lists of 2"),
        ({"names": "ab"}, "'names' must be a list"),
        ({"colour": "green"}, "'colour' must be one of 'red', 'blue', got 'green'"),
        ({"part": 3}, "'part' must be a mapping"),
        ({"part": {"size": 0}}, "'size' must be a whole number >= 1"),
        ({"part": {"size": 1.0}}, "'size' must be a whole number >= 1"),
        ({"part": {}}, "'size' is missing"),
        ({"other": None}, "'other' must be a mapping"),
    ],
)
def test_a_damaged_state_is_refused_by_name(damage, message):
    with pytest.raises(ValueError, match=message):
        Whole(Part()).load_state_dict({**SAVED, **damage})


def test_a_part_that_these_settings_do_not_have_is_refused():
    with pytest.raises(ValueError, match="'other' is of other settings, it must be None"):
        Whole().load_state_dict(SAVED)


def test_a_state_must_be_a_mapping():
    with pytest.raises(ValueError, match="must be a mapping with 'cf'"):
        Whole().load_state_dict([])
