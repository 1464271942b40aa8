"""Updates that wait while a schedule falls, and what moves the parameters by them after a warm
restart."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor, EveryStep, LocalSteps
from adaptive.step.synchronisation import Synchronisation
from tests.distributed.setting import Scripted, loss_of, small_net
from tests.unit.in_one_process import one_rank

CYCLE = 50


@pytest.fixture(autouse=True, scope="module")
def group() -> Iterator[None]:
    with one_rank():
        yield


@pytest.mark.parametrize(
    ("sync", "cfs", "rounds"),
    [
        (EveryStep(), [100.0] * 48 + [1.0] * 30, [0]),
        (EveryStep(), [100.0] * 47 + [4.0] * 30, [0]),  # int8: gradients are exchanged
        (LocalSteps("auto"), [100.0], [1] * 46 + [4] * 30),
    ],
    ids=["dense", "int8", "several steps"],
)
def test_momentum_takes_residuals_over_just_before_a_warm_restart(
    sync: Synchronisation, cfs: list[float], rounds: list[int]
) -> None:
    model = DDP(small_net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, CYCLE)
    policy = Scripted(cfs, local_steps=rounds)
    compressor = AdaptiveCompressor(cf_range=(1, 200), policy=policy, sync=sync)
    compressor.attach(model, optimizer=optimizer)
    losses = []
    for step in range(CYCLE + 20):
        optimizer.zero_grad()
        loss = loss_of(model, step, 0)
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
    compressor.detach()
    assert max(losses[CYCLE:]) < 2 * max(losses[CYCLE - 10 : CYCLE])
