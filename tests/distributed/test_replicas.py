"""All ranks hold the same parameters, whatever the memory, however unevenly they use the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor, Momentum
from tests.distributed.processes import run_ranks
from tests.distributed.setting import Scripted, batch, small_net

STEPS = 14


class _Branches(nn.Module):
    """A trunk and two branches; a step uses one, the other, both, or the first times zero."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(12, 12, dtype=torch.float64)
        self.branches = nn.ModuleList([small_net(seed=0), small_net(seed=1)])

    def forward(self, x: Tensor, which: int) -> Tensor:
        x = self.trunk(x)
        if which == 3:
            return self.branches[0](x) * 0
        return sum(self.branches[i](x) for i in ([0, 1] if which == 2 else [which]))


USES = [(0, 1), (3, 1), (1, 1), (2, 0), (1, 2), (3, 3), (2, 2)]
"""What each of two ranks uses, step by step, over and over."""


def _train(rank: int, sgd: dict[str, Any], options: dict[str, Any], changes: bool) -> float:
    """The largest difference between the ranks' parameters, after any step."""
    torch.manual_seed(0)
    model = DDP(_Branches(), find_unused_parameters=True, bucket_cap_mb=0.004)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, **sgd)

    def attached() -> AdaptiveCompressor:
        policy = Scripted([8.0, 8.0, 1.0])
        compressor = AdaptiveCompressor(policy=policy, cf_range=(1, 32), **options)
        return compressor.attach(model, optimizer=optimizer)

    compressor, spread = attached(), 0.0
    for step in range(STEPS):
        if changes and step in (2, 9):  # for one step, two branches have not been used by all
            compressor.detach()
        if changes and step == 4:
            compressor = attached()
        if changes and step == 10:
            other = AdaptiveCompressor(policy=Scripted([4.0]), cf_range=(1, 32), **options)
            other.attach(model, optimizer=optimizer)
        optimizer.zero_grad()
        x, y = batch(step, rank)
        ((model(x, USES[step % len(USES)][rank % 2]) - y) ** 2).mean().backward()
        optimizer.step()
        own = torch.cat([p.detach().flatten() for p in model.parameters()])
        first = own.clone()
        dist.broadcast(first, 0)
        spread = max(spread, float((own - first).abs().max()))
    return spread


PLAIN: dict[str, Any] = {"momentum": 0.9}
DAMPENED = {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}
NESTEROV = {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}


SETTINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    (PLAIN, {}),
    (PLAIN, {"memory": "residual"}),
    (PLAIN, {"base": "randomk", "memory": "none"}),
    (DAMPENED, {}),
    ({**DAMPENED, "maximize": True}, {"base": "dgc"}),
    ({"momentum": 0.9, "dampening": 0.5}, {"memory": Momentum(masking=True)}),
    (NESTEROV, {"memory": Momentum(clip_norm=0.05)}),
    (NESTEROV, {"base": "powersgd"}),
    (DAMPENED, {"base": "qsgd", "exchange": "sharded"}),
    (DAMPENED, {"base": "topk", "exchange": "voted_indices"}),
]


def _train_with_each(rank: int, changes: bool) -> dict[str, float]:
    return {str(each): _train(rank, *each, changes) for each in SETTINGS}


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(False, marks=pytest.mark.long, id="attached"),
        pytest.param(True, id="detached and attached"),
    ],
)
def test_replicas_stay_equal_where_ranks_use_other_parameters(changes: bool) -> None:
    nothing = dict.fromkeys(map(str, SETTINGS), 0.0)
    assert run_ranks(2, _train_with_each, changes) == [nothing, nothing]


def _dense_or_cf_1(rank: int) -> list[float]:
    return [_deviation(rank, sgd) for sgd in (PLAIN, DAMPENED, NESTEROV)]


def _deviation(rank: int, sgd: dict[str, Any]) -> float:
    """How far CF 1 is from plain DDP where a first gradient is zero on one rank."""
    ends = []
    for compressed in (False, True):
        torch.manual_seed(0)
        model = DDP(_Branches(), bucket_cap_mb=0.004)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, **sgd)
        if compressed:
            AdaptiveCompressor(policy=Scripted([1.0]), cf_range=(1, 32)).attach(
                model, optimizer=optimizer
            )
        for step in range(8):
            optimizer.zero_grad()
            x, y = batch(step, rank)
            both = model(x, 2) * (0 if rank == 1 and step < 2 else 1)
            ((both - y * (both != 0)) ** 2).mean().backward()
            optimizer.step()
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    return float((ends[0] - ends[1]).abs().max())


def test_cf_1_is_dense_sgd_where_a_first_gradient_is_zero_on_one_rank() -> None:
    assert max(map(max, run_ranks(2, _dense_or_cf_1))) < 1e-14
