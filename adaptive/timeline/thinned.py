"""The numbers of a step, by name, and the sinks that pass on as many of them as a dashboard needs.

Names are cf/*, gain/*, gain_of_step/*, throughput/*, bytes/*, time/*, policy/*, gradient/*, and
cf_layer/* where layers have CFs of their own; at the end final/*.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from math import isfinite
from typing import get_args

from adaptive.timeline.records import StepRecord, Timeline
from policies import GainKind, Measurement, checks

_MOVED = {
    "candidate": "cf/candidate",
    "floor": "cf/floor",
    "gain_candidate": "gain/candidate",
    "gain_floor": "gain/floor",
}
"""Numbers of a policy's status that belong on a chart with others; the rest is policy/*."""

SHORTEST = 0.1
"""Seconds between two records by default: one takes 0.1 to 0.3 ms to make and write, so that steps
of any length get well less than 1% longer (`python -m runs bench timeline`)."""


def scalars(record: StepRecord) -> dict[str, float]:
    """The values of a step by tag, in the units of `StepRecord`."""
    report = record.report
    parts = ("compress", "exchange", "network", "decode", "compute", "rest")
    return {
        "cf/sent": report.cf,
        "throughput/t_sys": record.t_sys,
        "throughput/t_comp": record.t_comp,
        "bytes/sent": report.wire_bytes,
        "bytes/wire_factor": record.wire_factor,
        "bytes/sent_total": record.sent,
        "bytes/dense_total": record.dense,
        "time/step": report.seconds,
        "time/total": record.pace.all_seconds,
        "gradient/norm": report.grad_norm,
        **{f"time/{part}": getattr(report, f"{part}_seconds") for part in parts},
        "gain/sent": record.gain,
        **{f"gain_of_step/{kind}": report.gain(report.cf, kind) for kind in get_args(GainKind)},
        "gain_of_step/energy_ratio": report.measurements.get(report.cf, Measurement()).energy_ratio,
        **{_MOVED.get(name, f"policy/{name}"): value for name, value in record.status.items()},
    }


class ThinnedTimeline(Timeline):
    """A sink that writes the numbers of some steps only. A subclass says how, in `_write_numbers`.

    interval: every so many steps; None: every step, but no more than one in `shortest` seconds. A
    step with another CF than the one before is always written, and so is the one before it.
    """

    def __init__(self, interval: int | None, shortest: float = SHORTEST) -> None:
        if interval is not None:
            checks.whole("interval", interval, least=1)
        self._interval, self._shortest = interval, shortest
        self._last: StepRecord | None = None
        self._skipped: tuple[StepRecord, float] | None = None
        self._due = 0.0
        self._layer_cfs: dict[str, float] = {}

    def step(self, record: StepRecord) -> None:
        now, report = time.time(), record.report
        switched = self._last is None or report.cf != self._last.report.cf
        if switched:
            self._write_skipped()
        # A layer that a record does not name has the CF of the whole model.
        layer_cfs = {**dict.fromkeys(self._layer_cfs, report.cf), **record.layer_cfs}
        changed = {
            f"cf_layer/{name}": cf
            for name, cf in layer_cfs.items()
            if self._layer_cfs.get(name) != cf
        }
        self._layer_cfs = layer_cfs
        due = now >= self._due if self._interval is None else report.step % self._interval == 0
        if switched or changed or due:
            self._write(record, now, changed)
        else:
            self._skipped = record, now
        self._last = record

    def _write(self, record: StepRecord, at: float, layers: Mapping[str, float]) -> None:
        self._skipped, self._due = None, at + self._shortest
        values = {**scalars(record), **layers}
        known = {name: value for name, value in values.items() if isfinite(value)}
        self._write_numbers(known, record.report.step, at)

    def _write_skipped(self) -> None:
        if self._skipped is not None:
            self._write(*self._skipped, {})

    def _final_numbers(self) -> dict[str, float]:
        """What the run comes down to, in the end."""
        if self._last is None:
            return {}
        numbers = {"final/bytes_sent": self._last.sent}
        if self._last.sent > 0:
            numbers["final/wire_factor"] = self._last.dense / self._last.sent
        numbers["final/steps_per_second"] = self._last.pace.steps_per_second
        return {name: value for name, value in numbers.items() if isfinite(value)}

    @abstractmethod
    def _write_numbers(self, values: Mapping[str, float], step: int, at: float) -> None:
        """Finite numbers by name. at: seconds since the epoch."""


LOG_SECONDS = 1.0
"""Seconds between two calls of a tracker's function by default: a server is slower than a file."""


class LogTimeline(ThinnedTimeline):
    """A sink that calls a function with the numbers of a step, as experiment trackers have one:
    `LogTimeline(wandb.log)`, `LogTimeline(mlflow.log_metrics)`.

    log: called as `log(numbers, step)`, on rank 0 only. The numbers are finite, and have the names
        at the top of this file. `close` calls it with the final/* ones.
    interval: call it every this many steps; None: every step, but at most once a second. A step
        with another CF than the step before is always logged, and so is the step before it.
    Reasons of switches are text, which such functions do not take: a subclass overrides `event`.
    TypeError if `log` cannot be called.
    """

    def __init__(
        self, log: Callable[[dict[str, float], int], object], interval: int | None = None
    ) -> None:
        super().__init__(interval, LOG_SECONDS)
        if not callable(log):
            raise TypeError(f"log must be a function of numbers and a step, got {log!r}")
        self._log = log

    def close(self) -> None:
        if self._last is not None:
            self._write_skipped()
            self._log(self._final_numbers(), self._last.report.step)
            self._last = None

    def _write_numbers(self, values: Mapping[str, float], step: int, at: float) -> None:
        self._log(dict(values), step)
