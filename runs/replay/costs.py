"""Bytes and seconds of a step at any CF: a model, from the CFs that were really sent.

Bytes: the median of those that were sent, and of others what the record's header says; between two
CFs a power of CF, beyond them in proportion to 1 / CF. Seconds: as measured where the CF was sent,
else the fitted a + b x bytes + compress (policies/step_time.py). One line for the whole run: a
network that changed is not followed.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, isfinite, log, nan
from statistics import median

from adaptive import Header, StepRecord
from policies.base import DENSE
from policies.step_time import CostModel
from runs.replay.log_cf import part_of_way

MEASURED = "step times of CFs that were never sent: a line fitted through those that were"
FROM_WAITING = (
    "only one CF was ever sent: step times of others go by the time it waited for the network"
)
NO_TIMES = "the record has no step times"


class RecordedCosts:
    """What steps cost in a record. basis: what the seconds rest on, in words."""

    def __init__(self, records: Sequence[StepRecord], header: Header | None = None) -> None:
        self._model = CostModel()
        self._computed = dict(header.wire_bytes) if header is not None else {}
        sent: dict[float, list[float]] = {}
        waits: list[tuple[float, float, float]] = []
        for record in records:
            report = record.report
            self._model.observe(report)
            if isfinite(report.wire_bytes):
                sent.setdefault(report.cf, []).append(report.wire_bytes)
            timed = (report.seconds, report.coding_seconds, report.wait_seconds)
            if all(map(isfinite, timed)) and isfinite(report.timed_bytes):
                waits.append((timed[0] - timed[1] - timed[2], timed[2], report.timed_bytes))
        dense = [r.report.dense_wire_bytes for r in records if r.report.dense_wire_bytes > 0]
        self._dense = median(dense) if dense else nan
        measured = {cf: median(values) for cf, values in sorted(sent.items())}
        self._bytes = {**self._computed, **measured}
        self._bytes.setdefault(DENSE, self._dense)
        waited: dict[float, list[float]] = {}
        for record in records:
            report = record.report
            if isfinite(report.wait_seconds):
                waited.setdefault(report.timed_cf, []).append(report.wait_seconds)
        self._waited = {cf: median(values) for cf, values in waited.items()}
        self._ran = tuple(sorted(cf for cf in sent if self._model.seconds(cf) is not None))
        self._line = self._model.fit()
        self.basis = MEASURED
        if self._line is None:
            self._line, self.basis = _from_waiting(waits)

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
        """Seconds of compression: measured at that CF or the nearest that was sent; 0 for dense."""
        sent = [known for known in self._ran if known != DENSE]
        if cf == DENSE or not sent:
            return 0.0
        return self._model.compress(min(sent, key=lambda known: abs(log(known / cf))))

    def exchange(self, cf: float) -> float:
        """Seconds of waiting for the network: as measured, else what the line says of the bytes."""
        if cf in self._waited:
            return self._waited[cf]
        return self._line[1] * self.nbytes(cf) if self._line is not None else nan

    def seconds(self, cf: float) -> float:
        """Seconds of a whole step; nan if no step was timed."""
        measured = self._model.seconds(cf)
        if measured is not None:
            return measured
        if self._line is None:
            return nan
        return self._line[0] + self._line[1] * self.nbytes(cf) + self.compress(cf)


def _from_waiting(
    waits: Sequence[tuple[float, float, float]],
) -> tuple[tuple[float, float] | None, str]:
    """(a, b) from (rest, exchange, bytes) of steps at one CF."""
    if not waits:
        return None, NO_TIMES
    rest, exchange, nbytes = (median(values) for values in zip(*waits, strict=True))
    return (max(0.0, rest), exchange / nbytes if nbytes > 0 else 0.0), FROM_WAITING
