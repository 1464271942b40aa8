"""Parameters that a step does not use keep their residual to themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor, Delayed, Fixed, Gossip, LocalSteps, Momentum
from tests.distributed.processes import run_ranks
from tests.distributed.setting import (
    Scripted,
    TwoBranches,
    batch,
    flat_parameters,
    loss_of,
    small_net,
    waiting,
)


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


def _off_ddp(rank: int, to_none: bool, alike: bool, views: bool) -> float:
    """How far a run at CF 1 ends from plain DDP, as a share of the way. to_none: gradients are
    cleared to None, not to zeros. alike: all ranks use the same branch in a step."""
    ends = []
    for compresses in (False, True):
        net = TwoBranches()
        start = flat_parameters(net)
        options = {"find_unused_parameters": True, "gradient_as_bucket_view": views}
        model = DDP(net, bucket_cap_mb=0.004, **options)
        optimizer = torch.optim.SGD(
            model.parameters(), lr=0.02, momentum=0.9, weight_decay=0.01, nesterov=views
        )
        if compresses:
            compressor = AdaptiveCompressor(cf_range=(1, 100), policy=Scripted([1.0]))
            compressor.attach(model, optimizer=optimizer)
        for step in range(20):
            optimizer.zero_grad(set_to_none=to_none)
            x, y = batch(step, rank)
            which = [2, 0, 0, 1, 2, 1][step % 6] if alike else (step + rank) % 2
            ((model(x, which) - y) ** 2).mean().backward()
            optimizer.step()
        ends.append(flat_parameters(model))
    plain, ours = ends
    return float((ours - plain).norm() / (plain - start).norm())


def _all_off_ddp(rank: int) -> list[float]:
    kinds = [(False, True), (False, False), (True, True)]
    return [_off_ddp(rank, *kind, views) for kind in kinds for views in (False, True)]


def test_momentum_moves_what_goes_unused_as_under_ddp() -> None:
    """SGD moves a parameter whose gradient is zero, and leaves one alone whose gradient is None."""
    for found in run_ranks(2, _all_off_ddp):
        assert max(found) < 1e-12


def _unfrozen(rank: int, sync: Any) -> str:
    """Parameters that were frozen when the compressor was attached, though not when DDP was."""
    model = DDP(small_net(), find_unused_parameters=True)
    model.module[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    compressor = AdaptiveCompressor(policy=Fixed(10), sync=sync)
    compressor.attach(model, optimizer=optimizer)
    model.module[0].requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"DDP reduces 0\.weight, which was not to be") as caught:
        loss_of(model, 0, rank).backward()
    return str(caught.value)


@pytest.mark.parametrize("sync", [LocalSteps(2), Delayed(2), Gossip("ring")], ids=str)
def test_ranks_do_not_part_by_what_is_unfrozen_after_attach(sync: Any) -> None:
    assert all("or for a time after attach()" in said for said in run_ranks(2, _unfrozen, sync))
