"""The record of what happened: one record a step, one event a switch. Rank 0 writes.

A timeline is a sink or several. Every record holds the whole agreed `StepReport`, so that a policy
can be replayed from it.
"""

from __future__ import annotations

import atexit
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, is_dataclass
from math import isfinite, nan
from pathlib import Path
from typing import Any, TextIO

from adaptive.headline import headline
from adaptive.pace import Pace
from policies import DENSE, GainKind, Policy, StepReport
from policies.state import Stateful, declare

log = logging.getLogger("adaptive")

VERSION = 1
"""Of the records: a larger one may say of a field what a reader of this one does not know."""


@dataclass(frozen=True)
class Header:
    """The facts of a run that a policy needs to be replayed from the run's records.

    policy, settings: its name, and what it was made with. expression: the call that makes it, as
    Python writes it; "" in older records. gain: by which it decides. cf_range, world_size: of the
    run. assumed: gains that the policy was told of, by CF.
    base, memory: names of the compressor, and of the memory of what is not sent. numel: elements of
    all gradients. dense_bytes: bytes a rank puts on the wire in a dense step, in the precision of
    the parameters.
    supported, wire_bytes: at each CF that the policy may send, the CF that the compressor can do,
    and the bytes of a step, statistics not counted. layers: shapes of the parameters that may have
    CFs of their own, if they are known. local_steps: numbers of them that the policy could choose
    from. overlap: of these, how many may pass while an exchange is under way; None: half. network:
    an emulated or modelled link, in words; "" for the real one. gossip: whether ranks send their
    parameters to neighbours, and make no mean. version: of the records; a reader
    must ignore fields that it does not know.
    """

    policy: str
    settings: Mapping[str, Any]
    cf_range: tuple[float, float]
    world_size: int
    base: str
    memory: str
    numel: int
    dense_bytes: float
    supported: Mapping[float, float]
    wire_bytes: Mapping[float, float]
    layers: Mapping[str, Sequence[int]] = field(default_factory=dict)
    assumed: Mapping[float, float] = field(default_factory=dict)
    local_steps: tuple[int, ...] = (1,)
    overlap: int | None = 0
    network: str = ""
    expression: str = ""
    gain: GainKind = "gradient"
    gossip: bool = False
    version: int = VERSION


@dataclass(frozen=True)
class StepRecord:
    """The record of one step.

    report: what the ranks agreed on. elapsed: seconds since the first step, on the writing rank.
    t_sys: steps/s (samples/s if `samples_per_step` is known) at the CF in use. t_comp: t_sys times
    the gain that the policy decides on. status: the policy's own numbers (candidate, floor, ...).
    layer_cfs: CFs of the layers that were sent at another CF than the report's. read_sum: the
    policy has read the norm of the sum of mean gradients, and a new sum has begun.
    pace, sent, dense: since the run began, also where it was resumed: seconds of steps, bytes of
    this rank, and what they would have been dense; dense_steps: so many were sent dense. verdict:
    what the policy has concluded by then.
    local_steps: of each rank, of which this one consists; a dense run would have exchanged in each.
    gain: of what was sent, by the definition that the policy decides on: the policy's average where
    it keeps one, else of this step alone; 1 when dense.
    """

    report: StepReport
    elapsed: float
    t_sys: float
    t_comp: float
    status: Mapping[str, float] = field(default_factory=dict)
    layer_cfs: Mapping[str, float] = field(default_factory=dict)
    read_sum: bool = False
    sent: float = nan
    dense: float = nan
    local_steps: int = 1
    gain: float = nan
    dense_steps: int = 0
    pace: Pace = field(default_factory=Pace)
    verdict: str = ""

    @property
    def dense_bytes(self) -> float:
        """Bytes that dense all-reduce would have sent, in the precision of the parameters."""
        return self.local_steps * self.report.dense_wire_bytes

    @property
    def wire_factor(self) -> float:
        """Those over bytes sent; 1 if neither sends."""
        sent = self.report.wire_bytes
        return self.dense_bytes / sent if sent else 1.0


def headline_of(
    record: StepRecord, network: str = "", gossip: bool = False, quality: str = ""
) -> str:
    """Whether compression was worth it so far; "" of a record that does not tell. network, gossip:
    see `Header`. quality: see `headline`."""
    if not (record.sent > 0 and record.dense > 0):
        return ""
    return headline(
        record.pace,
        1 - record.sent / record.dense,
        cf=record.report.cf,
        dense_share=record.dense_steps / (record.report.step + 1),
        verdict=record.verdict,
        network=network,
        quality=quality,
        gossip=gossip,
    )


@dataclass(frozen=True)
class Event:
    """A switch from one CF to another, or a judgement (both CFs the same), with its reason."""

    step: int
    cf_before: float
    cf: float
    reason: str


