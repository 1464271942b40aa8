"""What a step costs: seconds(cf) = a + b * bytes(cf) + compress(cf) (DESIGN section 5).

For whoever looks back on all CFs of an exploration (GraVAC, replays): one line through them all,
where policies/step_line.py follows a changing network from one CF, without knowing what of a step
is exchange, and policies/forecast.py is told that and keeps it apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, isfinite, nan
from typing import Any

from policies import saved
from policies.average import Average, averages_by_cf
from policies.base import DENSE, StepReport
from policies.step_times import COMPRESS_WEIGHT, LAST, median, single


class CostModel:
    """Step times of the CFs that were really run, and a line through them.

    The controller's medians, until `forget()`: they reach back beyond it, so that from then on the
    medians are made here. Compression time is measured, never fitted. The line (a: everything
    else, b: seconds a byte) goes through what is left of the step times, by least squares with
    a, b >= 0.
    """

    def __init__(self) -> None:
        self._seconds: dict[float, float] = {}
        self._bytes: dict[float, float] = {}
        self._compress: dict[float, Average] = {}
        self._since: dict[float, list[float]] | None = None  # times since forget(), if ever

    def forget(self) -> None:
        """The network or the machine has changed: no time from before counts any more."""
        self._seconds, self._bytes, self._compress, self._since = {}, {}, {}, {}

    def observe(self, report: StepReport) -> None:
        """Take in the times of one step: they come a report later, under `timed_cf`."""
        cf, seconds = report.timed_cf, report.median_seconds
        if self._since is not None:
            seconds = single(report) or nan
        if not (isfinite(cf) and isfinite(seconds) and seconds > 0):
            return
        if self._since is not None:
            self._since[cf] = [*self._since.get(cf, []), seconds][-LAST:]
            seconds = median(self._since[cf])
        self._seconds[cf] = seconds
        if isfinite(report.timed_bytes) and report.timed_bytes >= 0:
            self._bytes[cf] = report.timed_bytes
        coding = report.coding_seconds
        if coding >= 0:
            if cf not in self._compress:
                self._compress[cf] = Average(COMPRESS_WEIGHT)
            self._compress[cf].add(coding)

    def compress(self, cf: float) -> float:
        """Seconds a step at `cf` spends in compression; 0 if that was never reported."""
        average = self._compress.get(cf)
        return average.value if average is not None and average.count else 0.0

    def seconds(self, cf: float) -> float | None:
        """Measured seconds of a step at `cf`; None if it was not run.

        A dense step compresses only to probe, and would not without a policy: without that part.
        """
        measured = self._seconds.get(cf)
        if measured is None or cf != DENSE or self.compress(cf) >= measured:
            return measured
        return measured - self.compress(cf)

    def without_compression(self) -> dict[float, float]:
        """Seconds of a step by CF, those spent in compression left out."""
        return {cf: s - c if (c := self.compress(cf)) < s else s for cf, s in self._seconds.items()}

    def fit(self) -> tuple[float, float] | None:
        """(a, b) in seconds and seconds a byte; None with fewer than two distinct byte counts."""
        points = [
            (nbytes, max(0.0, self._seconds[cf] - self.compress(cf)))
            for cf, nbytes in self._bytes.items()
        ]
        if len({nbytes for nbytes, _ in points}) < 2:
            return None
        mean_x = sum(x for x, _ in points) / len(points)
        mean_y = sum(y for _, y in points) / len(points)
        spread = sum((x - mean_x) * (x - mean_x) for x, _ in points)
        if not 0 < spread < inf:
            return None
        b = max(0.0, sum((x - mean_x) * (y - mean_y) for x, y in points) / spread)
        a = mean_y - b * mean_x
        if a < 0:  # the best line with a >= 0 then goes through the origin
            a, b = 0.0, sum(x * y for x, y in points) / sum(x * x for x, _ in points)
        return (a, b) if isfinite(a) and isfinite(b) else None

    def predict(self, nbytes: float, compress: float = 0.0) -> float | None:
        """Seconds of a step that sends `nbytes` and compresses for `compress` seconds.

        None as long as the model does not know (fewer than two distinct byte counts were run).
        """
        fitted = self.fit()
        return None if fitted is None else fitted[0] + fitted[1] * nbytes + compress

    def state_dict(self) -> dict[str, Any]:
        """Everything, in JSON-like values: pairs, since JSON has no float keys."""
        return {
            "seconds": [list(item) for item in self._seconds.items()],
            "bytes": [list(item) for item in self._bytes.items()],
            "compress": [[cf, average.state_dict()] for cf, average in self._compress.items()],
            "since": None if self._since is None else [list(it) for it in self._since.items()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict()`."""
        self._seconds = saved.by_cf(state, "seconds", above=0)
        self._bytes = saved.by_cf(state, "bytes", least=0)
        saved.together(
            self._bytes.keys() <= self._seconds.keys(), "'bytes' has CFs that 'seconds' has not"
        )
        self._compress = averages_by_cf(state, "compress", COMPRESS_WEIGHT)
        forgotten = saved.field(state, "since") is not None
        self._since = saved.lists_by_cf(state, "since") if forgotten else None
