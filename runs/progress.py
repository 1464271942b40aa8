"""What a run says while it runs, on stderr: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import sys
import time
from math import isfinite
from typing import Any, TextIO

from adaptive import StepRecord
from adaptive.timeline.progress import SECONDS, make_bar, numbers_of
from adaptive.timeline.progress import cf_name as cf_name


class Progress:
    """A progress line of a training run, printed as the steps are done.

    total: steps in all. emulated: what to say of the link, or "".
    """

    def __init__(self, total: int, emulated: str, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._total, self._emulated = total, emulated
        self._note = f"  ({emulated})" if emulated else ""
        self._bar: Any = None
        self._begun, self._said = False, 0.0

    def update(self, step: int, loss: float, record: StepRecord | None, rate: float) -> None:
        """`step` steps are done. record: the newest there is. rate: steps a second; nan if not
        known."""
        numbers = {"loss": f"{loss:.3f}"}
        if record is not None:
            numbers |= numbers_of(record)
        now = time.monotonic()
        first, self._begun = not self._begun, True
        if first:
            self._bar = make_bar(
                self._stream,
                total=self._total,
                initial=step,
                desc=self._emulated or "train",
                unit=" steps",
                dynamic_ncols=True,
            )
        if self._bar is not None:
            self._bar.set_postfix(numbers, refresh=first)
            self._bar.update(0 if first else 1)
        elif first or now - self._said >= SECONDS or step == self._total:
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


def number_text(value: float, digits: int) -> str:
    """As many digits, never with an exponent; what is as good as nothing is 0."""
    if abs(value) < 5e-5:
        return "0"
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:.0f}"
    return f"{value:#.{digits}g}"
