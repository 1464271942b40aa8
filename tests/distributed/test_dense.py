"""At CF 1 the compressed run is the dense DDP run, whatever DDP's and the optimizer's options."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor, Fixed
from tests.distributed.processes import run_ranks
from tests.distributed.setting import Scripted, flat_parameters, loss_of, small_net

STEPS = 12


def _train(rank: int, optimizer_options: dict, ddp_options: dict, how: str) -> Tensor:
    model = DDP(small_net(), **ddp_options)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.SGD(
        [{"params": decayed}, {"params": others, "weight_decay": 0.0, "lr": 0.03}],
        **{"lr": 0.05, **optimizer_options},
    )
    if optimizer_options.get("momentum"):
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=0.1, total_steps=STEPS + 1, cycle_momentum=True
        )
    else:
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4)
    compressor = None
    if how in ("fixed", "late", "back"):
        compressor = AdaptiveCompressor("topk", (1, 10), policy=Fixed(cf=1))
    if how == "probing":
        compressor = AdaptiveCompressor("topk", (1, 10), policy=Scripted([1.0], (5.0, 10.0)))
    if compressor and how != "late":
        compressor.attach(model, optimizer=optimizer)
    for step in range(STEPS):
        if how == "late" and step == 4:  # SGD has momentum buffers by now
            compressor.attach(model, optimizer=optimizer)
        if how == "back" and step == 7:
            compressor.detach()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        if step % 3 == 0 and not model.static_graph:  # a static graph rules accumulation out
            with model.no_sync():
                loss_of(model, 100 + step, rank).backward()
        loss_of(model, step, rank).backward()
        optimizer.step()
        schedule.step()
    return flat_parameters(model)


SGD_OPTIONS = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "decay": {"momentum": 0.9, "weight_decay": 0.01},
    "nesterov": {"momentum": 0.8, "nesterov": True, "weight_decay": 0.01},
    "dampening": {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.02},
    "maximize": {"momentum": 0.9, "weight_decay": 0.01, "maximize": True, "lr": 0.001},
}


def _compare(rank: int, optimizer_options: dict, ddp_options: dict, ways: list[str]) -> dict:
    dense = _train(rank, optimizer_options, ddp_options, "off")
    return {
        how: float((_train(rank, optimizer_options, ddp_options, how) - dense).abs().max())
        for how in ways
    }


@pytest.mark.parametrize("name", SGD_OPTIONS)
def test_cf_1_equals_dense_ddp(name: str) -> None:
    ways = ["fixed", "probing", "late", "back"]
    for deviations in run_ranks(2, _compare, SGD_OPTIONS[name], {"bucket_cap_mb": 0.002}, ways):
        assert deviations == pytest.approx(dict.fromkeys(ways, 0), abs=1e-13)


@pytest.mark.parametrize(
    "ddp_options",
    [
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.002},
    ],
    ids=["static", "unused", "view"],
)
def test_cf_1_equals_dense_with_ddp_options(ddp_options: dict) -> None:
    for deviations in run_ranks(2, _compare, SGD_OPTIONS["decay"], ddp_options, ["fixed"]):
        assert deviations["fixed"] < 1e-13
