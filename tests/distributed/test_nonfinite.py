"""Non-finite gradients: as in dense DDP on every rank, and no trace of them in the memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor
from tests.distributed.processes import run_ranks
from tests.distributed.setting import Scripted, batch, loss_of, small_net


class _Poisonable(nn.Module):
    """A net whose first layer's gradient can be made non-finite, the others' not."""

    def __init__(self) -> None:
        super().__init__()
        self.net = small_net()
        self.bad = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.bad:
            self.net[0].weight.register_hook(lambda g: g * self.bad)
        return self.net(x)


def _run(rank: int, cf: float, momentum: float, bad: float) -> dict[str, Any]:
    module = _Poisonable()
    model = DDP(module, bucket_cap_mb=0.002, gradient_as_bucket_view=bool(momentum))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
    policy = Scripted([10.0, 10.0, 10.0, cf, 10.0])
    compressor = AdaptiveCompressor("topk", (1, 100), policy=policy).attach(
        model, optimizer=optimizer
    )

    def step(index: int) -> None:
        optimizer.zero_grad()
        x, y = batch(index, rank)
        ((model(x) - y) ** 2).mean().backward()

    for index in range(3):
        step(index)
        optimizer.step()
    before = compressor.state_dict()["memory"]
    module.bad = bad if rank == 1 else 1.0
    step(3)
    hit = {n: not bool(p.grad.isfinite().all()) for n, p in module.net.named_parameters()}
    after = compressor.state_dict()["memory"]
    module.bad = 0.0
    deviation = max(
        float(
            torch.as_tensor(after["net.0.weight"][kind] - before["net.0.weight"][kind]).abs().max()
        )
        for kind in before["net.0.weight"]
    )
    return {"hit": hit, "deviation": deviation, "memory": after}


@pytest.mark.parametrize("cf", [10.0, 50.0, 1.0], ids=["compressed", "another CF", "dense"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_all_ranks_end_non_finite_and_the_residual_is_untouched(
    cf: float, momentum: float, bad: float
) -> None:
    results = run_ranks(2, _run, cf, momentum, bad)
    assert results[0]["hit"] == results[1]["hit"]
    assert results[0]["hit"]["0.weight"]
    assert not results[0]["hit"]["4.weight"]  # another bucket goes on
    assert results[1]["deviation"] == 0  # exact where the NaN was
    assert results[0]["deviation"] < 1e-15  # to rounding elsewhere
    for result in results:
        for memory in result["memory"].values():
            assert all(bool(torch.as_tensor(kept).isfinite().all()) for kept in memory.values())


def _scaled(rank: int, cf: float, scale: float | None) -> dict[str, Any]:
    model = DDP(small_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    enabled = scale is not None
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=enabled)
    compressor = AdaptiveCompressor("topk", (1, 100), policy=Scripted([cf, cf, 1.0, cf]))
    compressor.attach(model, optimizer=optimizer, scaler=scaler)
    for index in range(5):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, index, rank)).backward()
        scaler.step(optimizer)
        scaler.update()
        if enabled and index == 2:
            scaler.update(64.0)  # the scale moves; the residual must not
    memory = compressor.state_dict()["memory"]
    return {
        "parameters": [p.detach() for p in model.parameters()],
        "memory": {n: m["residual"] for n, m in memory.items()},
    }


@pytest.mark.parametrize("cf", [10.0, 1.0])
def test_the_residual_is_kept_in_unscaled_units(cf: float) -> None:
    plain, scaled = run_ranks(2, _scaled, cf, None), run_ranks(2, _scaled, cf, 1024.0)
    for a, b in zip(plain, scaled, strict=True):
        torch.testing.assert_close(a["parameters"], b["parameters"])
        torch.testing.assert_close(a["memory"], b["memory"])
