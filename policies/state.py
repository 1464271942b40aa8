"""Saved states: objects that declare what they save, and how a saved value is read back.

A saved state holds plain values only (numbers, strings, lists, mappings with string keys), so that
it can be written as JSON. Each value is declared by its Python type and read back as that type. A
field that is missing, of another type or not finite raises a ValueError with its name. So a damaged
state is refused before a run goes on from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy, deepcopy
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import cache, partial
from math import isfinite
from numbers import Real
from types import UnionType
from typing import Any, ClassVar, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")


def read(state: Any, name: str, kind: Any) -> Any:
    """The value saved under `name`, as an object of the type `kind`.

    kind: bool, int, float (finite), str, an Enum (saved by value), Mapping, object (anything), and
        `X | None`, `list[X]`, `tuple[X, ...]`, `tuple[X, Y]` and `dict[X, Y]` of them. Tuples are
        saved as lists and dicts as lists of pairs, because JSON has no float keys.
    """
    if not isinstance(state, Mapping):
        raise ValueError(f"state: {state!r:.80} must be a mapping with {name!r}")
    if name not in state:
        raise ValueError(f"state: {name!r} is missing")
    try:
        return _restored(state[name], kind)
    except (TypeError, ValueError):
        wanted = getattr(kind, "__name__", kind) if get_origin(kind) is None else kind
        raise ValueError(
            f"state: {name!r} must be {wanted} (numbers finite), got {state[name]!r:.80}"
        ) from None


def require(condition: bool, what: str) -> None:
    """ValueError("state: " + what) unless the condition, on fields that were read, is true."""
    if not condition:
        raise ValueError(f"state: {what}")


def saved(first: Any = None) -> Any:
    """A field of a `Stateful` dataclass that is part of its state, and no argument of the
    constructor. Its first value is a copy of `first`."""
    copy_first = partial(deepcopy, first)
    return field(init=False, repr=False, default_factory=copy_first, metadata={"saved": True})


def declare(**kinds: Any) -> Mapping[str, Any]:
    """The attributes that a `Stateful` saves besides its `saved` fields, each with its type."""
    return kinds


def twin(part: T) -> tuple[T, Callable[[], None]]:
    """(copy, become): a copy of an object with a state, and of all objects with a state inside it;
    and a function that moves the copies' attributes to their objects.

    A state is loaded into the copy before `become` is called. So a state that cannot be loaded
    changes nothing. Therefore `load_state_dict` must replace the attributes of its object, and not
    change them in place. The objects stay the same, so references to them remain valid; an object
    that `load_state_dict` makes anew takes the place of the old one."""
    pairs: dict[int, tuple[Any, Any]] = {}  # object and copy, by the id of the object

    def copied(value: Any) -> Any:
        if not _saves(value):
            return value
        if id(value) not in pairs:
            pairs[id(value)] = value, copy(value)
            _change_inside(pairs[id(value)][1], copied)
        return pairs[id(value)][1]

    def become() -> None:
        objects = {id(new): old for old, new in pairs.values()}
        for old, new in pairs.values():
            _change_inside(new, lambda value: objects.get(id(value), value))
            vars(old).clear()
            vars(old).update(vars(new))

    return copied(part), become


def _change_inside(part: Any, change: Callable[[Any], Any]) -> None:
    """Replace each attribute by `change(attribute)`; for a dictionary its values."""
    for name, value in vars(part).items():
        if isinstance(value, dict):
            vars(part)[name] = {key: change(each) for key, each in value.items()}
        else:
            vars(part)[name] = change(value)


def _saves(value: Any) -> bool:
    return hasattr(value, "load_state_dict") and hasattr(value, "__dict__")


@dataclass(eq=False)
class Stateful:
    """An object that declares its state: as fields of a dataclass, or in `_fields`.

        _before: float | None = saved(None)
        _fields = declare(_before=float | None)

    An attribute `_name` is saved as "name". Attributes that are not declared are not saved. The
    type is one that `read` knows, or the type of an object with a state, which is loaded in place:
    `Stateful`, `Stateful | None` (None if the settings need none) or `dict[str, Stateful]`.
    """

    _fields: ClassVar[Mapping[str, Any]] = {}

    @classmethod
    @cache
    def _kinds(cls) -> Mapping[str, Any]:
        """The attributes that are saved, each with its type."""
        names = [each.name for each in fields(cls) if "saved" in each.metadata]
        hints = get_type_hints(cls) if names else {}
        return {**cls._fields, **{name: hints[name] for name in names}}

    def state_dict(self) -> dict[str, Any]:
        """All declared attributes, in plain JSON-like values."""
        return {name.removeprefix("_"): _plain(getattr(self, name)) for name in self._kinds()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a `state_dict()`. ValueError if a field is missing or wrong, or contradicts another
        one; the object may then be half loaded."""
        for name, kind in self._kinds().items():
            key = name.removeprefix("_")
            if _has_state(kind):
                _load_in_place(getattr(self, name), state, key)
            else:
                setattr(self, name, read(state, key, kind))
        self._check_loaded()

    def _check_loaded(self) -> None:
        """ValueError (see `require`) if loaded fields contradict each other."""

    def _begin(self) -> None:
        """Give all `saved` fields their first values again."""
        for each in fields(self):
            if "saved" in each.metadata and callable(each.default_factory):
                setattr(self, each.name, each.default_factory())


def _has_state(kind: Any) -> bool:
    """Whether a value of this type, or a value inside it, is an object with a state."""
    return any(map(_has_state, get_args(kind))) or hasattr(kind, "load_state_dict")


def _plain(value: Any) -> Any:
    if hasattr(value, "state_dict"):
        return value.state_dict()
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return [[_plain(key), _plain(each)] for key, each in value.items()]
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def _restored(value: Any, kind: Any) -> Any:
    """A saved value as the type `kind`. TypeError or ValueError if it is not of that type."""
    of, inner = get_origin(kind), get_args(kind)
    if isinstance(kind, UnionType):
        return None if value is None else _restored(value, inner[0])
    if of is dict:
        pairs = _restored(value, list[tuple[object, object]])
        restored = {_restored(key, inner[0]): _restored(each, inner[1]) for key, each in pairs}
        if len(restored) < len(pairs):
            raise ValueError("a key is there twice")
        return restored
    if of is not None:
        if not isinstance(value, list | tuple):
            raise TypeError("not a list")
        if of is tuple and inner[-1] is not ...:
            return tuple(_restored(v, each) for v, each in zip(value, inner, strict=True))
        return of(_restored(each, inner[0]) for each in value)
    if issubclass(kind, Enum):
        return kind(value)
    accepted = Real if kind is float else kind
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind in (int, float)):
        raise TypeError("another type")
    if kind is float and not isfinite(value):
        raise ValueError("not finite")
    return float(value) if kind is float else value


def _load_in_place(child: Any, state: Mapping[str, Any], name: str) -> None:
    """Load the saved value of `name` into `child`: an object with a state, a dict of such objects,
    or None."""
    if child is None:
        require(
            read(state, name, object) is None, f"{name!r} is of other settings, it must be None"
        )
    elif hasattr(child, "load_state_dict"):
        child.load_state_dict(read(state, name, Mapping))
    else:
        children = dict(read(state, name, dict[str, object]))
        require(children.keys() == child.keys(), f"{name!r} must be of {list(child)!r:.80}")
        for each, of_one in child.items():
            _load_in_place(of_one, children, each)
