"""The writing of a run's record, by the one rank that writes, to sinks that may fail."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from math import nan
from typing import Any

from adaptive.timeline.records import Event, Header, StepRecord
from adaptive.timeline.sinks import LogFunction, LogTimeline, Timeline
from policies import DENSE, Policy, StepReport
from policies.state import Stateful, declare

log = logging.getLogger("adaptive")

Sink = Timeline | LogFunction
"""Where records can go: a `Timeline`, or the logging function of an experiment tracker."""


class SafeTimeline(Timeline):
    """A sink made of several. A sink that fails is dropped with one warning, because a full disk
    must not stop one rank while the others wait for it in a collective.

    TypeError unless every sink is a `Timeline` or a function.
    """

    def __init__(self, timeline: Sink | Sequence[Sink] | None = None) -> None:
        given = [] if timeline is None else [timeline]
        given = list(timeline) if isinstance(timeline, (list, tuple)) else given
        self.sinks: list[Timeline] = []
        for sink in given:
            if not isinstance(sink, Timeline) and not callable(sink):
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


class Recorder(Stateful):
    """Turns agreed steps and switches into records, on the one rank that writes.

    writes: this rank is the one. header: makes the run's header, at the first record. samples:
    samples of all ranks in a step of the optimizer; 1 if unknown, and throughput is steps/s.
    """

    _fields = declare(_started_at=float | None)

    def __init__(
        self,
        timeline: SafeTimeline,
        writes: bool,
        header: Callable[[], Header],
        samples: float,
    ) -> None:
        self._timeline = timeline
        self._writes = writes
        self._header: Callable[[], Header] | None = header
        self._samples = samples
        self._started_at: float | None = None  # the time of the first step
        self._logged: set[str] = set()

    def event(self, event: Event) -> None:
        if self._writes:
            self._start()
            self._timeline.event(event)

    def step(self, report: StepReport, policy: Policy, now: float, **recorded: Any) -> None:
        """Record an agreed step, and log a new verdict of the policy. now: the time. recorded: the
        other fields of the `StepRecord`."""
        if not self._writes:
            return
        self._start()
        if self._started_at is None:
            self._started_at = now
        verdict = policy.verdict()
        if self._timeline.sinks:
            elapsed = now - self._started_at
            recorded |= {"elapsed": elapsed, "verdict": verdict}
            self._timeline.step(self._record(report, policy, recorded))
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
            t_sys=t_sys * report.timed_steps * self._samples,
            t_comp=t_comp * report.timed_steps * self._samples,
            status=status,
            down_cf=status.pop("down_cf", nan),
            down_gain=status.pop("down_gain", nan),
            **recorded,
        )

    def close(self) -> None:
        """Close the sinks; nothing is recorded from here on."""
        self._timeline.close()
        self._writes = False

    def _start(self) -> None:
        if self._header is not None:
            self._timeline.start(self._header())
            self._header = None

    def load_state_dict(self, state: Mapping[str, Any], pause: float = 0.0) -> None:
        """Go on after a pause of so many seconds, which `elapsed` leaves out."""
        super().load_state_dict(state)
        if self._started_at is not None:
            self._header = None
            self._started_at += pause
