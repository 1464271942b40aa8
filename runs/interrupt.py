"""Signals that ask a command to end: Ctrl-C, SIGTERM, and SIGHUP of a terminal that is closed.

A worker keeps a flag that the training loop looks at after each step (`Interrupt`); elsewhere a
command ends as by Ctrl-C (`raise_when_asked`).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import FrameType
from typing import Protocol

ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask a command to end."""

INTERRUPTED = 130
"""The exit code of an interrupted run, as shells have it."""

DIVERGED = 3
"""The exit code of a run that has failed by its loss or its parameters: see `Outcome.diverged`."""

UNSAVED = 4
"""The exit code of a run whose result, or last checkpoint, could not be written."""

PRUNED = 5
"""The exit code of a worker by which a trial has ended that fell behind others; and so of all."""

GOES_ON = "interrupted; the same command goes on from here"
"""What a command says in the end that goes on by itself when it is given again."""

STOPPING = "\nstopping after this step; once more ends at once\n"
"""What the first Ctrl-C is answered with."""

SAME_SIGNAL = 1.0
"""Seconds: the terminal and torchrun both deliver one Ctrl-C; what comes this soon is the same."""

Handler = Callable[[int, FrameType | None], object] | int | None


def take_signals(asked: Handler, by_terminal: Handler) -> dict[signal.Signals, Handler]:
    """Handle the signals of `ASKING`; returns their handlers before. asked: the handler of SIGTERM.
    by_terminal: the handler of the others, which a terminal sends to all of its processes. SIGHUP
    stays ignored where it is: under nohup."""
    before: dict[signal.Signals, Handler] = {}
    for number in ASKING:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            handler = asked if number == signal.SIGTERM else by_terminal
            before[number] = signal.signal(number, handler)
    return before


def give_signals_back(before: Mapping[signal.Signals, Handler]) -> None:
    """To the handlers that `take_signals` has returned."""
    for number, handler in before.items():
        signal.signal(number, handler)


def raise_when_asked() -> None:
    """From now on each of these signals raises KeyboardInterrupt, as Ctrl-C does, so that folders
    are given back and files are whole. What comes twice at once counts once, as in `Interrupt`."""
    first: float | None = None

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal first
        now = time.monotonic()
        if first is None:
            first = now
        elif number == signal.SIGHUP or now - first <= SAME_SIGNAL:
            return
        raise KeyboardInterrupt

    take_signals(stop, stop)


def say(text: str) -> None:
    """Write to stderr from a handler, where `print` may interrupt another; the terminal may be
    closed already."""
    with suppress(OSError):
        os.write(2, text.encode())


class Stop(Protocol):
    """Whatever may ask a run to stop after the step that it is in."""

    @property
    def requested(self) -> bool: ...


class Interrupt:
    """Catches the signals that ask a command to end, from now on.

    own_parent: the parent is our launcher. It gets them itself, counts them, and sends SIGTERM.
    SIGINT and SIGHUP are ignored here, since a terminal delivers them to every process. Otherwise
    (torchrun) a second signal ends this process at once. SIGHUP is never the second: a terminal and
    its shell may both deliver it.
    """

    def __init__(self, own_parent: bool) -> None:
        self.requested = False
        self._own_parent = own_parent
        self._first = 0.0
        self._before = take_signals(self._caught, signal.SIG_IGN if own_parent else self._caught)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKING)

    def restore(self) -> None:
        """Leave signals to whoever had them before."""
        give_signals_back(self._before)

    def _caught(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        again = self.requested and number != signal.SIGHUP and now - self._first > SAME_SIGNAL
        if again and not self._own_parent:
            os._exit(INTERRUPTED)
        if not self.requested:
            self.requested, self._first = True, now
