"""Other things that people train with, beside a compressor: at CF 1 it is what it is without one.

docs/compatibility.md names these tests, and those of other files.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

from adaptive import AdaptiveCompressor
from tests.distributed.processes import run_ranks
from tests.distributed.setting import Scripted, batch, flat_parameters, loss_of, small_net

STEPS = 6
CAP = 0.002
"""Of a bucket, in MB, so that there are several."""


class _Checkpointed(nn.Module):
    """Computes its first half again in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.net = small_net()
        self._reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.net, nn.Sequential)
        x = x.requires_grad_()
        half: Tensor = checkpoint(self.net[:2], x, use_reentrant=self._reentrant)
        out: Tensor = self.net[2:](half)
        return out


class _Adapter(nn.Module):
    """A frozen layer, and a product of two narrow matrices beside it (LoRA)."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, 2, bias=False, dtype=torch.float64)
        self.up = nn.Linear(2, layer.out_features, bias=False, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) + self.up(self.down(x))
        return out


def _with_adapters() -> nn.Module:
    torch.manual_seed(0)
    layers = [_Adapter(m) if isinstance(m, nn.Linear) else m for m in small_net().children()]
    return nn.Sequential(*layers)


def _tied() -> nn.Module:
    torch.manual_seed(0)
    first, second = (nn.Linear(12, 12, bias=False, dtype=torch.float64) for _ in range(2))
    second.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), nn.Linear(12, 3).double())


class _Scale(nn.Module):
    """Its parameter has another dtype than those of `small_net`."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.by


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def _zero(model: nn.Module) -> torch.optim.Optimizer:
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)


Way = tuple[Callable[[], DDP], Callable[[nn.Module], torch.optim.Optimizer]]

WAYS: dict[str, Way] = {
    "checkpointing": (lambda: DDP(_Checkpointed(False), bucket_cap_mb=CAP), _sgd),
    "checkpointing, reentrant": (
        lambda: DDP(_Checkpointed(True), bucket_cap_mb=CAP, static_graph=True),
        _sgd,
    ),
    "adapters": (lambda: DDP(_with_adapters(), bucket_cap_mb=CAP), _adamw),
    "static graph, several dtypes": (  # DDP begins with a bucket for each, and numbers them wrong
        lambda: DDP(nn.Sequential(small_net(), _Scale()), static_graph=True),
        _adamw,
    ),
    "tied weights": (lambda: DDP(_tied(), bucket_cap_mb=CAP), _sgd),
    "ZeRO": (lambda: DDP(small_net(), bucket_cap_mb=CAP), _zero),
}


def _train(rank: int, way: str, cf: float | None) -> dict[str, Any]:
    """cf: None without a compressor."""
    make_model, make_optimizer = WAYS[way]
    model = make_model()
    optimizer = make_optimizer(model)
    names: list[str] = []
    if cf is not None:
        compressor = AdaptiveCompressor(cf_range=(1, 100), policy=Scripted([cf]))
        compressor.attach(model, optimizer=None if way == "ZeRO" else optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        optimizer.step()
    if cf is not None:
        state = compressor.state_dict()
        names = [name for name, kept in state["memory"].items() if "residual" in kept]
    return {"parameters": flat_parameters(model), "waiting": names}


def _each_cf(rank: int, way: str) -> list[dict[str, Any]]:
    return [_train(rank, way, cf) for cf in (None, 1.0, 10.0)]


@pytest.mark.parametrize("way", WAYS)
def test_at_cf_1_it_is_what_it_is_without(way: str) -> None:
    (plain, whole, compressed), other = run_ranks(2, _each_cf, way)
    torch.testing.assert_close(whole["parameters"], plain["parameters"])
    assert not torch.equal(compressed["parameters"], plain["parameters"])
    assert compressed["waiting"]
    assert all("layer" not in name for name in compressed["waiting"])  # which adapters keep frozen
    for one, two in zip((plain, whole, compressed), other, strict=True):
        assert torch.equal(one["parameters"], two["parameters"])


def _uneven(rank: int) -> str:
    model = DDP(small_net())
    AdaptiveCompressor().attach(model)
    try:
        with model.join():
            for step in range(2 + rank):
                loss_of(model, step, rank).backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_join_is_refused_on_every_rank_at_the_first_backward() -> None:
    for said in run_ranks(2, _uneven, limit=30, timeout=20):
        assert "DDP's join() is not supported" in said
        assert "drop_last=True" in said


def _evaluated(rank: int) -> bool:
    """Passes without gradients, between steps and within them, are nobody's business."""
    ends = []
    for evaluates in (False, True):
        model = DDP(small_net())
        optimizer = _sgd(model)
        AdaptiveCompressor(policy=Scripted([10.0])).attach(model, optimizer=optimizer)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, step, rank).backward()
            if evaluates:
                with torch.inference_mode():
                    model(batch(step, 7)[0])
                model.eval()
                with torch.no_grad():
                    model.module(batch(step, 8)[0])
                model.train()
            optimizer.step()
        ends.append(flat_parameters(model))
    return torch.equal(*ends)


def test_evaluation_between_steps_changes_nothing() -> None:
    assert run_ranks(2, _evaluated) == [True, True]
