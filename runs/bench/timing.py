"""Timing contenders fairly: in turn, so that the machine's moods hit all alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Row:
    """One line of the bench: a ratio, what it is of, and its goal (None: reported only)."""

    what: str
    ratio: float
    goal: str
    detail: str

    @property
    def falls_short(self) -> bool:
        """Whether there is a goal, and the ratio does not reach it."""
        bound = self.goal.removeprefix(">= ").removeprefix("<= ")
        if not bound:
            return False
        return not (self.ratio <= float(bound) if "<" in self.goal else self.ratio >= float(bound))


def interleaved(
    contenders: Mapping[str, Callable[[], object]], rounds: int, warmup: int = 1
) -> dict[str, list[float]]:
    """Seconds of each contender in each of `rounds` rounds, all of them once a round."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for index in range(warmup + rounds):
        for name, run in contenders.items():
            start = time.perf_counter()
            run()
            if index >= warmup:
                times[name].append(time.perf_counter() - start)
    return times


def median_ratio(a: list[float], b: list[float]) -> float:
    """Median over rounds of a / b."""
    return median(x / y for x, y in zip(a, b, strict=True))


def describe(times: Mapping[str, list[float]]) -> str:
    """Median milliseconds of each contender."""
    return ", ".join(f"{name} {1e3 * median(t):.1f} ms" for name, t in times.items())
