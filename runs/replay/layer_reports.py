"""What a policy reads of each layer: recorded, or a model of it.

Of an interval that was not recorded, a layer's numbers are put together from the recorded intervals
that it overlaps. Within one of those they are shared out over the steps by what is known of every
step: energies by the squared norm of the whole gradient, norms of sums by the norm. That is exact
for the energies of whole intervals. Norms are added as if the sums of two intervals were parallel,
and so were the gradients of one, since no direction is recorded: over longer intervals they are too
large, over shorter ones mostly too small.

Measured on the language model (one seed, 100 steps at CF 10, eta 0.2, 0.3 and 0.5): comparisons
with eta that come out as in a run of that interval; and if all were said to be below it.

| recorded | replayed | this model | from energies | from the whole norm | all below |
| --- | --- | --- | --- | --- | --- |
| 8 | 16 | 102 of 105 | 87 | 85 | 80 |
| 8 | 10 | 174 of 189 | 151 | 150 | 165 |
| 16 | 8 | 199 of 231 | 210 | 213 | 201 |

So it tells of intervals longer than the recorded one, and little of shorter ones; and energies do
not stand in for sums where none was recorded.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from math import isfinite, nan
from typing import NamedTuple

from adaptive import StepRecord
from policies import LayerReport, Plan
from policies.base import DENSE
from runs.parser import UsageError
from runs.replay.log_cf import part_of_way


class _Span(NamedTuple):
    """A recorded reading and the steps it is about: from `first` on, before `end`."""

    first: int
    end: int
    layers: Mapping[str, LayerReport]


class _Spread:
    """Recorded totals of each layer, shared out over the steps in proportion to `weights`."""

    def __init__(
        self,
        weights: Sequence[float],
        spans: Sequence[_Span],
        names: Sequence[str],
        total: Callable[[LayerReport], float],
    ) -> None:
        self._until = [0.0, *accumulate(weights)]
        self._ends = [span.end for span in spans]
        unknown = LayerReport()
        self._rates = {
            name: _filled([self._rate(s, total(s.layers.get(name, unknown))) for s in spans])
            for name in names
        }

    def pieces(self, name: str, first: int, end: int) -> Iterator[tuple[int, float]]:
        """Of the steps from `first` on, before `end`: a layer's part of them in each recorded span,
        by its index. Steps after the last span are taken to be like those of the last."""
        rates, last = self._rates[name], len(self._ends) - 1
        while first < end:
            k = min(last, bisect_right(self._ends, first))
            until = end if k == last else min(end, self._ends[k])
            yield k, rates[k] * (self._until[until] - self._until[first])
            first = until

    def total(self, name: str, first: int, end: int) -> float:
        return sum(part for _, part in self.pieces(name, first, end))

    def _rate(self, span: _Span, total: float) -> float:
        weight = self._until[span.end] - self._until[span.first]
        return total / weight if weight > 0 else nan


class RecordedLayers:
    """The readings of layers in a record."""

    def __init__(self, records: Sequence[StepRecord]) -> None:
        norms = [record.report.grad_norm for record in records]
        self._lost = [0, *accumulate(not isfinite(norm) for norm in norms)]
        finite = [norm if isfinite(norm) else 0.0 for norm in norms]
        self._read, self._summed = _spans(records)
        self.names = tuple(dict.fromkeys(n for _, _, layers in self._read for n in layers))
        of_layers = [span.layers.values() for span in self._read]
        self.cfs = {cf for layers in of_layers for layer in layers for cf in layer.steady}
        squares = [norm * norm for norm in finite]
        self._energy = _Spread(squares, self._read, self.names, lambda layer: layer.energy)
        self._sum = _Spread(finite, self._summed, self.names, lambda layer: layer.sum_norm)
        self._read_at = {span.end: span for span in self._read}
        self._summed_at = {span.end: span for span in self._summed}

    def check(self, plan: Plan, ladder: tuple[float, ...]) -> None:
        """UsageError unless the record holds, at some step, what the plan reads of layers."""
        # Who wants gains of layers decides on these, and reads a sum for the whole model's sake.
        if ladder and not self.cfs:
            what, how = "steady-state gains of the layers", "--policy gravac --layerwise on"
        elif plan.read_sum and not ladder and not self._summed:
            what, how = "norms of the layers' summed gradients", "--policy accordion --per-layer on"
        elif not self._read:
            what, how = "energies of the layers", "--policy accordion --per-layer on"
        else:
            return
        raise UsageError(
            f"TIMELINE: the record holds no {what}, which this policy reads, and nothing in it can "
            f"stand in for them; accepted: a record of train {how}"
        )

    def energies(self, first: int, end: int) -> tuple[Mapping[str, float], bool]:
        """Of each layer, over the steps from `first` on, before `end`; and if that is a model."""
        span = self._read_at.get(end)
        if span is not None and span.first == first:
            return {name: layer.energy for name, layer in span.layers.items()}, False
        return {name: self._energy.total(name, first, end) for name in self.names}, first < end

    def sum_norms(self, first: int, end: int) -> tuple[Mapping[str, float], bool]:
        """Likewise, norms of the summed gradients; nan if one of them was not finite."""
        span = self._summed_at.get(end)
        if span is not None and span.first == first:
            return {name: layer.sum_norm for name, layer in span.layers.items()}, False
        if not self._summed or first == end or self._lost[end] > self._lost[first]:
            return {}, False
        return {name: self._sum.total(name, first, end) for name in self.names}, True

    def steady(
        self, first: int, end: int, ladder: tuple[float, ...]
    ) -> tuple[Mapping[str, Mapping[float, float]], bool]:
        """Likewise, the steady-state gains of the CFs in `ladder`."""
        span = self._read_at.get(end)
        if span is not None and span.first == first and self.cfs.issuperset(ladder):
            return {n: _only(layer.steady, ladder) for n, layer in span.layers.items()}, False
        found = {name: self._mean_gains(name, first, end, ladder) for name in self.names}
        return found, bool(ladder) and first < end

    def _mean_gains(
        self, name: str, first: int, end: int, ladder: tuple[float, ...]
    ) -> dict[float, float]:
        """Means over the recorded spans, each by the layer's energy in it."""
        pieces = list(self._energy.pieces(name, first, end))
        means = {}
        for cf in ladder:
            gains = [(part, _gain(self._steady_of(k, name), cf)) for k, part in pieces]
            known = [(part, gain) for part, gain in gains if isfinite(gain)]
            whole = sum(part for part, _ in known)
            if whole > 0:
                means[cf] = sum(part * gain for part, gain in known) / whole
        return means

    def _steady_of(self, k: int, name: str) -> Mapping[float, float]:
        layer = self._read[k].layers.get(name)
        return {} if layer is None else layer.steady


