"""What a run says while it runs, on stderr: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from adaptive import StepRecord
from adaptive.timeline.progress import SECONDS, make_bar, numbers_of
from adaptive.timeline.progress import cf_name as cf_name


class Progress:
    """A progress line of a training run, printed as the steps are done.

    first, total: steps done already and in all. emulated: what to say of the link, or "".
    """

    def __init__(
        self,
        first: int,
        total: int,
        emulated: str,
        stream: TextIO | None = None,
    ) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._total = total
        self._note = f"  ({emulated})" if emulated else ""
        self._bar = make_bar(
            self._stream,
            total=total,
            initial=first,
            desc=emulated or "train",
            unit=" steps",
            dynamic_ncols=True,
        )
        self._began = self._said = time.monotonic()
        self._first = first

    def update(self, step: int, loss: float, record: StepRecord | None) -> None:
        """`step` steps are done; `record` is the newest one there is."""
        numbers = {"loss": f"{loss:.3f}"}
        if record is not None:
            numbers |= numbers_of(record)
        if self._bar is not None:
            if step == self._first + 1:
                self._bar.unpause()  # what came before was not training
            self._bar.set_postfix(numbers, refresh=False)
            self._bar.update(1)
            return
        now = time.monotonic()
        if step == self._first + 1:
            self._began = now  # what came before was not training
        elif now - self._said >= SECONDS or step == self._total:
            rate = (step - self._first - 1) / max(now - self._began, 1e-9)
            numbers["steps/s"] = f"{rate:.1f}"
        else:
            return
        self._said = now
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
