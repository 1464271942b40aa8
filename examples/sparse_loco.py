"""SparseLoCo: local steps of AdamW, of which each rank sends a few elements in two bits.

    PYTHONPATH=. torchrun --standalone --nproc-per-node 2 examples/sparse_loco.py

Sarfi and others, "Communication Efficient LLM Pre-training with SparseLoCo" (2025), algorithm 1.
After H steps of its own optimizer a rank has moved by d from where all ranks stood:

    e <- decay e + d;  s = Q(top-k of each chunk of e);  e <- e - s;  x <- x - mean of s

The ranks' steps are `LocalSteps`, top-k is the sparsifier of own_sparsifier.py, the error e is the
memory of own_memory.py. Q, two bits a value, is this script's.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor, Fixed, LocalSteps
from compressors import Key, ValueFormat
from examples.own_memory import Decayed
from examples.own_sparsifier import ChunkedTopK


class TwoMeans(ValueFormat):
    """Of each value its sign, and whether its magnitude is above the mean: the values of either
    kind stand for their own mean magnitude.

    parts: two magnitudes for each tensor, and codes of four values a byte."""

    name = "two-means"

    def layout(
        self, count: int, dtype: torch.dtype, segments: tuple[int, ...] = ()
    ) -> tuple[tuple[int, torch.dtype], ...]:
        return (2, dtype), (-(-count // 4), torch.uint8)

    def encode(self, values: Tensor, key: Key) -> tuple[tuple[Tensor, ...], Tensor]:
        sizes = values.abs()
        large = sizes > sizes.sum() / max(1, len(values))
        kinds = torch.stack([~large, large])
        means = (kinds * sizes).sum(1) / kinds.sum(1).clamp(min=1)
        codes = (values < 0).to(torch.uint8) + 2 * large.to(torch.uint8)
        fours = torch.cat([codes, codes.new_zeros(-len(codes) % 4)]).view(-1, 4)
        parts = means, (fours << self._shifts(values)).sum(1, dtype=torch.uint8)
        return parts, self.decode(parts, len(values), values.dtype)

    def decode(self, parts: tuple[Tensor, ...], count: int, dtype: torch.dtype) -> Tensor:
        means, fours = parts
        codes = (fours[:, None] >> self._shifts(fours) & 3).flatten()[:count]
        sizes = torch.where(codes >= 2, means[1], means[0]).to(dtype)
        return torch.where(codes % 2 == 1, -sizes, sizes)

    def _shifts(self, like: Tensor) -> Tensor:
        return torch.arange(0, 8, 2, dtype=torch.uint8, device=like.device)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(100, 200), nn.ReLU(), nn.Linear(200, 10)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    compressor = AdaptiveCompressor(
        ChunkedTopK(values=TwoMeans()),
        policy=Fixed(64),
        sync=LocalSteps(15, overlap=0),
        memory=Decayed(0.95),
    ).attach(model, optimizer=optimizer)
    generator = torch.Generator().manual_seed(1 + rank)  # other inputs on every rank
    for _ in range(300):
        inputs = torch.randn(64, 100, generator=generator)
        loss = nn.functional.cross_entropy(model(inputs), inputs[:, :10].argmax(dim=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"SparseLoCo: loss {loss.item():.2f}, CF {compressor.cf:g}")
        print(compressor.summary())
    compressor.close()
    dist.destroy_process_group()
    time.sleep(0.5)  # torch may abort if a process exits while gloo's threads are still at work


if __name__ == "__main__":
    main()