class Timeline:
    """A sink for records and events; a subclass overrides what it wants to see. `start` comes once
    a run, before everything else; nothing comes after `close`."""

    def start(self, header: Header) -> None: ...

    def step(self, record: StepRecord) -> None: ...

    def event(self, event: Event) -> None: ...

    def flush(self) -> None:
        """Hand over to the operating system what was recorded so far."""

    def close(self) -> None: ...


class SafeTimeline(Timeline):
    """A sink that passes everything on to several sinks, to each until it fails, which is logged
    once: a full disk must neither take one rank out of the collectives that the others wait in, nor
    silence the other sinks. TypeError unless it is made from a `Timeline`, several or None."""

    def __init__(self, timeline: Timeline | Sequence[Timeline] | None = None) -> None:
        self.sinks: list[Any] = [] if timeline is None else [timeline]
        if isinstance(timeline, (list, tuple)):
            self.sinks = list(timeline)
        if not all(isinstance(sink, Timeline) for sink in self.sinks):
            raise TypeError(
                f"timeline must be a Timeline (MemoryTimeline, JSONLTimeline, ...),"
                f" a list of them or None, got {timeline!r}"
            )

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
                with suppress(Exception):  # what it still holds cannot be saved
                    sink.close()


class MemoryTimeline(Timeline):
    """Keeps everything: `header`, and two lists, `steps` and `events`."""

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
    """A sink that writes one JSON object a line, at full precision; null stands for a number that
    is not known. The first is the run's header, unless the run goes on in another file than it
    began in.

    path: the file; made, with its folder, at the first record (so on the writing rank only).
    append: go on after what is there (resuming).
    """

    def __init__(self, path: str | Path, append: bool = False) -> None:
        self.path = Path(path)
        self._append = append
        self._file: TextIO | None = None

    def start(self, header: Header) -> None:
        self._write(header)

    def step(self, record: StepRecord) -> None:
        self._write(record)

    def event(self, event: Event) -> None:
        self._write(event)
        self.flush()

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            atexit.unregister(self.close)
            file, self._file, self._append = self._file, None, True
            file.close()

    def _write(self, recorded: Header | StepRecord | Event) -> None:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            atexit.register(self.close)
            self._file = self.path.open("a" if self._append else "w", encoding="utf-8")
        self._file.write(as_line(recorded))


def as_line(recorded: Header | StepRecord | Event) -> str:
    """A line of JSON with all of a record, at full precision; null stands for what is not known."""
    value: dict[str, Any] = {"kind": _KINDS[type(recorded)], **vars(recorded)}
    if isinstance(recorded, StepRecord):
        value["wire_factor"] = recorded.wire_factor
    return json.dumps(_finite(value), separators=(",", ":"), allow_nan=False) + "\n"


_KINDS = {Header: "header", StepRecord: "step", Event: "event"}


def _finite(value: Any) -> Any:
    """With None for each nan or infinity, which JSON does not have, and dataclasses as mappings."""
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return _finite(vars(value)) if is_dataclass(value) else value


class Recorder(Stateful):
    """What puts steps and switches on record, on the one rank that writes.

    writes: on this rank. header: asked for at the first record of a run. samples: in a step of the
    optimizer, of all workers; 1 if throughput is to be steps/s.
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
        self._started_at: float | None = None  # the first step's time
        self._logged: set[str] = set()

    def event(self, event: Event) -> None:
        if self._writes:
            self._start()
            self._timeline.event(event)

    def step(self, report: StepReport, policy: Policy, now: float, **recorded: Any) -> None:
        """A step that was agreed on, at the time `now`; and in the log, what the policy has
        concluded. recorded: what else a `StepRecord` has of it."""
        if not self._writes:
            return
        self._start()
        if self._started_at is None:
            self._started_at = now
        seconds = report.median_seconds
        status = dict(policy.status())
        t_sys = status.pop("t_sys", 1 / seconds if seconds > 0 else nan)
        gain = 1.0 if report.timed_cf == DENSE else report.gain(report.timed_cf, policy.gain)
        t_comp = status.pop("t_comp", t_sys * gain)
        verdict = policy.verdict()
        record = StepRecord(
            report,
            elapsed=now - self._started_at,
            t_sys=t_sys * report.timed_steps * self._samples,
            t_comp=t_comp * report.timed_steps * self._samples,
            status=status,
            verdict=verdict,
            **recorded,
        )
        self._timeline.step(record)
        if verdict and verdict not in self._logged:
            log.warning("%s", verdict)
            self._logged.add(verdict)

    def close(self) -> None:
        """Nothing is recorded any more."""
        self._timeline.close()
        self._writes = False

    def _start(self) -> None:
        if self._header is not None:
            self._timeline.start(self._header())
            self._header = None

    def load_state_dict(self, state: Mapping[str, Any], pause: float = 0.0) -> None:
        """Go on after a pause of so many seconds, which do not count."""
        super().load_state_dict(state)
        if self._started_at is not None:
            self._header = None
            self._started_at += pause
