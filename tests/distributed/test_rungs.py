"""Ladders of several compressors: what one rounds away, the next one sends."""

from __future__ import annotations

from copy import deepcopy
from math import isfinite
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils._pytree import tree_leaves

from adaptive import (
    AdaptiveCompressor,
    Fixed,
    Ladder,
    LinkSpec,
    LocalSteps,
    MemoryTimeline,
    Network,
    Policy,
)
from adaptive.model.chunks import DEVICE_CHUNK
from adaptive.sync import every_step
from compressors.kernels import blocks
from compressors.ladder import GAIN
from runs.modelled_clock import ModelledClock
from tests.distributed.balance import balance
from tests.distributed.processes import run_ranks
from tests.distributed.setting import Scripted, flat_parameters, loss_of, small_net
from tests.distributed.test_device_path import ByStep
from tests.distributed.test_updates import MAKE, Training, differs

RUNGS = {2: "fp16", 4: "int8", 8: "int4"}
SWITCHES = [20.0, 4.0, 8.0, 4.0, 50.0, 2.0, 1.0, 8.0, 10.0, 2.0]


def _ladder() -> Ladder:
    return Ladder(RUNGS, "topk+int4")


def _deviation(rank: int, cfs: list[float], probe: list[float], exchange: str, cap: float) -> float:
    options = {"cf_range": (10, 1000), "exchange": exchange}
    policy, ddp = Scripted(cfs, tuple(probe)), {"bucket_cap_mb": cap}
    of = policy, len(cfs) + 2
    found = balance(rank, _ladder(), *of, options=options, ddp_options=ddp)
    return float(found["deviation"])


