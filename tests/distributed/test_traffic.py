"""The bytes that are reported are the bytes that the collectives were handed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor, MemoryTimeline, ParameterServer
from tests.distributed.processes import run_ranks
from tests.distributed.setting import Scripted, loss_of, small_net
from tests.quick import quick

COLLECTIVES = {"all_reduce": 0, "all_gather_single": 1, "all_to_all_single": 1}
"""By name: the position of the argument that is handed over."""


class Announced(Scripted):
    """Says beforehand what it sends, so that there is a forecast."""

    def candidates(self) -> tuple[float, ...]:
        return tuple(sorted({cf for cf in self.cfs if cf > 1}))


def _count(
    rank: int,
    base: str,
    exchange: str | ParameterServer,
    cfs: list[float],
    probe: list[float],
    granularity: str,
    cap: float,
) -> dict[str, Any]:
    model = DDP(small_net(torch.float32), bucket_cap_mb=cap)
    timeline = MemoryTimeline()
    compressor = AdaptiveCompressor(
        base,
        (2, 100),
        policy=Announced(cfs, tuple(probe)),
        exchange=exchange,
        timeline=timeline,
        granularity=granularity,
    ).attach(model)
    counted = dict.fromkeys((*COLLECTIVES, "calls"), 0)

    def counting(name: str, position: int) -> None:
        original = getattr(dist, name)

        def collective(*args: Any, **kwargs: Any) -> Any:
            counted[name] += args[position].numel() * args[position].element_size()
            counted["calls"] += 1
            return original(*args, **kwargs)

        setattr(dist, name, collective)

    for name, position in COLLECTIVES.items():
        counting(name, position)
    for step in range(6):
        loss_of(model, step, rank).backward()
    compressor.flush()
    summary = compressor.summary()
    return {
        "counted": counted,
        "payload": summary.payload_bytes,
        "wire": summary.bytes_sent,
        "floats": summary.floats_sent,
        "dense": summary.dense_bytes,
        "numel": sum(p.numel() for p in model.parameters()),
        "forecast": dict(timeline.header.wire_bytes) if timeline.header else {},
        "reports": [(s.report.cf, s.report.wire_bytes) for s in timeline.steps],
        "down": sum(s.report.down_bytes for s in timeline.steps),
        "recorded": sum(s.report.wire_bytes for s in timeline.steps),
        "sizes": [p.numel() for p in model.parameters()],
    }


@pytest.mark.parametrize(
    ("granularity", "cap"), [("layer", 0.002), ("bucket", 0.002), ("bucket", 25)]
)
@pytest.mark.parametrize("world_size", quick(2, of=[2, 4]))
@pytest.mark.parametrize(
    ("base", "exchange"),
    [
        ("none", "auto"),
        ("topk", "auto"),
        ("topk", "all_gather"),
        ("topk", "sharded"),
        ("topk", "voted_indices"),
        ("randomk", "auto"),
        ("powersgd", "auto"),
    ],
)
def test_reported_bytes_are_the_bytes_handed_to_collectives(
    base: str, exchange: str, world_size: int, granularity: str, cap: float
) -> None:
    cfs = [10.0, 1.0, 50.0]
    results = run_ranks(world_size, _count, base, exchange, cfs, [20.0], granularity, cap)
    for rank, result in enumerate(results):
        counted = result["counted"]
        assert result["payload"] == sum(counted[name] for name in COLLECTIVES)
        n = world_size
        wire = counted["all_reduce"] * 2 * (n - 1) / n + counted["all_gather_single"] * (n - 1)
        wire += counted["all_to_all_single"] * (n - 1) / n
        assert result["wire"] == pytest.approx(wire)
        assert result["dense"] == pytest.approx(6 * 4 * result["numel"] * 2 * (n - 1) / n)
        assert result["counted"] == results[0]["counted"]
        if rank == 0:
            assert result["recorded"] == pytest.approx(wire)
            back = counted["all_reduce"] * (n - 1) / n
            if exchange == "sharded":
                back += counted["all_gather_single"] * (n - 1)
            if exchange == "auto":  # with some CFs perhaps "sharded", by how fast the link proves
                gathered = counted["all_gather_single"] * (n - 1)
                assert back - 0.1 <= result["down"] <= back + gathered + 0.1
            elif exchange == "voted_indices":  # a mean is as large as one rank's share of values
                of_means = counted["all_to_all_single"] / n * (n - 1)
                assert result["down"] - back == pytest.approx(of_means, rel=0.05)
            else:
                assert result["down"] == pytest.approx(back)
        if base == "topk":
            whole = granularity == "bucket"
            sizes = [result["numel"]] if whole else result["sizes"]
            # The first backward has one bucket, whatever its size, and takes layer by layer.
            kept = sum(max(1, int(size / cfs[0])) for size in result["sizes"])
            kept += sum(max(1, int(size / cf)) for size in sizes for cf in (cfs * 2)[1:])
            # Each of several buckets, or shards, keeps a whole number.
            several = exchange == "sharded" or (whole and cap < 1)
            assert result["floats"] == pytest.approx(kept, abs=20 if several else 0)


@pytest.mark.parametrize("down_cf", [1.0, 5.0, None])
def test_means_travel_back_at_a_cf_of_their_own(down_cf: float | None) -> None:
    """Bytes are those of the collectives, as many as were forecast."""
    server = ParameterServer(down_cf)
    results = run_ranks(2, _count, "topk+fp32", server, [10.0], [], "layer", 25)
    for result in results:
        counted = result["counted"]
        assert result["payload"] == sum(counted[name] for name in COLLECTIVES)
        up, down = counted["all_to_all_single"], counted["all_gather_single"]
        numel = result["numel"]
        if down_cf == 1.0:
            # Statistics are summed. Both ranks send a shard as large as the larger one.
            assert down == pytest.approx(6 * 4 * numel / 2, rel=0.02)
        else:
            ratio = 10.0 / (down_cf or 10.0)
            assert 2 * down == pytest.approx(ratio * up, rel=0.15)
    (forecast,) = (nbytes for cf, nbytes in results[0]["forecast"].items() if cf == 10.0)
    statistics = results[0]["counted"]["all_reduce"] / 6
    for _, nbytes in results[0]["reports"]:
        assert nbytes - statistics == pytest.approx(forecast, rel=0.1)
