"""The ladder: the ascending CFs that GraVAC tries (GraVAC section 3.2, its scaling policies)."""

from __future__ import annotations

from collections.abc import Callable
from math import log

MAX_RUNGS = 1000
"""More rungs than this are a mistake in step_size, not a plan."""

ALMOST = 1 - 1e-9
"""A rung within rounding of the top is the top."""


def exponential(floor: float, top: float, step_size: float) -> tuple[float, ...]:
    """floor x step_size^1, ^2, ^4, ^8, ...: each counted from the *first* floor; ends at `top`.

    10, 20, 40, 160, 1000 in [10, 1000] with step_size 2.
    """
    rungs = [floor]
    factor = step_size
    while floor * factor < top * ALMOST:
        rungs.append(floor * factor)
        factor *= factor  # squaring doubles the exponent
    return _closed(rungs, top)


def geometric(floor: float, top: float, step_size: float) -> tuple[float, ...]:
    """Each rung step_size times the one before; ends at `top`.

    10, 20, 40, ..., 640, 1000 in [10, 1000] with step_size 2.
    """
    rungs = [floor]
    while rungs[-1] * step_size < top * ALMOST:
        rungs.append(rungs[-1] * step_size)
    return _closed(rungs, top)


SCALINGS: dict[str, Callable[[float, float, float], tuple[float, ...]]] = {
    "exponential": exponential,
    "geometric": geometric,
}


def make_ladder(cf_range: tuple[float, float], scaling: str, step_size: float) -> tuple[float, ...]:
    """The rungs for a CF range, the floor first and the largest CF last.

    Raises ValueError where a step_size close to 1 would make more than MAX_RUNGS rungs.
    """
    floor, top = cf_range
    if log(top / floor) > MAX_RUNGS * log(step_size):
        raise ValueError(
            f"step_size={step_size!r}: from CF {floor:g} to {top:g} it makes more than "
            f"{MAX_RUNGS} candidates; take a larger step"
        )
    return SCALINGS[scaling](floor, top, step_size)


def _closed(rungs: list[float], top: float) -> tuple[float, ...]:
    return tuple(rungs) if rungs[-1] == top else (*rungs, top)
