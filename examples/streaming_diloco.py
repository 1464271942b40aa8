"""Streaming DiLoCo: a part of the model is exchanged after every few local steps, by turns.

    torchrun --standalone --nproc-per-node 2 examples/streaming_diloco.py

Douillard and others, "Streaming DiLoCo with overlapping communication" (2025), algorithm 1. The
model's parameters are dealt out to P fragments. Each fragment has an exchange after every H steps
of the ranks' own, another fragment every H / P steps, so that the link has P times fewer bytes to
carry at a time:

    d <- anchor - x;  anchor <- outer step by the mean of d;  x <- anchor      (of that fragment)

The outer step is SGD with Nesterov momentum.

To the library that is local steps of H / P, and a compressor that sends nothing of the fragments
whose turn it is not: what is not sent stays in the rank's own parameters, and its outer momentum
waits with it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor, Compressor, Fixed, LocalSteps
from compressors import Payload, Spec, split_rows


class Fragments(Compressor):
    """Sends a parameter whole in one of so many exchanges, and nothing of it in the others.

    turns: the number of each parameter's fragment, from 0, by the parameter's name."""

    name = "fragments"
    multilevel = False
    sampled = False  # a sample has no name

    def __init__(self, turns: Mapping[str, int]) -> None:
        self.turns, self.count = dict(turns), 1 + max(turns.values())

    def compress(self, x: Tensor, spec: Spec, add: Tensor | None = None) -> Payload:
        if add is not None:
            x.add_(add)
        sent = x[: self._numel(spec)]
        total, kept = (each.double().square().sum() for each in (x, sent))
        return Payload((sent,), spec, torch.stack([total, kept, total - kept]))

    def add_to(self, out: Tensor, payload: Payload, scale: float = 1.0) -> None:
        (sent,) = payload.parts
        out[: len(sent)].add_(sent, alpha=scale)

    def nbytes(self, spec: Spec) -> int:
        if spec.key.name not in self.turns:  # of an exchange on average
            return spec.numel * spec.dtype.itemsize // self.count
        return self._numel(spec) * spec.dtype.itemsize

    def read(self, data: Tensor, spec: Spec) -> list[Payload]:
        return [Payload(parts, spec) for parts in split_rows(data, (self._numel(spec), spec.dtype))]

    def nearest(self, spec: Spec) -> float:
        return float(self.count)

    def _numel(self, spec: Spec) -> int:
        """Elements that are sent: the step of a key counts exchanges."""
        has_turn = self.turns[spec.key.name] == spec.key.step % self.count
        return spec.numel if has_turn else 0

    def __repr__(self) -> str:
        return f"Fragments({self.turns})"


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(100, 100), nn.ReLU()) for _ in range(3)]
    model = DDP(nn.Sequential(*blocks, nn.Linear(100, 10)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # Two fragments, in stripes: blocks 0 and 2, and blocks 1 and 3.
    turns = {name: int(name[0]) % 2 for name, _ in model.module.named_parameters()}
    compressor = AdaptiveCompressor(
        Fragments(turns), (2, 2), policy=Fixed(2), sync=LocalSteps(10, 0.7, 0.9, overlap=0)
    ).attach(model, optimizer=optimizer)
    generator = torch.Generator().manual_seed(1 + rank)  # other inputs on every rank
    for _ in range(300):
        inputs = torch.randn(64, 100, generator=generator)
        loss = nn.functional.cross_entropy(model(inputs), inputs[:, :10].argmax(dim=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"Streaming DiLoCo: loss {loss.item():.2f}, CF {compressor.cf:g}")
        print(compressor.summary())
    compressor.close()
    dist.destroy_process_group()
    time.sleep(0.5)  # torch may abort if a process exits while gloo's threads are still at work


if __name__ == "__main__":
    main()
