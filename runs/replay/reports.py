"""The reports that a policy gets for its plans: recorded ones, or by the model of gains.py and
costs.py.

A report is a function of the step and of what was planned, so that all settings that are tried on
the same record share the reports in which they plan the same.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, lru_cache
from math import isfinite, nan
from typing import Any

from policies import DENSE, StepReport
from runs.records import Recorded
from runs.replay.costs import RecordedCosts
from runs.replay.gains import RecordedGains

MOST = 200_000
"""Reports that are kept at a time, some 1 kB each: long records and CFs without end would fill the
memory."""


class Reports:
    """The reports that a policy gets from one record, for any number of replays: without the norm
    of a summed gradient and of its layers, which depend on earlier plans too.

    guessed: some steady-state gain was modelled."""

    def __init__(self, recorded: Recorded) -> None:
        self.recorded = recorded
        self.gains = RecordedGains(recorded.steps)
        self.costs = RecordedCosts(recorded.steps, recorded.header)
        self.guessed = False
        self.recorded_at = lru_cache(MOST)(self._recorded_at)
        self.modelled_at = lru_cache(MOST)(self._modelled_at)
        self.steady, self.seconds = cache(self._steady), cache(self.costs.seconds)
        self._measured, self._times = cache(self.gains.at), cache(self._times_of)

    def _recorded_at(self, i: int, ladder: tuple[float, ...]) -> tuple[StepReport, bool]:
        """The report of step `i` if all plans were those of the record, and whether its steady
        gains are modelled. ladder: the CFs whose steady-state gains the policy wants."""
        steady, guessed = self.gains.steady(i, ladder)
        self.guessed = self.guessed or guessed
        report = self.recorded.steps[i].report
        return replace(report, sum_norm=nan, steady_gain=steady, layer_norms={}), guessed

    def _modelled_at(
        self,
        i: int,
        cf: float,
        probe: tuple[float, ...],
        before: float,
        ladder: tuple[float, ...],
    ) -> tuple[StepReport, bool]:
        """The same if `cf` was sent and the CFs of `probe` measured, the CF before being `before`:
        a step's times come with the next report."""
        steady, guessed = self.gains.steady(i, ladder)
        self.guessed = self.guessed or guessed
        cfs = sorted({cf, *probe} - {DENSE})
        report = replace(
            self.recorded.steps[i].report,
            cf=cf,
            measurements={each: self._measured(i, each) for each in cfs},
            wire_bytes=self.costs.nbytes(cf),
            sum_norm=nan,
            steady_gain=steady,
            layer_norms={},
            **self._times(before if i >= 2 else nan),  # the first step of all is never timed
        )
        return report, guessed

    def _times_of(self, cf: float) -> dict[str, Any]:
        """The fields of a report that are about the step before; cf: nan if it was not timed."""
        costs, known = self.costs, isfinite(cf)
        seconds = costs.seconds(cf) if known else nan
        exchange = costs.exchange(cf) if known else nan
        return {
            "timed_cf": cf,
            "seconds": seconds,
            "median_seconds": seconds,
            "compress_seconds": costs.compress(cf) if known else nan,
            "decode_seconds": 0.0,  # the model has it in compression
            "exchange_seconds": exchange,
            "network_seconds": exchange,
            "timed_bytes": costs.nbytes(cf) if known else nan,
        }

    def _steady(self, i: int, cf: float) -> float:
        """The steady-state gain of a CF in step `i`, 1 for dense; 0 where nothing tells."""
        if cf == DENSE:
            return 1.0
        steady, guessed = self.gains.steady(i, (cf,))
        self.guessed = self.guessed or guessed
        gain = steady.get(cf, nan)
        return gain if isfinite(gain) else 0.0
