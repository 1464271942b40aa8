"""The norm of the summed gradient that a policy reads: recorded, or a model of it."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, nan

from adaptive import StepRecord


class RecordedSums:
    """A sum over an interval is recorded only if the recorded policy read the same interval (which
    records without `read_sum`, older ones, show only where it was finite).

    Otherwise the sum of the gradients' norms stands in for the norm of their sum. modelled: how
    many readings that was so for.
    """

    def __init__(self, records: Sequence[StepRecord]) -> None:
        self._records = records
        self._ours = self._theirs = 0  # first step since the last reading
        self.modelled = 0

    def read(self, i: int, reads: bool) -> float:
        """What a policy finds in the report of step `i`; nan if it does not read."""
        record = self._records[i]
        recorded = record.report.sum_norm
        theirs = record.read_sum or isfinite(recorded)
        value = nan
        if reads:
            value = recorded if theirs and self._same_interval() else self._model(i)
            self._ours = i
        if theirs:
            self._theirs = i
        return value

    def _same_interval(self) -> bool:
        """Also if only a reading that was not finite, and so not seen, lies between."""
        between = self._records[self._theirs : self._ours]
        return self._theirs == self._ours or any(
            not isfinite(record.report.grad_norm) for record in between
        )

    def _model(self, i: int) -> float:
        norms = [record.report.grad_norm for record in self._records[self._ours : i]]
        if not norms:
            return nan
        self.modelled += 1
        return sum(norms)
