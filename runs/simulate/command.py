"""The simulate command: checks the job, then runs all workers as threads that take turns."""

from __future__ import annotations

import argparse
import sys
import traceback
from typing import TYPE_CHECKING

from runs.config import write_text
from runs.interrupt import INTERRUPTED, STOPPING, Interrupt
from runs.parser import UsageError, fail
from runs.simulate.options import HELP, add_arguments, with_defaults

if TYPE_CHECKING:
    from runs.job import Job

__all__ = ["HELP", "add_arguments", "main"]

TRACE_FILE = "error.txt"


def main(args: argparse.Namespace) -> int:
    """Run the simulation; returns the exit code."""
    try:
        # torch is imported late, so that help and wrong options need not wait for it.
        from runs.job import claimed, make_job

        with claimed(make_job(with_defaults(vars(args)), None, simulated=True)) as job:
            return simulate(job)
    except UsageError as error:
        return fail("python -m runs simulate", error)
    except KeyboardInterrupt:
        return INTERRUPTED


def simulate(job: Job) -> int:
    """Train as the job says; the exit code, 1 after saying which worker failed.

    UsageError if that is what a worker raised."""
    import torch
    import torch.distributed as dist

    from runs.build import build_task
    from runs.simulate.ranks import WorkerError, run_ranks
    from runs.worker import Ended, run_rank

    config = job.config
    torch.set_num_threads(config.threads)
    task = build_task(config)
    interrupt = Interrupt(own_parent=False)

    def work(rank: int, group: dist.ProcessGroup) -> Ended:
        return run_rank(job, rank, interrupt, task, voters=group)

    try:
        ended = run_ranks(config.workers, work, _Answer(interrupt))
    except WorkerError as error:
        cause = error.__cause__
        if isinstance(cause, UsageError):
            raise cause from None
        path = config.folder / TRACE_FILE
        where = f"traceback in {path}"
        try:
            write_text(path, "".join(traceback.format_exception(cause)))
        except OSError as full:
            where = f"no traceback in {path}: {full.strerror}"
        print(f"error: {error}; all ended ({where})", file=sys.stderr)
        return 1
    finally:
        interrupt.restore()
    return int(ended[0].code(0))


class _Answer:
    """Says, once, that a request to stop was heard."""

    def __init__(self, interrupt: Interrupt) -> None:
        self._interrupt = interrupt
        self._told = False

    def __call__(self) -> None:
        if self._interrupt.requested and not self._told:
            self._told = True
            print(STOPPING, end="", file=sys.stderr, flush=True)
