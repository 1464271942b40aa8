"""What differs between ranks and must not: found by `debug`, by name, on every rank."""

from __future__ import annotations

import os

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor
from tests.distributed.processes import run_ranks
from tests.distributed.setting import Scripted, loss_of, small_net


def _train(rank: int, what: str, from_environment: bool) -> str:
    """The error of a run of which rank 1 differs from step 4 on, if there is one."""
    if from_environment:
        os.environ["ADAPTIVE_DEBUG"] = "2"
    model = DDP(small_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    cfs = [10.0] * 4 + [20.0 if what == "plan" and rank == 1 else 10.0] * 9
    compressor = AdaptiveCompressor(policy=Scripted(cfs), debug=None if from_environment else 2)
    compressor.attach(model, optimizer=optimizer)
    try:
        for step in range(8):
            optimizer.zero_grad()
            loss_of(model, step, rank).backward()
            if what == "parameter" and rank == 1 and step == 4:
                with torch.no_grad():
                    model.module[2].bias[3] += 1e-9
            optimizer.step()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("from_environment", [False, True])
def test_a_parameter_that_differs_is_named_with_its_rank(from_environment: bool) -> None:
    for error in run_ranks(2, _train, "parameter", from_environment, lost=[2]):
        assert "parameter '2.bias' of rank 1 is not that of rank 0 before step 6" in error


def test_a_plan_that_differs_is_told_before_it_is_carried_out() -> None:
    for error in run_ranks(3, _train, "plan", False, lost=[3]):
        assert "rank 1 plans otherwise" in error
        assert "step 4" in error
        assert "send=20.0" in error


def test_ranks_that_are_alike_pass() -> None:
    assert run_ranks(2, _train, "nothing", False) == ["", ""]


@pytest.mark.parametrize("debug", [-1, 1.5, "yes"])
def test_debug_is_a_number_of_steps(debug: object) -> None:
    with pytest.raises((TypeError, ValueError), match=f"debug={debug!r}: must be an int >= 0"):
        AdaptiveCompressor(debug=debug)
