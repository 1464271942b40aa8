"""Reading a run's records back, as the objects that `JSONLTimeline` wrote.

The file may have been cut short, damaged, or written by somebody else. Every line is checked: one
that is no record, or has a number that no run can have, is left out with a warning, and the others
are put in order. So nobody who works on records has to expect a CF below 1 or a step that comes
twice.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from adaptive import Event, Header, StepRecord
from adaptive.timeline.records import VERSION
from runs.fields import EXACT, Fields, Limits, abridged
from runs.files import Damage, json_lines, not_a_link, write_text

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


INSIDE = 10**6
"""Steps of the optimizer in a run's rounds of several, at most: each is a point of a curve, so that
a small file could take any memory."""

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
        """Bytes of a dense all-reduce / bytes sent; 1 if nothing was sent."""
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
    out, with a warning. Where a step comes again, the run was resumed from there: what was recorded
    of it and of later steps counts no more.

    OSError for a file that cannot be read; ValueError, naming the file and its first line, if
    there are lines and none of them is a record.
    """
    damage = Damage(path)
    steps: dict[int, StepRecord] = {}
    events: dict[int, Event] = {}
    header: Header | None = None
    again = ""
    inside = 0  # steps of the optimizer in rounds of several
    pending: set[int] = set()  # steps of the events since the last step's record
    gc.disable()  # millions of new objects: looking for cycles takes most of the time
    try:
        for line, value in json_lines(path, damage):
            try:
                record = _record(value)
            except ValueError as error:
                damage.add(line, f"not a timeline record: {error}")
                continue
            if isinstance(record, Header):
                header = record
            elif isinstance(record, Event):
                events[record.step] = record
                pending.add(record.step)
            else:
                step = record.report.step
                inside += record.local_steps - 1
                if inside > INSIDE:
                    damage.add(line, f"more than {INSIDE:,} local steps in all")
                    inside -= record.local_steps - 1
                    continue
                if step <= next(reversed(steps), -1):
                    again = again or f"steps come again (step {step} in line {line})"
                    steps = {at: one for at, one in steps.items() if at < step}
                    inside = sum(each.local_steps - 1 for each in (*steps.values(), record))
                    pending &= {*range(step, step + DELAY + 1)}
                    events = {at: one for at, one in events.items() if at < step or at in pending}
                steps[step] = record
                pending.clear()
    finally:
        gc.enable()
    if damage.count and not (steps or events or header):
        raise ValueError(f"{path}, {damage.first}")
    damage.others += (
        [f"{again}, as in a run that was resumed: the later ones count"] if again else []
    )
    damage.warn()
    in_order = sorted(events.values(), key=lambda event: event.step)
    return Recorded([*steps.values()], in_order, header, damage.text)


def _record(value: dict[str, Any]) -> Header | StepRecord | Event:
    """ValueError if the value is no record."""
    kinds = {"step": StepRecord, "event": Event, "header": Header}
    kind = value.get("kind")
    if not isinstance(kind, str) or kind not in kinds:
        raise ValueError(f"kind must be step, event or header, got {abridged(kind)}")
    record: Header | StepRecord | Event = make(kinds[kind], value)
    if isinstance(record, Header) and record.version != VERSION:
        raise ValueError(f"version must be {VERSION}, got {record.version}")
    return record


def read_header(path: Path) -> Header | None:
    """With which a timeline begins; None if it does not. OSError or ValueError if it is damaged."""
    _, value = next(json_lines(path, Damage(path)), (0, {}))
    return make(Header, value) if value.get("kind") == "header" else None


def keep_before(path: Path, step: int) -> None:
    """Drop the records of `step` and later ones, and a last line that was cut short. The header
    belongs to no step, and stays. Damaged lines go too, with a warning."""
    if not path.exists():
        not_a_link(path)  # to nothing: whoever appends would make what it names
        return
    damage, kept = Damage(path), []
    for number, value in json_lines(path, damage):
        try:
            if _step_of(value) < step:
                kept.append(json.dumps(value) + "\n")
        except ValueError as error:
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
    for line, value in json_lines(path, damage):
        try:
            done = _step_of(value) + 1
            if "quality" in value:
                evaluations.append((done, make(float, value["quality"], "quality")))
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
    step: int = make(int, whose.get("step") if isinstance(whose, dict) else None, "step")
    return step
