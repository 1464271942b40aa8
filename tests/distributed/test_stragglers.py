"""Ranks of unequal speed and unequal data plan alike in every step."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor
from policies import Accordion, Goodput, GraVAC, Plan, Policy
from tests.distributed.processes import run_ranks
from tests.distributed.setting import batch, flat_parameters, small_net

STEPS = 24
COMPUTE = 0.002
"""Seconds of a step on the fast ranks."""

POLICIES: dict[str, Callable[[], Policy]] = {
    "gravac": lambda: GraVAC(window=6, dense_window=3, omega=0.2),
    "goodput": lambda: Goodput(goal="time", opening=4, cooldown=3),
    # two intervals show that the regime is not critical
    "accordion": lambda: Accordion(interval=5, eta=1e9),
}


def _pause(kind: str, rank: int, last: int, luck: random.Random) -> float:
    """Seconds of compute in one step: the last rank takes three times as long, or now and then
    any rank takes ten times as long, in bursts of its own."""
    if kind == "slow":
        return COMPUTE * (3 if rank == last else 1)
    return COMPUTE * (10 if luck.random() < 0.15 else 1)


def _all(rank: int, world_size: int) -> dict[str, Any]:
    """Plans and final parameters by policy and kind of trouble."""
    found = {}
    for kind in ("slow", "comes and goes"):
        for name, make in POLICIES.items():
            found[f"{name}, {kind}"] = _train(rank, world_size, kind, make())
    return found


def _train(rank: int, world_size: int, kind: str, policy: Policy) -> dict[str, Any]:
    model = DDP(small_net(torch.float32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    compressor = AdaptiveCompressor(
        "topk",
        (4, 100),
        policy=policy,
        exchange="sharded",
        network="10gbit" if policy.name == "goodput" else "50mbit",
    ).attach(model, optimizer=optimizer)
    luck = random.Random(rank)
    assert compressor._session is not None
    plans: list[Plan] = []
    for step in range(STEPS):
        time.sleep(_pause(kind, rank, world_size - 1, luck))
        optimizer.zero_grad()
        x, y = batch(step, rank, torch.float32)
        ((model(x * 3**rank) - y * (rank + 1)) ** 2).mean().backward()
        plans.append(compressor._session.controller.plan)
        optimizer.step()
    return {"plans": plans, "parameters": flat_parameters(model)}


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_plans_are_identical_on_all_ranks_at_each_step(world_size: int) -> None:
    results = run_ranks(world_size, _all, world_size)
    # What moves, and when, follows times of a machine that may be busy; that most move does not.
    moved = [name for name, mine in results[0].items() if len({p.send for p in mine["plans"]}) > 1]
    assert len(moved) > len(results[0]) // 2, f"only {moved} moved"
    for setting, mine in results[0].items():
        assert len(mine["plans"]) == STEPS
        for other in results[1:]:
            assert other[setting]["plans"] == mine["plans"], setting
            assert torch.equal(other[setting]["parameters"], mine["parameters"]), setting
