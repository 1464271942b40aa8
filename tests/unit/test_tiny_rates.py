"""Learning rates so small that float32 has no number for 1 / lr, as at the end of an exponential
schedule: plain DDP stands still, and so do ranks that step by themselves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor, EveryStep, LocalSteps
from adaptive.step.synchronisation import Synchronisation
from tests.distributed.setting import Scripted, flat_parameters
from tests.unit.device_path import device_path
from tests.unit.in_one_process import Given, one_rank

SHAPES = ((8, 12), (40,), (3,))
RATES = (1e-3, 1e-30, 1e-38, 2e-39, 1e-42, 1e-45, 0.0)


@pytest.fixture(autouse=True, scope="module")
def group() -> Iterator[None]:
    with one_rank():
        yield


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("as_tensor", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("sync", [EveryStep(), LocalSteps("auto")], ids=["one", "several"])
def test_a_rate_that_vanishes_moves_nothing_and_spoils_nothing(
    on_device: bool, as_tensor: bool, groups: int, sync: Synchronisation
) -> None:
    with device_path() if on_device else nullcontext():
        model = DDP(Given(SHAPES))
        own = [*model.parameters()]
        with torch.no_grad():
            own[0].zero_()  # which any step moves, however small
        split = [own] if groups == 1 else [own[:1], own[1:]]
        rates = [torch.tensor(1.0) if as_tensor else 1.0 for _ in split]
        groups_of = [{"params": p, "lr": lr} for p, lr in zip(split, rates, strict=True)]
        optimizer = torch.optim.AdamW(groups_of)
        local_steps = (0,) if isinstance(sync, EveryStep) else (1, 2, 2, 1)
        policy = Scripted([10.0, 100.0, 10.0, 1.0], local_steps=local_steps)
        compressor = AdaptiveCompressor(cf_range=(1, 100), policy=policy, sync=sync)
        compressor.attach(model, optimizer=optimizer)
        ends = []
        for rate in RATES:
            for i, group in enumerate(optimizer.param_groups):
                lr = rate * (1 + i)
                group["lr"] = group["lr"].fill_(lr) if as_tensor else lr
            for step in range(8):
                made = torch.Generator().manual_seed(step)
                model([torch.randn(shape, generator=made) for shape in SHAPES]).backward()
                optimizer.step()
                optimizer.zero_grad()
            ends.append(flat_parameters(model))
        for kept in compressor.state_dict()["memory"].values():
            assert kept["residual"].isfinite().all()
        compressor.detach()
        torch.testing.assert_close(flat_parameters(model), ends[0], rtol=1e-6, atol=1e-20)
        assert (ends[0] != 0).all()
