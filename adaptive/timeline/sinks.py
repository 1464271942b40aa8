"""Sinks, which get the records of a run: memory, JSON lines, or a tracker's logging function; and
the `Recorder`, which makes the records on the one rank that writes."""

from __future__ import annotations

import atexit
import json
import logging
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, is_dataclass
from math import isfinite, nan
from os import PathLike
from pathlib import Path
from typing import Any, TextIO

from adaptive.timeline.records import Event, Header, StepRecord, final_scalars, scalars
from policies import DENSE, Policy, StepReport, checks
from policies.state import Stateful, saved

LogFunction = Callable[[dict[str, float], int], object]
"""An experiment tracker's function, called with numbers by name and a step."""


class Timeline:
    """A sink for records and events. A subclass overrides the methods that it needs. `start` is
    called once a run, before all other methods. No method is called after `close`."""

    def start(self, header: Header) -> None: ...

    def step(self, record: StepRecord) -> None: ...

    def event(self, event: Event) -> None: ...

    def flush(self) -> None:
        """Hand all records so far to the operating system."""

    def close(self) -> None: ...


class MemoryTimeline(Timeline):
    """A sink that keeps all records: `header`, and two lists, `steps` and `events`."""

    def __init__(self) -> None:
        self.header: Header | None = None
        self.steps: list[StepRecord] = []
        self.events: list[Event] = []

    def start(self, header: Header) -> None:
        self.header = header

    def step(self, record: StepRecord) -> None:
        self.steps.append(record)

    def event(self, event: Event) -> None:
        self.events.append(event)


class JSONLTimeline(Timeline):
    """A sink that writes one JSON object a line, at full precision, with null for unknown numbers.
    The header is the first line, unless the run resumes in another file than it began in.

    path: the file. It is made, with its folder, at the first record, so only on the writing rank.
    append: add to the end of an existing file (for a resumed run).
    """

    def __init__(self, path: str | Path, append: bool = False) -> None:
        if not isinstance(path, str | PathLike):
            raise TypeError(f"path must be the name of a file, got {path!r:.80}")
        self.path = Path(path)
        self._append = append
        self._file: TextIO | None = None

    def start(self, header: Header) -> None:
        self._write("header", header)

    def step(self, record: StepRecord) -> None:
        self._write("step", record, wire_factor=record.wire_factor)

    def event(self, event: Event) -> None:
        self._write("event", event)
        self.flush()

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            atexit.unregister(self.close)
            file, self._file, self._append = self._file, None, True
            file.close()

    def _write(self, kind: str, recorded: Header | StepRecord | Event, **more: float) -> None:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            atexit.register(self.close)
            self._file = self.path.open("a" if self._append else "w", encoding="utf-8")
        value = _plain({"kind": kind, **vars(recorded), **more})
        self._file.write(json.dumps(value, separators=(",", ":"), allow_nan=False) + "\n")


def _plain(value: Any) -> Any:
    """The value with dataclasses as mappings, and None for nan and infinity: JSON has neither."""
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return _plain(vars(value)) if is_dataclass(value) else value


class ThinnedTimeline(Timeline):
    """A sink that writes the numbers of some steps only. A subclass implements `_write_numbers`.

    interval: number of steps from one written step to the next; None: at most one step in
    `shortest` seconds. The two steps around a switch of CF are always written.
    """

    shortest: float

    def __init__(self, interval: int | None) -> None:
        if interval is not None:
            checks.whole("interval", interval, least=1)
        self._interval = interval
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
        passed = time.monotonic() >= self._due  # the time of day may be set back
        due = passed if self._interval is None else report.step % self._interval == 0
        if switched or changed or due:
            self._write(record, now, changed)
        else:
            self._skipped = record, now
        self._last = record

    def close(self) -> None:
        """Write the last step and the final/* numbers."""
        if self._last is not None:
            self._write_skipped()
            self._write_numbers(final_scalars(self._last), self._last.report.step, time.time())
            self._last = None

    def _write(self, record: StepRecord, at: float, layers: Mapping[str, float]) -> None:
        self._skipped, self._due = None, time.monotonic() + self.shortest
        self._write_numbers({**scalars(record), **layers}, record.report.step, at)

    def _write_skipped(self) -> None:
        if self._skipped is not None:
            self._write(*self._skipped, {})

    @abstractmethod
    def _write_numbers(self, values: Mapping[str, float], step: int, at: float) -> None:
        """Write the finite ones of these numbers by name. at: seconds since the epoch."""


