"""Parameters that a step does not use keep their residual to themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor, Momentum
from tests.distributed.processes import run_ranks
from tests.distributed.setting import Scripted, TwoBranches, batch, waiting


def _run(rank: int, cfs: list[float], momentum: float) -> float:
    model = DDP(TwoBranches(), find_unused_parameters=True, bucket_cap_mb=0.004)
    compressor = AdaptiveCompressor(
        "topk",
        (1, 100),
        policy=Scripted(cfs),
        memory=Momentum(masking=False) if momentum else "residual",
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
    compressor.attach(model, optimizer=optimizer)
    total: dict[str, Any] = {}
    sent: dict[str, Any] = {}
    for step in range(12):
        # Now and then a branch is unused on all ranks, and now and then on one only.
        which = [0, 1, 2, (step + rank) % 2][step % 4]
        x, y = batch(step, rank)
        names, parameters = zip(*model.module.named_parameters(), strict=True)
        loss = ((model.module(x, which) - y) ** 2).mean()
        for name, g in zip(
            names, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True
        ):
            if g is not None:
                total[name] = total.get(name, 0) + g.flatten() / (1 - momentum)
        optimizer.zero_grad()
        ((model(x, which) - y) ** 2).mean().backward()
        for name, p in model.module.named_parameters():
            if p.grad is not None:
                sent[name] = sent.get(name, 0) + p.grad.flatten() * dist.get_world_size()
        optimizer.step()
    memory = compressor.state_dict()["memory"]
    worst = 0.0
    for name, p in model.module.named_parameters():
        rest = waiting(memory.get(name, {}), momentum) + torch.zeros(p.numel(), dtype=p.dtype)
        both = torch.stack([total[name], rest])
        dist.all_reduce(both)
        worst = max(worst, float((sent[name] + both[1] - both[0]).abs().max()))
    return worst


@pytest.mark.parametrize("cfs", [[10.0], [10.0, 10.0, 1.0], [1.0]])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_nothing_is_lost_where_parameters_go_unused(cfs: list[float], momentum: float) -> None:
    assert max(run_ranks(2, _run, cfs, momentum)) < 1e-12
