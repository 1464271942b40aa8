"""Many small pieces of work on all processors, their results in order."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import TypeVar

Result = TypeVar("Result")

FEW = 50
"""Done right here, before there are others: starting them must pay, and they inherit what the work
has remembered by then."""

AT_A_TIME = 10
"""Pieces of work that a process is handed together."""

_work: Callable[[int], object]


def in_order(work: Callable[[int], Result], total: int) -> Iterator[Result]:
    """work(0), work(1), ..., work(total - 1), each as soon as those before it are there.

    Only processes that are forked know `work` without importing everything anew, which takes
    longer than hundreds of replays. They open no file and call nothing of torch.
    """
    for number in range(min(FEW, total)):
        yield work(number)
    rest = range(FEW, total)
    processes = min(_processors(), -(-len(rest) // AT_A_TIME))
    if processes < 2:
        yield from map(work, rest)
        return
    forked = multiprocessing.get_context("fork")
    with forked.Pool(processes, initializer=_begin, initargs=(work,)) as pool:
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
        try:
            yield from pool.imap(_do, rest, chunksize=AT_A_TIME)
        finally:
            signal.signal(signal.SIGTERM, before)


def _processors() -> int:
    """That may be used; 1 where forking a process that has threads is not safe."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1


def _begin(work: Callable[[int], object]) -> None:
    """In a new process. Ctrl-C goes to all; the first process ends the others, by SIGTERM."""
    global _work
    _work = work
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _do(number: int) -> object:
    return _work(number)