class LayerReadings:
    """What one replayed policy reads. ladder: the CFs whose steady-state gains it wants. modelled:
    readings that are no recorded ones."""

    def __init__(self, recorded: RecordedLayers, ladder: tuple[float, ...]) -> None:
        self._recorded, self._ladder = recorded, ladder
        self._read = self._summed = 0  # first step since the last reading
        self.modelled = 0

    def read(self, i: int, plan: Plan) -> Mapping[str, LayerReport]:
        """In the report of step `i`; none if the plan reads none. UsageError if the record has
        nothing to tell."""
        found = self._report(i, plan) if plan.read_layers else {}
        if plan.read_layers:
            self._read = i
        if plan.read_sum:
            self._summed = i
        return found

    def _report(self, i: int, plan: Plan) -> Mapping[str, LayerReport]:
        recorded = self._recorded
        recorded.check(plan, self._ladder)
        energies, of_energies = recorded.energies(self._read, i)
        steady, of_steady = recorded.steady(self._read, i, self._ladder)
        sums, of_sums = recorded.sum_norms(self._summed, i) if plan.read_sum else ({}, False)
        self.modelled += of_energies or of_steady or of_sums
        return {
            name: LayerReport(energy, sums.get(name, nan), steady.get(name, {}))
            for name, energy in energies.items()
        }


def _spans(records: Sequence[StepRecord]) -> tuple[list[_Span], list[_Span]]:
    """Of the readings of layers, and of those that also have their sums."""
    read: list[_Span] = []
    summed: list[_Span] = []
    since = since_sum = 0
    for i, record in enumerate(records):
        layers = record.report.layers
        if layers:
            read.append(_Span(since, i, layers))
            since = i
        if record.read_sum or isfinite(record.report.sum_norm):
            if layers:
                summed.append(_Span(since_sum, i, layers))
            since_sum = i
    return read, summed


def _filled(values: Sequence[float]) -> list[float]:
    """In place of those that are not finite, the one before, else the first one that is."""
    known = next((value for value in values if isfinite(value)), nan)
    filled = []
    for value in values:
        known = value if isfinite(value) else known
        filled.append(known)
    return filled


def _only(gains: Mapping[float, float], ladder: tuple[float, ...]) -> dict[float, float]:
    return {cf: gain for cf, gain in gains.items() if cf in ladder}


def _gain(known: Mapping[float, float], cf: float) -> float:
    """Between two CFs linear in log CF, dense having 1; above the largest that of the largest, and
    so too much; nan if none is known."""
    gains = {other: gain for other, gain in sorted(known.items()) if isfinite(gain)}
    if cf in gains or not gains:
        return gains.get(cf, nan)
    below = max((other for other in gains if other < cf), default=DENSE)
    above = min((other for other in gains if other > cf), default=below)
    left, right = gains.get(below, 1.0), gains[above]
    return left + (right - left) * part_of_way(cf, below, above)
