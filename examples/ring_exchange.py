"""An exchange of one's own: payloads travel round a ring, from each rank to the next.

    torchrun --standalone --nproc-per-node 2 examples/ring_exchange.py

docs/own_exchange.md explains it line by line.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import (
    AdaptiveCompressor,
    Exchange,
    Fixed,
    Outgoing,
    Piece,
    Rounds,
    Strategy,
    register_exchange,
)


class Ring(Strategy):
    """Each rank hands the next one what it has got from the one before, until all have all.

    As many bytes as an all-gather, (N-1) payloads a rank, and never to any but one neighbour."""

    def rounds(self, exchange: Exchange, outgoing: Outgoing) -> Rounds:
        me, n = exchange.rank, exchange.world_size
        held = outgoing.pack()  # (bytes,), uint8
        rows = {me: held}
        for hop in range(1, n):
            held = yield exchange.pass_on(held, to=(me + 1) % n, source=(me - 1) % n)
            rows[(me - hop) % n] = held
        return outgoing.received(torch.stack([rows[rank] for rank in range(n)]))

    def nbytes(self, pieces: Sequence[Piece], ranks: int) -> float:
        return (ranks - 1) * sum(piece.nbytes for piece in pieces)

    def collectives(self, ranks: int) -> int:
        return ranks - 1


def main() -> None:
    register_exchange("ring", Ring)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(nn.Linear(100, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    compressor = AdaptiveCompressor(exchange="ring", policy=Fixed(20)).attach(model)
    generator = torch.Generator().manual_seed(1 + rank)  # other inputs on every rank
    for _ in range(60):
        inputs = torch.randn(64, 100, generator=generator)
        loss = nn.functional.cross_entropy(model(inputs), inputs[:, :10].argmax(dim=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"loss {loss.item():.2f}, CF {compressor.cf:g}")
        print(compressor.summary())
    compressor.close()
    dist.destroy_process_group()
    time.sleep(0.5)  # torch may abort if a process exits while gloo's threads are still at work


if __name__ == "__main__":
    main()
