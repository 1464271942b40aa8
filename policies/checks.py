"""Checks of arguments: every error names the argument, the value and what would be accepted."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from math import inf, isfinite, nan
from numbers import Integral, Real
from typing import Any, TypeVar

Name = TypeVar("Name", bound=str)


def _check(name: str, value: object, kind: type, fits: bool, wanted: str) -> None:
    """TypeError if the value is not of this kind, ValueError if it does not fit."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"{name}={value!r}: must be {wanted}, got {type(value).__name__}")
    if not fits:
        raise ValueError(f"{name}={value!r}: must be {wanted}")


def real(name: str, value: Any, *, above: float = -inf, least: float = -inf) -> float:
    """`value` as a finite float > `above` and >= `least`."""
    number = float(value) if isinstance(value, Real) else nan
    fits = isfinite(number) and number > above and number >= least
    bound = f" > {above:g}" if above > least else f" >= {least:g}"
    _check(name, value, Real, fits, f"a finite number{bound}")
    return number


def fraction(name: str, value: Any) -> float:
    """`value` as a float in (0, 1]."""
    number = float(value) if isinstance(value, Real) else nan
    _check(name, value, Real, 0 < number <= 1, "in (0, 1]")
    return number


def whole(name: str, value: Any, *, least: int) -> int:
    """`value` as an int >= `least`."""
    fits = isinstance(value, Integral) and int(value) >= least
    _check(name, value, Integral, fits, f"an int >= {least}")
    return int(value)


def flag(name: str, value: Any) -> bool:
    """`value` as a bool."""
    _check(name, value, bool, True, "True or False")
    return bool(value)


def nearest(given: str, names: Iterable[str]) -> str:
    """ "; did you mean 'topk'?" for "top-k" or "TopK"; "" if no name is near."""
    plain = {"".join(filter(str.isalnum, name.lower())): name for name in names}
    found = get_close_matches("".join(filter(str.isalnum, given.lower())), plain, 1, 0.75)
    return f"; did you mean {plain[found[0]]!r}?" if found else ""


def one_of(name: str, value: Any, accepted: Iterable[Name]) -> Name:
    """`value` as one of the `accepted` names."""
    names = sorted(accepted)
    near = nearest(value, names) if isinstance(value, str) else ""
    _check(name, value, str, value in names, f"one of {', '.join(map(repr, names))}{near}")
    named: Name = value
    return named


def cf_range(value: Any) -> tuple[float, float]:
    """`value` as (smallest, largest) CF, 1 <= smallest <= largest."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise ValueError(f"cf_range={value!r}: must be a pair (smallest CF, largest CF)")
    low, high = (real("cf_range", cf, least=1) for cf in value)
    if low > high:
        raise ValueError(f"cf_range={value!r}: the smallest CF must not exceed the largest")
    return low, high


def new_class(name: Any, cls: Any, parent: type, taken: Iterable[str]) -> None:
    """TypeError or ValueError unless a user may register `cls` under `name`: the name is not in
    `taken`, and the class inherits from `parent`, lacks no method and needs no arguments."""
    if not isinstance(name, str) or not name:
        raise TypeError(f"name must be a text, got {name!r}")
    if name in taken:
        raise ValueError(f"name must not be registered yet, got {name!r}")
    if not (isinstance(cls, type) and issubclass(cls, parent)):
        wanted = f"a class that inherits from adaptive.{parent.__name__}"
        raise TypeError(f"cls must be {wanted}, got {cls!r}")
    if missing := ", ".join(sorted(getattr(cls, "__abstractmethods__", ()))):
        raise TypeError(f"cls must define {missing}, got {cls!r}")
    try:
        cls()
    except TypeError as error:
        raise TypeError(f"cls must be made without arguments, got {cls!r}: {error}") from None


def settings_of(made: object) -> str:
    """An object of a user's class in words: the class and its settings (all attributes whose names
    do not begin with "_")."""
    known = sorted(vars(made).items())
    settings = ", ".join(f"{name}={value!r}" for name, value in known if name[:1] != "_")
    return f"{type(made).__name__}({settings})"
