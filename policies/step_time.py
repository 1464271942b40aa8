"""What a step takes: three models, each for what its policies know and need.

All of them take a step to be work that is the same at any CF, compression, and time on the network
that grows with the bytes sent.

- `CostModel` (GraVAC, replays) looks back on all CFs of an exploration: one line by least squares
  through the step times of all CFs that were run. It needs step times and compression times.
- `StepLine` (Budget) follows a network that changes while one CF is in use: the work is found from
  two CFs sent in close succession and then kept, so that the seconds a byte follow from the CF in
  use alone. It needs no more than step times.
- `Forecast` (Goodput) is told how long a step waited for the network, and keeps that apart from
  work and compression (policies/exposed_time.py). It needs all times that a report can hold.

Times are in seconds. The time of a step comes with the report of the next one, under `timed_cf`.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, isfinite, nan
from typing import Any

from policies.base import DENSE, StepReport
from policies.estimators import AVERAGES, Average, Averages, median, relative_change
from policies.exposed_time import ExposedTime, nearest, on_line, scaled
from policies.state import (
    CHILD,
    Field,
    Stateful,
    by_cf,
    count,
    declare,
    field,
    lists_by_cf,
    maybe_number,
    number,
    saved_as,
    together,
)

LAST = 32
"""The step time at a CF is the median over so many of the last steps sent at that CF."""

COMPRESS_WEIGHT = 0.1
"""Weight of a new compression time in its average, in `CostModel` and `StepLine`."""

FORECAST_WEIGHT = 0.2
"""Weight of a new step in the averages of `Forecast`."""

SNAP = 0.5
"""`StepLine` believes a change of the work by this ratio or more at once, and goes half the way of
a smaller one, which may be noise."""

ENOUGH = 3
"""Step times that a median of `StepLine` needs."""

PAUSE = 3.0
"""A step this many times the median is a pause (an evaluation, a checkpoint) and does not count. A
second one in a row does: the median lags behind a network that has become slow."""

NOISE_SHARE = 0.1
"""Differences of exposed times below this share of the work are noise of the machine."""


def step_seconds(report: StepReport) -> float | None:
    """Seconds of the one step that was timed, or the median where only that was reported; None if
    neither was."""
    for seconds in (report.seconds, report.median_seconds):
        if isfinite(seconds) and seconds > 0:
            return seconds
    return None


def seconds_without_compression(report: StepReport) -> float | None:
    """Seconds of the timed step less compression, which also takes time for probes and says nothing
    of the network; None if there is no step time."""
    seconds, compress = step_seconds(report), report.coding_seconds
    if seconds is None or not 0 <= compress < seconds:
        return seconds
    return seconds - compress


# GraVAC, replays: a line through all CFs that were run.


def _load_recent(state: Any, key: str, _: Any) -> dict[float, list[float]] | None:
    return None if field(state, key) is None else lists_by_cf(state, key)


_RECENT = Field(
    _load_recent,
    lambda times: None if times is None else [[cf, list(each)] for cf, each in times.items()],
)


class CostModel(Stateful):
    """A model of the step time that looks back on all CFs that were run:
    seconds(cf) = a + b * bytes(cf) + compress(cf).

    Compression time is measured, never fitted. The line (a: all other work, b: seconds a byte) is
    fitted to the rest of the step times by least squares with a, b >= 0. Step times are the
    controller's medians; after `forget()`, which these would reach beyond, they are medians of the
    times since then.
    """

    _fields = declare(
        _seconds=saved_as(by_cf, above=0),
        _bytes=saved_as(by_cf, least=0),
        _compress=AVERAGES,
        _since_forgotten=_RECENT,
    )

    def __init__(self) -> None:
        self._seconds: dict[float, float] = {}
        self._bytes: dict[float, float] = {}
        self._compress = Averages(COMPRESS_WEIGHT)
        self._since_forgotten: dict[float, list[float]] | None = None  # None: never forgotten

    def forget(self) -> None:
        """Forget all times: the network or the machine has changed."""
        self._seconds, self._bytes, self._since_forgotten = {}, {}, {}
        self._compress = Averages(COMPRESS_WEIGHT)

    def observe(self, report: StepReport) -> None:
        """Take in the times of one step."""
        cf, seconds = report.timed_cf, report.median_seconds
        recent = self._since_forgotten
        if recent is not None:
            seconds = step_seconds(report) or nan
        if not (isfinite(cf) and isfinite(seconds) and seconds > 0):
            return
        if recent is not None:
            recent[cf] = [*recent.get(cf, []), seconds][-LAST:]
            seconds = median(recent[cf])
        self._seconds[cf] = seconds
        if isfinite(report.timed_bytes) and report.timed_bytes >= 0:
            self._bytes[cf] = report.timed_bytes
        if report.coding_seconds >= 0:
            self._compress.add(cf, report.coding_seconds)

    def compress(self, cf: float) -> float:
        """Seconds that a step at `cf` spends in compression; 0 if that was never reported."""
        return self._compress.value(cf) or 0.0

    def seconds(self, cf: float) -> float | None:
        """Measured seconds of a step at `cf`; None if it was not run.

        A dense step compresses only to probe. Without a policy it would not, so that time is left
        out.
        """
        measured = self._seconds.get(cf)
        if measured is None or cf != DENSE or self.compress(cf) >= measured:
            return measured
        return measured - self.compress(cf)

    def without_compression(self) -> dict[float, float]:
        """Measured seconds of a step less compression, by CF."""
        return {cf: s - c if (c := self.compress(cf)) < s else s for cf, s in self._seconds.items()}

    def fit(self) -> tuple[float, float] | None:
        """The line (a, b) in seconds and seconds a byte; None with fewer than two distinct numbers
        of bytes."""
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
        """Seconds of a step that sends `nbytes` and compresses for `compress` seconds; None while
        there is no line."""
        fitted = self.fit()
        return None if fitted is None else fitted[0] + fitted[1] * nbytes + compress

    def _check_loaded(self) -> None:
        timed = self._bytes.keys() <= self._seconds.keys()
        together(timed, "'bytes' has CFs that 'seconds' has not")


# Budget: a line that follows the network from the CF in use.


class StepLine(Stateful):
    """A model of the step time that follows the network from the CF in use: without compression,
    seconds = a + b * bytes.

    The work a changes rarely: it is found from two CFs sent in close succession, by `solve`, and
    then kept. The seconds a byte b then follow from the CF in use alone, by `follow`.

    a: None until it was found. Compression takes an average of its own.
    """

    _fields = declare(
        a=saved_as(maybe_number, least=0),
        b=saved_as(number, least=0),
        _times=saved_as(lists_by_cf),
        _compress=CHILD,
    )

    def __init__(self) -> None:
        self.a: float | None = None
        self.b = 0.0
        self._times: dict[float, list[float]] = {}  # of the CFs that were restarted
        self._compress = Average(COMPRESS_WEIGHT)

    def restart(self, cf: float) -> None:
        """Forget the step times at `cf` and begin to collect new ones."""
        self._times[cf] = []

    def observe(self, report: StepReport) -> None:
        """Take in the times of one step."""
        seconds = seconds_without_compression(report)
        if seconds is not None and report.timed_cf in self._times:
            self._times[report.timed_cf].append(seconds)
        if report.timed_cf > DENSE and report.coding_seconds >= 0:
            self._compress.add(report.coding_seconds)

    def seconds(self, cf: float) -> float | None:
        """Median of the step times at `cf` since its restart, without compression; None with fewer
        than ENOUGH of them."""
        times = self._times.get(cf, [])
        return median(times) if len(times) >= ENOUGH else None

    def solve(self, cf: float, nbytes: float, other: float, other_nbytes: float) -> bool:
        """Find a and b from the step times of two CFs; returns whether that was possible."""
        seconds, other_seconds = self.seconds(cf), self.seconds(other)
        if seconds is None or other_seconds is None or nbytes == other_nbytes:
            return False
        b = max(0.0, (seconds - other_seconds) / (nbytes - other_nbytes))
        a = max(0.0, seconds - b * nbytes)
        if not (isfinite(a) and isfinite(b)):
            return False
        small = self.a is not None and relative_change(a, self.a) < SNAP
        self.a = (a + self.a) / 2 if small and self.a is not None else a
        # b is not computed from `cf` and the new a: few bytes would blow up any error of a.
        self.b = b if a > 0 else seconds / nbytes
        return True

    def all_work(self, cf: float) -> None:
        """No CF sends another number of bytes: take the whole step time at `cf` as work."""
        seconds = self.seconds(cf)
        if seconds is not None:
            self.a, self.b = seconds, 0.0

    def follow(self, cf: float, nbytes: float) -> None:
        """Find b anew from the CF in use, with the work a as it was."""
        seconds = self.seconds(cf)
        if seconds is not None and self.a is not None and nbytes > 0:
            b = max(0.0, (seconds - self.a) / nbytes)
            self.b = b if isfinite(b) else self.b

    def share(self, cf: float, nbytes: float) -> float:
        """Predicted part, in [0, 1], of a step at `cf` that goes to sending `nbytes`."""
        exchange = self.b * nbytes
        compress = self._compress.value if self._compress.count and cf != DENSE else 0.0
        total = (self.a or 0.0) + compress + exchange
        return exchange / total if total > 0 and isfinite(total) else float(exchange > 0)


# Goodput: work, compression and exposed time apart.


class Forecast(Stateful):
    """A model of the step time that keeps apart what the network does not change: at any CF, run or
    not, seconds = work + compression and decoding + exposed time.

    The exposed time is what backward waits for the network, as measured by the rank that waits
    least. What other ranks wait for a slower one is there at any CF, and counts as work. Work and
    compression do not depend on the network.

    nbytes: returns the bytes on the wire at a CF.
    """

    _fields = declare(
        _work=CHILD,
        _compress=AVERAGES,
        _decode=AVERAGES,
        _exposed=CHILD,
        _pauses=saved_as(count),
    )

    def __init__(self, nbytes: Callable[[float], float]) -> None:
        self._nbytes = nbytes
        self._exposed = ExposedTime(nbytes)
        self._work = Average(FORECAST_WEIGHT)
        self._compress = Averages(FORECAST_WEIGHT)
        self._decode = Averages(FORECAST_WEIGHT)
        self._pauses = 0  # steps in a row that took far longer than their median

    def observe(self, report: StepReport) -> None:
        """Take in the times of one step."""
        cf, seconds, exposed = report.timed_cf, report.seconds, report.wait_seconds
        compress, coding = report.compress_seconds, report.coding_seconds
        if not all(map(isfinite, (cf, seconds, exposed, compress, coding))):
            return
        if seconds <= 0 or exposed < 0 or not 0 <= compress <= coding:
            return
        self._pauses = self._pauses + 1 if seconds > PAUSE * report.median_seconds else 0
        if self._pauses == 1:
            return
        self._work.add(max(0.0, seconds - exposed - coding))
        self._compress.add(cf, compress)
        self._decode.add(cf, coding - compress)
        self._exposed.observe(cf, exposed, NOISE_SHARE * self._work.value)

    def seconds(self, cf: float) -> float | None:
        """Seconds of a step at `cf`; None before the first step."""
        if not self._work.count:
            return None
        return self._work.value + self._coding(cf) + self._exposed.seconds(cf)

    def timed(self) -> tuple[float, ...]:
        """The CFs that were run on the network as it is now."""
        return self._exposed.timed()

    def _coding(self, cf: float) -> float:
        """Seconds that compressing and decoding take; dense needs neither.

        For a CF that was not run: on the line through the two CFs with the nearest numbers of
        bytes, if it sends fewer bytes than both. Otherwise that line says little: compression,
        which mostly searches, takes as long as at the nearest CF, and decoding grows with the
        bytes.
        """
        if cf == DENSE:
            return 0.0
        if cf in self._compress:
            return self._compress[cf].value + self._decode[cf].value
        near = nearest(self._nbytes, (other for other in self._compress if other != DENSE), cf)
        if not near:
            return 0.0
        if len(near) > 1 and self._nbytes(cf) < min(map(self._nbytes, near)):
            return on_line(self._nbytes, {other: self._coding(other) for other in near}, near, cf)
        decode = scaled(self._nbytes, self._decode[near[0]].value, near[0], cf)
        return self._compress[near[0]].value + decode

    def _check_loaded(self) -> None:
        both = self._compress.keys() == self._decode.keys()
        together(both, "'compress' and 'decode' are of different CFs")
