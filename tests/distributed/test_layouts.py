"""What is kept of a bucket from step to step: its layout, the units and the runs."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor, Residual
from adaptive.exchange.bucket import Granularity
from adaptive.exchange.bucket_memory import BucketMemory
from adaptive.memory.momentum import RESTING
from adaptive.step.config import RUNGS
from adaptive.step.reducer import Reducer
from compressors.ladder import Ladder
from tests.distributed.processes import run_ranks
from tests.distributed.setting import Scripted, TwoBranches, batch, flat_parameters, same

CFS = [20.0, 20.0, 20.0, 50.0, 20.0, 1.0, 20.0, 1.0, 20.0, 20.0, 20.0, 20.0]
STEADY = 3
"""So many steps at the end are like the one before."""

CASES: dict[str, dict[str, Any]] = {
    "bucket": {"granularity": "bucket"},
    "layer": {"granularity": "layer"},
    "some uncompressed": {"dense_below": 50},
    "narrow": {"memory": Residual(dtype=torch.bfloat16), "granularity": "layer"},
    "updates": {"memory": "updates"},
    "sharded": {"exchange": "sharded"},
    "unused": {"memory": "residual"},
    "unused, momentum": {},
}


def _train(rank: int, case: str, kept: bool) -> tuple[Any, list[Counter[str]]]:
    """(parameters and memory at the end, what was made anew in each step). In one group of
    parameters the momentum changes, and SGD does not step all parameters in each step.

    kept: layouts are. Else each bucket has a new one, and the memory of each parameter moves alone,
    unless that draws other random numbers."""
    unused = case.startswith("unused")
    net = TwoBranches().to(torch.float32)
    model = DDP(net, bucket_cap_mb=0.004, find_unused_parameters=unused)
    groups = [{"params": [p for p in net.parameters() if p.dim() == i]} for i in (1, 2)]
    optimizer = torch.optim.SGD(groups, lr=0.02, momentum=0.9, dampening=0.1)
    compressor = AdaptiveCompressor("topk", (1, 100), policy=Scripted(CFS), **CASES[case])
    compressor.attach(model, optimizer=optimizer)
    made: list[Counter[str]] = []

    def counted(of: Any) -> Any:
        def call(*args: Any) -> Any:
            made[-1][of.__name__] += 1
            return of(*args)

        return call

    def opened(self: Reducer, *args: Any) -> Any:
        if not kept:
            self.layouts.clear()
            if case != "narrow":
                self.memory.update_keys = lambda of: [object() for _ in of]  # type: ignore
        return reducer_open(self, *args)

    reducer_open = Reducer._open
    with (
        patch.object(Reducer, "_open", opened),
        patch.object(Granularity, "_units", counted(Granularity._units)),
        patch.object(BucketMemory, "_find_runs", counted(BucketMemory._find_runs)),
    ):
        for step in range(len(CFS)):
            made.append(Counter())
            optimizer.param_groups[1]["momentum"] = 0.5 if step in (4, 5) else 0.9
            optimizer.zero_grad()
            x, y = batch(step, rank, torch.float32)
            which = (step + rank) % 3 if unused and step < len(CFS) - STEADY else 2
            ((model(x, which) - y) ** 2).mean().backward()
            if step < 2:
                net.branches[0][0].weight.grad = None
            optimizer.step()
    return {"p": flat_parameters(model), "m": compressor.state_dict()["memory"]}, made


def _all(rank: int) -> dict[str, list[tuple[Any, list[Counter[str]]]]]:
    return {case: [_train(rank, case, kept) for kept in (True, False)] for case in CASES}


@pytest.fixture(scope="module")
def trained() -> list[Any]:
    return run_ranks(2, _all)


@pytest.mark.parametrize("case", CASES)
def test_neither_a_layout_that_is_kept_nor_a_run_changes_a_bit(
    trained: list[Any], case: str
) -> None:
    for (kept, _), (anew, made) in (each[case] for each in trained):
        assert same(kept, anew)
        assert made[-1]["_find_runs"] > 0
        assert made[-1]["_units"] > 0


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_made_in_a_step_like_the_one_before(trained: list[Any], case: str) -> None:
    for (_, made), _ in (each[case] for each in trained):
        assert made[1]
        assert not made[-1]


def _kept(rank: int, ends: str) -> list[bool]:
    """Whether what was kept of a parameter in step 3 is there after each step from then on. It has
    no use any more since "dense" steps or "changed" gradients give SGD its momentum back, or since
    "updates" are exchanged in the place of gradients."""
    net = TwoBranches()
    model, optimizer = DDP(net), torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    name, cfs, base = "velocity", [20.0] * (RESTING + 7), Ladder({4.0: RUNGS[4.0]}, "topk")
    if ends == "dense":
        cfs[4:] = [1.0] * (RESTING + 3)
    elif ends == "updates":
        name, cfs[:4], optimizer = "residual", [4.0] * 4, torch.optim.AdamW(net.parameters())
    compressor = AdaptiveCompressor(base, policy=Scripted(cfs))
    compressor.attach(model, optimizer=optimizer)
    there, kept = [], lambda: None
    for step in range(len(cfs)):
        optimizer.zero_grad()
        x, y = batch(step, rank)
        ((model(x, 2) - y) ** 2).mean().backward()
        if ends == "changed" and step >= 4:
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
        optimizer.step()
        if step == 3:
            of = next(iter(compressor._session._parameters.values()))
            kept = weakref.ref(getattr(of, name))
        there.append(kept() is not None)
    return there[3:]


@pytest.mark.parametrize("ends", ["dense", "changed", "updates"])
def test_what_has_no_use_any_more_is_freed(ends: str) -> None:
    for there in run_ranks(2, _kept, ends):
        assert there[0]
        assert not there[-1]
