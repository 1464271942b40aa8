"""The record of what happened: one record a step, one event a switch. Rank 0 writes.

A timeline is a sink or several. Every record holds the whole agreed `StepReport`, so that a policy
can be replayed from it.
"""

from __future__ import annotations

import atexit
import json
from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from policies import StepReport


@dataclass(frozen=True)
class StepRecord:
    """report: what the ranks agreed on. status: the policy's own numbers (candidate, floor, ...).

    elapsed: seconds since the first step, on the writing rank. t_sys: steps/s (samples/s if
    `samples_per_step` is known). t_comp: t_sys times the gain that the policy decides on.
    """

    report: StepReport
    elapsed: float
    t_sys: float
    t_comp: float
    status: Mapping[str, float] = field(default_factory=dict)

    @property
    def wire_factor(self) -> float:
        """Bytes that dense fp32 all-reduce would have sent / bytes sent; 1 if neither sends."""
        sent = self.report.wire_bytes
        return self.report.dense_wire_bytes / sent if sent else 1.0


@dataclass(frozen=True)
class Event:
    """A switch from one CF to another (or a verdict, where both are the same), with its reason."""

    step: int
    cf_before: float
    cf: float
    reason: str


class Timeline(ABC):  # noqa: B024 - a sink overrides what it wants to see
    """A sink for records and events."""

    def step(self, record: StepRecord) -> None:  # noqa: B027
        """Called once a step, in order."""

    def event(self, event: Event) -> None:  # noqa: B027
        """Called at each switch."""

    def close(self) -> None:  # noqa: B027
        """Flush and release; nothing comes after."""


class MemoryTimeline(Timeline):
    """Keeps everything in two lists: `steps` and `events`."""

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []
        self.events: list[Event] = []

    def step(self, record: StepRecord) -> None:
        self.steps.append(record)

    def event(self, event: Event) -> None:
        self.events.append(event)


class JSONLTimeline(Timeline):
    """One JSON object a line, at full precision; null stands for a number that is not known.

    path: the file; its folder is made. append: go on after what is there (resuming).
    """

    def __init__(self, path: str | Path, append: bool = False) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a" if append else "w", encoding="utf-8")
        atexit.register(self.close)

    def step(self, record: StepRecord) -> None:
        self._write({"kind": "step", **asdict(record), "wire_factor": record.wire_factor})

    def event(self, event: Event) -> None:
        self._write({"kind": "event", **asdict(event)})
        self.flush()

    def flush(self) -> None:
        """Hand what is buffered to the operating system, e.g. before a checkpoint."""
        self._file.flush()

    def close(self) -> None:
        atexit.unregister(self.close)
        self._file.close()

    def _write(self, value: dict[str, Any]) -> None:
        json.dump(_plain(value), self._file, separators=(",", ":"), allow_nan=False)
        self._file.write("\n")


class SeveralTimelines(Timeline):
    """Passes everything on to several sinks."""

    def __init__(self, sinks: Sequence[Timeline]) -> None:
        self.sinks = list(sinks)

    def step(self, record: StepRecord) -> None:
        for sink in self.sinks:
            sink.step(record)

    def event(self, event: Event) -> None:
        for sink in self.sinks:
            sink.event(event)

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()


def make_timeline(timeline: Timeline | Sequence[Timeline] | None) -> Timeline:
    """One sink from what the user gave. TypeError if it is not a `Timeline` or several."""
    sinks = [timeline] if isinstance(timeline, Timeline) else list(timeline or ())
    for sink in sinks:
        if not isinstance(sink, Timeline):
            raise TypeError(
                f"timeline must be a Timeline or a sequence of them (MemoryTimeline, "
                f"JSONLTimeline, TensorBoardTimeline), got {sink!r}"
            )
    return sinks[0] if len(sinks) == 1 else SeveralTimelines(sinks)


def _plain(value: Any) -> Any:
    """JSON has no nan or infinity, and only strings as keys."""
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, Mapping):
        return {k if isinstance(k, str) else repr(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value
