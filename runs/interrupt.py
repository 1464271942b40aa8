"""Ctrl-C and SIGTERM in a worker: a flag that the training loop looks at after each step."""

from __future__ import annotations

import os
import signal
import time
from types import FrameType
from typing import Protocol

INTERRUPTED = 130
"""The exit code of an interrupted run, as shells have it."""

DIVERGED = 3
"""The exit code of a run that has failed by its loss or its parameters: see `Outcome.diverged`."""

UNSAVED = 4
"""The exit code of a run whose result, or last checkpoint, could not be written."""

GOES_ON = "interrupted; the same command goes on from here"
"""What a command says in the end that goes on by itself when it is given again."""

STOPPING = "\nstopping after this step; once more ends at once\n"
"""What the first Ctrl-C is answered with."""

SAME_SIGNAL = 1.0
"""Seconds: the terminal and torchrun both deliver one Ctrl-C; what comes this soon is the same."""


class Stop(Protocol):
    """Whatever may ask a run to stop after the step that it is in."""

    @property
    def requested(self) -> bool: ...


class Interrupt:
    """Catches SIGTERM and SIGINT from now on.

    own_parent: the parent is our launcher. It gets every Ctrl-C itself, counts them, and sends
    SIGTERM; SIGINT is ignored here, since a terminal delivers it to every process. Otherwise
    (torchrun) a second signal ends this process at once.
    """

    def __init__(self, own_parent: bool) -> None:
        self.requested = False
        self._own_parent = own_parent
        self._first = 0.0
        self._before = {
            signal.SIGTERM: signal.signal(signal.SIGTERM, self._caught),
            signal.SIGINT: signal.signal(
                signal.SIGINT, signal.SIG_IGN if own_parent else self._caught
            ),
        }
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))

    def restore(self) -> None:
        """Leave signals to whoever had them before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _caught(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.requested and not self._own_parent and now - self._first > SAME_SIGNAL:
            os._exit(INTERRUPTED)
        if not self.requested:
            self.requested, self._first = True, now
