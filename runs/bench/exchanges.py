"""Bytes that a rank puts on the wire against the number of ranks, in real gloo processes."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor, Fixed
from runs.bench.processes import in_processes
from runs.bench.timing import Row

CF, WIDTH = 100.0, 512
RANKS = (2, 4, 8)


def _bytes(rank: int, base: str, exchange: str) -> float:
    """Bytes that a rank puts on the wire in a step."""
    torch.manual_seed(0)
    model = DDP(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))))
    compressor = AdaptiveCompressor(base, (CF, CF), policy=Fixed(), exchange=exchange).attach(model)
    for _ in range(3):
        model.zero_grad()
        model(torch.randn(8, WIDTH)).square().mean().backward()
    summary = compressor.summary()
    return summary.bytes_sent / summary.steps


def bench_exchanges() -> list[Row]:
    """kB a step for top-k at CF 100 of 1.05 M parameters, by exchange and number of ranks."""
    rows = []
    for base, exchange in (
        ("topk", "all_gather"),
        ("topk", "sharded"),
        ("topk", "voted_indices"),
        ("topk", "shared_indices"),
        ("randomk", "all_reduce"),
    ):
        sent = {n: in_processes(n, _bytes, base, exchange) for n in RANKS}
        detail = ", ".join(f"{n} ranks {nbytes / 1e3:.1f} kB" for n, nbytes in sent.items())
        what = f"{base} by {exchange}: bytes a rank at 8 ranks / at 2"
        goal = "<= 2" if exchange != "all_gather" else ""
        rows.append(Row(what, sent[8] / sent[2], goal, detail))
    return rows
