"""Two ranks: parameters of odd shapes, one huge element on one rank, and settings of one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor, Delayed, Gossip, LocalSteps, Momentum
from tests.distributed.processes import run_ranks
from tests.distributed.setting import Scripted
from tests.unit.in_one_process import Given

SHAPES = ((), (1,), (0,), (3, 0), (8, 12), (40,), ())

MODES: dict[str, dict[str, Any]] = {
    "plain": {"memory": "residual"},
    "momentum": {},
    "layers": {"granularity": "layer"},
    "sharded": {"exchange": "sharded"},
    "local steps": {"sync": LocalSteps(2)},
    "outer momentum": {"sync": LocalSteps(2, outer_momentum=0.9, overlap=1)},
    "delay": {"sync": Delayed(2)},
    "gossip": {"sync": Gossip()},
    "updates": {"memory": "updates"},
}


def _train(rank: int, mode: str, value: float) -> dict[str, Any]:
    """The element is huge in a compressed step, and in a dense one. Afterwards the gradients are
    zeros, so that what the ranks know of each other is all that moves them."""
    torch.manual_seed(0)
    model = DDP(Given(SHAPES), bucket_cap_mb=0.0002)
    momentum = 0.0 if mode == "delay" else 0.5
    optimizer: torch.optim.Optimizer
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=momentum)
    if mode == "updates":
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    policy = Scripted([10.0] * 6 + [1.0] * 4 + [10.0] * 8 + [1.0] * 22)
    compressor = AdaptiveCompressor("topk", (1, 20), policy=policy, **MODES[mode])
    compressor.attach(model, optimizer=optimizer)
    finite = []
    for step in range(40):
        made = torch.Generator().manual_seed(2 * step + rank)
        gradients = [torch.randn(shape, generator=made) for shape in SHAPES]
        if rank and step in (4, 8):
            gradients[4][3, 4] = value
            gradients[0].fill_(value)
        model(gradients).backward()
        finite.append(all(bool(p.grad.isfinite().all()) for p in model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
    state = compressor.state_dict()
    compressor.load_state_dict(state)
    compressor.detach()
    return {"finite": finite, "end": [p.detach() for p in model.parameters()]}


@pytest.mark.parametrize("value", [1.0, 1e38])
@pytest.mark.parametrize("mode", MODES)
def test_all_ranks_train_on_and_stay_together(mode: str, value: float) -> None:
    results = run_ranks(2, _train, mode, value)
    for result in results:
        assert all(result["finite"])
        assert all(p.isfinite().all() for p in result["end"])
    for mine, theirs in zip(results[0]["end"], results[1]["end"], strict=True):
        torch.testing.assert_close(mine, theirs)  # detached: at their mean, or replicas all along


def _one_rank_asks(rank: int) -> str:
    """Momentum correction, which AdamW has not, is asked for by rank 1 only."""
    model = DDP(Given([(8, 12)]))
    asks = {"memory": Momentum(masking=True)} if rank else {}
    compressor = AdaptiveCompressor("topk", **asks)  # type: ignore[arg-type]
    with pytest.raises((ValueError, RuntimeError)) as caught:
        compressor.attach(model, optimizer=torch.optim.AdamW(model.parameters()))
    return str(caught.value)


def test_a_setting_that_only_one_rank_has_is_refused_on_every_rank() -> None:
    other, own = run_ranks(2, _one_rank_asks)
    assert own.startswith("memory='momentum' needs an SGD of torch's with momentum")
    assert "rank 1 failed to set up: ValueError: memory='momentum' needs" in other


def _last_step_left_out(rank: int, then: str) -> torch.Tensor:
    """A script that skips steps whose gradients are not finite, on one rank and with gossip."""
    model = DDP(Given([(8, 12)]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compressor = AdaptiveCompressor("none", sync=Gossip()).attach(model, optimizer=optimizer)
    for step in range(3):
        model([torch.full((8, 12), float(rank))]).backward()
        if not rank or step < 2:
            optimizer.step()
        optimizer.zero_grad()
    if then == "averaged":
        with compressor.averaged():
            pass
    elif then != "detach":
        getattr(compressor, then)()
    compressor.detach()
    return next(model.parameters()).detach()


@pytest.mark.parametrize("then", ["detach", "averaged", "state_dict", "close"])
def test_with_gossip_no_rank_waits_for_a_last_step_that_was_left_out(then: str) -> None:
    ends = run_ranks(2, _last_step_left_out, then, timeout=20)
    # Rank 0 has made three steps of 0, rank 1 two of 0.1, and all go on from the mean.
    for end in ends:
        torch.testing.assert_close(end, torch.full((8, 12), 1 - 0.1))
