"""Every exchange: nothing is lost, all ranks decode the same, and bad gradients leave no trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from adaptive import ParameterServer
from tests.distributed.balance import balance
from tests.distributed.processes import run_ranks
from tests.distributed.setting import Scripted, same
from tests.quick import quick

STEPS = 8
CFS = [10.0, 100.0, 1.0, 3.0, 1000.0]


def run(
    rank: int, base: Any, options: dict[str, Any], cap: float, cfs: list[float], bad_at: int | None
) -> dict[str, Any]:
    policy = Scripted(cfs, (20.0, 50.0))
    ddp_options = {"bucket_cap_mb": cap}
    return balance(
        rank, base, policy, STEPS, options=options, ddp_options=ddp_options, bad_at=bad_at
    )


def _check(results: list[dict[str, Any]], limit: float = 1e-12) -> None:
    for result in results:
        assert result["deviation"] < limit
        assert torch.equal(result["parameters"], results[0]["parameters"])
        assert same(result["reports"], results[0]["reports"])
        assert all(result["nonfinite"])


WAYS = [
    ("topk", {"exchange": "all_gather"}),
    ("topk", {"exchange": "sharded"}),
    ("topk", {"exchange": ParameterServer(down_cf=1.0)}),
    ("topk+fp32", {"exchange": ParameterServer(down_cf=5.0)}),
    ("topk", {"exchange": "voted_indices"}),
    ("dgc+qsgd", {"exchange": "voted_indices"}),
    ("topk+fp32", {"exchange": "voted_indices"}),
    ("randomk", {"exchange": "all_reduce"}),
    ("randomk", {"exchange": "sharded"}),
]
NAMES = ["-".join(map(str, [base, *options.values()])) for base, options in WAYS]
every_way = pytest.mark.parametrize(("base", "options"), WAYS, ids=NAMES)


@every_way
@pytest.mark.parametrize("granularity", quick("bucket", of=["layer", "bucket"]))
def test_three_ranks_several_buckets_and_a_nonfinite_step(
    base: str, options: dict[str, Any], granularity: str
) -> None:
    options = {**options, "granularity": granularity}
    _check(run_ranks(3, run, base, options, 0.004, CFS, 4))


@every_way
@pytest.mark.parametrize("world_size", quick(2, of=[2, 4]))
def test_one_bucket(base: str, options: dict[str, Any], world_size: int) -> None:
    _check(run_ranks(world_size, run, base, {**options, "dense_below": 50}, 25, CFS, None))


@pytest.mark.parametrize(
    "exchange",
    quick("sharded", of=["sharded", "voted_indices", "all_gather"]),
)
def test_eight_ranks(exchange: str) -> None:
    _check(run_ranks(8, run, "topk", {"exchange": exchange}, 0.004, CFS, 4))


def test_auto_measures_the_link_and_all_ranks_choose_alike() -> None:
    _check(run_ranks(4, run, "topk", {"exchange": "auto"}, 0.004, CFS, 4))
    _check(run_ranks(3, run, "int8", {"network": "500mbit,1ms"}, 25, [4.0], None))
