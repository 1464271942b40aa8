"""A training script as users write them, for `docs.studies.doctor`: DDP, an optimizer, a loop; and
with --cf the default AdaptiveCompressor, held at that CF."""

from __future__ import annotations

import argparse
import json
import time
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor, Goodput, Plan

SETTLING = 6
"""Steps that are not timed."""


class At(Goodput):
    """The default policy once it stays at a CF, with all that it measures."""

    cf = 1.0

    def plan(self) -> Plan:
        return Plan(self.cf)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--cf", type=float, help="compress all along by so much")
    parser.add_argument("--optimizer", default="sgd")
    parser.add_argument("--out", help="file for the median of the seconds of a step")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, width = dist.get_rank(), options.width
    torch.manual_seed(0)
    layers = [nn.Linear(256, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    model = DDP(nn.Sequential(*layers, nn.Linear(width, 256)))
    if options.optimizer == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(
            model.parameters(), lr=0.05, momentum=0.9
        )
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if options.cf is not None:
        policy = At()
        policy.cf = options.cf
        AdaptiveCompressor(policy=policy).attach(model, optimizer=optimizer)
    generator = torch.Generator().manual_seed(rank)
    teacher = torch.randn(256, 256, generator=torch.Generator().manual_seed(99)) / 16
    ends = []
    for _ in range(options.steps):
        inputs = torch.randn(32, 256, generator=generator)
        loss = (model(inputs) - (inputs @ teacher).tanh()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ends.append(time.perf_counter())
    if options.out and rank == 0:
        seconds = [after - before for before, after in pairwise(ends)]
        Path(options.out).write_text(json.dumps(median(seconds[SETTLING - 1 :])))
    dist.destroy_process_group()
    time.sleep(0.5)  # torch may abort if a process exits while gloo's threads are still at work


if __name__ == "__main__":
    main()
