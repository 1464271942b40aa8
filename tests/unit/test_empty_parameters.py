"""Parameters without elements, where what optimizers do is exchanged in chunks: plain DDP steps
them like all others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor, Delayed, Gossip, LocalSteps
from adaptive.model import chunks as chunks_module
from tests.distributed.setting import Scripted, flat_parameters
from tests.unit.in_one_process import Given, one_rank

SHAPES: dict[str, Sequence[tuple[tuple[int, ...], torch.dtype]]] = {
    "alone in their precision": [
        ((8, 12), torch.float32),
        ((0,), torch.float64),
        ((0, 4), torch.float64),
        ((7,), torch.float32),
    ],
    "behind a large one": [((40, 30), torch.float32), ((0,), torch.float32)],
    "between large ones": [
        ((0,), torch.float32),
        ((40, 30), torch.float32),
        ((0,), torch.float32),
        ((30, 40), torch.float32),
    ],
    "and nothing else in half precision": [((0,), torch.bfloat16), ((9, 9), torch.float32)],
}
WAYS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {}, {}),
    "RMSprop": (torch.optim.RMSprop, {}, {}),
    "SGD": (torch.optim.SGD, {"momentum": 0.9}, {}),
    "local steps": (torch.optim.AdamW, {}, {"sync": LocalSteps(2)}),
    "automatic steps": (torch.optim.AdamW, {}, {"sync": LocalSteps("auto")}),
    "delay": (torch.optim.AdamW, {}, {"sync": Delayed(1)}),
    "gossip": (torch.optim.AdamW, {}, {"sync": Gossip()}),
}


@pytest.fixture(autouse=True, scope="module")
def group() -> Iterator[None]:
    with one_rank():
        yield


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shapes", SHAPES)
def test_it_trains_and_goes_back(shapes: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks_module, "CHUNK", 4000)
    kind, settings, options = WAYS[way]
    net = Given([shape for shape, _ in SHAPES[shapes]])
    for p, (_, dtype) in zip(net.all, SHAPES[shapes], strict=True):
        p.data = p.data.to(dtype)
    model = DDP(net)
    optimizer = kind(model.parameters(), lr=0.01, **settings)
    steps = (1, 2, 2, 1) if way == "automatic steps" else (0,)
    policy = Scripted([10.0, 10.0, 10.0, 10.0, 1.0, 1.0], local_steps=steps)
    compressor = AdaptiveCompressor(cf_range=(1, 20), policy=policy, **options)
    compressor.attach(model, optimizer=optimizer)
    start = flat_parameters(model)
    for step in range(14):
        if step == 12:
            compressor.detach()
        made = torch.Generator().manual_seed(step)
        model([torch.randn(p.shape, generator=made).to(p.dtype) for p in net.all]).backward()
        optimizer.step()
        optimizer.zero_grad()
    end = flat_parameters(model)
    assert end.isfinite().all()
    assert not torch.equal(start, end)
