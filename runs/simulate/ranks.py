"""One function on every rank of a simulated group, a thread for each."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from runs.simulate.group import SimulatedGroup, simulated_group

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
