"""What a step takes apart from the network, and what a byte costs: seconds = a + b * bytes.

For `Budget`, which stays at one CF while the network changes: unlike the cost model
(policies/cost.py), which looks back on a whole exploration, a is found from two CFs sent in close
succession and then held, since compute changes rarely, so that b = (seconds - a) / bytes follows
from the CF in use alone; unlike policies/forecast.py it needs no more than step times.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

from policies import saved
from policies.average import Average
from policies.base import DENSE, StepReport
from policies.drift import apart
from policies.step_times import COMPRESS_WEIGHT, median, without_compression

SNAP = 0.5
"""An a that changed by this ratio is believed at once; a smaller change may be noise: halfway."""

ENOUGH = 3
"""Step times that a median must rest on."""


class StepLine:
    """The line, the step times of the CFs sent last, and what compression takes."""

    def __init__(self) -> None:
        self.a: float | None = None
        self.b = 0.0
        self._times: dict[float, list[float]] = {}
        self._compress = Average(COMPRESS_WEIGHT)

    def restart(self, cf: float) -> None:
        """From here on the times of `cf` are taken afresh."""
        self._times[cf] = []

    def observe(self, report: StepReport) -> None:
        """Take in the time of one step: it comes a report later, under `timed_cf`."""
        seconds = without_compression(report)
        if seconds is not None and report.timed_cf in self._times:
            self._times[report.timed_cf].append(seconds)
        if report.timed_cf > DENSE and report.coding_seconds >= 0:
            self._compress.add(report.coding_seconds)

    def seconds(self, cf: float) -> float | None:
        """Median of the step times at `cf` since its restart, without compression."""
        times = self._times.get(cf, [])
        return median(times) if len(times) >= ENOUGH else None

    def solve(self, cf: float, nbytes: float, other: float, other_nbytes: float) -> bool:
        """Find a and b from two CFs; whether that was possible."""
        seconds, other_seconds = self.seconds(cf), self.seconds(other)
        if seconds is None or other_seconds is None or nbytes == other_nbytes:
            return False
        b = max(0.0, (seconds - other_seconds) / (nbytes - other_nbytes))
        a = max(0.0, seconds - b * nbytes)
        if not (isfinite(a) and isfinite(b)):
            return False
        small = self.a is not None and apart(a, self.a) < SNAP
        self.a = (a + self.a) / 2 if small and self.a is not None else a
        # Not from `cf` and this a: few bytes would blow up what is still wrong with it.
        self.b = b if a > 0 else seconds / nbytes
        return True

    def free(self, cf: float) -> None:
        """No CF has other bytes: none of the step time is the network's."""
        seconds = self.seconds(cf)
        if seconds is not None:
            self.a, self.b = seconds, 0.0

    def follow(self, cf: float, nbytes: float) -> None:
        """Find b anew from the CF in use."""
        seconds = self.seconds(cf)
        if seconds is not None and self.a is not None and nbytes > 0:
            b = max(0.0, (seconds - self.a) / nbytes)
            self.b = b if isfinite(b) else self.b

    def share(self, cf: float, nbytes: float) -> float:
        """Part of a step at `cf` that goes to sending `nbytes`, as predicted."""
        exchange = self.b * nbytes
        compress = self._compress.value if self._compress.count and cf != DENSE else 0.0
        total = (self.a or 0.0) + compress + exchange
        return exchange / total if total > 0 and isfinite(total) else float(exchange > 0)

    def state_dict(self) -> dict[str, Any]:
        """Everything, in JSON-like values: pairs, since JSON has no float keys."""
        return {
            "a": self.a,
            "b": self.b,
            "times": [[cf, list(times)] for cf, times in self._times.items()],
            "compress": self._compress.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict()`."""
        self.a = saved.maybe_number(state, "a", least=0)
        self.b = saved.number(state, "b", least=0)
        self._times = saved.lists_by_cf(state, "times")
        self._compress.load_state_dict(saved.part(state, "compress"))
