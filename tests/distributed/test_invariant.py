"""Sum of sent + residual = sum of gradients, over any run: nothing is lost and nothing invented."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor
from tests.distributed.processes import run_ranks
from tests.distributed.setting import Scripted, local_gradients, loss_of, small_net

STEPS = 9


def _run(rank: int, base: str, cfs: list[float], probe: list[float], ddp_options: dict) -> float:
    """Largest deviation from the invariant, relative to the largest sum."""
    model = DDP(small_net(), **ddp_options)
    policy = Scripted(cfs, tuple(probe))
    compressor = AdaptiveCompressor(base, (1.5, 1000), policy=policy, memory="residual")
    compressor.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sums: dict[str, Any] = {}
    sent: dict[str, Any] = {}
    for step in range(STEPS):
        for name, gradient in local_gradients(model, step, rank).items():
            sums[name] = sums.get(name, 0) + gradient
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        for name, p in model.module.named_parameters():
            sent[name] = sent.get(name, 0) + p.grad.flatten() * dist.get_world_size()
        optimizer.step()
    memory = compressor.state_dict()["memory"]
    worst = 0.0
    for name, total in sums.items():
        residual = memory.get(name, {}).get("residual", torch.zeros_like(total))
        both = torch.stack([total, residual])
        dist.all_reduce(both)
        worst = max(
            worst, float((sent[name] + both[1] - both[0]).abs().max() / both[0].abs().max())
        )
    return worst


@pytest.mark.parametrize("base", ["topk", "randomk"])
@pytest.mark.parametrize(
    "ddp_options",
    [
        {},
        {"bucket_cap_mb": 0.002},
        {"static_graph": True, "bucket_cap_mb": 0.002},
        {"find_unused_parameters": True, "bucket_cap_mb": 0.002},
        {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.004},
    ],
    ids=["plain", "buckets", "static", "unused", "view"],
)
def test_invariant_across_switches_and_bucket_rebuilds(base: str, ddp_options: dict) -> None:
    cfs = [10.0, 100.0, 1.0, 1000.0, 1.5, 10.0, 1.0, 30.0]
    worst = run_ranks(2, _run, base, cfs, [10.0, 20.0], ddp_options)
    assert max(worst) < 1e-12


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    base=st.sampled_from(["topk", "randomk"]),
    cfs=st.lists(st.one_of(st.just(1.0), st.floats(1, 2000)), min_size=1, max_size=STEPS),
    probe=st.lists(st.floats(1.1, 1500), max_size=2, unique=True),
    cap=st.sampled_from([0.001, 0.003, 25]),
)
def test_invariant_for_any_sequence_of_cfs(
    base: str, cfs: list[float], probe: list[float], cap: float
) -> None:
    worst = run_ranks(2, _run, base, cfs, probe, {"bucket_cap_mb": cap})
    assert max(worst) < 1e-12


def test_invariant_on_four_ranks() -> None:
    worst = run_ranks(4, _run, "topk", [7.0, 1.0, 90.0], [20.0], {"bucket_cap_mb": 0.002})
    assert max(worst) < 1e-12
