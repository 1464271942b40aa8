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


def counted(
    parts: Iterable[_T], total: int, name: str, unit: str, stream: TextIO | None = None
) -> Iterator[_T]:
    """Go through so many parts. unit: what they are, e.g. steps."""
    from runs.progress import make_bar  # torch is imported late

    out = sys.stderr if stream is None else stream
    bar = make_bar(out, total=total, desc=name, unit=f" {unit}", delay=QUIET, leave=False)
    if bar is not None:
        with bar:
            for part in parts:
                yield part
                bar.update(1)
        return
    due = time.monotonic() + QUIET
    for number, part in enumerate(parts, 1):
        now = time.monotonic()
        if now >= due:
            print(f"{name} {number} of {total} {unit}", file=out, flush=True)
            due = now + EVERY
        yield part
