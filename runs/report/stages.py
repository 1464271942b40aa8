"""Progress through work of several parts that may take long, on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TextIO, TypeVar

QUIET = 2.0
"""Seconds of work before anything is said."""
EVERY = 5.0
"""Between two plain lines."""

_T = TypeVar("_T")


def told(parts: Iterable[tuple[str, _T]], name: str, stream: TextIO | None = None) -> Iterator[_T]:
    """Go through (what it is, part): a bar on a terminal, elsewhere a line now and then.

    Quick work says nothing.
    """
    listed = list(parts)
    out = sys.stderr if stream is None else stream
    bar = _bar(listed, name, out)
    began = said = time.monotonic()
    for number, (what, part) in enumerate(listed, start=1):
        now = time.monotonic()
        if bar is not None:
            bar.set_postfix_str(what, refresh=False)
        elif now - began >= QUIET and (said == began or now - said >= EVERY):
            print(f"{name} {number} of {len(listed)}: {what}", file=out, flush=True)
            said = now
        yield part
        if bar is not None:
            bar.update(1)
    if bar is not None:
        bar.close()


def _bar(parts: Sequence[object], name: str, stream: TextIO):  # type: ignore[no-untyped-def]
    if not stream.isatty():
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(total=len(parts), desc=name, file=stream, delay=QUIET, leave=False)
