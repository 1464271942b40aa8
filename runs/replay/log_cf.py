"""Between two CFs, in log CF."""

from __future__ import annotations

from math import log


def part_of_way(cf: float, low: float, high: float) -> float:
    """How far `cf` is on the way from `low` to `high`; 0 if those are the same."""
    return log(cf / low) / log(high / low) if high > low else 0.0
