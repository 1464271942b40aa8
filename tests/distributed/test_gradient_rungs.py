"""Beside Adam int8 and int4 send mean gradients, with their errors fed back, and sparser steps
updates. What waits is never in the wrong units, and is lost only with a gradient that is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Adam, AdamW, RMSprop

from adaptive import AdaptiveCompressor, Ladder, LocalSteps, ParameterServer
from adaptive.memory.step_watch import UNSCALED, _divided_by_a_power_of_two, _norms
from tests.distributed.processes import run_ranks
from tests.distributed.setting import (
    Scripted,
    TwoBranches,
    batch,
    flat_parameters,
    listen,
    local_gradients,
    loss_of,
    small_net,
)
from tests.distributed.test_device_path import ByStep
from tests.distributed.test_updates import Training, differs, moments

RUNGS = {4: "int8", 8: "int4"}
MAKE = {
    "adamw": lambda model: AdamW(model.parameters(), lr=0.01),
    "adam": lambda model: Adam(model.parameters(), lr=0.01, amsgrad=True),
    "rmsprop": lambda model: RMSprop(model.parameters(), lr=0.01),
}


def _ladder() -> Ladder:
    return Ladder(RUNGS, "topk+int4")


def _summed(own: Tensor) -> Tensor:
    total = own.clone()
    dist.all_reduce(total)
    return total


def _residuals(compressor: AdaptiveCompressor, model: DDP) -> Tensor:
    """All that waits on this rank, flat; zeros where nothing does."""
    kept = compressor.state_dict()["memory"]
    return torch.cat(
        [
            kept.get(name, {}).get("residual", torch.zeros(p.numel(), dtype=p.dtype))
            for name, p in model.module.named_parameters()
        ]
    )


def _balanced(rank: int, optimizer: str, cfs: list[float]) -> dict[str, Any]:
    """After each step that is not sparse: by how much what was sent and what waits differ from the
    gradients so far. After each first sparse one: by how much the gradient that autograd got
    differs from the rank's own and what waited."""
    training = Training(MAKE[optimizer], ByStep(cfs), base=_ladder(), cf_range=(10, 100))
    model, compressor = training.model, training.compressor
    due = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    balance, folded, waited = [], [], torch.zeros_like(due)
    for step, cf in enumerate(cfs):
        own = torch.cat([*local_gradients(model, step, rank).values()])
        training.optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        found = torch.cat([p.grad.flatten() for p in model.parameters()])
        training.optimizer.step()
        if cf > 8:
            folded.append(float((found - own - waited).abs().max()))
            due.zero_()
            waited = torch.zeros_like(due)
            continue
        due += _summed(own) - 2 * found
        waited = _residuals(compressor, model)
        balance.append(float((due - _summed(waited)).abs().max()))
    apart = differs([flat_parameters(model)])
    return {"balance": max(balance), "folded": max(folded, default=0.0), "apart": apart}


@pytest.mark.parametrize("optimizer", ["adamw", "adam"])
def test_sent_and_waiting_are_all_gradients(optimizer: str) -> None:
    cfs = [8.0, 8.0, 4.0, 1.0, 4.0, 8.0, 20.0, 20.0, 8.0, 8.0, 1.0, 1.0, 8.0, 10.0, 4.0]
    for found in run_ranks(2, _balanced, optimizer, cfs):
        assert found["balance"] < 1e-14
        assert found["folded"] < 1e-14
        assert found["apart"] == 0.0


def _beside_plain_error_feedback(rank: int, optimizer: str, exchange: str) -> float:
    """By how much a run of int4 alone is apart from one with memory="residual"."""
    flats = []
    for memory in ("auto", "residual"):
        options = {"base": "int4", "memory": memory, "exchange": exchange, "cf_range": (8, 8)}
        training = Training(MAKE[optimizer], ByStep([8.0]), **options).train(rank, 0, 12)
        flats.append(torch.cat([training.flat, *map(torch.flatten, moments(training))]))
    return float((flats[0] - flats[1]).abs().max())


@pytest.mark.parametrize("exchange", ["all_gather", "sharded"])
def test_a_run_of_int4_is_one_of_plain_error_feedback(exchange: str) -> None:
    assert run_ranks(2, _beside_plain_error_feedback, "adamw", exchange) == [0.0, 0.0]


def test_an_optimizer_without_a_first_moment_sends_updates_all_along() -> None:
    assert min(run_ranks(2, _beside_plain_error_feedback, "rmsprop", "all_gather")) > 0


