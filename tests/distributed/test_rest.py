"""Where dense is right, Goodput leaves gains unmeasured for a while, on all ranks alike."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor, JSONLTimeline, Network
from examples.replay_policy import replay
from policies import DENSE, Goodput, Plan
from runs.modelled_clock import ModelledClock
from runs.records import read_records
from tests.distributed.processes import run_ranks
from tests.distributed.setting import flat_parameters, loss_of, same, small_net

BF16 = 2.0  # the CF of a rung that rests, too
STEPS, SAVED_AT = 60, 36
TURN = {"WATCHED": 7, "RESTING": 9, "BRIEF": 6}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


class Run:
    """A model in training with the default compressor on a network that takes no time."""

    def __init__(self, optimizer: str, path: Path) -> None:
        self.model = DDP(small_net(torch.float32))
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.compressor = AdaptiveCompressor(
            "topk",
            (4, 100),
            policy=Goodput(goal="time"),
            network=Network(clock=ModelledClock(0.01)),
            timeline=JSONLTimeline(path),
        ).attach(self.model, optimizer=self.optimizer)
        self.plans: list[Plan] = []

    def train(self, steps: range, rank: int) -> None:
        assert self.compressor._session is not None
        for step in steps:
            self.optimizer.zero_grad()
            loss_of(self.model, step, rank).backward()
            self.plans.append(self.compressor._session.controller.plan)
            self.optimizer.step()

    def state(self) -> list[object]:
        return deepcopy([part.state_dict() for part in self._parts()])

    def load(self, state: list[object]) -> None:
        for part, of in zip(self._parts(), state, strict=True):
            part.load_state_dict(of)

    def _parts(self) -> tuple[Any, ...]:
        return self.model, self.optimizer, self.compressor


def _train(rank: int, optimizer: str, folder: str) -> tuple[list[Plan], torch.Tensor]:
    with patch.multiple("policies.goodput", **TURN):
        whole = Run(optimizer, Path(folder, f"whole{rank}.jsonl"))
        whole.train(range(SAVED_AT), rank)
        state = whole.state()
        whole.train(range(SAVED_AT, STEPS), rank)
        resumed = Run(optimizer, Path(folder, f"resumed{rank}.jsonl"))
        resumed.train(range(2), rank)  # of another state, and another order of buckets
        resumed.load(state)
        resumed.plans.clear()
        resumed.train(range(SAVED_AT, STEPS), rank)
        assert resumed.plans == whole.plans[SAVED_AT:]
        assert same(resumed.state(), whole.state())
        whole.compressor.close()
        resumed.compressor.close()
    return whole.plans, flat_parameters(whole.model)


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("sgd", marks=pytest.mark.long)])
def test_ranks_rest_together_and_a_resumed_run_rests_on(optimizer: str, tmp_path: Path) -> None:
    (plans, ours), (theirs, others) = run_ranks(2, _train, optimizer, str(tmp_path))
    assert plans == theirs
    assert torch.equal(ours, others)
    begin = next(i for i, plan in enumerate(plans) if plan.send in (DENSE, BF16))
    # The network takes no time, so no gain matters.
    turn = [False] * TURN["BRIEF"] + [True] * (TURN["WATCHED"] + TURN["RESTING"] - TURN["BRIEF"])
    assert [plan.skip_gains for plan in plans] == [False] * begin + (turn * 5)[: STEPS - begin]
    assert plans[SAVED_AT - 1].skip_gains
    assert plans[SAVED_AT].skip_gains  # it was saved at rest
    recorded = read_records(tmp_path / "whole0.jsonl")
    for plan, record in zip(plans, recorded.steps, strict=True):
        assert bool(record.report.steady_gain) != plan.skip_gains
        assert record.report.cf == plan.send
    # Statistics are sent in fewer bytes, all of which are counted.
    sent = {plan.skip_gains: r.report.statistics_bytes for plan, r in zip(plans, recorded.steps)}  # noqa: B905
    assert 0 < sent[True] < sent[False]
    with patch.multiple("policies.goodput", **TURN):
        assert replay(Goodput(goal="time"), recorded) == (plans, "")
