"""Parameters that are not in one piece of memory, or not row by row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor, LocalSteps
from examples.own_memory import Decayed
from tests.distributed.processes import run_ranks
from tests.distributed.setting import Scripted, flat_parameters


class _Net(nn.Module):
    """The same values, dense or with strides."""

    def __init__(self, dense: bool) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(0)
        whole = torch.randn(40, 3, generator=made, dtype=torch.float64)
        strided = {
            "column": whole[:, :1],
            "odd_rows": torch.randn(20, 6, generator=made, dtype=torch.float64)[1::2],
            "turned": torch.randn(40, 10, generator=made, dtype=torch.float64).t(),
        }
        for name, values in strided.items():
            values = values.contiguous() if dense else values
            assert values.is_contiguous() == dense
            self.register_parameter(name, nn.Parameter(values))
        torch.manual_seed(1)
        self.conv = nn.Conv2d(3, 6, 3, dtype=torch.float64)
        if not dense:
            self.conv.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).mean((2, 3))  # (batch, 6)
        x = (x @ self.odd_rows.t()).tanh()  # (batch, 10)
        return (x @ self.turned).tanh() @ self.column


def _run(rank: int, dense: bool, cf: float, options: dict[str, Any]) -> Tensor:
    """Trains, saves, goes on in a new model from what was saved, detaches and goes on."""

    def make() -> tuple[DDP, torch.optim.Optimizer, AdaptiveCompressor]:
        model = DDP(_Net(dense), bucket_cap_mb=0.002)
        optimizer: torch.optim.Optimizer
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-2)
        if options.get("memory") == "updates":
            optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        policy = Scripted([cf])
        compressor = AdaptiveCompressor("topk+fp32", (1, 100), policy=policy, **options)
        return model, optimizer, compressor.attach(model, optimizer=optimizer)

    def train(first: int, last: int) -> None:
        for step in range(first, last):
            made = torch.Generator().manual_seed(100 * step + rank)
            x = torch.randn(4, 3, 8, 8, generator=made, dtype=torch.float64)
            optimizer.zero_grad()
            (model(x) - x.mean((1, 2, 3))[:, None]).square().mean().backward()
            optimizer.step()

    model, optimizer, compressor = make()
    train(0, 5)
    saved = model.state_dict(), optimizer.state_dict(), compressor.state_dict()
    model, optimizer, compressor = make()
    train(0, 1)  # DDP cuts its buckets
    for each, state in zip((model, optimizer, compressor), saved, strict=True):
        each.load_state_dict(state)
    train(5, 9)
    compressor.detach()
    train(9, 12)
    return flat_parameters(model)


def _both(rank: int, cf: float, options: dict[str, Any]) -> float:
    dense, strided = (_run(rank, each, cf, options) for each in (True, False))
    return float((dense - strided).norm() / dense.norm())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"memory": "residual"},
        {"granularity": "layer"},
        {"memory": "updates"},
        {"memory": Decayed(), "sync": LocalSteps(2)},
    ],
    ids=str,
)
def test_strides_change_nothing(options: dict[str, Any]) -> None:
    for cf in (1.0, 8.0):
        assert max(run_ranks(2, _both, cf, options)) < 1e-9


def _expanded(rank: int) -> str:
    net = nn.Module()
    net.dense = nn.Parameter(torch.zeros(4))
    net.wide = nn.Parameter(torch.zeros(1, 3).expand(4, 3))
    with pytest.raises(ValueError, match="'wide' must have a place in memory") as caught:
        AdaptiveCompressor().attach(DDP(net, init_sync=False))
    return str(caught.value)


def test_expanded_parameters_are_refused() -> None:
    assert all("(0, 1)" in said for said in run_ranks(2, _expanded))
