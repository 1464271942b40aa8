"""The train command: checks the job in this process, then hands it to the workers."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping

from runs.options import HELP, add_arguments
from runs.parser import UsageError, fail

__all__ = ["HELP", "add_arguments", "main"]

SAY = 5.0
"""Seconds that the first worker under torchrun gets to say what is wrong."""


def main(args: argparse.Namespace) -> int:
    """Run the job; returns the exit code."""
    torchrun = {"RANK", "WORLD_SIZE"} <= set(os.environ)
    try:
        return _as_torchrun_worker(args, os.environ) if torchrun else _launch(args)
    except UsageError as error:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(SAY)  # the first worker says it; torchrun ends all when one has ended
            return 2
        return fail("python -m runs train", error)
    except KeyboardInterrupt:
        return 130


# torch is imported late, so that help and wrong options need not wait for it.


def _launch(args: argparse.Namespace) -> int:
    from runs.job import claimed, make_job
    from runs.launch import launch
    from runs.worker import run_worker

    with claimed(make_job(vars(args), None)) as job:
        workers = "1 worker" if job.config.workers == 1 else f"{job.config.workers} workers"
        # It takes seconds, in which they import torch.
        print(f"starting {workers}", file=sys.stderr, flush=True)
        return launch(run_worker, job, job.config.workers)


def _as_torchrun_worker(args: argparse.Namespace, environment: Mapping[str, str]) -> int:
    from runs.job import make_job
    from runs.worker import run_torchrun_worker

    rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    return run_torchrun_worker(make_job(vars(args), world_size), rank, world_size)
