"""The sink behind `AdaptiveCompressor(progress=True)`: how training goes, in a line on stderr."""

from __future__ import annotations

import sys
import threading
from math import isfinite
from typing import Any, TextIO

from adaptive.timeline.records import Event, StepRecord, Timeline
from policies import DENSE

SECONDS = 5.0
"""Between two plain lines."""


class ProgressTimeline(Timeline):
    """A sink that shows how training goes: a bar of tqdm on a terminal, if tqdm is there, else a
    line now and then; and each switch of CF, with its reason.

    stream: where to; None: stderr. seconds: between two plain lines.
    """

    def __init__(self, stream: TextIO | None = None, seconds: float = SECONDS) -> None:
        self._stream, self._seconds = stream, seconds
        self._bar: Any = None
        self._last: StepRecord | None = None
        self._said: float | None = None  # seconds of the run

    def step(self, record: StepRecord) -> None:
        numbers = numbers_of(record)
        first, self._last = self._last is None, record
        if first:
            self._bar = make_bar(
                self._out, desc="compressed", unit=" steps", initial=record.report.step
            )
        if self._bar is not None:
            self._bar.set_postfix(numbers, refresh=False)
            self._bar.update(1)
        elif self._said is None or record.elapsed - self._said >= self._seconds:
            self._say_step(record)

    def event(self, event: Event) -> None:
        if event.cf != event.cf_before:
            self._say(f"step {event.step}: {event.reason or 'switch'}")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        elif self._last is not None and self._said != self._last.elapsed:
            self._say_step(self._last)
        self._bar = self._last = None

    @property
    def _out(self) -> TextIO:
        return sys.stderr if self._stream is None else self._stream

    def _say_step(self, record: StepRecord) -> None:
        self._said = record.elapsed
        numbers = numbers_of(record)
        if record.report.median_seconds > 0:
            numbers["s/step"] = f"{record.report.median_seconds:.3g}"
        told = "  ".join(f"{name} {value}" for name, value in numbers.items())
        self._say(f"step {record.report.step + 1}  {told}")

    def _say(self, text: str) -> None:
        if self._bar is not None:
            self._bar.write(text, file=self._out)
        else:
            print(text, file=self._out, flush=True)


def numbers_of(record: StepRecord) -> dict[str, str]:
    """What a progress line shows of a step."""
    return {
        "CF": cf_name(record.report.cf),
        "gain": f"{record.gain:.3f}",
        "wire factor": f"{record.wire_factor:.1f}",
    }


def cf_name(cf: float) -> str:
    """ "dense" for CF 1, else the number."""
    if cf == DENSE:
        return "dense"
    return f"{cf:.4g}" if isfinite(cf) else "?"


def make_bar(stream: TextIO, **options: Any) -> Any:
    """A bar of tqdm with its options; None without a terminal, or without tqdm."""
    if not stream.isatty():
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    # Its own lock is one between processes, of which workers that end at once would leave a
    # semaphore behind.
    tqdm.set_lock(threading.RLock())
    return tqdm(file=stream, **options)
