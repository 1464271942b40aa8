"""Progress through work of many parts that may take long, on stderr: a bar on a terminal, else a
line now and then. Quick work says nothing."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TextIO, TypeVar

QUIET = 2.0
"""Seconds of work before anything is said."""
EVERY = 5.0
"""Between two plain lines."""

_T = TypeVar("_T")


def told(parts: Iterable[tuple[str, _T]], name: str, stream: TextIO | None = None) -> Iterator[_T]:
    """Go through (what it is, part)."""
    listed = list(parts)
    said = _Said(name, len(listed), "parts", sys.stderr if stream is None else stream)
    with said:
        for what, part in listed:
            said.begin(what)
            yield part
            said.end()


def counted(
    parts: Iterable[_T], total: int, name: str, unit: str, stream: TextIO | None = None
) -> Iterator[_T]:
    """Go through so many parts that have no names. unit: what they are, e.g. steps."""
    with _Said(name, total, unit, sys.stderr if stream is None else stream) as said:
        for part in parts:
            said.begin()
            yield part
            said.end()


class _Said:
    """What has been said of the parts so far."""

    def __init__(self, name: str, total: int, unit: str, stream: TextIO) -> None:
        self._name, self._total, self._unit, self._stream = name, total, f" {unit}", stream
        from adaptive.timeline.progress import make_bar  # torch is imported late

        self._bar = make_bar(
            stream, total=total, desc=name, unit=self._unit, delay=QUIET, leave=False
        )
        self._number = 0
        self._began = self._last = time.monotonic()

    def begin(self, what: str = "") -> None:
        """The next part; what: its name, if it has one."""
        self._number += 1
        if self._bar is not None:
            if what:
                self._bar.set_postfix_str(what, refresh=False)
            return
        now = time.monotonic()
        first = self._last == self._began
        if now - self._last >= (QUIET if first else EVERY):
            name = f": {what}" if what else self._unit
            text = f"{self._name} {self._number} of {self._total}{name}"
            print(text, file=self._stream, flush=True)
            self._last = now

    def end(self) -> None:
        if self._bar is not None:
            self._bar.update(1)

    def __enter__(self) -> _Said:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()
