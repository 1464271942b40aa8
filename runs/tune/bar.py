"""A plain bar for work that has no steps of training in it; plain lines without a terminal."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

from runs.progress import SECONDS


class Bar:
    """Counts to `total` on stderr; says nothing of what is done within seconds."""

    def __init__(self, total: int, what: str, unit: str) -> None:
        self._total, self._what, self._unit = total, what, unit
        self._done, self._said = 0, time.monotonic()
        self._bar: Any = None
        if sys.stderr.isatty():
            try:
                from tqdm import tqdm
            except ImportError:
                return
            self._bar = tqdm(total=total, desc=what, unit=unit, leave=False, delay=1.0)

    def step(self) -> None:
        """One more is done."""
        self._done += 1
        if self._bar is not None:
            self._bar.update(1)
        elif time.monotonic() - self._said >= SECONDS:
            self._said = time.monotonic()
            print(f"{self._what} {self._done}/{self._total}{self._unit}", file=sys.stderr)

    def __enter__(self) -> Bar:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()
