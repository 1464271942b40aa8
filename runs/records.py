"""Reading timeline.jsonl back, as the objects that `JSONLTimeline` wrote."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cache
from math import nan
from pathlib import Path
from typing import Any, TypeVar

from adaptive import Event, Header, StepRecord, StepReport
from policies import LayerReport, Measurement
from runs.config import write_text
from runs.stages import counted

TIMELINE_FILE = "timeline.jsonl"
METRICS_FILE = "metrics.jsonl"

_T = TypeVar("_T")


@dataclass(frozen=True)
class Recorded:
    """A run's records, in order of their steps. header: None in files older than it."""

    steps: list[StepRecord]
    events: list[Event]
    header: Header | None = None

    @property
    def bytes_sent(self) -> float:
        """Bytes a rank put on the wire."""
        return sum(step.report.wire_bytes for step in self.steps)

    @property
    def wire_factor(self) -> float:
        """Bytes of dense fp32 all-reduce / bytes sent; 1 if nothing was sent."""
        dense = sum(step.report.dense_wire_bytes for step in self.steps)
        return dense / self.bytes_sent if self.bytes_sent else 1.0


@dataclass(frozen=True)
class Stretch:
    """Steps first..last, all sent at `cf`, and why it was switched to."""

    first: int
    last: int
    cf: float
    reason: str


def read_records(path: Path) -> Recorded:
    """All records of a timeline file. A last line cut short by a crash is left out.

    ValueError names the file and the line that is not a record.
    """
    recorded, header = Recorded([], []), None
    with _no_collection():
        for line, value in json_lines(path, told=True):
            try:
                record = _record(value)
            except (KeyError, TypeError, AttributeError) as error:
                raise ValueError(
                    f"{path}, line {line}: not a timeline record ({error!r})"
                ) from error
            if isinstance(record, StepRecord):
                recorded.steps.append(record)
            elif isinstance(record, Header):
                header = record
            else:
                recorded.events.append(record)
    return replace(recorded, header=header)


def keep_before(path: Path, step: int) -> list[int]:
    """Drop the records of `step` and later ones, of a timeline or of metrics, and a last line that
    was cut short. The header belongs to no step, and stays.

    Returns the numbers of the lines before the last that are damaged, and dropped, too.
    """
    if not path.exists():
        return []
    kept, damaged = [], []
    lines = path.read_bytes().split(b"\n")  # a damaged byte must not hide the other lines
    for number, line in enumerate(lines, start=1):
        try:
            value = json.loads(line)
            if "kind" in value:
                _record(value)  # whoever reads the file must understand it
            if _step_of(value) < step:
                kept.append(json.dumps(value, separators=(",", ":"), allow_nan=False) + "\n")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            if number < len(lines):  # after the last line end is nothing, or a line cut short
                damaged.append(number)
    write_text(path, "".join(kept))
    return damaged


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


def json_lines(path: Path, told: bool = False) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line numbers and values of a file of JSON lines. A last line cut short is left out. told: say
    how far it is, in a long file.

    ValueError names the file and the line.
    """
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    shown = counted(lines, len(lines), f"reading {path}", "lines") if told else lines
    for number, line in enumerate(shown, start=1):
        try:
            yield number, json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines) and not text.endswith("\n"):
                return
            raise ValueError(f"{path}, line {number}: not JSON ({error})") from error


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
    return int(value["report"]["step"] if value.get("kind") == "step" else value["step"])


def _record(value: dict[str, Any]) -> StepRecord | Header | Event:
    """The record that a line of a timeline is."""
    if value["kind"] == "step":
        return _step(value)
    if value["kind"] == "header":
        return _header(value)
    event: Event = _only(Event, value)
    return event


def _step(value: dict[str, Any]) -> StepRecord:
    report = dict(value["report"])
    for name, numbers in report.items():
        if isinstance(numbers, dict) and name not in ("measurements", "layers"):
            report[name] = {_key(key): _number(number) for key, number in numbers.items()}
    report["measurements"] = {
        float(cf): _only(Measurement, measured) for cf, measured in report["measurements"].items()
    }
    report["layers"] = {name: _layer(of_it) for name, of_it in report.get("layers", {}).items()}
    status = {name: _number(number) for name, number in value["status"].items()}
    return _only(StepRecord, {**value, "report": _only(StepReport, report), "status": status})


def _layer(value: dict[str, Any]) -> LayerReport:
    steady = {float(cf): _number(gain) for cf, gain in value["steady"].items()}
    return _only(LayerReport, {**value, "steady": steady})


def _header(value: dict[str, Any]) -> Header:
    low, high = value["cf_range"]
    tables = {
        name: {_key(key): _number(number) for key, number in value[name].items()}
        for name in ("supported", "wire_bytes")
    }
    return _only(Header, {**value, **tables, "cf_range": (float(low), float(high))})


def _only(kind: Callable[..., _T], value: dict[str, Any]) -> _T:
    """Make a dataclass from the entries that it has; null is a number that is not known."""
    return kind(**{name: _number(value[name]) for name in _names(kind) if name in value})


@cache
def _names(kind: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))  # type: ignore[arg-type]


def _key(text: str) -> float | str:
    """JSON has only strings as keys; most of ours are CFs."""
    try:
        return float(text)
    except ValueError:
        return text


def _number(value: Any) -> Any:
    return nan if value is None else value
