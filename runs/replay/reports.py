"""The reports that a policy gets for its plans: recorded ones, or by the model of gains.py and
costs.py.

A report is a function of the step and of what was planned, so that all settings that are tried on
the same record share the reports in which they plan the same.
"""

from __future__ import annotations

from dataclasses import replace
from math import isfinite, nan
from typing import NamedTuple

from policies import DENSE, Measurement, Plan, StepReport
from runs.records import Recorded
from runs.replay.costs import RecordedCosts
from runs.replay.gains import RecordedGains

MOST = 200_000
"""Reports that are kept at a time, some 1 kB each: long records and CFs without end would fill the
memory."""


class Shown(NamedTuple):
    """A report without the norm of a summed gradient and without layers, which depend on earlier
    plans too. guessed: its steady-state gains are modelled."""

    report: StepReport
    guessed: bool


class _Costs(NamedTuple):
    """Of a step at one CF."""

    seconds: float
    compress: float
    exchange: float
    nbytes: float


_UNTIMED = _Costs(nan, nan, nan, nan)
"""The first step of all is never timed."""


class Reports:
    """The reports that a policy gets from one record, for any number of replays.

    guessed: some steady-state gain was modelled."""

    def __init__(self, recorded: Recorded) -> None:
        self.recorded = recorded
        self.gains = RecordedGains(recorded.steps)
        self.costs = RecordedCosts(recorded.steps, recorded.header)
        self.guessed = False
        self._shown: dict[tuple[object, ...], Shown] = {}
        self._measured: dict[tuple[int, float], Measurement] = {}
        self._steady: dict[tuple[int, float], float] = {}
        self._cost: dict[float, _Costs] = {}

    def recorded_at(self, i: int, ladder: tuple[float, ...]) -> Shown:
        """Of step `i`, as long as all plans were those of the record. ladder: the CFs whose
        steady-state gains the policy wants."""
        key = (i, ladder)
        shown = self._shown.get(key)
        if shown is None:
            steady, guessed = self.gains.steady(i, ladder)
            report = replace(self.recorded.steps[i].report, sum_norm=nan, steady=steady, layers={})
            shown = self._keep(key, Shown(report, guessed))
        return shown

    def modelled_at(self, i: int, plan: Plan, before: float, ladder: tuple[float, ...]) -> Shown:
        """Of step `i` with this plan, the CF before it being `before`."""
        key = (i, plan.send, plan.probe, before, ladder)
        shown = self._shown.get(key)
        if shown is None:
            steady, guessed = self.gains.steady(i, ladder)
            report = replace(self._model(i, plan, before), steady=steady)
            shown = self._keep(key, Shown(report, guessed))
        return shown

    def seconds(self, cf: float) -> float:
        """Of a whole step, by the model."""
        return self._costs(cf).seconds

    def steady(self, i: int, cf: float) -> float:
        """The steady-state gain of a CF in step `i`, 1 for dense; 0 where nothing tells."""
        if cf == DENSE:
            return 1.0
        key = (i, cf)
        if key not in self._steady:
            steady, guessed = self.gains.steady(i, (cf,))
            self.guessed = self.guessed or guessed
            gain = steady.get(cf, nan)
            self._steady[key] = gain if isfinite(gain) else 0.0
        return self._steady[key]

    def _model(self, i: int, plan: Plan, before: float) -> StepReport:
        timed = before if i >= 2 else nan
        cost = self._costs(before) if i >= 2 else _UNTIMED
        cfs = sorted({plan.send, *plan.probe} - {DENSE})
        return replace(
            self.recorded.steps[i].report,
            cf=plan.send,
            measurements={cf: self._measurement(i, cf) for cf in cfs},
            timed_cf=timed,
            seconds=cost.seconds,
            median_seconds=cost.seconds,
            compress_seconds=cost.compress,
            decode_seconds=0.0,  # the model has it in compression
            exchange_seconds=cost.exchange,
            network_seconds=cost.exchange,
            wire_bytes=self._costs(plan.send).nbytes,
            timed_bytes=cost.nbytes,
            sum_norm=nan,
            layers={},
        )

    def _keep(self, key: tuple[object, ...], shown: Shown) -> Shown:
        self.guessed = self.guessed or shown.guessed
        if len(self._shown) >= MOST:
            self._shown.clear()
        self._shown[key] = shown
        return shown

    def _measurement(self, i: int, cf: float) -> Measurement:
        key = (i, cf)
        if key not in self._measured:
            self._measured[key] = self.gains.at(i, cf)
        return self._measured[key]

    def _costs(self, cf: float) -> _Costs:
        if cf not in self._cost:
            c = self.costs
            self._cost[cf] = _Costs(c.seconds(cf), c.compress(cf), c.exchange(cf), c.nbytes(cf))
        return self._cost[cf]
