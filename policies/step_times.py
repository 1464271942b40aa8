"""Step times from reports: what a step took without compression, and medians of a few."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

from policies.base import StepReport

LAST = 32
"""A step time at a CF is the median over this many of the last steps sent at that CF."""

COMPRESS_WEIGHT = 0.1
"""Weight of a new compression time: a few tens of steps, enough to smooth a busy machine."""


def median(values: Sequence[float]) -> float:
    """The middle one, of an even number the lower of the two: a time that was really measured."""
    return sorted(values)[(len(values) - 1) // 2]


def single(report: StepReport) -> float | None:
    """Seconds of the one step that was timed; the median where only that was reported."""
    for seconds in (report.seconds, report.median_seconds):
        if isfinite(seconds) and seconds > 0:
            return seconds
    return None


def without_compression(report: StepReport) -> float | None:
    """Seconds of the timed step less those spent in compressing and probing, which come and go
    with what is asked for and say nothing of the network; None if there is no time."""
    seconds, compress = single(report), report.coding_seconds
    if seconds is None or not 0 <= compress < seconds:
        return seconds
    return seconds - compress
