"""Seconds at a CF that was not run, from those of others, by the bytes that they send."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isfinite, nan


class ByBytes:
    """nbytes: bytes on the wire at a CF."""

    def __init__(self, nbytes: Callable[[float], float]) -> None:
        self.nbytes = nbytes

    def nearest(self, known: Iterable[float], cf: float) -> list[float]:
        """Up to two of the CFs known, by their bytes, the nearest first."""
        wanted = self.nbytes(cf)
        return sorted(known, key=lambda other: (abs(self.nbytes(other) - wanted), other))[:2]

    def on_line(self, seconds: Mapping[float, float], near: Sequence[float], cf: float) -> float:
        """At the bytes of a CF, through two that are known; more bytes never take less."""
        (nbytes, value), (other, theirs) = ((self.nbytes(each), seconds[each]) for each in near)
        slope = max(0.0, (theirs - value) / (other - nbytes)) if other != nbytes else 0.0
        predicted = value + slope * (self.nbytes(cf) - nbytes)
        return max(0.0, predicted) if isfinite(predicted) else value

    def scaled(self, seconds: float, known: float, cf: float) -> float:
        """In proportion to the bytes at two CFs, where that means something."""
        times = self.nbytes(cf) / (self.nbytes(known) or nan)
        return seconds * times if isfinite(times) else seconds
