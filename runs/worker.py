"""One worker process, from the process group's start to its end; rank 0 also reports."""

from __future__ import annotations

import os
import sys
import time
from contextlib import ExitStack
from functools import partial
from multiprocessing import parent_process
from typing import TextIO

import torch
import torch.distributed as dist

from runs.checkpoint import raise_on_all
from runs.config import TrainConfig
from runs.interrupt import DIVERGED, INTERRUPTED, UNSAVED, Interrupt
from runs.job import Job, claimed
from runs.logbook import Logbook
from runs.parser import UsageError
from runs.result import header, make_report
from runs.tasks import Task
from runs.train import train


def run_worker(job: Job, rank: int, world_size: int, init_method: str) -> int:
    """Train as one of `world_size` ranks; returns the exit code, see `run_rank`."""
    interrupt = join(job.config.threads, rank, world_size, init_method)
    code = run_rank(job, rank, interrupt)
    dist.destroy_process_group()
    return code


def run_torchrun_worker(job: Job, rank: int, world_size: int) -> int:
    """The same in a process of torchrun's: there is no launcher that has claimed the folder, so
    rank 0 does, and tells the others which it is. job: as this rank has understood the command."""
    interrupt = join(job.config.threads, rank, world_size, "env://")
    with ExitStack() as held:
        agreed, problem = [job], ""
        if rank == 0:
            try:
                agreed = [held.enter_context(claimed(job))]
            except UsageError as error:
                problem = str(error)
        raise_on_all(problem)
        dist.broadcast_object_list(agreed, src=0)
        code = run_rank(agreed[0], rank, interrupt)
        dist.destroy_process_group()
        time.sleep(0.5)  # torch may abort if a process exits while gloo's threads are still at work
        return code


def run_rank(
    job: Job,
    rank: int,
    interrupt: Interrupt,
    task: Task | None = None,
    voters: dist.ProcessGroup | None = None,
) -> int:
    """Train as that rank of the default group, and if it is 0 keep the run's files and report. The
    exit code of that rank's process: what has gone wrong is rank 0's to say, which needs time for
    it, and a failure of another would cut that short.

    task, voters: see `train`."""
    config, checkpoint = job.config, job.checkpoint
    logbook = None
    if rank == 0:
        first = checkpoint.step if checkpoint is not None else 0
        # Not before a checkpoint was found to be good: what is said has happened.
        heading = partial(print, header(config, first), file=output(config), flush=True)
        logbook = Logbook(config, first, opened=heading)
    try:
        outcome = train(
            config,
            checkpoint=checkpoint,
            interrupt=interrupt,
            logbook=logbook,
            task=task,
            voters=voters,
        )
    finally:
        if logbook is not None:
            logbook.close()
    if logbook is not None:
        saved = make_report(config, outcome, logbook, output(config))
        if outcome.diverged:
            return DIVERGED
        if not saved:
            return UNSAVED
    return INTERRUPTED if outcome.interrupted else 0


def join(threads: int, rank: int, world_size: int, init_method: str) -> Interrupt:
    """Enter the process group; what asks this worker to stop."""
    interrupt = Interrupt(own_parent=parent_process() is not None)
    torch.set_num_threads(threads)
    if init_method.startswith("file:") and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # whatever this host's name means
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world_size)
    return interrupt


def output(config: TrainConfig) -> TextIO:
    """Where text for people goes: stdout, unless that is for JSON."""
    return sys.stderr if config.json else sys.stdout