def _of_the_second_branch(rank: int, cfs: list[float], used: list[int]) -> list[Tensor]:
    """What waits for it after each step; some steps leave it unused on all ranks."""
    model = DDP(TwoBranches(), find_unused_parameters=True, bucket_cap_mb=0.004)
    optimizer = AdamW(model.parameters(), lr=0.01)
    compressor = AdaptiveCompressor(_ladder(), (10, 100), policy=ByStep(cfs))
    compressor.attach(model, optimizer=optimizer)
    kept = []
    for step, which in enumerate(used):
        x, y = batch(step, rank)
        optimizer.zero_grad()
        (model(x, which) - y).square().mean().backward()
        optimizer.step()
        kept.append(_residuals(compressor, model).split(flat_parameters(model).numel() // 2)[1])
    return kept


def test_what_waits_for_an_unused_parameter_stays() -> None:
    for kept in run_ranks(2, _of_the_second_branch, [8.0], [2, 0, 0, 2]):
        assert torch.equal(kept[0], kept[2])
        assert not torch.equal(kept[3], kept[0])


def _scaled(rank: int, cfs: list[float]) -> list[float]:
    """With a loss scale that was not handed over: how far each step moves the model."""
    model = DDP(small_net(torch.float32), bucket_cap_mb=0.004)
    optimizer = AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    AdaptiveCompressor(_ladder(), (10, 100), policy=ByStep(cfs)).attach(model, optimizer=optimizer)
    moved = []
    for step in range(len(cfs)):
        before = flat_parameters(model).clone()
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step, rank)).backward()
        scaler.step(optimizer)
        scaler.update()
        moved.append(float((flat_parameters(model) - before).abs().max()))
    return moved


def _warned(rank: int, cf: float) -> list[str]:
    told = listen()
    _scaled(rank, [cf] * 4)
    return [line for line in told if UNSCALED in line]


@pytest.mark.parametrize("cf", [8.0, 20.0, 2.0, 1.0])
def test_a_loss_scale_that_was_not_handed_over_is_told_of(cf: float) -> None:
    """Where gradients wait, which would stay in its units. Updates have none."""
    first, other = run_ranks(2, _warned, cf)
    assert (len(first), other) == (int(cf == 8.0), [])


@pytest.mark.parametrize(
    ("factor", "scaler"), [(2.0**-16, True), (0.5, True), (0.5 * (1 + 4e-6), False), (2.0, False)]
)
def test_clipping_that_comes_near_a_power_of_two_is_taken_for_no_scaler(
    factor: float, scaler: bool
) -> None:
    """One clipped step in 50,000 comes as near as that, and long runs have more."""
    parameters = [*small_net(torch.float32).parameters()]
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(0))
    before = torch.stack([*_norms(parameters).values()])
    for p in parameters:
        p.grad.mul_(factor)
    after = torch.stack([*_norms(parameters).values()])
    assert bool(_divided_by_a_power_of_two(before, after)) is scaler


def test_what_waits_in_the_units_of_a_loss_scale_is_unscaled_with_a_gradient() -> None:
    for moved in run_ranks(2, _scaled, [8.0, 8.0, 8.0, 20.0, 20.0, 8.0, 20.0]):
        assert 0 < min(moved) <= max(moved) < 0.5


def _after_rounds(rank: int) -> float:
    """Rounds of several steps, of which the ranks have agreed in the middle, then of one: how far
    what autograd gets in the first of these is from the rank's own gradient."""
    policy = Scripted([20.0], local_steps=[2, 2, 2, 1])
    model = DDP(small_net(), bucket_cap_mb=0.004)
    optimizer = AdamW(model.parameters(), lr=0.01)
    compressor = AdaptiveCompressor(_ladder(), (10, 100), policy=policy, sync=LocalSteps("auto"))
    compressor.attach(model, optimizer=optimizer)
    apart = 0.0
    for step in range(24):
        own = torch.cat([*local_gradients(model, step, rank).values()])
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        found = torch.cat([p.grad.flatten() for p in model.parameters()])
        apart = max(apart, float((found - own).abs().max()))
        optimizer.step()
        if step == 4:
            compressor.state_dict(checkpoint="gathered")
    assert len(policy.reports) > 6
    return apart


def test_updates_that_wait_are_never_taken_for_gradients() -> None:
    assert run_ranks(2, _after_rounds) == [0.0, 0.0]


def test_gradients_that_wait_are_never_taken_for_updates() -> None:
    """Updates are exchanged again when no rank uses the branch."""
    for kept in run_ranks(2, _of_the_second_branch, [8.0, 8.0, 20.0, 20.0], [2, 2, 0, 0]):
        assert kept[1].abs().max() > 0
        assert not torch.equal(kept[3], kept[1])


def _on_a_server(rank: int) -> bool:
    """Whether a server's own memory keeps to updates."""
    exchange = ParameterServer(own_memory=True)
    options = {"base": _ladder(), "cf_range": (10, 100), "exchange": exchange}
    training = Training(MAKE["adamw"], ByStep([8.0]), **options)
    own = torch.cat([*local_gradients(training.model, 0, rank).values()])
    training.train(rank, 0, 1)
    found = torch.cat([p.grad.flatten() for p in training.model.parameters()])
    return torch.equal(own, found)


def test_a_servers_own_memory_is_of_updates() -> None:
    assert run_ranks(2, _on_a_server) == [True, True]
