"""The train command: checks the job in this process, then hands it to the workers."""

from __future__ import annotations

import os
import sys
from typing import Any

from runs.parser import options
from runs.settings import (
    Compressing,
    Keeping,
    Modelling,
    Optimizing,
    PolicyArguments,
    Resuming,
    Training,
)

HELP = """\
Train a model with adaptive gradient compression, on several workers.

examples:
  python -m runs train
      a byte-level LSTM on Python's own sources, two workers, goodput over top-k
  python -m runs train --network 100mbit --steps 500
      the same as if the workers were joined by 100 Mbit/s (emulated): compression pays
  python -m runs train --cf 100
      one compression factor all along; --policy dense sends everything, and --policy ddp is
      plain DDP without the library
  python -m runs train --model gpt --optimizer adamw --warmup 30 --lr-schedule cosine --clip-grad 1
      as people train transformers: betas 0.9 0.95, weight decay 0.1
  python -m runs train --task cifar10 --data DIR --model resnet20 --policy accordion
  python -m runs train --checkpoint-every 100 --log-dir logs/mine
  python -m runs train --resume logs/mine --steps 1000
      go on where it stopped, with the same options; up to step 1000 in all
  torchrun --nproc-per-node 4 -m runs train --workers 4
      under torchrun the processes are there already; --workers may be left out

Ctrl-C stops all workers after the step they are in and saves a checkpoint (exit code 130); a
second Ctrl-C ends at once. SIGTERM and a closed terminal do as the first Ctrl-C. Wrong options
end with exit code 2, a failed worker with 1. A run that diverges, by its loss or its parameters,
stops with 3 and keeps the last checkpoint before. One whose result or last checkpoint cannot be
written, on a full disk, trains to the end and ends with 4: records that cannot be written are
dropped with a warning."""

OPTIONS = {
    "training": options(Training),
    "optimizer": options(Optimizing),
    "compression": options(Compressing),
    "policy": options(PolicyArguments),
    "output": options(Keeping),
    "resume": options(Resuming),
    "modelling": options(Modelling),
}


def main(given: dict[str, Any]) -> int:
    """Run the job; returns the exit code."""
    # torch is imported late, so that help and wrong options need not wait for it.
    from runs.job import claimed, make_job
    from runs.launch import launch
    from runs.worker import run_torchrun_worker, run_worker

    if {"RANK", "WORLD_SIZE"} <= set(os.environ):
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        return run_torchrun_worker(make_job(given, world_size), rank, world_size)
    with claimed(make_job(given, None)) as job:
        workers = "1 worker" if job.config.workers == 1 else f"{job.config.workers} workers"
        # It takes seconds, in which they import torch.
        print(f"starting {workers}", file=sys.stderr, flush=True)
        return launch(run_worker, job, job.config.workers)
