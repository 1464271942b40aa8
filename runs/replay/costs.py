"""Bytes and seconds of a step at any CF: a model, from the CFs that were really sent.

Bytes: the median of those that were sent, and of others what the record's header says; between two
CFs a power of CF, beyond them in proportion to 1 / CF. Seconds: by the policies' own model of the
step time (policies/step_time.py), as it is at the end of the record.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, isfinite, log, nan
from statistics import median

from adaptive import Header, StepRecord
from policies.base import DENSE
from policies.step_time import StepTime
from runs.replay.gains import part_of_way

MEASURED = "step times of CFs that were never sent: by the bytes and the waits of those that were"
FROM_WAITING = (
    "only one CF was ever sent: step times of others go by the time it waited for the network"
)
NO_TIMES = "the record has no step times"


class RecordedCosts:
    """What steps cost in a record. basis: what the seconds rest on, in words."""

    def __init__(self, records: Sequence[StepRecord], header: Header | None = None) -> None:
        self._computed = dict(header.wire_bytes) if header is not None else {}
        sent: dict[float, list[float]] = {}
        for record in records:
            report = record.report
            if isfinite(report.wire_bytes):
                sent.setdefault(report.cf, []).append(report.wire_bytes)
        dense = [r.report.dense_wire_bytes for r in records if r.report.dense_wire_bytes > 0]
        self._dense = median(dense) if dense else nan
        measured = {cf: median(values) for cf, values in sorted(sent.items())}
        self._bytes = {**self._computed, **measured}
        self._bytes.setdefault(DENSE, self._dense)
        self._time = StepTime(self.nbytes, 0 if header is None else header.overlap)
        for record in records:
            self._time.observe(record.report)
        timed = len(self._time.without_compression())
        self.basis = NO_TIMES if not timed else FROM_WAITING if timed == 1 else MEASURED

    def computed(self, cf: float) -> float:
        """Bytes as the policy was told of them: computed, statistics not counted."""
        return self._computed[cf] if cf in self._computed else self.nbytes(cf)

    def nbytes(self, cf: float) -> float:
        """Bytes that a rank sends in a step."""
        if cf in self._bytes:
            return self._bytes[cf]
        known = sorted(self._bytes)
        below = max((k for k in known if k < cf), default=DENSE)
        above = min((k for k in known if k > cf), default=None)
        at = self._bytes[below]
        if above is None or below == DENSE:
            nearest = below if above is None else above
            return min(self._dense, self._bytes[nearest] * nearest / cf)
        if at <= 0 or self._bytes[above] <= 0:
            return at
        part = part_of_way(cf, below, above)
        return exp(log(at) + part * (log(self._bytes[above]) - log(at)))

    def compress(self, cf: float) -> float:
        """Seconds of compressing and decoding; 0 for dense."""
        return self._time.coding(cf)

    def exchange(self, cf: float) -> float:
        """Seconds of waiting for the network; nan if no step was timed."""
        return nan if self._time.seconds(cf) is None else self._time.exposed(cf)

    def seconds(self, cf: float) -> float:
        """Seconds of a whole step: as measured if the CF was sent, else by the model; nan if no
        step was timed."""
        measured = self._time.measured(cf)
        seconds = self._time.seconds(cf) if measured is None else measured
        return nan if seconds is None else seconds
