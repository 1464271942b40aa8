"""Saved states: readers of single fields, and objects whose state is a declared list of fields.

A saved state holds plain values only (numbers, strings, lists, mappings with string keys), so that
it can be written as JSON. Numbers by CF are saved as pairs, because JSON has no float keys. A
field that is missing or cannot be right raises a ValueError that names it: a damaged state is
refused before a run goes on from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from math import inf, isfinite
from numbers import Integral, Real
from typing import Any, ClassVar

# Readers: each takes a saved state and the name of a field, and returns the field's value.


def field(state: Any, name: str) -> Any:
    """The value saved under `name`, whatever it is."""
    if not isinstance(state, Mapping):
        raise ValueError(f"state: {state!r:.80} must be a mapping with {name!r}")
    if name not in state:
        raise ValueError(f"state: {name!r} is missing")
    return state[name]


def part(state: Any, name: str) -> Mapping[str, Any]:
    """The mapping saved under `name`."""
    value = field(state, name)
    if not isinstance(value, Mapping):
        raise _wrong(name, value, "a mapping")
    return value


def values(state: Any, name: str) -> list[Any]:
    """The list saved under `name`."""
    value = field(state, name)
    if not isinstance(value, list | tuple):
        raise _wrong(name, value, "a list")
    return list(value)


def entries(state: Any, name: str, width: int) -> list[list[Any]]:
    """The list of lists of `width` values each that is saved under `name`."""
    rows = values(state, name)
    if not all(isinstance(row, list | tuple) and len(row) == width for row in rows):
        raise _wrong(name, rows, f"a list of lists of {width}")
    return [list(row) for row in rows]


def number(state: Any, name: str, *, least: float = -inf, above: float = -inf) -> float:
    """A finite number >= `least` and > `above`."""
    return _number(name, field(state, name), least, above)


def maybe_number(
    state: Any, name: str, *, least: float = -inf, above: float = -inf
) -> float | None:
    """A finite number >= `least` and > `above`, or None."""
    value = field(state, name)
    return None if value is None else _number(name, value, least, above)


def maybe_cf(state: Any, name: str) -> float | None:
    """A CF (a finite number >= 1), or None."""
    return maybe_number(state, name, least=1)


def numbers(state: Any, name: str, *, least: float = -inf) -> list[float]:
    """A list of finite numbers >= `least`."""
    return [_number(name, value, least) for value in values(state, name)]


def by_any_cf(state: Any, name: str) -> dict[float, Any]:
    """Values of any kind by CF, saved as pairs."""
    pairs = entries(state, name, 2)
    found = {_number(name, cf, 1): value for cf, value in pairs}
    together(len(found) == len(pairs), f"{name!r} has a CF twice")
    return found


def by_cf(state: Any, name: str, *, least: float = -inf, above: float = -inf) -> dict[float, float]:
    """Finite numbers by CF, saved as pairs."""
    pairs = by_any_cf(state, name).items()
    return {cf: _number(name, value, least, above) for cf, value in pairs}


def lists_by_cf(state: Any, name: str) -> dict[float, list[float]]:
    """Lists of finite numbers >= 0 by CF, saved as pairs."""
    return {cf: numbers({name: each}, name, least=0) for cf, each in by_any_cf(state, name).items()}


def whole(state: Any, name: str) -> int:
    """A whole number, which may be negative."""
    value = field(state, name)
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise _wrong(name, value, "a whole number")
    return int(value)


def count(state: Any, name: str, *, least: int = 0) -> int:
    """A whole number >= `least`."""
    return _count(name, field(state, name), least)


def maybe_count(state: Any, name: str, *, least: int = 0) -> int | None:
    """A whole number >= `least`, or None."""
    value = field(state, name)
    return None if value is None else _count(name, value, least)


def flag(state: Any, name: str) -> bool:
    """True or False."""
    value = field(state, name)
    if not isinstance(value, bool):
        raise _wrong(name, value, "True or False")
    return value


def text(state: Any, name: str) -> str:
    """A string."""
    value = field(state, name)
    if not isinstance(value, str):
        raise _wrong(name, value, "a string")
    return value


def together(condition: bool, what: str) -> None:
    """Raises ValueError("state: " + what) unless the fields that were read fit together."""
    if not condition:
        raise ValueError(f"state: {what}")


def _number(name: str, value: Any, least: float = -inf, above: float = -inf) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not isfinite(value):
        raise _wrong(name, value, "a finite number")
    number = float(value)
    if number < least or number <= above:
        bound = f"> {above:g}" if above > least else f">= {least:g}"
        raise _wrong(name, value, f"a number {bound}")
    return number


def _count(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise _wrong(name, value, f"a whole number >= {least}")
    return int(value)


def _wrong(name: str, value: Any, wanted: str) -> ValueError:
    return ValueError(f"state: {name!r} must be {wanted}, got {value!r:.80}")


# States as declared lists of fields.


@dataclass(frozen=True)
class Field:
    """A declaration of how one attribute is saved, and read back.

    load: called with the saved state, the field's name in it and the attribute's present value;
        returns the new value (or the present one, after loading into it).
    save: called with the attribute's value; returns what is saved.
    """

    load: Callable[[Any, str, Any], Any]
    save: Callable[[Any], Any]


class Stateful:
    """An object whose state is declared in `_fields`: a field for each attribute that is saved.

    An attribute `_name` is saved as "name". Attributes that are not declared are not saved.
    """

    _fields: ClassVar[Mapping[str, Field]]

    def state_dict(self) -> dict[str, Any]:
        """All declared fields, in plain JSON-like values."""
        return {_key(name): each.save(getattr(self, name)) for name, each in self._fields.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict()`. ValueError if a field is missing, is wrong, or contradicts
        another one; the object may then be half loaded."""
        for name, each in self._fields.items():
            setattr(self, name, each.load(state, _key(name), getattr(self, name, None)))
        self._check_loaded()

    def _check_loaded(self) -> None:
        """Raises ValueError (see `together`) where fields that were loaded contradict another."""


