"""Checks of arguments: every error names the argument, the value and what would be accepted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf, isfinite
from numbers import Integral, Real
from typing import Any


def real(name: str, value: object, *, above: float = -inf, least: float = -inf) -> float:
    """`value` as a finite float > `above` and >= `least`."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}={value!r}: must be a number, got {type(value).__name__}")
    number = float(value)
    if not (isfinite(number) and number > above and number >= least):
        bound = f" > {above:g}" if above > least else f" >= {least:g}"
        raise ValueError(f"{name}={value!r}: must be a finite number{bound}")
    return number


def fraction(name: str, value: object) -> float:
    """`value` as a float in (0, 1]."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}={value!r}: must be a number in (0, 1], got {type(value).__name__}")
    number = float(value)
    if not 0 < number <= 1:  # also turns NaN away
        raise ValueError(f"{name}={value!r}: must be in (0, 1]")
    return number


def whole(name: str, value: object, *, least: int) -> int:
    """`value` as an int >= `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name}={value!r}: must be an int >= {least}, got {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name}={value!r}: must be an int >= {least}")
    return int(value)


def flag(name: str, value: object) -> bool:
    """`value` as a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: must be True or False, got {type(value).__name__}")
    return value


def one_of(name: str, value: object, accepted: Iterable[str]) -> str:
    """`value` as one of the `accepted` names."""
    names = sorted(accepted)
    listed = ", ".join(repr(option) for option in names)
    if not isinstance(value, str):
        raise TypeError(f"{name}={value!r}: must be one of {listed}, got {type(value).__name__}")
    if value not in names:
        raise ValueError(f"{name}={value!r}: must be one of {listed}")
    return value


def cf_range(value: object) -> tuple[float, float]:
    """`value` as (smallest, largest) CF, 1 <= smallest <= largest."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise ValueError(f"cf_range={value!r}: must be a pair (smallest CF, largest CF)")
    low, high = (real("cf_range", cf, least=1) for cf in value)
    if low > high:
        raise ValueError(f"cf_range={value!r}: the smallest CF must not exceed the largest")
    return low, high


def cf_within(name: str, cf: float, allowed: tuple[float, float]) -> float:
    """`cf` if it is dense (1) or inside the `allowed` range."""
    low, high = allowed
    if cf != 1 and not low <= cf <= high:
        raise ValueError(f"{name}={cf:g}: must be 1 (dense) or inside cf_range ({low:g}, {high:g})")
    return cf


def same(policy: str, settings: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Refuse a state that was saved under other settings: it would go on as something else."""
    for name in sorted({*settings, *saved}):
        here, there = settings.get(name, "nothing"), saved.get(name, "nothing")
        if here != there:
            raise ValueError(
                f"state of policy {policy!r} was saved with {name}={there!r}: it can only be "
                f"loaded with the same, here it is {here!r}"
            )
