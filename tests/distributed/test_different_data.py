"""Ranks whose data differ for good, as in federated training: each has classes of its own."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor
from tests.distributed.processes import run_ranks
from tests.distributed.setting import Scripted

CLASSES, STEPS = 10, 120


def _data(seed: int, rank: int, count: int = 32) -> tuple[Tensor, Tensor]:
    """Inputs (count, 32) about the centres of five classes, and those classes."""
    centres = torch.randn(CLASSES, 32, generator=torch.Generator().manual_seed(5))
    drawn = torch.Generator().manual_seed(7 * seed + rank + 1)
    classes = torch.randint(0, CLASSES // 2, (count,), generator=drawn) + CLASSES // 2 * rank
    return 0.55 * centres[classes] + torch.randn(count, 32, generator=drawn), classes


def _held_out(rank: int, base: str | None) -> float:
    torch.manual_seed(0)
    layers = [nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, CLASSES)]
    model = DDP(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    if base is not None:
        AdaptiveCompressor(base, policy=Scripted([8.0])).attach(model, optimizer=optimizer)
    loss = nn.CrossEntropyLoss()
    for step in range(STEPS):
        optimizer.zero_grad()
        x, classes = _data(step, rank)
        loss(model(x), classes).backward()
        optimizer.step()
    with torch.no_grad():
        held = [_data(10**6, each, 300) for each in range(2)]
        return sum(float(loss(model.module(x), classes)) for x, classes in held) / 2


def _all_held_out(rank: int) -> list[float]:
    return [_held_out(rank, base) for base in (None, "int4")]


def test_adamw_on_gradients_in_4_bits_trains_as_under_ddp() -> None:
    """There second moments are the mean gradient's. Steps that ranks make by their own second
    moments are slower, which docs/limits.md tells."""
    for plain, int4 in run_ranks(2, _all_held_out):
        assert plain < 0.6
        assert int4 < 1.1 * plain
