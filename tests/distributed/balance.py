"""The invariant that every distributed test of what is sent checks: sum of sent + residual = sum of
gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor, MemoryTimeline
from tests.distributed.setting import (
    Scripted,
    flat_parameters,
    local_gradients,
    loss_of,
    small_net,
)


def balance(
    rank: int,
    base: Any,
    policy: Scripted,
    steps: int,
    *,
    options: dict[str, Any] | None = None,
    ddp_options: dict[str, Any] | None = None,
    bad_at: int | None = None,
    device: str = "cpu",
    dtype: torch.dtype = torch.float64,
) -> dict[str, Any]:
    """Train. deviation: of sent + residual from the sum of the gradients, relative to the latter.

    bad_at: the step in which rank 1's gradient is NaN. What it leaves behind is what the other
    ranks have accumulated, in a compressed step; `nonfinite` says, parameter by parameter, that
    nothing of its mean was finite."""
    model = DDP(small_net(dtype).to(device), **(ddp_options or {}))
    timeline = MemoryTimeline()
    compressor = AdaptiveCompressor(
        base,
        **{"cf_range": (1, 1000), "memory": "residual", **(options or {})},
        policy=policy,
        timeline=timeline,
    ).attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sums: dict[str, Any] = {}
    sent: dict[str, Any] = {}
    nonfinite: list[bool] = []
    for step in range(steps):
        bad, own = step == bad_at, local_gradients(model, step, rank)
        optimizer.zero_grad()
        loss = loss_of(model, step, rank)
        (loss * (float("nan") if bad and rank == 1 else 1.0)).backward()
        counts = not bad or (rank != 1 and compressor.cf > 1)
        for name, gradient in own.items():
            sums[name] = sums.get(name, 0) + (gradient if counts else torch.zeros_like(gradient))
        if bad:
            nonfinite = [not bool(p.grad.isfinite().any()) for p in model.parameters()]
            continue
        for name, p in model.module.named_parameters():
            sent[name] = sent.get(name, 0) + p.grad.flatten() * dist.get_world_size()
        optimizer.step()
    memory = compressor.state_dict()["memory"]
    return {
        "deviation": max(
            _deviation(sent[name], total, memory.get(name, {})) for name, total in sums.items()
        ),
        "parameters": flat_parameters(model),
        "nonfinite": nonfinite,
        "reports": [
            (r.step, r.cf, {cf: vars(m) for cf, m in r.measurements.items()}, r.wire_bytes)
            for r in policy.reports
        ],
        "layer_cfs": [dict(record.layer_cfs) for record in timeline.steps],
    }


def _deviation(sent: torch.Tensor, total: torch.Tensor, memory: dict[str, Any]) -> float:
    residual = memory.get("residual", torch.zeros_like(total)).to(total.device)
    both = torch.stack([total, residual])
    dist.all_reduce(both)
    return float((sent + both[1] - both[0]).abs().max() / both[0].abs().max())
