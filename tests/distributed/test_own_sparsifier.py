"""A sparsifier of a user's own, in real processes: nothing is lost, whatever the exchange."""

from __future__ import annotations

from typing import Any

import torch

from examples.own_sparsifier import ChunkedTopK
from tests.distributed.balance import balance
from tests.distributed.processes import run_ranks
from tests.distributed.setting import Scripted, same

EXCHANGES = ("all_gather", "sharded", "voted_indices")


class Small(ChunkedTopK):
    """Several chunks a tensor of small tensors."""

    name = "small chunks"
    CHUNK = 64


def _ranks(rank: int) -> dict[str, Any]:
    return {
        exchange: balance(
            rank,
            Small("int4"),
            Scripted([10.0, 100.0, 1.0, 3.0], (20.0, 50.0)),
            7,
            options={"exchange": exchange},
            ddp_options={"bucket_cap_mb": 0.004},
            bad_at=4,
        )
        for exchange in EXCHANGES
    }


def test_nothing_is_lost() -> None:
    results = run_ranks(2, _ranks, limit=150)
    for result in results:
        for exchange, found in result.items():
            assert found["deviation"] < 1e-12, exchange
            assert torch.equal(found["parameters"], results[0][exchange]["parameters"])
            assert same(found["reports"], results[0][exchange]["reports"])
            assert all(found["nonfinite"])