def declare(**fields: Field | Callable[..., Any]) -> Mapping[str, Field]:
    """The fields of a `Stateful`, by attribute; a reader stands for a field that it reads:
    `_fields = declare(count=count, size=saved_as(number, least=0), part=CHILD)`."""
    return {
        name: each if isinstance(each, Field) else saved_as(each) for name, each in fields.items()
    }


def _key(attribute: str) -> str:
    return attribute.removeprefix("_")


def saved_as(reader: Callable[..., Any], **bounds: Any) -> Field:
    """A field read by one of the readers above, within these bounds, and saved as it is; sequences
    are saved as lists and mappings by CF as pairs."""
    return Field(lambda state, key, _: reader(state, key, **bounds), _plain)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return [[key, _plain(each)] for key, each in value.items()]
    return list(value) if isinstance(value, list | tuple) else value


def saved_enum(kind: type[Enum]) -> Field:
    """A field that holds a member of `kind`, saved by its value."""

    def load(state: Any, key: str, _: Any) -> Enum:
        value = field(state, key)
        found = [each for each in kind if type(each.value) is type(value) and each.value == value]
        if not found:
            raise _wrong(key, value, f"one of {', '.join(repr(each.value) for each in kind)}")
        return found[0]

    return Field(load, lambda member: member.value)


def _load_child(state: Any, key: str, child: Any) -> Any:
    child.load_state_dict(part(state, key))
    return child


def _load_optional_child(state: Any, key: str, child: Any) -> Any:
    if child is not None:
        return _load_child(state, key, child)
    if field(state, key) is not None:
        raise ValueError(f"state: {key!r} is of other settings, it must be None")
    return None


CHILD = Field(_load_child, lambda child: child.state_dict())
"""A field that holds an object with a state of its own."""


def _load_children(state: Any, key: str, children: Any) -> Any:
    states = part(state, key)
    together(states.keys() == children.keys(), f"{key!r} must be of {list(children)!r:.80}")
    for name, child in children.items():
        _load_child(states, name, child)
    return children


CHILDREN = Field(
    _load_children, lambda children: {name: each.state_dict() for name, each in children.items()}
)
"""A field that holds several such objects by name; the names stay what they are."""

OPTIONAL_CHILD = Field(
    _load_optional_child, lambda child: None if child is None else child.state_dict()
)
"""The same, or None where the settings need no such object."""
