"""A user's exchange, the ring of examples/ring_exchange.py, does all that ours do: nothing is lost,
ranks stay alike, bytes reported are bytes on the wire, and what is bad is refused on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import (
    AdaptiveCompressor,
    Delayed,
    Exchange,
    Fixed,
    MemoryTimeline,
    Outgoing,
    Rounds,
    TwoLevel,
    register_exchange,
)
from examples.ring_exchange import Ring
from tests.distributed.balance import balance
from tests.distributed.processes import run_ranks
from tests.distributed.setting import Scripted, flat_parameters, loss_of, same, small_net

CFS = [10.0, 100.0, 1.0, 3.0, 1000.0]

WAYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "topk": ("topk", {"exchange": "ring"}),
    "layers": ("topk+fp32", {"exchange": Ring(), "granularity": "layer", "dense_below": 50}),
    "summed": ("randomk", {"exchange": Ring()}),
}


class ToAll(Ring):
    """Every rank sends its payloads to every other."""

    def rounds(self, exchange: Exchange, outgoing: Outgoing) -> Rounds:
        rows = yield exchange.all_gather(outgoing.pack())
        return outgoing.received(rows)

    def collectives(self, ranks: int) -> int:
        return 1


class OnlyRank1(Ring):
    """Its ranks do not agree on the number of collectives."""

    def collectives(self, ranks: int) -> int:
        return ranks - 1 + (dist.get_rank() == 1)


def _ranks(rank: int) -> dict[str, Any]:
    register_exchange("ring", Ring)
    ways = {}
    for name, (base, options) in WAYS.items():
        policy, cap = Scripted(CFS, (20.0, 50.0)), {"bucket_cap_mb": 0.004}
        ways[name] = balance(rank, base, policy, 8, options=options, ddp_options=cap, bad_at=4)
    return {
        "ways": ways,
        "bytes": _bytes(rank),
        "trained": {name: _train(rank, **options) for name, options in TRAINED.items()},
        "refused": [_refused(OnlyRank1()), _refused(Ring(), Delayed(1))],
    }


def _bytes(rank: int) -> dict[str, float]:
    """What is handed over for other ranks, what is reported, and what was forecast for one step."""
    timeline = MemoryTimeline()
    model = DDP(small_net(torch.float32))
    compressor = AdaptiveCompressor(
        "topk+fp32", policy=Fixed(10), exchange="ring", granularity="layer", timeline=timeline
    ).attach(model)
    original, counted = dist.all_to_all_single, 0

    def counting(out: Any, own: Any, received: Any, sent: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal counted
        counted += own.element_size() * sum(n for to, n in enumerate(sent) if to != rank)
        return original(out, own, received, sent, *args, **kwargs)

    dist.all_to_all_single = counting
    for step in range(5):
        loss_of(model, step, rank).backward()
    compressor.flush()
    dist.all_to_all_single = original
    told = [step.report.wire_bytes - step.report.statistics_bytes for step in timeline.steps]
    forecast = dict(timeline.header.wire_bytes) if timeline.header else {}
    return {"counted": counted, "told": sum(told), "forecast": forecast.get(10.0, 0.0)}


TRAINED: dict[str, dict[str, Any]] = {
    "updates": {"exchange": "ring"},
    "two levels": {"exchange": TwoLevel(2, between="ring")},
    "gathered": {"exchange": "all_gather"},
    "gathered in two levels": {"exchange": TwoLevel(2, between=ToAll())},
}


def _train(rank: int, exchange: Any) -> torch.Tensor:
    model = DDP(small_net(), bucket_cap_mb=0.004)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    made = AdaptiveCompressor("topk+fp32", policy=Scripted([10.0, 1.0, 50.0]), exchange=exchange)
    made.attach(model, optimizer=optimizer)
    for step in range(6):
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        optimizer.step()
    made.close()
    return flat_parameters(model)


def _refused(exchange: Ring, sync: Any = None) -> str:
    try:
        made = AdaptiveCompressor(exchange=exchange, sync=sync).attach(DDP(small_net()))
    except (ValueError, RuntimeError) as error:
        return str(error)
    made.close()
    return ""


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_ring_of_neighbours(world_size: int) -> None:
    results = run_ranks(world_size, _ranks, limit=150)
    for rank, result in enumerate(results):
        for name, way in result["ways"].items():
            assert way["deviation"] < 1e-12, name
            assert torch.equal(way["parameters"], results[0]["ways"][name]["parameters"])
            assert same(way["reports"], results[0]["ways"][name]["reports"])
            assert all(way["nonfinite"])
        sent = results[0]["bytes"]  # rank 0 writes the record
        assert result["bytes"]["counted"] == sent["told"]
        # In the first step, before DDP cuts its buckets, each tensor has a list of indices.
        assert sent["told"] == pytest.approx(5 * sent["forecast"], rel=1e-3)
        trained = result["trained"]
        for name in trained:
            assert torch.equal(trained[name], results[0]["trained"][name])
        # What arrives is what an all-gather brings, in the same order.
        assert torch.equal(trained["updates"], trained["gathered"])
        assert torch.equal(trained["two levels"], trained["gathered in two levels"])
        wrong, delayed = result["refused"]
        told = f"collectives({world_size}) says {world_size}, and rounds yields {world_size - 1}"
        assert told in wrong
        assert "exchange=OnlyRank1()" in wrong
        assert wrong.startswith("rank 1 failed to set up") is (rank != 1)
        # Among two ranks a ring is one collective, for which no backward waits.
        assert ("must be of one collective with a delay" in delayed) is (world_size == 4)
