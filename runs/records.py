"""Reading a run's records back, as the objects that `JSONLTimeline` or `TensorBoardTimeline` wrote.

The file may have been cut short, damaged, or written by somebody else. Every line is checked: one
that is no record, or has a number that no run can have, is left out with a warning, and the others
are put in order. So nobody who works on records has to expect a CF below 1 or a step that comes
twice.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields
from functools import cache
from itertools import accumulate
from math import nan, prod
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from adaptive import Event, Header, StepRecord, StepReport
from adaptive.headline import DenseStep
from adaptive.timeline.records import VERSION
from policies import GainKind, LayerReport, Measurement
from runs.config import write_text
from runs.events import event_values, has_events
from runs.files import Damage, json_lines, not_a_link, parse_object, raw_lines

__all__ = [
    "METRICS_FILE",
    "TIMELINE_FILE",
    "Metrics",
    "Recorded",
    "Stretch",
    "amount",
    "json_lines",
    "keep_before",
    "make",
    "number",
    "planned",
    "read_header",
    "read_metrics",
    "read_records",
    "stretches",
    "whole_number",
]

TIMELINE_FILE = "timeline.jsonl"
METRICS_FILE = "metrics.jsonl"

LAST_STEP = 2**53
"""Steps, CFs and sizes beyond are not exact in double precision, and nobody has them."""

LARGE = 1e100
"""Beyond what a squared norm in single precision can reach, summed over any number of elements."""

DELAY = 2
"""A switch is on record up to so many steps before the record of its step."""

_T = TypeVar("_T")


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
    """All records of a timeline file, or of TensorBoard's event files (one, or a folder of them),
    in order of their steps. What is damaged or cut short is left out, with a warning.

    OSError for a file that cannot be read; ValueError, naming the file and its first line, if
    there are lines and none of them is a record.
    """
    damage = Damage(path)
    found = _Found(damage)
    values = event_values(path, damage) if has_events(path) else json_lines(path, True, damage)
    with _no_collection():
        for line, value in values:
            try:
                found.take(line, value)
            except ValueError as error:
                damage.add(line, f"not a timeline record: {error}")
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
        self._again: list[str] = []  # where the run was resumed

    def take(self, line: int, value: dict[str, Any]) -> None:
        """ValueError if the value is no record."""
        kind = value.get("kind")
        if kind == "step":
            record = make(StepRecord, value)
            step = record.report.step
            if step in self.steps:
                self._again.append(f"step {step} in line {line}")
                self._go_back_to(step)
            elif step < self._newest:
                self._damage.unordered = True
            self.steps[step] = record
            self._newest, self._events_before = step, len(self.events)
        elif kind == "event":
            self.events.append(make(Event, value))
        elif kind == "header":
            version = whole_number("version", value.get("version", VERSION))
            if version != VERSION:
                self._damage.others.append(
                    f"its records are of version {version}, and are read as those of version "
                    f"{VERSION}: what they have besides is passed over"
                )
            self.header = make(Header, value)
        else:
            raise ValueError(f"kind must be step, event or header, got {_shown(kind)}")

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
            more = f", and {len(self._again) - 1} more" if len(self._again) > 1 else ""
            said.append(
                f"steps come again ({self._again[0]}{more}), as in a run that was resumed: the "
                f"later ones count"
            )
        missing = steps[-1].report.step - steps[0].report.step + 1 - len(steps) if steps else 0
        if missing and not self._damage.count:
            said.append(f"{missing} of its steps are missing")
        return said


def read_header(path: Path) -> Header | None:
    """With which a timeline begins; None if it does not. OSError or ValueError if it is damaged."""
    _, value = next(json_lines(path), (0, {}))
    return make(Header, value) if value.get("kind") == "header" else None


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
    quality) in order, nan for what was not finite. damage: as in `Recorded`. densities: (step, what
    was recorded) in order."""

    trained: int
    evaluations: tuple[tuple[int, float], ...]
    damage: str = ""
    densities: tuple[tuple[int, Any], ...] = ()


