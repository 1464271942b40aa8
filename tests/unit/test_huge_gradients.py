"""One finite element whose square overflows: plain DDP trains on, and so does every mode."""

from __future__ import annotations

from collections.abc import Iterator
from math import sqrt
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor, Delayed, Gossip, LocalSteps, Residual
from adaptive.exchange.bucket import LARGEST
from compressors.kernels import judge, squared_norms
from tests.distributed.setting import Scripted
from tests.unit.device_path import device_path
from tests.unit.in_one_process import Given, one_rank

SHAPES = ((8, 12), (40,), (3,))
AT = 4
MODES: dict[str, tuple[dict[str, Any], float]] = {
    "plain": ({"memory": "residual"}, 0.0),
    "plain beside momentum": ({"memory": "residual"}, 0.9),
    "half a residual": ({"memory": Residual(dtype=torch.bfloat16)}, 0.0),
    "momentum": ({}, 0.9),
    "no memory": ({"memory": "none"}, 0.0),
    "local steps": ({"sync": LocalSteps(2)}, 0.9),
    "outer momentum": ({"sync": LocalSteps(2, outer_momentum=0.9, overlap=1)}, 0.9),
    "delay": ({"sync": Delayed(1)}, 0.0),
    "choco-sgd": ({"sync": Gossip()}, 0.9),
    "deepsqueeze": ({"sync": Gossip(algorithm="deepsqueeze")}, 0.9),
}
STEPS = {
    "compressed": [10.0],
    "dense before": [1.0] * AT + [10.0] * 8,
    "the first dense": [10.0] * AT + [1.0] * 8,
    "dense": [10.0] * (AT - 1) + [1.0] * 9,
}


@pytest.fixture(autouse=True, scope="module")
def group() -> Iterator[None]:
    with one_rank():
        yield


def _trained(
    options: dict[str, Any], momentum: float, value: float, cfs: list[float], base: str = "topk"
) -> tuple[list[bool], torch.Tensor]:
    """Whether the gradients of each step were finite, and the parameters in the end. The script
    skips no step."""
    model = DDP(Given(SHAPES), bucket_cap_mb=0.0002)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=momentum)
    compressor = AdaptiveCompressor(base, (1, 20), policy=Scripted(cfs), **options)
    compressor.attach(model, optimizer=optimizer)
    finite = []
    for step in range(10):
        made = torch.Generator().manual_seed(step)
        gradients = [torch.randn(shape, generator=made) for shape in SHAPES]
        if step == AT:
            gradients[0][3, 4] = value
        model(gradients).backward()
        finite.append(all(bool(p.grad.isfinite().all()) for p in model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
    compressor.detach()
    return finite, torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("mode", MODES)
def test_nothing_becomes_infinite(mode: str, steps: str) -> None:
    finite, end = _trained(*MODES[mode], 1e38, STEPS[steps])
    assert all(finite)
    assert end.isfinite().all()


@pytest.mark.parametrize(
    "base", ["topk+fp32", "topk+int8", "int8", "bf16", "powersgd", "sketch", "onebit", "dgc"]
)
def test_nor_with_another_base(base: str) -> None:
    finite, end = _trained({"memory": "residual"}, 0.0, 3e38, [10.0], base)
    assert all(finite)
    assert end.isfinite().all()


@pytest.mark.parametrize("kind", ["AdamW", "Muon", "RMSprop"])
def test_nor_by_the_steps_of_another_optimizer(kind: str) -> None:
    if not hasattr(torch.optim, kind):
        pytest.skip("torch before 2.9")
    model = DDP(Given(SHAPES[:1]))
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01)
    compressor = AdaptiveCompressor(cf_range=(1, 20), policy=Scripted([10.0] * 8 + [1.0] * 2))
    compressor.attach(model, optimizer=optimizer)
    for step in range(10):
        gradient = torch.randn(SHAPES[0], generator=torch.Generator().manual_seed(step))
        if step == AT:
            gradient[3, 4] = 1e38
        model([gradient]).backward()
        optimizer.step()
        optimizer.zero_grad()
    compressor.detach()
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("mode", ["plain", "momentum", "local steps", "delay"])
def test_nor_on_a_device(mode: str) -> None:
    with device_path():
        finite, end = _trained(*MODES[mode], 1e38, STEPS["compressed"])
    assert all(finite)
    assert end.isfinite().all()


def test_only_what_is_not_finite_makes_a_bucket_so(either_path: str) -> None:
    """What is too large to be squared tells nothing of its step either."""
    for value, spoils in ((float("inf"), True), (float("nan"), True), (1e38, False)):
        x = torch.ones(1000)
        x[7] = value
        total, nonfinite = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
        flag = judge(squared_norms([x[:500], x[500:]]), x, total, nonfinite)
        assert bool(flag) == spoils
        assert nonfinite == 1


def test_the_largest_that_is_kept_can_be_squared_and_added_up() -> None:
    for dtype, largest in LARGEST.items():
        assert 1e9 * largest**2 * 50 < torch.finfo(dtype).max
        assert largest < sqrt(torch.finfo(dtype).max)
