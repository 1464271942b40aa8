"""Memories of one's own: a residual that fades, and EF21.

    torchrun --standalone --nproc-per-node 2 examples/own_memory.py --memory ef21

docs/own_memory.md explains them line by line.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor, Fixed, Kept, MemoryRule, register_memory


class Decayed(MemoryRule):
    """Error feedback that forgets: a = g + decay * r, and r' is what of a was not sent.

    What has waited for long is of parameters that are no more (DeMo: Peng and others 2024;
    SparseLoCo: Sarfi and others 2025)."""

    def __init__(self, decay: float = 0.95) -> None:
        self.decay = decay

    def accumulate(self, kept: Kept, grad: Tensor, cf: float) -> Tensor:
        kept["residual"].mul_(self.decay)
        return grad


class EF21(MemoryRule):
    """Differences from an estimate h that all can follow are sent, and not gradients (Richtarik,
    Sokolov and Fatkhullin 2021, algorithm 2): c = C(g - h), h' = h + c, and the optimizer gets the
    mean of h' over the ranks, the mean of h before and that of c.

    What is not sent of g - h is the next g - h but for the change of g. So the residual is g - h.
    """

    keeps = ("last", "mean")  # g of the step before, and the mean of h
    owed = False

    def accumulate(self, kept: Kept, grad: Tensor, cf: float) -> Tensor:
        change = grad - kept["last"]
        kept["last"].copy_(grad)
        return change

    def received(self, kept: Kept, mean: Tensor, cf: float) -> None:
        mean.copy_(kept["mean"].add_(mean))


def main() -> None:
    register_memory("decayed", Decayed)
    register_memory("ef21", EF21)
    parser = argparse.ArgumentParser()
    parser.add_argument("--memory", default="decayed")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(nn.Linear(100, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    compressor = AdaptiveCompressor(memory=arguments.memory, policy=Fixed(10)).attach(model)
    generator = torch.Generator().manual_seed(1 + rank)  # other inputs on every rank
    for _ in range(100):
        inputs = torch.randn(64, 100, generator=generator)
        loss = nn.functional.cross_entropy(model(inputs), inputs[:, :10].argmax(dim=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"{compressor.memory}: loss {loss.item():.2f}, CF {compressor.cf:g}")
        print(compressor.summary())
    compressor.close()
    dist.destroy_process_group()
    time.sleep(0.5)  # torch may abort if a process exits while gloo's threads are still at work


if __name__ == "__main__":
    main()
