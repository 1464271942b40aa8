"""Checks of what `AdaptiveCompressor` is given: errors name argument, value and what is right."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any

MEMORIES = ("auto", "residual", "momentum", "none")


def check_cf_range(cf_range: Any) -> tuple[float, float]:
    """(smallest, largest) as floats. ValueError unless 1 <= smallest <= largest, finite."""
    wanted = (
        f"cf_range must be two finite numbers (low, high) with 1 <= low <= high, got {cf_range!r}"
    )
    if not isinstance(cf_range, Sequence) or isinstance(cf_range, str) or len(cf_range) != 2:
        raise ValueError(wanted)
    if not all(isinstance(cf, (int, float)) and not isinstance(cf, bool) for cf in cf_range):
        raise ValueError(wanted)
    low, high = map(float, cf_range)
    if not (isfinite(low) and isfinite(high) and 1 <= low <= high):
        raise ValueError(wanted)
    return low, high


def check_choice(argument: str, value: Any, accepted: Sequence[str]) -> str:
    """`value` if it is one of `accepted`; ValueError otherwise."""
    if value not in accepted:
        raise ValueError(f"{argument} must be one of {', '.join(accepted)}; got {value!r}")
    return value


def check_positive(argument: str, value: Any) -> float | None:
    """`value` as a float, or None; ValueError unless it is a finite number > 0."""
    if value is None:
        return None
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not 0 < value < float("inf")
    ):
        raise ValueError(f"{argument} must be a finite number > 0 or None, got {value!r}")
    return float(value)


def check_momentum(value: Any) -> float | None:
    """`value` as a float, or None; ValueError unless it is in (0, 1)."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1:
        raise ValueError(f"momentum must be a number in (0, 1) or None, got {value!r}")
    return float(value)


def check_masking(value: Any) -> float:
    """The smallest CF at which velocities are masked: True is every CF above 1, False none."""
    if isinstance(value, bool):
        return 1.0 if value else float("inf")
    if isinstance(value, (int, float)) and value >= 1:
        return float(value)
    raise ValueError(f"masking must be True, False or a CF >= 1 from which to mask, got {value!r}")