class LogTimeline(ThinnedTimeline):
    """A sink that calls an experiment tracker's function with the numbers of some steps:
    `timeline=wandb.log`, or `LogTimeline(wandb.log, interval=10)`.

    log: called as `log(numbers, step)`, on rank 0 only. The numbers are finite and named as
        `adaptive.timeline.records.scalars` says. `close` logs the final/* numbers.
    interval: number of steps between two calls; None: at most one call a second. The two steps
        around a switch of CF are always logged.
    The reason of a switch is text, and is not logged: a subclass may override `event`.
    TypeError if `log` cannot be called.
    """

    shortest = 1.0  # a server is slower than a file

    def __init__(self, log: LogFunction, interval: int | None = None) -> None:
        super().__init__(interval)
        if not callable(log):
            raise TypeError(f"log must be a function of numbers and a step, got {log!r}")
        self._log = log

    def _write_numbers(self, values: Mapping[str, float], step: int, at: float) -> None:
        self._log({name: value for name, value in values.items() if isfinite(value)}, step)


log = logging.getLogger("adaptive")

Sink = Timeline | LogFunction
"""A receiver of records: a `Timeline`, or the logging function of an experiment tracker."""


class SafeTimeline(Timeline):
    """Several sinks as one. A sink that fails is dropped with one warning, because a full disk must
    not stop one rank while the others wait for it in a collective.

    TypeError unless every sink is a `Timeline` or a function.
    """

    def __init__(self, timeline: Sink | Sequence[Sink] | None = None) -> None:
        given = [] if timeline is None else [timeline]
        given = list(timeline) if isinstance(timeline, (list, tuple)) else given
        self.sinks: list[Timeline] = []
        for sink in given:
            is_class = isinstance(sink, type) and issubclass(sink, Timeline)
            if is_class or not (isinstance(sink, Timeline) or callable(sink)):
                raise TypeError(
                    f"timeline must be a Timeline (MemoryTimeline, JSONLTimeline, ...), a function "
                    f"log(numbers, step), a list of them or None, got {timeline!r}"
                )
            self.sinks.append(sink if isinstance(sink, Timeline) else LogTimeline(sink))

    def start(self, header: Header) -> None:
        self._each("start", header)

    def step(self, record: StepRecord) -> None:
        self._each("step", record)

    def event(self, event: Event) -> None:
        self._each("event", event)

    def flush(self) -> None:
        self._each("flush")

    def close(self) -> None:
        self._each("close")

    def _each(self, method: str, *recorded: object) -> None:
        for sink in list(self.sinks):
            try:
                getattr(sink, method)(*recorded)
            except Exception as error:
                name = type(sink).__name__
                log.warning(
                    "the %s has failed, and gets no more records: %r", name, error, exc_info=True
                )
                self.sinks.remove(sink)
                with suppress(Exception):  # its unwritten records are lost
                    sink.close()


@dataclass(eq=False)
class Recorder(Stateful):
    """Turns agreed steps and switches into records, on the one rank that writes.

    writes: this rank writes. header: makes the run's header, called at the first record. samples:
    samples of all ranks in a step of the optimizer; 1 if unknown: throughput is then in steps/s.
    """

    timeline: SafeTimeline
    writes: bool
    header: Callable[[], Header] | None
    samples: float
    _started_at: float | None = saved(None)  # the time of the first step
    _logged: set[str] = field(default_factory=set)

    def event(self, event: Event) -> None:
        if self.writes:
            self._start()
            self.timeline.event(event)

    def step(self, report: StepReport, policy: Policy, now: float, **recorded: Any) -> None:
        """Record an agreed step, and log a new verdict of the policy. now: the time. recorded: the
        other fields of the `StepRecord`."""
        if not self.writes:
            return
        self._start()
        if self._started_at is None:
            self._started_at = now
        verdict = policy.verdict()
        if self.timeline.sinks:
            elapsed = now - self._started_at
            recorded |= {"elapsed": elapsed, "verdict": verdict}
            self.timeline.step(self._record(report, policy, recorded))
        if verdict and verdict not in self._logged:
            log.warning("%s", verdict)
            self._logged.add(verdict)

    def _record(
        self, report: StepReport, policy: Policy, recorded: Mapping[str, Any]
    ) -> StepRecord:
        seconds = report.median_seconds
        status = dict(policy.status())
        t_sys = status.pop("t_sys", 1 / seconds if seconds > 0 else nan)
        gain = 1.0 if report.timed_cf == DENSE else report.gain(report.timed_cf, policy.gain)
        t_comp = status.pop("t_comp", t_sys * gain)
        return StepRecord(
            report,
            t_sys=t_sys * report.timed_steps * self.samples,
            t_comp=t_comp * report.timed_steps * self.samples,
            status=status,
            down_cf=status.pop("down_cf", nan),
            down_gain=status.pop("down_gain", nan),
            **recorded,
        )

    def close(self) -> None:
        """Close the sinks. Later steps are not recorded."""
        self.timeline.close()
        self.writes = False

    def _start(self) -> None:
        if self.header is not None:
            self.timeline.start(self.header())
            self.header = None

    def load_state_dict(self, state: Mapping[str, Any], pause: float = 0.0) -> None:
        """Load a `state_dict()`. pause: seconds since it was saved, which `elapsed` leaves out."""
        super().load_state_dict(state)
        if self._started_at is not None:
            self.header = None
            self._started_at += pause
