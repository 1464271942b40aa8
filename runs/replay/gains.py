"""Gains of CFs that were not measured in a step: a model of them, from those that were.

Of each CF the newest measurement counts (before its first one, the first). Between two CFs, what
is lost is interpolated linearly in log CF, dense losing nothing; above the largest CF the line
through the two largest goes on.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from math import isfinite, log, nan
from typing import NamedTuple

from adaptive import StepRecord
from policies import Measurement
from policies.base import DENSE


class _Shares(NamedTuple):
    """Of one measurement: what was kept and lost, as shares of the whole and of the sample; of
    norms, where they were measured, what was kept."""

    kept: float
    error: float
    sample_error: float
    norms: float


class RecordedGains:
    """The measurements of a record, at any step and CF."""

    def __init__(self, records: Sequence[StepRecord]) -> None:
        self._records = records
        self._steps: dict[float, list[int]] = {}
        self._shares: dict[float, list[_Shares]] = {}
        self._shadowed = any(record.report.steady_gain for record in records)
        self._measured: list[int] = []  # steps
        self._totals: list[Measurement] = []  # of these, the same for all their CFs
        for i, record in enumerate(records):
            measured = record.report.measurements.items()
            known = [(cf, m, shares) for cf, m in measured if (shares := _shares(m)) is not None]
            for cf, _, shares in known:
                self._steps.setdefault(cf, []).append(i)
                self._shares.setdefault(cf, []).append(shares)
            if known:
                self._measured.append(i)
                self._totals.append(known[0][1])
        self.cfs = tuple(sorted(self._steps))

    def at(self, i: int, cf: float) -> Measurement:
        """What step `i` would have measured at `cf`; nan throughout if nothing tells."""
        report = self._records[i].report
        if cf in report.measurements:
            return report.measurements[cf]
        if not self.cfs or not isfinite(report.grad_norm):
            return Measurement()
        totals = self._totals[max(0, bisect_right(self._measured, i) - 1)]
        shares = self._between(i, cf)
        return Measurement(
            kept=shares.kept * totals.total,
            error=shares.error * totals.total,
            total=totals.total,
            grad=totals.grad,
            sample_error=shares.sample_error * totals.sample_total,
            sample_total=totals.sample_total,
            kept_norms=shares.norms * totals.grad_norms,
            grad_norms=totals.grad_norms,
        )

    def steady(self, i: int, ladder: Sequence[float]) -> tuple[Mapping[float, float], bool]:
        """Steady-state gains of the CFs in `ladder`: recorded, if step `i` has them all, else what
        an error-fed gain was when last measured (too much for a CF that was not being sent); and
        whether that was so.

        A step that was not finite has none, in a run that has them otherwise."""
        report = self._records[i].report
        recorded = report.steady_gain
        nothing_to_see = self._shadowed and not (recorded or isfinite(report.grad_norm))
        if nothing_to_see or all(cf in recorded for cf in ladder):
            return recorded, False
        return {cf: recorded.get(cf, self.at(i, cf).gain("error_fed")) for cf in ladder}, True

    def _between(self, i: int, cf: float) -> _Shares:
        points = [(1.0, _Shares(1.0, 0.0, 0.0, 1.0))]
        points += [(known, self._newest(i, known)) for known in self.cfs if known > DENSE]
        above = next((n for n, (known, _) in enumerate(points) if known >= cf), len(points) - 1)
        (low, left), (high, right) = points[max(0, above - 1)], points[above]
        part = part_of_way(cf, low, high)
        kept, error, sample_error, norms = (
            max(0.0, a + part * (b - a)) for a, b in zip(left, right, strict=True)
        )
        return _Shares(kept, min(1.0, error), min(1.0, sample_error), norms)

    def _newest(self, i: int, cf: float) -> _Shares:
        return self._shares[cf][max(0, bisect_right(self._steps[cf], i) - 1)]


def _shares(m: Measurement) -> _Shares | None:
    """None if the measurement is of a step that was not finite."""
    if not (isfinite(m.kept) and isfinite(m.error) and isfinite(m.total) and m.total > 0):
        return None
    sample = m.sample_error / m.sample_total if m.sample_total > 0 else nan
    norms = m.kept_norms / m.grad_norms if m.grad_norms > 0 else nan
    return _Shares(m.kept / m.total, m.error / m.total, sample, norms)


def part_of_way(cf: float, low: float, high: float) -> float:
    """How far `cf` is on the way from `low` to `high`, in log CF; 0 if those are the same."""
    return log(cf / low) / log(high / low) if high > low else 0.0
