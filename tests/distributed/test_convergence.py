"""A small real task: compressed runs learn what the dense run learns, on identical replicas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor, GraVAC
from policies import Policy
from runs.tasks import make_task
from tests.distributed.processes import run_ranks
from tests.distributed.setting import flat_parameters


def _learn(rank: int, world_size: int, steps: int, policy: Policy | None) -> dict[str, Any]:
    task = make_task("text", batch_size=4, lr=0.3)
    model = DDP(task.build_model())
    optimizer = task.optimizer(model)
    compressor = None
    if policy is not None:
        compressor = AdaptiveCompressor("topk", (10, 1000), policy=policy, network="300mbit")
        compressor.attach(model, optimizer=optimizer)
    before = task.evaluate(model) if rank == 0 else None
    for step in range(steps):
        optimizer.zero_grad()
        task.loss(model, task.batch(step, rank, world_size)).backward()
        optimizer.step()
    return {
        "before": before,
        "after": task.evaluate(model) if rank == 0 else None,
        "parameters": flat_parameters(model),
        "summary": compressor.summary() if compressor else None,
    }


@pytest.mark.long
@pytest.mark.parametrize(("world_size", "steps"), [(2, 50), (4, 30)])
def test_compressed_training_learns_a_real_task(world_size: int, steps: int) -> None:
    gravac = GraVAC(window=6, cooldown=6, allow_dense=False)
    dense, adaptive = (
        run_ranks(world_size, _learn, world_size, steps, policy) for policy in (None, gravac)
    )
    for results in (dense, adaptive):
        assert all(torch.equal(r["parameters"], results[0]["parameters"]) for r in results)
        assert results[0]["before"] > 200  # perplexity a byte of an untrained model
        assert results[0]["after"] < 40
    assert adaptive[0]["after"] < 1.5 * dense[0]["after"]
    assert adaptive[0]["summary"].switches >= 2
