"""Every compressor with error feedback, by every exchange that it allows: nothing is lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from adaptive.exchange.choice import strategies
from compressors import QSGD, Compressor, compressor_names, make_compressor
from compressors.base import Spec
from compressors.powersgd import PowerSGD
from tests.distributed.processes import run_ranks
from tests.distributed.setting import same
from tests.distributed.test_exchanges import run

CFS = (10.0, 100.0, 1.0, 2.5, 1000.0)


def _bases() -> dict[str, Compressor]:
    """All that feed their error back, and some with coded values."""
    named = {name: make_compressor(name) for name in compressor_names() if name != "none"}
    more = ("topk+bf16", "topk+int8", "dgc+fp16", "topk+qsgd")
    named |= {name: make_compressor(name) for name in more}
    named["qsgd, fed back"] = QSGD(feeds_back=True)
    return {name: base for name, base in named.items() if base.feeds_back}


def _all(rank: int, exchange: str, bad_at: int | None) -> dict[str, Any]:
    results = {}
    for name, base in _bases().items():
        if exchange not in {way.name for way in strategies(base)}:
            continue
        cfs = [base.nearest(Spec.shaped((40, 14), cf)) if cf != 1 else cf for cf in CFS]
        results[name] = run(rank, base, {"exchange": exchange}, 0.004, cfs, bad_at)
    return results


@pytest.mark.parametrize("exchange", ["all_reduce", "all_gather", "sharded", "voted_indices"])
@pytest.mark.parametrize(
    ("world_size", "bad_at"), [(2, 4), pytest.param(3, None, marks=pytest.mark.long)]
)
def test_nothing_is_lost(exchange: str, world_size: int, bad_at: int | None) -> None:
    everyone = run_ranks(world_size, _all, exchange, bad_at)
    assert everyone[0]
    for name, first in everyone[0].items():
        # Sums are rounded on the wire in the dtype that they travel in.
        halves = {"fp16": 2e-3, "bf16": 2e-2} if exchange == "all_reduce" else {}
        for theirs in everyone:
            assert theirs[name]["deviation"] < halves.get(name, 1e-12), name
            assert torch.equal(theirs[name]["parameters"], first["parameters"]), name
            assert same(theirs[name]["reports"], first["reports"]), name
            assert all(theirs[name]["nonfinite"]), name


def test_powersgd_is_among_them() -> None:
    assert isinstance(_bases()["powersgd"], PowerSGD)
