"""Bytes: of a payload for each kept element, beside the fewest that any code could do with; and of
what a rank puts on the wire against the number of ranks, in real gloo processes."""

from __future__ import annotations

from math import lgamma, log

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor, Fixed
from compressors import kept, make_compressor
from compressors.wire.indices import choose_format
from runs.bench.timing import Row, in_processes

VALUES = {
    "topk": (4, "<= 6.1"),
    "topk+bf16": (2, "<= 4.1"),
    "topk+int8": (1, ""),
    "topk+int4": (0.5, "<= 2.3"),
}


def bench_wire(numel: int) -> list[Row]:
    """Bytes a kept element of the payload; the bound is log2 of the binomial, plus the values."""
    rows = []
    for size in (1_000_000, numel):
        for name, (value_bytes, goal) in VALUES.items():
            compressor = make_compressor(name)
            for cf in (10.0, 100.0, 1000.0):
                k = kept(size, cf)
                ours = compressor.payload_nbytes(size, cf) / k
                bound = bound_nbytes(size, k) / k + value_bytes
                what = f"{name} CF {cf:g} of {size / 1e6:g} M: bytes / kept element"
                detail = f"bound {bound:.2f}, {choose_format(size, k)}"
                rows.append(Row(what, ours, goal, detail))
    return rows


def bound_nbytes(numel: int, k: int) -> float:
    """Bytes that no format can beat on average: log2 of the number of subsets of `k` of `numel`
    elements, divided by 8."""
    subsets = lgamma(numel + 1) - lgamma(k + 1) - lgamma(numel - k + 1)
    return subsets / log(2) / 8


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
