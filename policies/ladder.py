"""Ladders: the ascending CFs that a policy chooses from."""

from __future__ import annotations

from math import log
from typing import Literal, get_args

ScalingName = Literal["exponential", "geometric"]
SCALINGS: tuple[ScalingName, ...] = get_args(ScalingName)
"""GraVAC's scaling policies (section 3.2), from 10 to 1000 with step_size 2. "exponential": 10, 20,
40, 160, 1000, the first CF x step_size^1, ^2, ^4, ^8. "geometric": 10, 20, 40, ..., 640, 1000, each
CF step_size times the one before."""

MAX_RUNGS = 1000
"""More rungs than this are a mistake in step_size, not a plan."""


def make_ladder(cf_range: tuple[float, float], scaling: str, step_size: float) -> tuple[float, ...]:
    """Ascending CFs from one end of the range to the other. ValueError if more than MAX_RUNGS."""
    low, top = cf_range
    if log(top / low) > MAX_RUNGS * log(step_size):
        raise ValueError(
            f"step_size={step_size!r}: from CF {low:g} to {top:g} it makes more than "
            f"{MAX_RUNGS} candidates; take a larger step"
        )
    rungs, factor, rung = [low], step_size, low * step_size
    while rung < top * (1 - 1e-9):  # a rung within rounding of the top is the top
        rungs.append(rung)
        factor *= factor  # squaring doubles the exponent
        rung = low * factor if scaling == "exponential" else rung * step_size
    return tuple(rungs) if rungs[-1] == top else (*rungs, top)
