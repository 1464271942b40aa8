"""Reading a run's records back, as the objects that `JSONLTimeline` wrote.

The file may have been cut short, damaged, or written by somebody else. Every line is checked: one
that is no record, or has a number that no run can have, is left out with a warning, and the others
are put in order. So nobody who works on records has to expect a CF below 1 or a step that comes
twice.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

from adaptive import Event, Header, StepRecord
from adaptive.timeline.records import VERSION
from runs.fields import EXACT, Fields, Limits, abridged
from runs.files import (
    Damage,
    json_lines,
    not_a_link,
    parse_object,
    raw_lines,
    write_text,
)

TIMELINE_FILE = "timeline.jsonl"
METRICS_FILE = "metrics.jsonl"

LARGE = 1e100
"""Beyond what a squared norm in single precision can reach, summed over any number of elements."""

_CF, _COUNT, _LOCAL = Limits(1, EXACT), Limits(1, EXACT), Limits(1, 10**4)
_AMOUNT = Limits(0, LARGE, unknown=True)
_NUMBER, _WHOLE = Limits(-LARGE, LARGE, unknown=True), Limits(0, EXACT)
_FIELDS = Fields(
    {
        **{"float": _NUMBER, "int": _WHOLE},
        **dict.fromkeys(("cf", "cf_before", "cf_range", "layer_cfs"), _CF),
        **dict.fromkeys(("timed_cf", "down_cf"), _CF._replace(unknown=True)),
        **dict.fromkeys(("numel", "world_size"), _COUNT),
        **dict.fromkeys(("local_steps", "timed_steps"), _LOCAL),
        **dict.fromkeys(("seconds", "median_seconds", "grad_norm", "sum_norm"), _AMOUNT),
        **dict.fromkeys(("kept", "total", "grad", "sample_total"), _AMOUNT),
        **dict.fromkeys(("kept_norms", "grad_norms", "down_bytes"), _AMOUNT),
        **dict.fromkeys(("wire_bytes", "dense_wire_bytes", "timed_bytes"), _AMOUNT),
        **dict.fromkeys(("statistics_bytes", "dense_bytes"), _AMOUNT),
        **dict.fromkeys(("bytes_sent", "floats_sent", "steps_per_second"), _AMOUNT),
    }
)
"""How records are read; of all other fields a number may be anything."""

make = _FIELDS.read


def whole_number(name: str, value: Any) -> int:
    """A count of another file. ValueError names it."""
    return _FIELDS.read(int, value, name)


DEEPEST = 32
"""Settings of a policy in one another, and dimensions of a tensor."""

DELAY = 2
"""A switch is on record up to so many steps before the record of its step."""


@dataclass(frozen=True)
class Recorded:
    """A run's records, in order of their steps. header: None in files older than it. damage: what
    was left out of them, in a sentence; "" if nothing was."""

    steps: list[StepRecord]
    events: list[Event]
    header: Header | None = None
    damage: str = ""

    @property
    def bytes_sent(self) -> float:
        """Bytes a rank put on the wire."""
        return sum(step.report.wire_bytes for step in self.steps)

    @property
    def wire_factor(self) -> float:
        """Bytes of dense fp32 all-reduce / bytes sent; 1 if nothing was sent."""
        dense = sum(step.dense_bytes for step in self.steps)
        return dense / self.bytes_sent if self.bytes_sent else 1.0


def local_steps(records: Sequence[StepRecord]) -> list[int]:
    """Steps of the optimizer from each exchange to the next; those after the last, which is not on
    record, are taken to be as many as before it."""
    return [record.local_steps for record in (*records[1:], *records[-1:])]


def exchanges(records: Sequence[StepRecord]) -> list[int]:
    """How many were over by the end of each step of the optimizer. The first step of a round is the
    one with the exchange; before the first exchange there are steps only with local steps."""
    rounds = enumerate(local_steps(records), 1)
    before = records[0].local_steps - 1 if records else 0
    return [*([0] * before), *(count for count, steps in rounds for _ in range(steps))]


def bytes_by_step(records: Sequence[StepRecord]) -> list[float]:
    """Bytes that a rank has sent by the end of each step of the optimizer."""
    sent = [0.0, *accumulate(record.report.wire_bytes for record in records)]
    return [sent[count] for count in exchanges(records)]


def seconds_by_step(records: Sequence[StepRecord], ends: Sequence[float]) -> list[float]:
    """When each step of the optimizer ended, from when the round of each exchange did. Steps before
    the first exchange are taken to last as long as those after it."""
    if not ends:
        return []
    rounds = local_steps(records)
    each, before = ends[0] / rounds[0], records[0].local_steps - 1
    seconds, start = [each * (i + 1) for i in range(before)], 0.0
    for end, steps in zip(ends, rounds, strict=True):
        inside = [start + (end - start) * (i + 1) / steps for i in range(steps - 1)]
        seconds += [each * before + at for at in (*inside, end)]
        start = end
    return seconds


@dataclass(frozen=True)
class Stretch:
    """Steps first..last, all sent at `cf`, and why it was switched to."""

    first: int
    last: int
    cf: float
    reason: str


def read_records(path: Path) -> Recorded:
    """All records of a timeline file, in order of their steps. What is damaged or cut short is left
    out, with a warning.

    OSError for a file that cannot be read; ValueError, naming the file and its first line, if
    there are lines and none of them is a record.
    """
    damage = Damage(path)
    found = _Found(damage)
    gc.disable()  # millions of new objects: looking for cycles takes most of the time
    try:
        for line, value in json_lines(path, True, damage):
            try:
                found.take(line, value)
            except ValueError as error:
                damage.add(line, f"not a timeline record: {error}")
    finally:
        gc.enable()
    if damage.count and not (found.steps or found.events or found.header):
        raise ValueError(f"{path}, {damage.first}")
    steps = [found.steps[step] for step in sorted(found.steps)]
    damage.others += found.told(steps)
    damage.warn()
    events = sorted(found.events, key=lambda event: event.step)
    return Recorded(steps, events, found.header, damage.text)


class _Found:
    """The records of a file so far. Where a step comes again, the run was resumed from there: of
    what was recorded before, only earlier steps still count."""

    def __init__(self, damage: Damage) -> None:
        self.steps: dict[int, StepRecord] = {}
        self.events: list[Event] = []
        self.header: Header | None = None
        self._damage = damage
        self._newest = -1
        self._events_before = 0  # the last step
        self._again = ""  # where the run was resumed first

    def take(self, line: int, value: dict[str, Any]) -> None:
        """ValueError if the value is no record."""
        kind = value.get("kind")
        if kind == "step":
            record = _FIELDS.read(StepRecord, value)
            step = record.report.step
            if step in self.steps:
                self._again = self._again or f"step {step} in line {line}"
                self._go_back_to(step)
            elif step < self._newest:
                self._damage.unordered = True
            self.steps[step] = record
            self._newest, self._events_before = step, len(self.events)
        elif kind == "event":
            self.events.append(_FIELDS.read(Event, value))
        elif kind == "header":
            version = whole_number("version", value.get("version", VERSION))
            if version != VERSION:
                self._damage.others.append(
                    f"its records are of version {version}, and are read as those of version "
                    f"{VERSION}: what they have besides is passed over"
                )
            self.header = _header(value)
        else:
            raise ValueError(f"kind must be step, event or header, got {abridged(kind)}")

    def _go_back_to(self, step: int) -> None:
        """Forget the step, and what came after it (files are in order, or next to it). Switches
        are on record before their steps, and so may be the first of the part that begins here."""
        first = range(step, min(step + DELAY, self._newest) + 1)
        since = [e for e in self.events[self._events_before :] if e.step in first]
        del self.events[self._events_before :]
        while self.events and self.events[-1].step >= step:
            self.events.pop()
        self.events += since
        while self.steps and next(reversed(self.steps)) >= step:
            self.steps.popitem()
        self.steps.pop(step, None)

    def told(self, steps: Sequence[StepRecord]) -> list[str]:
        """What else there is to say of the file."""
        said = []
        if self._again:
            said.append(
                f"steps come again ({self._again}), as in a run that was resumed: the later ones "
                f"count"
            )
        missing = steps[-1].report.step - steps[0].report.step + 1 - len(steps) if steps else 0
        if missing and not self._damage.count:
            said.append(f"{missing} of its steps are missing")
        return said


def read_header(path: Path) -> Header | None:
    """With which a timeline begins; None if it does not. OSError or ValueError if it is damaged."""
    _, value = next(json_lines(path), (0, {}))
    return _header(value) if value.get("kind") == "header" else None


def _header(value: dict[str, Any]) -> Header:
    """ValueError also for numbers that fit by themselves, and not together."""
    header: Header = _FIELDS.read(Header, value)
    _check_depth(header.settings, 0)
    counts = header.local_steps
    if not counts or sorted(set(counts)) != list(counts):
        raise ValueError(
            f"local_steps must be different, the smallest first, got {abridged(counts)}"
        )
    for name, shape in header.layers.items():
        if len(shape) > DEEPEST or prod(shape) > EXACT:
            raise ValueError(f"layers: {name} must be the shape of a tensor, got {abridged(shape)}")
    return header


def _check_depth(value: Any, depth: int) -> None:
    if depth > DEEPEST:
        raise ValueError("settings is nested too deep")
    for part in value.values() if isinstance(value, dict) else value:
        if isinstance(part, (dict, list)):
            _check_depth(part, depth + 1)


def keep_before(path: Path, step: int) -> None:
    """Drop the records of `step` and later ones, and a last line that was cut short. The header
    belongs to no step, and stays. Damaged lines go too, with a warning."""
    if not path.exists():
        not_a_link(path)  # to nothing: whoever appends would make what it names
        return
    damage, kept = Damage(path), []
    for number, line in raw_lines(path, damage):
        try:
            if _step_of(parse_object(line)) < step:
                kept.append(line.decode().rstrip("\r\n") + "\n")
        except ValueError as error:
            if line.endswith(b"\n"):
                damage.add(number, str(error))
    damage.warn()
    write_text(path, "".join(kept))


def stretches(recorded: Recorded) -> list[Stretch]:
    """The CF history: consecutive steps at one CF, taken together."""
    reasons = {event.step: event.reason for event in recorded.events if event.cf != event.cf_before}
    found: list[Stretch] = []
    for record in recorded.steps:
        step, cf = record.report.step, record.report.cf
        if found and found[-1].cf == cf:
            last = found.pop()
            found.append(Stretch(last.first, step, cf, last.reason))
        else:
            found.append(Stretch(step, step, cf, reasons.get(step, "")))
    return found


@dataclass(frozen=True)
class Metrics:
    """A run's own numbers, from metrics.jsonl. trained: steps done. evaluations: (steps done,
    quality) in order, nan for what was not finite. damage: as in `Recorded`."""

    trained: int
    evaluations: tuple[tuple[int, float], ...]
    damage: str = ""


def read_metrics(path: Path) -> Metrics:
    """All metrics of a run, none if the file is not there; damaged lines are left out with a
    warning (which is left to the caller if no line was good). OSError for a file that cannot be
    read."""
    if not path.exists():
        return Metrics(0, ())
    damage, trained = Damage(path), 0
    evaluations: list[tuple[int, float]] = []
    for line, value in json_lines(path, damage=damage):
        try:
            done = _step_of(value) + 1
            if "quality" in value:
                evaluations.append((done, _FIELDS.read(float, value["quality"], "quality")))
            trained = max(trained, done)
        except ValueError as error:
            damage.add(line, f"not a metric: {error}")
    if trained:
        damage.warn()
    ordered = tuple(sorted(evaluations, key=lambda pair: pair[0]))
    return Metrics(trained, ordered, damage.text)


def _step_of(value: dict[str, Any]) -> int:
    if value.get("kind") == "header":
        return -1
    whose = value.get("report") if value.get("kind") == "step" else value
    return whole_number("step", whose.get("step") if isinstance(whose, dict) else None)
