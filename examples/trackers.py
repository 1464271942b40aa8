"""The compressor's numbers in an experiment tracker: Weights & Biases, MLflow, or standard output.

    torchrun --standalone --nproc-per-node 2 examples/trackers.py --tracker wandb

Any function `log(numbers, step)` is enough for a tracker: `LogTimeline` calls it on rank 0.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor, Event, LogTimeline, Warmup

Log = Callable[[dict[str, float], int], object]


def tracker(name: str) -> Log:
    """A function that logs numbers of a step. Called on rank 0 only: it opens a run."""
    if name == "wandb":
        import wandb

        run = wandb.init(project="adaptive-compression")
        # Log your own numbers with the same step, or without a step: W&B drops earlier steps.
        return lambda numbers, step: run.log(numbers, step=step)
    if name == "mlflow":
        import mlflow

        mlflow.start_run()
        return lambda numbers, step: mlflow.log_metrics(numbers, step=step)
    return lambda numbers, step: print(f"step {step}: {numbers}", flush=True)


class Tracked(LogTimeline):
    """Also prints each switch of CF, with its reason."""

    def event(self, event: Event) -> None:
        why = event.reason.partition("\n")[0]  # what follows is its arithmetic
        print(f"step {event.step}: CF {event.cf_before:g} -> {event.cf:g}: {why}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tracker", choices=("print", "wandb", "mlflow"), default="print")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--interval", type=int, help="steps between two that are logged")
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    timeline = Tracked(tracker(arguments.tracker), arguments.interval) if rank == 0 else None
    compressor = AdaptiveCompressor(cf_range=(10, 100), policy=Warmup(steps=10), timeline=timeline)
    compressor.attach(model, optimizer=optimizer)

    teacher = torch.randn(64, 8)  # the same on all ranks, by the seed above
    generator = torch.Generator().manual_seed(1 + rank)  # other inputs on every rank
    for _ in range(arguments.steps):
        inputs = torch.randn(32, 64, generator=generator)
        loss = nn.functional.mse_loss(model(inputs), inputs @ teacher)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    compressor.close()  # logs the last numbers, before the tracker's run ends
    dist.destroy_process_group()
    time.sleep(0.5)  # torch may abort if a process exits while gloo's threads are still at work


if __name__ == "__main__":
    main()
