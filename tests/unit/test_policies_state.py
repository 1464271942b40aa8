"""States as declared types: written, read back, and refused where they are damaged."""

from __future__ import annotations

import json
from dataclasses import InitVar, dataclass
from enum import Enum
from math import inf, nan

import pytest

from policies.state import Stateful, declare, require, saved, twin


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Part(Stateful):
    _fields = declare(size=int)

    def __init__(self, size=1):
        self.size = size


@dataclass(eq=False)
class Whole(Stateful):
    other: InitVar[Part | None] = None

    _cf: float | None = saved(None)
    _times: dict[float, list[float]] = saved({})
    _names: tuple[str, ...] = saved(())
    _span: tuple[int, float] = saved((0, 0.0))
    colour: Colour = saved(Colour.RED)
    part: Part = saved(Part())
    _other: Part | None = saved(None)
    _parts: dict[str, Part] = saved({"a": Part(), "b": Part()})

    def __post_init__(self, other):
        self._other = other
        self.not_saved = 7

    def _check_loaded(self):
        require(self._cf is None or self._cf in self._times, "'cf' has no times")


def filled():
    whole = Whole(Part(5))
    whole._cf, whole._times, whole._names = 10.0, {10.0: [1.0, 2.0]}, ("a", "b")
    whole._span = (3, 4.5)
    whole.colour, whole.part.size, whole._parts["b"].size = Colour.BLUE, 3, 4
    return whole


SAVED = {
    "cf": 10.0,
    "times": [[10.0, [1.0, 2.0]]],
    "names": ["a", "b"],
    "span": [3, 4.5],
    "colour": "blue",
    "part": {"size": 3},
    "other": {"size": 5},
    "parts": [["a", {"size": 1}], ["b", {"size": 4}]],
}


def test_what_is_declared_is_saved_and_goes_on():
    assert filled().state_dict() == SAVED
    again = Whole(Part())
    part = again.part
    again.load_state_dict(json.loads(json.dumps(SAVED)))
    assert again.state_dict() == SAVED
    assert again._times == {10.0: [1.0, 2.0]}
    assert (again._names, again._span) == (("a", "b"), (3, 4.5))
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
        ({"cf": True}, r"state: 'cf' must be float \| None \(numbers finite\), got True"),
        ({"cf": inf}, "'cf' must be float"),
        ({"cf": 20.0}, "state: 'cf' has no times"),
        ({"times": [[10.0, [nan]]]}, r"'times' must be dict\[float, list\[float\]\]"),
        ({"times": [[10.0, [1.0]], [10.0, [2.0]]]}, "'times' must be dict"),
        ({"times": [[10.0]]}, "'times' must be dict"),
        ({"times": 3}, "'times' must be dict"),
        ({"names": "ab"}, "'names' must be tuple"),
        ({"names": ["a", 3]}, "'names' must be tuple"),
        ({"span": [3]}, "'span' must be tuple"),
        ({"span": [3, 4.5, 6]}, "'span' must be tuple"),
        ({"span": [3.5, 4.5]}, "'span' must be tuple"),
        ({"colour": "green"}, "'colour' must be Colour .*, got 'green'"),
        ({"part": 3}, "'part' must be Mapping"),
        ({"part": {"size": True}}, "'size' must be int"),
        ({"part": {"size": 1.0}}, "'size' must be int"),
        ({"part": {}}, "'size' is missing"),
        ({"other": None}, "'other' must be Mapping"),
        ({"parts": [["a", {"size": 1}]]}, r"'parts' must be of \['a', 'b'\]"),
        ({"parts": [["a", {"size": 1}], ["b", {"size": "x"}]]}, "'size' must be int"),
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


@dataclass(eq=False)
class _Inner(Stateful):
    seen: list[int] = saved([])


@dataclass(eq=False)
class _Outer(Stateful):
    inner: _Inner = saved(_Inner())
    by_name: dict[str, _Inner] = saved({"a": _Inner()})
    last: int = saved(0)

    def _check_loaded(self) -> None:
        require(self.last >= 0, "'last' must not be negative")


def test_a_twin_takes_a_state_and_its_original_takes_it_over_or_is_as_it_was() -> None:
    part = _Outer()
    inside = part.inner, part.by_name["a"]
    good = {"inner": {"seen": [1]}, "by_name": [["a", {"seen": [2]}]], "last": 3}
    before = part.state_dict()
    other, _ = twin(part)
    with pytest.raises(ValueError, match="'last' must not be negative"):
        other.load_state_dict({**good, "last": -1})  # the rest of it is loaded by then
    assert part.state_dict() == before
    other, become = twin(part)
    other.load_state_dict(good)
    assert part.state_dict() == before
    become()
    assert part.state_dict() == good
    assert (part.inner, part.by_name["a"]) == inside  # whom others know by these objects
    assert inside[0].seen == [1]
