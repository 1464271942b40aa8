"""Buckets compressed as one: what is kept of them lies together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor, Fixed
from adaptive.exchange.bucket import Bucket, BucketLayout
from adaptive.model.parameters import ModelParameter
from tests.distributed.processes import run_ranks
from tests.distributed.setting import flat_parameters, same

CAP = 0.01
"""MiB of a bucket, of which the model then has several."""

STEPS = 6


def _net() -> nn.Module:
    """Parameters become ready in another order than any simple one: weights before biases in
    BatchNorm, after them in Linear."""
    torch.manual_seed(0)
    conv = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3)]
    head = [nn.BatchNorm2d(16), nn.Flatten(), nn.Linear(16 * 16, 24), nn.ReLU(), nn.Linear(24, 5)]
    return nn.Sequential(*conv, *head).double()


def _run(
    rank: int, memory: str, options: dict[str, Any], exchange: str = "auto", unused: bool = False
) -> dict[str, Any]:
    """places: where what is kept for each bucket lies, by step. buffers: where working memory lies,
    by step and use. unused: the last bucket holds a parameter that is."""
    places: list[list[int]] = []
    buffers: list[list[tuple[str, int]]] = []
    original, buffer = BucketLayout.flat, Bucket.buffer

    def recorded(self: BucketLayout, name: str) -> torch.Tensor:
        flat = original(self, name)
        places[-1].append(flat.data_ptr())
        return flat

    def counted(self: Bucket, use: str, numel: int) -> torch.Tensor:
        given = buffer(self, use, numel)
        buffers[-1].append((use, given.data_ptr()))
        return given

    BucketLayout.flat = recorded  # type: ignore[method-assign]
    Bucket.buffer = counted  # type: ignore[method-assign]
    net = _net()
    if unused:
        net.register_parameter("unused", nn.Parameter(torch.ones(3, dtype=torch.float64)))
    model = DDP(net, bucket_cap_mb=CAP, **options)
    momentum = 0.9 if memory == "momentum" else 0.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
    compressor = AdaptiveCompressor(
        "topk", (2, 100), policy=Fixed(cf=20), memory=memory, exchange=exchange
    )
    compressor.attach(model, optimizer=optimizer)
    for step in range(STEPS):
        places.append([])
        buffers.append([])
        draw = torch.Generator().manual_seed(10 * step + rank)
        x = torch.randn(4, 3, 8, 8, generator=draw, dtype=torch.float64)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return {"buffers": buffers, "places": places, "parameters": flat_parameters(model)}


@pytest.mark.parametrize("options", [{}, {"static_graph": True}], ids=str)
@pytest.mark.parametrize("memory", ["residual", "momentum"])
def test_it_lies_together_and_nothing_is_copied(memory: str, options: dict[str, Any]) -> None:
    everyone = run_ranks(2, _run, memory, options)
    assert same(everyone[0]["parameters"], everyone[1]["parameters"])
    for one in everyone:
        settled = one["places"][2:]
        assert len(settled[0]) > 2 * (2 if memory == "momentum" else 1)
        assert all(places == settled[0] for places in settled)
        assert options or not any(one["buffers"])


@pytest.mark.parametrize("exchange", ["all_gather", "sharded"])
def test_working_memory_is_that_of_the_step_before(exchange: str) -> None:
    options = {"find_unused_parameters": True}
    everyone = run_ranks(2, _run, "residual", options, exchange, True)
    assert same(everyone[0]["parameters"], everyone[1]["parameters"])
    for one in everyone:
        settled = one["buffers"][2:]
        assert "error-fed gradients" in dict(settled[0])
        assert ("mean of a shard" in dict(settled[0])) == (exchange == "sharded")
        assert all(buffers == settled[0] for buffers in settled)


def _parameters(sizes: tuple[int, ...]) -> list[ModelParameter]:
    return [ModelParameter(f"p{i}", torch.empty(size)) for i, size in enumerate(sizes)]


def test_what_is_kept_moves_to_where_it_lies_together() -> None:
    parameters = _parameters((3, 1, 6))
    parameters[1].open_residual().fill_(7.0)
    layout = BucketLayout(parameters)
    flat = layout.flat("residual")
    assert flat.tolist() == [0, 0, 0, 7, 0, 0, 0, 0, 0, 0]
    assert [parameter.has_residual for parameter in parameters] == [False, True, False]
    parameters[2].open_residual().fill_(1.0)
    assert flat.tolist() == [0, 0, 0, 7, 1, 1, 1, 1, 1, 1]
    assert layout.flat("residual") is flat


def test_it_moves_again_if_the_order_changes_or_some_of_it_was_replaced() -> None:
    parameters = _parameters((3, 1, 6))
    for i, parameter in enumerate(parameters):
        parameter.open_residual().fill_(float(i))
    layout, other = BucketLayout(parameters), BucketLayout(parameters[::-1])
    before = layout.flat("residual")
    assert other.flat("residual").tolist() == [2.0] * 6 + [1.0] + [0.0] * 3
    parameters[1].residual = torch.full((1,), 5.0)
    assert other.flat("residual")[6] == 5.0
    assert layout.flat("residual").tolist() == [0.0] * 3 + [5.0] + [2.0] * 6
    assert layout.flat("residual") is not before
