"""Where dense steps go on, SGD has its momentum back, and nothing is done to gradients any more."""

from __future__ import annotations

from contextlib import nullcontext
from copy import deepcopy
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor, Ladder
from adaptive.memory import momentum
from tests.distributed.processes import run_ranks
from tests.distributed.setting import Scripted, flat_parameters, loss_of, same, small_net
from tests.unit.device_path import device_path

CFS = [10.0] * 5 + [1.0] * 20
"""Twenty dense steps, of which SGD takes the last twelve by itself."""

SETTINGS: list[dict[str, Any]] = [
    {"weight_decay": 1e-2},
    {"nesterov": True},
    {"dampening": 0.3, "maximize": True},
]


class Run:
    def __init__(self, cfs: list[float], settings: dict[str, Any], base: Any = "topk+fp32") -> None:
        self.model = DDP(small_net())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.9, **settings)
        self.compressor = AdaptiveCompressor(base, (10, 100), policy=Scripted(cfs))
        self.compressor.attach(self.model, optimizer=self.optimizer)

    @property
    def rests(self) -> bool:
        assert self.compressor._session is not None
        return self.compressor._session._memory.now.handover.rests

    def train(self, rank: int, first: int, last: int) -> None:
        for step in range(first, last):
            self.optimizer.zero_grad()
            loss_of(self.model, step, rank).backward()
            self.optimizer.step()

    def state(self) -> list[Any]:
        parts = (self.model, self.optimizer, self.compressor)
        return deepcopy([part.state_dict() for part in parts])

    def load(self, state: list[Any]) -> None:
        parts = (self.model, self.optimizer, self.compressor)
        for part, of in zip(parts, state, strict=True):
            part.load_state_dict(of)


def _steps(rank: int, settings: dict[str, Any], resting: int) -> tuple[Tensor, bool]:
    with patch.object(momentum, "RESTING", resting):
        run = Run(CFS, settings)
        run.train(rank, 0, len(CFS))
        return flat_parameters(run.model), run.rests


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_steps_are_those_of_velocities_that_ranks_keep(
    ranks: int, settings: dict[str, Any]
) -> None:
    found = run_ranks(ranks, _steps, settings, 8)
    kept = run_ranks(ranks, _steps, settings, 1000)
    assert all(rests for _, rests in found)
    assert not any(rests for _, rests in kept)
    for parameters, _ in found:
        assert torch.equal(parameters, found[0][0])
        torch.testing.assert_close(parameters, kept[0][0], rtol=1e-10, atol=1e-12)


def _in_bf16(rank: int, on_device: bool) -> bool:
    with device_path() if on_device else nullcontext():
        run = Run([10.0] * 3 + [2.0] * 20, {}, Ladder({2: "bf16"}, "topk+fp32"))
        run.train(rank, 0, 16)
        return run.rests


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
def test_steps_in_bf16_are_dense_ones(on_device: bool) -> None:
    assert run_ranks(2, _in_bf16, on_device) == [True] * 2


def _gradients(rank: int) -> tuple[Tensor, Tensor]:
    run = Run([1.0], {})
    run.train(rank, 0, 20)
    assert run.rests
    plain = DDP(small_net())
    plain.load_state_dict(run.model.state_dict())
    run.optimizer.zero_grad()
    for model in (run.model, plain):
        loss_of(model, 20, rank).backward()
    grads = [[p.grad for p in model.parameters()] for model in (run.model, plain)]
    first, second = (torch.cat([g.reshape(-1) for g in of if g is not None]) for of in grads)
    return first, second


def test_gradients_are_ddps_own() -> None:
    """So a script may clip them, add noise, or scale them."""
    for mine, plain in run_ranks(2, _gradients):
        torch.testing.assert_close(mine, plain, rtol=1e-12, atol=0)


def _resumed(rank: int, at: int) -> tuple[bool, bool]:
    cfs = [*CFS, *[10.0] * 6]
    whole, run = Run(cfs, {}), Run(cfs, {})
    whole.train(rank, 0, len(cfs))
    run.train(rank, 0, at)
    state, rested = run.state(), run.rests
    again = Run(cfs, {})
    again.train(rank, 0, 2)  # DDP cuts its buckets
    again.load(state)
    again.train(rank, at, len(cfs))
    return same(flat_parameters(whole.model), flat_parameters(again.model)), rested


@pytest.mark.parametrize(("at", "rests"), [(10, False), (18, True), (28, False)])
def test_a_resumed_run_is_one_that_was_never_stopped(at: int, rests: bool) -> None:
    assert run_ranks(2, _resumed, at) == [(True, rests)] * 2


def _gone_back(rank: int) -> tuple[Tensor, Tensor, bool, bool]:
    with device_path():
        cfs = [*CFS, *[10.0] * 6]
        run = Run(cfs, {})
        run.train(rank, 0, 6)
        state = run.state()
        run.train(rank, 6, 20)
        straight, rested = flat_parameters(run.model), run.rests
        run.train(rank, 20, len(cfs))
        run.load(state)
        run.train(rank, 6, 20)
        return straight, flat_parameters(run.model), rested, run.rests


def test_a_run_that_goes_back_on_a_device_is_the_same_again() -> None:
    """It had compressed later steps, and took residuals for nonempty until these came again."""
    for straight, again, *rested in run_ranks(2, _gone_back):
        assert torch.equal(straight, again)
        assert rested == [True, True]


def _spoiled(rank: int, cfs: list[float], bad: int) -> tuple[Tensor, bool, bool]:
    """In step `bad` rank 0 alone has gradients that are not finite, and no rank steps."""
    run = Run(cfs, {})
    for step in range(len(cfs)):
        run.optimizer.zero_grad()
        loss = loss_of(run.model, step, rank)
        (loss * torch.nan if step == bad and rank == 0 else loss).backward()
        if step != bad:
            run.optimizer.step()
    finite = bool(flat_parameters(run.model).isfinite().all())
    return flat_parameters(run.model), run.rests, finite


@pytest.mark.parametrize(
    ("cfs", "bad", "rests"),
    [
        ([1.0] * 12 + [10.0] + [1.0] * 12, 12, True),  # while SGD rests
        ([1.0] * 6 + [10.0] + [1.0] * 4, 6, False),  # while dense steps are counted
        ([10.0] * 3 + [1.0] * 8 + [1.0] * 4, 10, False),
    ],
)
def test_a_bad_step_of_one_rank_leaves_ranks_alike(cfs: list[float], bad: int, rests: bool) -> None:
    found = run_ranks(2, _spoiled, cfs, bad)
    assert torch.equal(found[0][0], found[1][0])
    assert [rank[1:] for rank in found] == [(rests, True)] * 2
