"""Residuals in bfloat16: half the memory, and nothing that is lost on the whole."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor, Fixed, LocalSteps, Network, Residual, Updates
from compressors.kernels import blocks
from tests.distributed.processes import run_ranks
from tests.distributed.setting import flat_parameters, local_gradients, loss_of, small_net

STEPS = 60


def _run(rank: int, dtype: torch.dtype, options: dict[str, Any], on_device: bool) -> dict[str, Any]:
    """The deviation of what was sent and what waits from the sum of all ranks' gradients, which the
    parameters move too little to change much."""
    blocks.force_device_path = on_device
    model = DDP(small_net(torch.float32))
    compressor = AdaptiveCompressor(
        cf_range=(1, 1000), policy=Fixed(cf=100), memory=Residual(dtype=dtype), **options
    ).attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    total: Any = 0
    sent: Any = 0
    for step in range(STEPS):
        total = total + torch.cat(list(local_gradients(model, step, rank).values()))
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        sent = sent + torch.cat([p.grad.flatten() for p in model.parameters()])
        optimizer.step()
    memory = compressor.state_dict()["memory"]
    kept = [memory[name]["residual"] for name, _ in model.module.named_parameters()]
    both = torch.stack([total, torch.cat([k.float() for k in kept])])
    dist.all_reduce(both)
    lost = sent * dist.get_world_size() + both[1] - both[0]
    return {
        "lost": float(lost.norm() / both[0].norm()),
        "bias": float(lost.mean() / both[0].abs().mean()),
        "kept": {k.dtype for k in kept},
        "parameters": flat_parameters(model),
    }


@pytest.mark.parametrize("on_device", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "options",
    [
        {"base": "topk"},
        *(
            pytest.param({"base": "topk", **each}, marks=pytest.mark.long)
            for each in (
                {"granularity": "layer"},
                {"exchange": "sharded"},
                {"exchange": "voted_indices"},
            )
        ),
        {"base": "topk+int4"},
    ],
    ids=str,
)
def test_nothing_is_lost_but_by_rounding(options: dict[str, Any], on_device: bool) -> None:
    results = run_ranks(2, _run, torch.bfloat16, options, on_device)
    for result in results:
        assert result["kept"] == {torch.bfloat16}
        assert torch.equal(result["parameters"], results[0]["parameters"])
        assert 1e-6 < result["lost"] < 0.02  # sixty roundings by up to 1/256
        assert abs(result["bias"]) < 2e-3
    for result in run_ranks(2, _run, torch.float32, options, on_device):
        assert result["kept"] == {torch.float32}
        assert result["lost"] < 1e-5


def _stopped(rank: int, stop: int | None) -> torch.Tensor:
    """AdamW's run of twelve steps, perhaps stopped and gone on with."""

    def start() -> tuple[Any, Any, Any]:
        model = DDP(small_net(torch.float32))
        optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
        compressor = AdaptiveCompressor(
            policy=Fixed(cf=20),
            memory=Residual(dtype=torch.bfloat16),
            network=Network(clock=lambda: 0.0),
        )
        return model, optimizer, compressor.attach(model, optimizer=optimizer)

    model, optimizer, compressor = start()
    for step in range(12):
        if step == stop:
            states = [copy.deepcopy(x.state_dict()) for x in (model, optimizer, compressor)]
            compressor.detach()
            model, optimizer, compressor = start()
            loss_of(model, step, rank).backward()  # DDP builds its buckets anew after the first
            optimizer.zero_grad()
            for x, state in zip((model, optimizer, compressor), states, strict=True):
                x.load_state_dict(state)
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        optimizer.step()
    return flat_parameters(model)


def test_resuming_equals_never_having_stopped() -> None:
    whole, *others = (run_ranks(2, _stopped, stop) for stop in (None, 3, 8))
    assert torch.equal(whole[0], whole[1])
    for stopped in others:
        assert torch.equal(stopped[0], whole[0])
        assert torch.equal(stopped[1], whole[1])


def _changed(rank: int, before: torch.dtype, after: torch.dtype) -> float:
    """How far the residuals of a state are from those of a compressor that has loaded it."""
    states = []
    for dtype in (before, after):
        model = DDP(small_net(torch.float32))
        compressor = AdaptiveCompressor(policy=Fixed(cf=20), memory=Residual(dtype=dtype)).attach(
            model
        )
        loss_of(model, 0, rank).backward()
        if states:
            compressor.load_state_dict(states[0])
        states.append(compressor.state_dict())
        compressor.detach()
    first, second = (
        torch.cat([kept["residual"].float() for kept in state["memory"].values()])
        for state in states
    )
    assert {kept["residual"].dtype for kept in states[1]["memory"].values()} == {after}
    return float((first - second).norm() / first.norm())


def test_a_state_may_be_loaded_into_residuals_of_another_dtype() -> None:
    full, half = torch.float32, torch.bfloat16
    assert run_ranks(2, _changed, half, full) == [0.0, 0.0]
    assert all(0 < apart < 1 / 256 for apart in run_ranks(2, _changed, full, half))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"base": "qsgd"}, "memory must be 'none' or 'auto' for base 'qsgd'"),
        ({"sync": LocalSteps(4)}, "dtype torch.float32 with sync=LocalSteps(steps=4"),
    ],
    ids=str,
)
def test_what_does_not_go_with_it_is_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        AdaptiveCompressor(**{"memory": Residual(dtype=torch.bfloat16), **options})


@pytest.mark.parametrize("memory", [Residual, Updates])
def test_no_other_dtype_is_accepted(memory: Any) -> None:
    with pytest.raises(ValueError, match=r"dtype must be torch.float32 or torch.bfloat16, got tor"):
        memory(dtype=torch.float16)
