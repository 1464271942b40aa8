"""NoLoCo: local steps, and an outer momentum that no all-reduce makes, with partners at random.

    torchrun --standalone --nproc-per-node 4 examples/noloco.py

Kolehmainen and others, "NoLoCo: No-all-reduce Low Communication Training Method for Large Models"
(2025), section 3. Rank i has slow parameters s, takes H steps of its own from there, to x, and
exchanges with one partner, another one every time. With means over the two,

    d <- momentum d + lr mean(x - s) - pull (s - mean(s));  s <- s + d;  x <- s

`lr mean(x - s) + pull mean(s)` is the mean of one message. The momentum is a rank's own, and the
last term keeps ranks together.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor, Gossip, GossipRule, Kept


class NoLoCo(GossipRule):
    """The outer step with momentum, and its three numbers."""

    keeps = ("slow", "momentum")

    def __init__(self, momentum: float = 0.5, lr: float = 0.7, pull: float = 0.9) -> None:
        self.momentum, self.lr, self.pull = momentum, lr, pull

    def begin(self, kept: Kept, here: Tensor) -> None:
        kept["slow"].copy_(here)
        kept["momentum"].zero_()

    def tell(self, kept: Kept, here: Tensor) -> Tensor:
        return self.lr * (here - kept["slow"]) + self.pull * kept["slow"]

    def mix(self, kept: Kept, here: Tensor, sent: Tensor, mean: Tensor) -> Tensor:
        kept["momentum"].mul_(self.momentum).add_(mean - self.pull * kept["slow"])
        return kept["slow"].add_(kept["momentum"])


def partners(ranks: int, rounds: int, seed: int = 0) -> Tensor:
    """Matrices (rounds, ranks, ranks) that pair ranks at random; an odd one stays alone."""
    generator = torch.Generator().manual_seed(seed)
    matrices = torch.eye(ranks, dtype=torch.float64).repeat(rounds, 1, 1)
    for matrix in matrices:
        order = torch.randperm(ranks, generator=generator).tolist()
        for i, j in zip(order[::2], order[1::2], strict=False):
            matrix[[i, i, j, j], [i, j, i, j]] = 0.5
    return matrices


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sync = Gossip(partners(dist.get_world_size(), 100), NoLoCo(), every=10)
    compressor = AdaptiveCompressor("none", sync=sync).attach(model, optimizer=optimizer)
    generator = torch.Generator().manual_seed(1 + rank)  # other inputs on every rank
    for _ in range(300):
        inputs = torch.randn(64, 100, generator=generator)
        loss = nn.functional.cross_entropy(model(inputs), inputs[:, :10].argmax(dim=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"NoLoCo: loss {loss.item():.2f}, CF {compressor.cf:g}")
        print(compressor.summary())
    compressor.close()
    dist.destroy_process_group()
    time.sleep(0.5)  # torch may abort if a process exits while gloo's threads are still at work


if __name__ == "__main__":
    main()
