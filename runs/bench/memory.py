"""Memory beyond DDP's own, in real gloo processes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor, Fixed
from runs.bench.timing import Row, in_processes

if TYPE_CHECKING:
    from runs.bench.command import Benching

WIDTH = 1024


def _model(layers: int) -> nn.Module:
    """Linear layers, of about a million parameters each."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))


def _peak(rank: int, layers: int, cf: float, momentum: bool) -> int:
    """Peak resident bytes of this process after a few steps; CF 0 is DDP without a hook."""
    torch.manual_seed(0)
    model = DDP(_model(layers), gradient_as_bucket_view=True)
    if cf:
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9) if momentum else None
        compressor = AdaptiveCompressor("topk", (min(cf, 10), 1000), policy=Fixed(cf=cf))
        compressor.attach(model, optimizer=optimizer)
    x = torch.randn(16, WIDTH)
    for _ in range(5):
        model.zero_grad(set_to_none=False)
        model(x).square().mean().backward()
    # Of this program alone: getrusage's figure would include the parent's at the fork.
    status = Path("/proc/self/status").read_text()
    return 1024 * next(int(x.split()[1]) for x in status.splitlines() if x.startswith("VmHWM"))


def bench_memory(asked: Benching) -> list[Row]:
    """Peak memory beyond DDP's own, in units of what is allowed."""
    nbytes = 4 * sum(p.numel() for p in _model(asked.layers).parameters())
    bucket = 25 * 1024**2
    without = in_processes(asked.workers, _peak, asked.layers, 0.0, False)
    rows = []
    for cf in (10.0, 100.0, 1000.0):
        for momentum in (False, True):
            extra = in_processes(asked.workers, _peak, asked.layers, cf, momentum) - without
            allowed = nbytes * (2 if momentum else 1) + 1.5 * bucket
            what = f"memory at CF {cf:g}, {'momentum' if momentum else 'residual'}: extra / allowed"
            detail = f"{extra / 2**20:.0f} MiB, model {nbytes / 2**20:.0f} MiB"
            rows.append(Row(what, extra / allowed, "<= 1", detail))
    return rows