def read_metrics(path: Path) -> Metrics:
    """All metrics of a run, none if the file is not there; damaged lines are left out with a
    warning (which is left to the caller if no line was good). OSError for a file that cannot be
    read."""
    if not path.exists():
        return Metrics(0, ())
    damage, trained = Damage(path), 0
    evaluations: list[tuple[int, float]] = []
    densities: dict[int, Any] = {}
    for line, value in json_lines(path, damage=damage):
        try:
            done = _step_of(value) + 1
            if "quality" in value:
                evaluations.append((done, number("quality", value["quality"])))
            if "densities" in value:
                densities[done - 1] = value["densities"]
            trained = max(trained, done)
        except ValueError as error:
            damage.add(line, f"not a metric: {error}")
    if trained:
        damage.warn()
    ordered = tuple(sorted(evaluations, key=lambda pair: pair[0]))
    return Metrics(trained, ordered, damage.text, tuple(sorted(densities.items())))


def planned(record: StepRecord, name: str) -> float:
    """A CF of the policy's own status, its candidate or floor; nan if it has none of that name."""
    cf = record.status.get(name, nan)
    return cf if 1 <= cf <= LAST_STEP else nan


@contextmanager
def _no_collection() -> Iterator[None]:
    """Millions of new objects, no cycles among them: looking for cycles takes most of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _step_of(value: dict[str, Any]) -> int:
    if value.get("kind") == "header":
        return -1
    whose = _object("report", value.get("report")) if value.get("kind") == "step" else value
    return whole_number("step", whose.get("step"))


# -- from JSON to dataclasses, each field by its declared type -------------------------------------


def make(kind: Callable[..., _T], value: Mapping[str, Any]) -> _T:
    """A dataclass from the entries that it has; others are passed over. ValueError names the one
    that is missing or wrong."""
    made = {}
    for name, read, required in _fields(kind):
        if name in value:
            made[name] = read(name, value[name])
        elif required:
            raise ValueError(f"{name} is missing")
    return kind(**made)


@cache
def _fields(kind: Callable[..., Any]) -> tuple[tuple[str, Callable[[str, Any], Any], bool], ...]:
    """Name, reader, and whether it must be there."""
    types = get_type_hints(kind)
    return tuple(
        (
            field.name,
            _BY_NAME.get((field.name, types[field.name])) or _READERS[types[field.name]],
            field.default is MISSING and field.default_factory is MISSING,
        )
        for field in fields(kind)  # type: ignore[arg-type]
    )


def number(name: str, value: Any) -> float:
    """A finite number of a record; null, and what other programs write as NaN, is one that is not
    known. ValueError names the entry."""
    if value is None or value != value:
        return nan
    if type(value) is not float and type(value) is not int:
        raise ValueError(f"{name} must be a number, got {_shown(value)}")
    if not -LARGE <= value <= LARGE:
        raise ValueError(f"{name} must be a finite number, got {_shown(value)}")
    return value


def amount(name: str, value: Any) -> float:
    """The same for bytes, seconds and energies, which are never negative."""
    known = number(name, value)
    if known < 0:
        raise ValueError(f"{name} must not be negative, got {_shown(value)}")
    return known


def _cf(name: str, value: Any) -> float:
    cf = number(name, value)
    if not 1 <= cf <= LAST_STEP:
        raise ValueError(f"{name} must be a CF, a number >= 1, got {_shown(value)}")
    return cf


def _cf_if_known(name: str, value: Any) -> float:
    return nan if value is None or value != value else _cf(name, value)


def whole_number(name: str, value: Any) -> int:
    if type(value) is not int or not 0 <= value <= LAST_STEP:
        raise ValueError(f"{name} must be a whole number from 0 to 2^53, got {_shown(value)}")
    return value


def _counted(name: str, value: Any) -> int:
    return whole_number(name, value) or _refuse(name, value, "must be at least 1")


def _local_steps(name: str, value: Any) -> int:
    count = _counted(name, value)
    return count if count <= 10**4 else _refuse(name, value, "must be at most 10,000")


def _text(name: str, value: Any) -> str:
    return value if isinstance(value, str) else _refuse(name, value, "must be a text")


def _gain(name: str, value: Any) -> Any:
    kinds = get_args(GainKind)
    return value if value in kinds else _refuse(name, value, f"must be one of {', '.join(kinds)}")


def _flag(name: str, value: Any) -> bool:
    return value if isinstance(value, bool) else _refuse(name, value, "must be true or false")


def _object(name: str, value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else _refuse(name, value, "must be an object")


def _refuse(name: str, value: Any, what: str) -> Any:
    raise ValueError(f"{name} {what}, got {_shown(value)}")


def _by_cf(name: str, value: Any) -> dict[float, float]:
    """JSON has only strings as keys."""
    found = _object(name, value)
    return {_key(name, key): number(name, value) for key, value in found.items()}


def _key(name: str, text: str) -> float:
    try:
        cf = float(text)
    except ValueError:
        cf = nan
    if not 0 < cf <= LAST_STEP:
        raise ValueError(f"{name} must have CFs as keys, got {_shown(text)}")
    return cf


def _by_name(name: str, value: Any) -> dict[str, float]:
    return {key: number(key, value) for key, value in _object(name, value).items()}


def _measurements(name: str, value: Any) -> dict[float, Measurement]:
    found = _object(name, value)
    return {_key(name, cf): make(Measurement, _object(cf, one)) for cf, one in found.items()}


def _pair(name: str, value: Any) -> tuple[float, float]:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError(f"{name} must be two numbers, got {_shown(value)}")
    return float(_cf(name, value[0])), float(_cf(name, value[1]))


def _counts(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not value or sorted(set(value)) != value:
        _refuse(name, value, "must be a list of different numbers, the smallest first")
    return tuple(_local_steps(name, count) for count in value)


def _shapes(name: str, value: Any) -> dict[str, Sequence[int]]:
    found = _object(name, value)
    for layer, shape in found.items():
        sizes = [whole_number(layer, size) for size in shape] if isinstance(shape, list) else [-1]
        if len(sizes) > _DEEPEST or not 0 <= prod(sizes) <= LAST_STEP:
            raise ValueError(f"{name} must be the shapes of tensors, got {_shown(shape)}")
    return found


def _settings(name: str, value: Any) -> dict[str, Any]:
    """Plain values, in one another a few times at most."""
    found = _object(name, value)
    _check_depth(name, found, 0)
    return found


def _check_depth(name: str, value: Any, depth: int) -> None:
    if depth > _DEEPEST:
        raise ValueError(f"{name} is nested too deep")
    for part in value.values() if isinstance(value, dict) else value:
        if isinstance(part, (dict, list)):
            _check_depth(name, part, depth + 1)


_DEEPEST = 32


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested, or a number of thousands of digits
        text = type(value).__name__
    return text if len(text) <= 60 else f"{text[:57]}..."


_READERS: dict[Any, Callable[[str, Any], Any]] = {
    float: number,
    int: whole_number,
    int | None: lambda name, value: None if value is None else whole_number(name, value),
    str: _text,
    GainKind: _gain,
    bool: _flag,
    Mapping[float, float]: _by_cf,
    Mapping[str, float]: _by_name,
    Mapping[str, Any]: _settings,
    Mapping[str, Sequence[int]]: _shapes,
    tuple[int, ...]: _counts,
    Mapping[float, Measurement]: _measurements,
    Mapping[str, LayerReport]: lambda name, value: {
        layer: make(LayerReport, _object(layer, one)) for layer, one in _object(name, value).items()
    },
    StepReport: lambda name, value: make(StepReport, _object(name, value)),
    DenseStep: lambda name, value: make(DenseStep, _object(name, value)),
    tuple[float, float]: _pair,
}
"""How a field of each type is read."""

_BY_NAME: dict[tuple[str, Any], Callable[[str, Any], Any]] = {
    ("cf", float): _cf,
    ("cf_before", float): _cf,
    ("timed_cf", float): _cf_if_known,
    ("layer_cfs", Mapping[str, float]): lambda name, value: {
        layer: _cf(layer, cf) for layer, cf in _object(name, value).items()
    },
    ("numel", int): _counted,
    ("world_size", int): _counted,
    ("local_steps", int): _local_steps,
    ("timed_steps", int): _local_steps,
    **{
        (name, float): amount
        for name in (
            *("seconds", "median_seconds", "grad_norm", "sum_norm", "energy"),
            *("kept", "total", "grad", "sample_total", "kept_norms", "grad_norms"),
            *("wire_bytes", "dense_wire_bytes", "timed_bytes", "statistics_bytes", "dense_bytes"),
            *("down_bytes", "bytes_sent", "floats_sent", "steps_per_second"),
        )
    },
}
"""How a field is read whose name says more than its type."""
