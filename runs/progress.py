"""What a run says while it runs, on stderr: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import sys
import threading
import time
from math import isfinite
from typing import Any, TextIO

from adaptive import StepRecord
from policies import DENSE

SMALL = 5e-5
"""Below, a number of seconds and the like is as good as nothing."""

SECONDS = 5.0
"""Between two plain lines."""


class Progress:
    """A progress line of a training run, printed as the steps are done.

    total: steps in all. name: of the bar, or "". note: in brackets at the end of each line, or "".
    quiet: no lines of steps, and no bar is left.
    """

    def __init__(
        self,
        total: int,
        name: str,
        note: str = "",
        stream: TextIO | None = None,
        quiet: bool = False,
    ) -> None:
        self.quiet = quiet
        self._stream = sys.stderr if stream is None else stream
        self._total, self._name = total, name
        self._note = f"  ({note})" if note else ""
        self._bar: Any = None
        self._begun, self._said = False, 0.0

    def update(self, step: int, loss: float, record: StepRecord | None, rate: float) -> None:
        """`step` steps are done. record: the newest there is. rate: steps a second; nan if not
        known."""
        numbers = {"loss": f"{loss:.3f}"}
        if record is not None:
            numbers["CF"] = cf_name(record.report.cf)
            numbers["gain"] = f"{record.gain:.3f}"
            numbers["wire factor"] = f"{record.wire_factor:.1f}"
        now = time.monotonic()
        first, self._begun = not self._begun, True
        if first:
            self._bar = make_bar(
                self._stream,
                total=self._total,
                initial=step,
                desc=self._name or "train",
                unit=" steps",
                leave=not self.quiet,
                dynamic_ncols=True,
            )
        if self._bar is not None:
            self._bar.set_postfix(numbers, refresh=first)
            self._bar.update(0 if first else 1)
        elif not self.quiet and (first or now - self._said >= SECONDS or step == self._total):
            self._said = now
            if isfinite(rate):
                numbers["steps/s"] = number_text(rate, 3)
            text = "  ".join(f"{name} {value}" for name, value in numbers.items())
            self.say(f"step {step:>{len(str(self._total))}}/{self._total}  {text}")

    def say(self, text: str) -> None:
        """A line of its own, above the bar."""
        if self._bar is not None:
            self._bar.write(text + self._note, file=self._stream)
        else:
            print(text + self._note, file=self._stream, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def time_left(seconds: float, done: float, to_do: float) -> str:
    """ ", about 50 min left", if so much of it took so many seconds; "" before anything is done."""
    if not (done > 0 and to_do > 0):
        return ""
    left = seconds / done * to_do
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if left >= 1.5 * size:
            return f", about {left / size:.2g} {unit} left"
    return f", about {max(1, round(left))} s left"


def number_text(value: float, digits: int) -> str:
    """As many digits, never with an exponent; what is as good as nothing is 0."""
    if abs(value) < SMALL:
        return "0"
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:.0f}"
    return f"{value:#.{digits}g}"


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
