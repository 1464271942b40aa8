"""The shadow ladder of a bucket of which ranks use different parts, or once sampled otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor, Goodput
from policies import Plan, StepReport
from tests.distributed.processes import run_ranks
from tests.quick import quick

WIDE = 400


class Branches(nn.Module):
    """Of the gradient nearly everything is in the trunk, whichever branch is used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(WIDE, WIDE)
        self.branches = nn.ModuleList([nn.Linear(WIDE, n) for n in (400, 300)])
        self.head = nn.Linear(WIDE, 10)

    def forward(self, x: Tensor, branch: int) -> Tensor:
        deep = self.head(torch.tanh(self.trunk(x))).square().mean()
        return deep + 1e-4 * self.branches[branch](x).mean()


class Watching(Goodput):
    """Keeps the reports, and sends CF 20."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.reports: list[StepReport] = []

    def plan(self) -> Plan:
        super().plan()
        return Plan(20.0)

    def observe(self, report: StepReport) -> None:
        self.reports.append(report)
        super().observe(report)


class Run:
    """Two ranks that see the same data, so that between them <g, g> is ||g||^2."""

    def __init__(self, granularity: str) -> None:
        self.model = DDP(Branches(), find_unused_parameters=True)
        self.policy = Watching()
        self.compressor = AdaptiveCompressor(
            "topk", (2, 100), policy=self.policy, granularity=granularity
        ).attach(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def train(self, steps: range, branch: Any) -> None:
        for step in steps:
            draw = torch.Generator().manual_seed(step)
            self.optimizer.zero_grad()
            self.model(torch.randn(64, WIDE, generator=draw), branch(step)).backward()
            self.optimizer.step()

    def agreement(self) -> float:
        """<g, g of a peer> of the sample / ||g||^2."""
        self.compressor.flush()
        reports = self.policy.reports[-20:]
        # The products of a step are reported with the next one.
        products = sum(report.peers_total for report in reports[1:])
        return products / sum(2 * report.grad_norm**2 for report in reports[:-1])


def _branching(rank: int, which: str) -> float:
    branch = {
        "alternating": lambda step: (step + rank) % 2,
        "a rank's own": lambda step: rank,
        "other in the first step": lambda step: rank if step == 0 else 0,
    }[which]
    run = Run("bucket")
    run.train(range(30), branch)
    return run.agreement()


@pytest.mark.parametrize(
    "which", quick("alternating", of=["alternating", "a rank's own", "other in the first step"])
)
def test_ranks_that_use_different_parts_sample_the_same_elements(which: str) -> None:
    found = run_ranks(2, _branching, which)
    assert found[0] == found[1] == pytest.approx(1, abs=0.1)


def _reloaded(rank: int) -> float:
    before = Run("layer")
    before.train(range(10), lambda step: 0)
    after = Run("bucket")
    after.train(range(1), lambda step: 0)
    after.compressor.load_state_dict(before.compressor.state_dict())
    after.train(range(10, 40), lambda step: 0)
    return after.agreement()


def test_samples_of_a_state_that_is_tensor_by_tensor_are_drawn_anew() -> None:
    found = run_ranks(2, _reloaded)
    assert found[0] == found[1] == pytest.approx(1, abs=0.1)


class Idle(nn.Module):
    """Nine tenths of it are never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used, self.idle = nn.Linear(60, 60), nn.Linear(60, 540)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x).square().mean()


def _idle(rank: int) -> list[tuple[float, float]]:
    model = DDP(Idle(), find_unused_parameters=True)
    policy = Watching(gain="error_fed", step_size=10**0.25)
    AdaptiveCompressor(
        "topk+fp32", (20, 200), policy=policy, granularity="bucket", memory="residual"
    ).attach(model)
    for step in range(20):
        draw = torch.Generator().manual_seed(2 * step + rank)
        model.zero_grad()
        model(torch.randn(16, 60, generator=draw)).backward()
    return [(r.steady_gain[20.0], r.measurements[20.0].gain("error_fed")) for r in policy.reports]


def test_it_keeps_as_many_as_are_sent_though_most_of_a_bucket_is_not_used() -> None:
    told, delivered = zip(*run_ranks(2, _idle)[0][2:], strict=True)
    assert told == pytest.approx(delivered, rel=0.05)
    assert min(delivered) > 0.7  # a CF of 2 for what is used
