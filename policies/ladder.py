"""Ladders: the ascending CFs that a policy chooses from."""

from __future__ import annotations

from math import log
from typing import Literal, get_args

ScalingName = Literal["exponential", "geometric"]
SCALINGS: tuple[ScalingName, ...] = get_args(ScalingName)
"""GraVAC's scaling policies (section 3.2). With step_size 2, from 10 to 1000: "exponential" is 10,
20, 40, 160, 1000 (the first CF x step_size^1, ^2, ^4, ^8); "geometric" is 10, 20, 40, ..., 640,
1000 (each CF is step_size times the CF before)."""

MAX_RUNGS = 1000
"""The largest number of rungs. More rungs are a mistake in step_size."""


def make_ladder(cf_range: tuple[float, float], scaling: str, step_size: float) -> tuple[float, ...]:
    """Ascending CFs from one end of the range to the other. ValueError if more than MAX_RUNGS."""
    low, top = cf_range
    if log(top / low) > MAX_RUNGS * log(step_size):
        raise ValueError(
            f"step_size={step_size!r}: from CF {low:g} to {top:g} it makes more than "
            f"{MAX_RUNGS} candidates; take a larger step"
        )
    rungs, factor, rung = [low], step_size, low * step_size
    while rung < top * (1 - 1e-9):  # up to rounding, a rung at the top is the top
        rungs.append(rung)
        factor *= factor  # squaring doubles the exponent
        rung = low * factor if scaling == "exponential" else rung * step_size
    return tuple(rungs) if rungs[-1] == top else (*rungs, top)
