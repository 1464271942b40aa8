"""Rows of a table: runs of the same settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf, isfinite, nan
from statistics import mean, stdev
from typing import Any

from policies.words import rung_named
from runs.files import known
from runs.progress import SMALL, cf_name, number_text
from runs.report.run import Run

UNKNOWN, NEVER = "-", "never"

SHOWN = 8
"""Stretches of a CF history; the middle of a longer one is left out."""


@dataclass(frozen=True)
class Spread:
    """A spread is a number of each of some runs: nan where it is not known, inf where what it is
    counted to never came. mean, deviation: of those that are finite (sample standard deviation, nan
    for fewer than two)."""

    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        return cls(tuple(values))

    @property
    def _known(self) -> list[float]:
        return [value for value in self.values if isfinite(value)]

    @property
    def mean(self) -> float:
        return mean(self._known) if self._known else nan

    @property
    def deviation(self) -> float:
        return stdev(self._known) if len(self._known) > 1 else nan

    def text(self, digits: int, scale: float = 1.0) -> str:
        """As people read it: mean ± deviation, and how many are not in these: never reached, or
        not known, as the quality of a run that has diverged."""
        never = self.values.count(inf)
        if not self._known:
            return NEVER if never else UNKNOWN
        value = scale * self.mean
        # A loss of 2e-5 is not 0, and another not the same.
        text = f"{value:.{digits}g}" if 0 < abs(value) < SMALL else number_text(value, digits)
        if self.deviation > 0:
            text += f" ± {scale * self.deviation:.2g}"
        lost = len(self.values) - len(self._known) - never
        left_out = [
            f"{count} of {len(self.values)} {what}"
            for count, what in ((never, NEVER), (lost, "not known"))
            if count
        ]
        return f"{text} ({', '.join(left_out)})" if left_out else text

    def as_json(self) -> dict[str, Any]:
        """null for what is not known."""
        values = [NEVER if value == inf else known(value) for value in self.values]
        return {"mean": known(self.mean), "deviation": known(self.deviation), "values": values}


@dataclass(frozen=True)
class Row:
    """A row is runs of the same settings, one for each seed; in a report each run has its own."""

    label: str
    runs: tuple[Run, ...]

    @property
    def run(self) -> Run:
        """The first, for what they have in common."""
        return self.runs[0]

    def of(self, value: Callable[[Run], float]) -> Spread:
        """A number of each run."""
        return Spread.of(map(value, self.runs))


def history(run: Run) -> str:
    """Its CFs, as CF x steps: "dense x10, int4 (CF 8) x20, 10 x50"."""
    header = run.recorded.header
    names = {} if header is None else header.rungs
    told = {cf: rung_named(name, cf) for cf, name in names.items()}
    parts = [
        f"{told.get(part.cf, cf_name(part.cf))} x{part.last - part.first + 1}"
        for part in run.history
    ]
    if len(parts) > SHOWN:
        left_out = len(parts) - SHOWN + 1
        parts[SHOWN // 2 : SHOWN // 2 + left_out] = [f"... {left_out} more ..."]
    return ", ".join(parts) or UNKNOWN
