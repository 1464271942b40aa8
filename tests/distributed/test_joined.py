"""Buckets compressed as one: what is kept of them lies together, and that is only speed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor, Fixed, reducer
from adaptive.bucket import as_one
from adaptive.memory import bucket_memory
from tests.distributed.processes import run_ranks
from tests.distributed.setting import flat_parameters, same

CAP = 0.01
"""MiB of a bucket, of which the model then has several."""


def _net() -> nn.Module:
    """Parameters become ready in another order than any simple one: weights before biases in
    BatchNorm, after them in Linear."""
    torch.manual_seed(0)
    conv = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3)]
    head = [nn.BatchNorm2d(16), nn.Flatten(), nn.Linear(16 * 16, 24), nn.ReLU(), nn.Linear(24, 5)]
    return nn.Sequential(*conv, *head).double()


def _run(rank: int, memory: str, together: bool, options: dict[str, Any]) -> dict[str, Any]:
    copies = 0
    original = bucket_memory.BucketMemory._copied

    def counted(*args: Any) -> Any:
        nonlocal copies
        copies += 1
        return original(*args)

    bucket_memory.BucketMemory._copied = counted  # type: ignore[method-assign]
    if not together:
        reducer.lay_out = lambda parameters, velocities: None  # type: ignore[assignment]
    model = DDP(_net(), bucket_cap_mb=CAP, **options)
    momentum = 0.9 if memory == "momentum" else 0.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
    compressor = AdaptiveCompressor("topk", (2, 100), policy=Fixed(cf=20), memory=memory)
    compressor.attach(model, optimizer=optimizer)
    for step in range(6):
        draw = torch.Generator().manual_seed(10 * step + rank)
        x = torch.randn(4, 3, 8, 8, generator=draw, dtype=torch.float64)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return {"copies": copies, "parameters": flat_parameters(model)}


@pytest.mark.parametrize("memory", ["residual", "momentum"])
def test_it_lies_together_and_nothing_is_copied(memory: str) -> None:
    everyone = run_ranks(2, _run, memory, True, {})
    assert [one["copies"] for one in everyone] == [0, 0]
    assert same(everyone[0]["parameters"], everyone[1]["parameters"])


@pytest.mark.parametrize(
    "options", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str
)
@pytest.mark.parametrize("memory", ["residual", "momentum"])
def test_where_it_lies_changes_nothing(memory: str, options: dict[str, Any]) -> None:
    together, apart = (run_ranks(2, _run, memory, each, options)[0] for each in (True, False))
    assert apart["copies"] > 0
    torch.testing.assert_close(together["parameters"], apart["parameters"], rtol=0, atol=1e-12)


def test_tensors_are_one_only_in_order_and_without_gaps() -> None:
    room = torch.arange(10.0)
    a, b, c = room[:3], room[3:4], room[4:]
    whole = as_one([a, b, c])
    assert whole is not None
    assert torch.equal(whole, room)
    assert whole.data_ptr() == room.data_ptr()
    assert as_one([b, a]) is None
    assert as_one([a, c]) is None
    assert as_one([a, room[3:4].clone()]) is None
