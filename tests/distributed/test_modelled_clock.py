"""Step times by a model: as long as it says, the same on every machine, and resumable."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import (
    AdaptiveCompressor,
    Fixed,
    Gossip,
    GraVAC,
    LinkSpec,
    MemoryTimeline,
    Network,
    TwoLevel,
)
from runs.modelled_clock import ModelledClock
from tests.distributed.processes import run_ranks
from tests.distributed.setting import Scripted, loss_of, small_net

COMPUTE = 0.1
LINK = LinkSpec(8e5, 0.01)  # 100 kB a second


def _run(
    rank: int, policy: Any, steps: int, stop: int | None = None, scale: float = 1.0
) -> list[Any]:
    model, clock = DDP(small_net()), ModelledClock(COMPUTE, LINK, scale)
    timeline = MemoryTimeline()
    compressor = AdaptiveCompressor(
        "topk", (2, 100), policy=policy, network=Network(clock=clock), timeline=timeline
    ).attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(steps):
        if step == stop:
            compressor.load_state_dict(compressor.state_dict())
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        optimizer.step()
    compressor.flush()
    return [vars(record.report) for record in timeline.steps]


def test_a_step_takes_compute_and_what_the_link_takes_for_its_bytes() -> None:
    reports = run_ranks(2, _run, Scripted([1.0, 10.0]), 6)[0]
    for before, report in pairwise(reports[1:]):
        sent, waited = report["timed_bytes"], 0.01 * before["hops"]
        assert before["hops"] == (2 if before["cf"] == 1 else 1)  # of two ranks and one bucket
        assert report["timed_cf"] == before["cf"]
        assert sent == pytest.approx(before["wire_bytes"], abs=400)  # statistics come later
        assert report["exchange_seconds"] == pytest.approx(waited + sent / 1e5)
        assert report["seconds"] == pytest.approx(COMPUTE + waited + sent / 1e5)
        assert report["compute_seconds"] == COMPUTE


def test_a_small_model_stands_for_a_large_one() -> None:
    """Its gradients are as many times as large, and statistics no larger."""
    reports = run_ranks(2, _run, Scripted([1.0, 10.0]), 6, None, 50.0)[0]
    for before, report in pairwise(reports[1:]):
        statistics = before["statistics_bytes"]
        assert 0 < statistics < 500
        imagined = 50 * (report["timed_bytes"] - statistics) + statistics
        assert report["exchange_seconds"] == pytest.approx(0.01 * before["hops"] + imagined / 1e5)


ALL = {"all_gather": 3, "sharded": 6, "voted_indices": 9}
WAYS: dict[str, tuple[dict[str, Any], int, int]] = {
    **{name: ({"exchange": name}, hops, 6) for name, hops in ALL.items()},
    "two levels": ({"exchange": TwoLevel(node=2)}, 1, 2),
    "gossip": ({"sync": Gossip("ring")}, 1, 6),
    "a hook": ({"hooks": {10.0: default_hooks.fp16_compress_hook}}, 6, 6),
}


def _hops(rank: int, way: str, cap: float) -> list[tuple[float, int, int]]:
    """CF, hops, and those of a dense step, once DDP has cut its buckets."""
    model, timeline = DDP(small_net(), bucket_cap_mb=cap), MemoryTimeline()
    policy = Fixed(10.0) if way == "gossip" else Scripted([1.0, 10.0])
    network = Network(clock=ModelledClock(COMPUTE, LINK))
    compressor = AdaptiveCompressor(
        cf_range=(2, 100), policy=policy, network=network, timeline=timeline, **WAYS[way][0]
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    compressor.attach(model, optimizer=optimizer)
    for step in range(6):
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        optimizer.step()
    compressor.flush()
    reports = [record.report for record in timeline.steps]
    return [(report.cf, report.hops, report.dense_hops) for report in reports[2:]]


@pytest.mark.parametrize("way", WAYS)
def test_latency_is_charged_for_each_hop_of_each_bucket(way: str) -> None:
    """Round a ring of N ranks there are N - 1 in each collective, to neighbours one."""
    _, sparse, dense = WAYS[way]
    (one, *_), (several, *_) = (run_ranks(4, _hops, way, cap) for cap in (25, 0.002))
    for (cf, hops, of_dense), (_, more, more_of_dense) in zip(one, several, strict=True):
        assert hops == (sparse if cf > 1 else dense)
        assert of_dense == dense
        buckets = more // hops
        assert (more, more_of_dense) == (buckets * hops, buckets * dense)
        assert buckets > 1 or way == "gossip"  # which sends chunks of parameters


def test_compression_takes_what_it_is_said_to_take_and_a_dense_step_none_of_it() -> None:
    coded = {2.0: 0.01, 10.0: 0.05, 100.0: 0.03}
    clock = ModelledClock(COMPUTE, LINK, coded=coded)
    found = [clock.coding(cf) for cf in (1.0, 2.0, 4.0, 20.0, 40.0, 1000.0)]
    assert found == [0.0, 0.01, 0.01, 0.05, 0.03, 0.03]
    assert clock.step(500, cf=10.0) == pytest.approx(COMPUTE + 0.05 + clock.exchange(500))
    assert clock.step(500) == pytest.approx(COMPUTE + clock.exchange(500))
    delayed = ModelledClock(COMPUTE, LINK, delay=4, coded=coded)
    assert delayed.step(10, cf=10.0) == pytest.approx(COMPUTE + 0.05)
    assert delayed.exposed(10, cf=10.0) == pytest.approx(0.0)
    assert ModelledClock(COMPUTE, LINK).coding(10.0) == 0.0


def test_the_same_run_goes_the_same_way_also_when_it_was_saved_in_the_middle() -> None:
    policy = GraVAC(window=6, dense_window=3, epsilon=0.05)
    first, again = run_ranks(2, _run, policy, 40)[0], run_ranks(2, _run, policy, 40)[0]
    resumed = run_ranks(2, _run, policy, 40, 17)[0]
    assert repr(first) == repr(again) == repr(resumed)
    assert len({report["cf"] for report in first}) > 2


@pytest.mark.parametrize("compute", [0.0, -1.0, float("nan"), float("inf")])
def test_a_step_must_take_time(compute: float) -> None:
    with pytest.raises(ValueError, match="compute"):
        ModelledClock(compute)
    with pytest.raises(ValueError, match="scale"):
        ModelledClock(COMPUTE, LINK, scale=compute)
