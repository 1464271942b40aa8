"""A compressor that leaves the energies of its payloads unknown, as the contract allows: what it
keeps and loses is measured by decoding, and it trains as one that knows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor, ParameterServer, TopK
from compressors import Payload
from compressors.base import Spec
from tests.distributed.processes import run_ranks
from tests.distributed.setting import Scripted, flat_parameters, loss_of, small_net


class Unknowing(TopK):
    """Top-k that tells nothing of what it keeps."""

    def compress(self, x: Tensor, spec: Spec, add: Tensor | None = None) -> Payload:
        return replace(super().compress(x, spec, add), energies=None)

    def smaller(self, payload: Payload, factor: float) -> Payload:
        return replace(super().smaller(payload, factor), energies=None)


WAYS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "gathered": (torch.optim.SGD, {}),
    "sharded": (torch.optim.SGD, {"exchange": "sharded"}),
    "a server": (torch.optim.SGD, {"exchange": ParameterServer(own_memory=True)}),
    "voted": (torch.optim.SGD, {"exchange": "voted_indices"}),
    "by layer": (torch.optim.SGD, {"granularity": "layer", "dense_below": 20}),
    "updates": (torch.optim.AdamW, {}),
}


def _trained(way: str, base: TopK, rank: int) -> tuple[Tensor, list[tuple[float, ...]]]:
    kind, options = WAYS[way]
    model = DDP(small_net(), bucket_cap_mb=0.002)
    optimizer = kind(model.parameters(), lr=0.01)
    policy = Scripted([10.0, 10.0, 1.0, 40.0], probe=(10.0, 40.0))
    compressor = AdaptiveCompressor(base, (1, 100), policy=policy, **options)
    compressor.attach(model, optimizer=optimizer)
    for step in range(8):
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        optimizer.step()
    compressor.close()
    cfs, kinds = (10.0, 40.0), ("error_fed", "gradient", "raw")
    told = [tuple(r.gain(cf, kind) for cf in cfs for kind in kinds) for r in policy.reports]
    return flat_parameters(model), told


def _all_trained(rank: int) -> dict[str, list[Any]]:
    return {way: [_trained(way, base(), rank) for base in (TopK, Unknowing)] for way in WAYS}


def test_what_is_unknown_is_measured() -> None:
    for found in run_ranks(2, _all_trained):
        for (parameters, gains), (others, measured) in found.values():
            torch.testing.assert_close(others, parameters)
            assert len(gains) > 5
            torch.testing.assert_close(
                torch.tensor(measured), torch.tensor(gains), rtol=1e-4, atol=1e-6, equal_nan=True
            )