@pytest.mark.parametrize("exchange", ["all_gather", "sharded", "voted_indices"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_sent_plus_residual_is_the_sum_of_gradients(exchange: str, world_size: int) -> None:
    worst = run_ranks(world_size, _deviation, SWITCHES, [2.0, 20.0], exchange, 0.004)
    assert max(worst) < 1e-12


@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    cfs=st.lists(st.sampled_from([1.0, 2.0, 4.0, 8.0, 10.0, 300.0]), min_size=1, max_size=7),
    probe=st.lists(st.sampled_from([2.0, 4.0, 10.0, 40.0]), max_size=3, unique=True),
    cap=st.sampled_from([0.001, 0.004, 25]),
)
def test_nothing_is_lost_whatever_follows_what(
    cfs: list[float], probe: list[float], cap: float
) -> None:
    assert max(run_ranks(2, _deviation, cfs, probe, "all_gather", cap)) < 1e-12


def _measured(rank: int, exchange: str) -> dict[str, Any]:
    """Gains and bytes of each CF, whether it is sent or probed."""
    policy = Scripted([4.0, 20.0, 2.0, 1.0], probe=(2.0, 4.0, 20.0))
    model = DDP(small_net(torch.float32), bucket_cap_mb=0.004)
    options = {"exchange": exchange, "memory": "residual"}
    compressor = AdaptiveCompressor(_ladder(), policy=policy, **options).attach(model)
    for step in range(9):
        loss_of(model, step, rank).backward()
    compressor.flush()
    return {
        "gains": [
            {cf: m.gain("error_fed") for cf, m in r.measurements.items()} for r in policy.reports
        ],
        "sent": [(r.cf, r.wire_bytes - r.statistics_bytes) for r in policy.reports],
        "promised": {cf: policy.context.wire_bytes(cf) for cf in (1.0, 2.0, 4.0)},
        "assumed": dict(policy.context.assumed),
    }


@pytest.mark.parametrize("exchange", ["all_gather", "sharded"])
def test_each_cf_is_measured_and_sent_by_its_own_compressor(exchange: str) -> None:
    for found in run_ranks(2, _measured, exchange):
        assert found["assumed"] == {2.0: GAIN, 4.0: GAIN, 8.0: GAIN}
        for gains in found["gains"]:
            assert set(gains) >= {2.0, 4.0, 20.0}
            assert gains[20.0] < 0.9
            assert gains[20.0] < gains[4.0] < gains[2.0] <= 1
        sent = {cf: gains for gains, (cf, _) in zip(found["gains"], found["sent"], strict=True)}
        assert sent[2.0][2.0] > 0.9999
        assert sent[4.0][4.0] > 0.999
        for cf, nbytes in found["sent"][1:]:
            if cf in found["promised"]:  # a scale more for the last bits of each bucket
                assert nbytes == pytest.approx(found["promised"][cf], rel=0.03)
        dense = found["promised"][1.0]
        assert found["promised"][2.0] == pytest.approx(dense / 2, rel=0.01)
        assert found["promised"][4.0] == pytest.approx(dense / 4, rel=0.03)


def _for_the_record(rank: int, decides: bool) -> list[tuple[float, list[int], list[int]]]:
    """For each CF, the steps that have measured what is kept, and those that have measured the
    gradients' norm. decides: what is kept may move the policy."""
    found = []
    for cf in (2.0, 4.0, 20.0):
        policy: Policy = Scripted([cf]) if decides else Fixed(cf)
        timeline, model = MemoryTimeline(), DDP(small_net(torch.float32))
        ladder = Ladder({c: name for c, name in ((2, "bf16"), (4, "int8")) if c == cf}, "topk")
        compressor = AdaptiveCompressor(ladder, policy=policy, timeline=timeline)
        compressor.attach(model)
        for step in range(12):
            loss_of(model, step, rank).backward()
        compressor.flush()
        reports = [record.report for record in timeline.steps]
        kept = [r.step for r in reports if r.measurements and isfinite(r.measurements[cf].total)]
        found.append((cf, kept, [r.step for r in reports if isfinite(r.grad_norm)]))
    return found


@pytest.mark.parametrize("decides", [False, True])
def test_where_no_gain_decides_one_step_in_ten_is_measured(decides: bool) -> None:
    """It does not where it is assumed."""
    every, few = list(range(12)), [0, 10]
    expected = [(2.0, [], few), (4.0, few, every), (20.0, every if decides else few, every)]
    assert run_ranks(2, _for_the_record, decides)[0] == expected  # who writes the timeline


def _in_bfloat16(rank: int) -> dict[str, Any]:
    """Gradients at CF 2 after a step at CF 20, what the memory holds then, and what was sent."""
    base = Ladder({2: "bf16"}, "topk+int4")
    model, plain = DDP(small_net(torch.float32)), small_net(torch.float32)
    policy, found = Scripted([20.0, 2.0, 2.0, 2.0]), {}
    compressor = AdaptiveCompressor(base, policy=policy, memory="residual").attach(model)
    for step in range(4):
        model.zero_grad()
        loss_of(model, step, rank).backward()
        plain.zero_grad()
        loss_of(plain, step, rank).backward()
        found[step] = [p.grad.clone() for p in model.parameters()]
    compressor.flush()
    own = [p.grad for p in plain.parameters()]
    everyones: list[Any] = [None, None]
    dist.all_gather_object(everyones, own)
    halves = [[g.bfloat16().div(2) for g in each] for each in everyones]
    kept = tree_leaves(compressor.state_dict()["memory"])
    return {
        "as PyTorch's hook": [(a + b).float() for a, b in zip(*halves, strict=True)],
        "mean": found[3],
        "residual": [float(t.abs().max()) for t in kept if isinstance(t, torch.Tensor)],
        "sent": [r.wire_bytes - r.statistics_bytes for r in policy.reports],
        "measured": [sorted(r.measurements) for r in policy.reports],
        "dense": policy.context.wire_bytes(1.0),
    }


def test_bfloat16_is_summed_as_by_pytorchs_hook() -> None:
    """All that waits goes with the first such step; nothing is measured, kept or fed back."""
    for found in run_ranks(2, _in_bfloat16):
        for mean, expected in zip(found["mean"], found["as PyTorch's hook"], strict=True):
            assert torch.equal(mean, expected)
        assert not any(found["residual"])
        assert found["sent"][1:] == [found["dense"] / 2] * (len(found["sent"]) - 1)
        assert not any(found["measured"][1:])


def _in_rounds(rank: int) -> tuple[float, list[tuple[float, int]]]:
    """Rounds of several steps, at a rung that is sent as dense, too: how far the ranks' mean models
    are apart, and what was sent."""
    base = Ladder({2: "bf16", 8: "int4"}, "topk+int4")
    policy = Scripted([20.0, 2.0, 2.0, 8.0, 1.0], local_steps=[1, 2, 4])
    model, timeline = DDP(small_net(torch.float32)), MemoryTimeline()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    compressor = AdaptiveCompressor(
        base, policy=policy, sync=LocalSteps("auto"), timeline=timeline
    ).attach(model, optimizer=optimizer)
    for step in range(40):
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        optimizer.step()
    with compressor.averaged():
        flat = flat_parameters(model)
    everyones: list[Any] = [None, None]
    dist.all_gather_object(everyones, flat)
    sent = [(each.report.cf, each.local_steps) for each in timeline.steps]
    return differs(everyones), sent


def test_a_rung_that_is_sent_as_dense_goes_with_rounds_of_several_steps() -> None:
    found = run_ranks(2, _in_rounds)
    assert [apart for apart, _ in found] == [0.0, 0.0]
    assert {(2.0, 2), (2.0, 4)} <= {*found[0][1]}


def _with_adamw(rank: int, exchange: str, path: str) -> dict[str, float]:
    """Across all rungs: by how much ranks differ, and another path from that of the host, after it
    was resumed in the middle or on a device."""
    if path == "device":  # buckets are cut alike on both
        every_step.joined_nbytes = lambda device: DEVICE_CHUNK
    options = {"cf_range": (10, 100), "exchange": exchange}
    plain = Training(MAKE["adamw"], ByStep(SWITCHES), base=_ladder(), **options).train(rank, 0, 10)
    parts = {"model": plain.model, "optimizer": plain.optimizer, "memory": plain.compressor}
    saved = deepcopy({name: part.state_dict() for name, part in parts.items()})
    plain.train(rank, 10, 20)
    blocks.force_device_path = path == "device"
    other = Training(MAKE["adamw"], ByStep(SWITCHES), base=_ladder(), **options)
    if path == "resumed":
        loss_of(other.model, 0, rank).backward()  # DDP cuts its buckets anew
        other.model.load_state_dict(saved["model"])
        other.optimizer.load_state_dict(saved["optimizer"])
        other.compressor.load_state_dict(saved["memory"])
        other.compressor.policy.planned = 10
        other.train(rank, 10, 20)
    else:
        other.train(rank, 0, 20)
    blocks.force_device_path = False
    apart = float((plain.flat - other.flat).abs().max())
    return {"ranks": differs([plain.flat, other.flat]), "paths": apart}


# Many of Adam's first updates are as large as each other: of means, each path picks its own.
@pytest.mark.parametrize(
    ("exchange", "path"),
    [("all_gather", "resumed"), ("all_gather", "device"), ("sharded", "resumed")],
)
def test_updates_go_through_every_rung(exchange: str, path: str) -> None:
    for found in run_ranks(2, _with_adamw, exchange, path):
        assert found["ranks"] == 0.0
        assert found["paths"] <= (1e-6 if path == "device" else 0.0)


def _chosen(rank: int) -> list[float]:
    """What the default sends on an ever slower network."""
    found = []
    for link in ("1000gbit", "15gbit", "1mbit"):
        model = DDP(small_net(torch.float32))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
        clock = ModelledClock(1e-3, LinkSpec.parse(link), 100.0)
        compressor = AdaptiveCompressor(policy="goodput", network=Network(clock=clock)).attach(
            model, optimizer=optimizer
        )
        for step in range(40):
            optimizer.zero_grad()
            loss_of(model, step, rank).backward()
            optimizer.step()
        found.append(compressor.cf)
    return found


def test_a_network_that_is_a_little_too_slow_gets_a_little_compression() -> None:
    for fast, slower, slow in run_ranks(2, _chosen):
        assert fast <= 8  # where bf16 promises less than 5% more
        assert 4 <= slower <= 8
        assert slow >= 10
