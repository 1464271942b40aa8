"""Granularity "layer" by one selection for a bucket, against one selection for each tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor, ParameterServer, TwoLevel
from compressors import TopK
from compressors.base import Key
from compressors.kernels.blocks import Selected
from tests.distributed.processes import run_ranks
from tests.distributed.setting import Scripted, flat_parameters, loss_of, same, small_net

STEPS = 5


class ByTensor(TopK):
    """Top-k that is handed one tensor at a time."""

    def select(self, tensor: Tensor, k: int, add: Tensor | None, key: Key) -> Selected:
        return super().select(tensor, k, add, key)


class Raw(Scripted):
    gain = "raw"


EXCHANGES: dict[str, Any] = {
    "gathered": "all_gather",
    "voted": "voted_indices",
    "sharded": "sharded",
    "server": ParameterServer(down_cf=5, own_memory=True),
    "two levels": TwoLevel(node=2),
}


def _both(
    rank: int, exchange: str, policy: type[Scripted], adamw: bool
) -> list[tuple[Tensor, list[Any]]]:
    """Parameters, and each step's measurements: energies, and norms for the gain "raw"."""
    found = []
    for base in (TopK(), ByTensor()):
        model = DDP(small_net(), bucket_cap_mb=0.004)
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        if adamw:
            optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        compressor = AdaptiveCompressor(
            base,
            (2, 1000),
            policy=policy([10.0, 100.0, 1.0], probe=(5.0, 50.0)),
            granularity="layer",
            exchange=EXCHANGES[exchange],
            dense_below=10,
        ).attach(model, optimizer=optimizer)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, step, rank).backward()
            optimizer.step()
        compressor.close()
        told = [
            (cf, each.kept, each.error, each.kept_norms, each.grad_norms)
            for report in compressor.policy.reports
            for cf, each in report.measurements.items()
        ]
        found.append((flat_parameters(model), told))
    return found


@pytest.mark.parametrize("policy", [Scripted, Raw])
@pytest.mark.parametrize("adamw", [False, True])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_it_sends_and_measures_what_tensor_by_tensor_would(
    exchange: str, adamw: bool, policy: type[Scripted]
) -> None:
    ranks = 4 if exchange == "two levels" else 2
    results = run_ranks(ranks, _both, exchange, policy, adamw)
    for (parameters, told), (expected, wanted) in results:
        assert same(parameters, results[0][0][0])
        assert torch.allclose(parameters, expected, rtol=1e-10, atol=1e-12)
        assert len(told) == len(wanted) > STEPS
        for each, other in zip(told, wanted, strict=True):
            assert each == pytest.approx(other, rel=1e-6, nan_ok=True)
