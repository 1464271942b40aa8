"""Fields of a saved state, read with care: what is missing or cannot be is a ValueError that names
the field, so that a damaged state is refused before anything goes on from it."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, isfinite
from numbers import Integral, Real
from typing import Any, Protocol


class Loadable(Protocol):
    """What has a saved state of its own."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def field(state: Any, name: str) -> Any:
    """Whatever is saved under `name`."""
    if not isinstance(state, Mapping):
        raise ValueError(f"state: {state!r:.80} must be a mapping with {name!r}")
    if name not in state:
        raise ValueError(f"state: {name!r} is missing")
    return state[name]


def part(state: Any, name: str) -> Mapping[str, Any]:
    """A mapping."""
    value = field(state, name)
    if not isinstance(value, Mapping):
        raise _wrong(name, value, "a mapping")
    return value


def entries(state: Any, name: str, width: int) -> list[list[Any]]:
    """A list of lists of `width` values each."""
    rows = values(state, name)
    if not all(isinstance(row, list | tuple) and len(row) == width for row in rows):
        raise _wrong(name, rows, f"a list of lists of {width}")
    return [list(row) for row in rows]


def load_if_there(state: Any, name: str, target: Loadable | None) -> None:
    """Load what is saved under `name` into the target; without one, it must be None."""
    if target is not None:
        target.load_state_dict(part(state, name))
    elif field(state, name) is not None:
        raise ValueError(f"state: {name!r} is of other settings, it must be None")


def values(state: Any, name: str) -> list[Any]:
    """A list."""
    value = field(state, name)
    if not isinstance(value, list | tuple):
        raise _wrong(name, value, "a list")
    return list(value)


def number(state: Any, name: str, *, least: float = -inf, above: float = -inf) -> float:
    """A finite number >= `least` and > `above`."""
    return _number(name, field(state, name), least, above)


def maybe_number(
    state: Any, name: str, *, least: float = -inf, above: float = -inf
) -> float | None:
    """The same, or None."""
    value = field(state, name)
    return None if value is None else _number(name, value, least, above)


def maybe_cf(state: Any, name: str) -> float | None:
    """A CF, or None."""
    return maybe_number(state, name, least=1)


def numbers(state: Any, name: str, *, least: float = -inf) -> list[float]:
    """A list of finite numbers."""
    return [_number(name, value, least) for value in values(state, name)]


def by_cf(state: Any, name: str, *, least: float = -inf, above: float = -inf) -> dict[float, float]:
    """Finite numbers by CF."""
    pairs = by_any_cf(state, name).items()
    return {cf: _number(name, value, least, above) for cf, value in pairs}


def by_any_cf(state: Any, name: str) -> dict[float, Any]:
    """Whatever is saved by CF, from pairs: JSON has no float keys."""
    pairs = entries(state, name, 2)
    found = {_number(name, cf, 1): value for cf, value in pairs}
    together(len(found) == len(pairs), f"{name!r} has a CF twice")
    return found


def lists_by_cf(state: Any, name: str) -> dict[float, list[float]]:
    """Lists of finite numbers >= 0 by CF, from pairs."""
    return {cf: numbers({name: each}, name, least=0) for cf, each in by_any_cf(state, name).items()}


def whole(state: Any, name: str) -> int:
    """A whole number, negative ones too."""
    value = field(state, name)
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise _wrong(name, value, "a whole number")
    return int(value)


def count(state: Any, name: str, *, least: int = 0) -> int:
    """A whole number >= `least`."""
    return _count(name, field(state, name), least)


def maybe_count(state: Any, name: str, *, least: int = 0) -> int | None:
    """The same, or None."""
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


def nested(state: Any, name: str) -> tuple[str, Any]:
    """Name and state of a policy inside another one."""
    value = field(state, name)
    if not isinstance(value, list | tuple) or len(value) != 2 or not isinstance(value[0], str):
        raise _wrong(name, value, "the name and the state of a policy")
    return value[0], value[1]


def together(condition: bool, what: str) -> None:
    """ValueError unless what was read fits together."""
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
