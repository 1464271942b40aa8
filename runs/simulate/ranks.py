"""One function on every rank of a simulated group, a thread for each."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import torch

from runs.build import build_task
from runs.config import TrainConfig
from runs.interrupt import STOPPING, Interrupt
from runs.parser import UsageError
from runs.simulate.group import SimulatedGroup, simulated_group
from runs.tasks import Task

WATCH = 0.2
"""Seconds between two looks at whether the user wants to stop."""


class WorkerError(Exception):
    """A rank has failed, and with it the run; the cause is what it failed with."""

    def __init__(self, rank: int, cause: BaseException) -> None:
        what = " ".join(f"{type(cause).__name__}: {cause}".split())
        super().__init__(f"worker {rank} failed: {what}")


def run_ranks(
    ranks: int,
    work: Callable[[int, SimulatedGroup], Any],
    watch: Callable[[], None] = lambda: None,
) -> list[Any]:
    """work(rank, group) on each of so many ranks; what they returned.

    watch: called now and then, in this thread. WorkerError if a rank fails; the others then end
    too. Torch's global random numbers are afterwards what they were.
    """
    results: list[Any] = [None] * ranks
    with torch.random.fork_rng(devices=[]), simulated_group(ranks) as group:

        def live(rank: int) -> None:
            try:
                group.turns.begin(rank)
                # Torch has one thread a GPU for the backwards of all ranks: a rank that waits there
                # for the others would wait for ever, and nobody would know which one it is.
                with torch.autograd.set_multithreading_enabled(False):
                    results[rank] = work(rank, group)
                group.turns.end()
            except BaseException as error:  # whatever it is, the others must not wait for it
                group.turns.fail(error)

        threads = [
            threading.Thread(target=live, args=(rank,), name=f"worker-{rank}", daemon=True)
            for rank in range(ranks)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(WATCH)
                watch()
        failure = group.turns.failure
    if failure is not None:
        rank, cause = failure
        raise WorkerError(rank, cause) from cause
    return results


def simulate(
    config: TrainConfig, work: Callable[[int, Interrupt, Task, SimulatedGroup], int]
) -> int:
    """work(rank, interrupt, task, group) on each rank of a run, until Ctrl-C asks them to stop;
    rank 0's exit code, 1 after saying which worker failed. UsageError if that is what it raised."""
    torch.set_num_threads(config.threads)
    task, interrupt = build_task(config), Interrupt(own_parent=False)
    answers = iter([STOPPING])

    def answer() -> None:
        if interrupt.requested:
            print(next(answers, ""), end="", file=sys.stderr, flush=True)

    try:
        codes = run_ranks(
            config.workers, lambda rank, group: work(rank, interrupt, task, group), answer
        )
    except WorkerError as error:
        cause = error.__cause__
        if isinstance(cause, UsageError):
            raise cause from None
        traceback.print_exception(cause)
        print(f"error: {error} (traceback above); all ended", file=sys.stderr)
        return 1
    finally:
        interrupt.restore()
    return int(codes[0])
