"""Nothing of a run is left once its script has let go of it."""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import optimizer as torchs

from adaptive import AdaptiveCompressor, Delayed, LocalSteps
from tests.distributed.processes import run_ranks
from tests.distributed.setting import Scripted, loss_of, small_net


def _hooks() -> int:
    return len(torchs._global_optimizer_pre_hooks) + len(torchs._global_optimizer_post_hooks)


def _run(rank: int, end: str, options: dict[str, Any]) -> list[weakref.ref[Any]]:
    model = DDP(small_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    compressor = AdaptiveCompressor(policy=Scripted([10.0]), **options)
    compressor.attach(model, optimizer=optimizer)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        optimizer.step()
    if end == "close":
        compressor.close()
    elif end == "detach":
        compressor.detach()
    return [weakref.ref(each) for each in (model, compressor, optimizer, model.module)]


def _left(rank: int, end: str) -> tuple[list[str], int]:
    """What is alive of several runs, and how many global hooks are left."""
    before, refs = _hooks(), []
    for options in OPTIONS.values():
        refs += _run(rank, end, options)
    deadline = time.monotonic() + 20  # a thread of the process group may be at work still
    while True:
        gc.collect()
        left = [type(each).__name__ for ref in refs if (each := ref()) is not None]
        if (not left and _hooks() == before) or time.monotonic() > deadline:
            return left, _hooks() - before
        time.sleep(0.05)


OPTIONS: dict[str, dict[str, Any]] = {
    "momentum": {},
    "residual": {"memory": "residual"},
    "updates": {"memory": "updates"},
    "local steps": {"sync": LocalSteps(2)},
    "delay": {"sync": Delayed(1)},
}


@pytest.mark.parametrize("end", ["close", "detach", "nothing"])
def test_models_compressors_and_optimizers_are_freed(end: str) -> None:
    assert run_ranks(2, _left, end) == [([], 0)] * 2
