"""The shadow ladder tells what a CF would keep in steady state, and what it then does keep."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor, Momentum, Residual
from adaptive.bucket import shadow
from adaptive.bucket.shadow import ShadowLadder
from policies import StepReport
from runs.tasks import make_task
from tests.distributed.processes import run_ranks
from tests.distributed.setting import Scripted, loss_of, same, small_net
from tests.quick import quick

LADDER = (10.0, 30.0, 100.0)


class Watching(Scripted):
    """Sends what it is told and keeps a shadow ladder."""

    shadow = True

    def candidates(self) -> tuple[float, ...]:
        return LADDER


def _reports(
    rank: int, cf: float, momentum: float, nesterov: bool, granularity: str = "auto"
) -> list[StepReport]:
    model = DDP(small_net(), bucket_cap_mb=0.004)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.01, momentum=momentum, nesterov=nesterov, weight_decay=0.01
    )
    policy = Watching([cf])
    memory = Momentum(masking=25) if momentum else Residual()
    AdaptiveCompressor(
        "topk+fp32", (1, 100), policy=policy, memory=memory, granularity=granularity
    ).attach(model, optimizer=optimizer)
    for step in range(10):
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        optimizer.step()
    return policy.reports


@pytest.mark.parametrize(
    ("momentum", "nesterov"), quick((0.9, True), of=[(0.0, False), (0.9, False), (0.9, True)])
)
@pytest.mark.parametrize("cf", LADDER)
@pytest.mark.parametrize("granularity", ["layer", "bucket"])
def test_where_the_sample_is_the_whole_it_is_the_gain_of_the_cf_in_use(
    granularity: str, cf: float, momentum: float, nesterov: bool
) -> None:
    everyone = run_ranks(2, _reports, cf, momentum, nesterov, granularity)
    for report in everyone[0]:
        delivered = report.measurements[cf].gain("error_fed")
        assert report.steady_gain[cf] == pytest.approx(delivered, rel=1e-9)
        gains = [report.steady_gain[each] for each in LADDER]
        assert gains == sorted(gains, reverse=True)
    steady = [[dict(report.steady_gain) for report in reports] for reports in everyone]
    assert same(steady[0], steady[1])


def test_it_also_learns_while_dense_is_sent() -> None:
    reports = run_ranks(2, _reports, 1.0, 0.9, False)[0]
    assert all(set(report.steady_gain) == set(LADDER) for report in reports)
    assert reports[-1].steady_gain[30.0] < reports[0].steady_gain[30.0]  # the residual builds up


def _real_task(
    rank: int, cf: float, steps: int, granularity: str, base: str = "topk", sample: float = 1 / 64
) -> dict[str, Any]:
    """Mean over the second half of the steps: predicted gains, and the one of the CF in use."""
    task = make_task("text", batch_size=2, lr=0.3)
    model = DDP(task.build_model())
    optimizer = task.optimizer(model)
    policy = Watching([cf])
    shadow.ShadowLadder = partial(ShadowLadder, share=sample, most=10**9)
    compressor = AdaptiveCompressor(base, (10, 1000), policy=policy, granularity=granularity)
    compressor.attach(model, optimizer=optimizer)
    for step in range(steps):
        optimizer.zero_grad()
        task.loss(model, task.batch(step, rank, 2)).backward()
        optimizer.step()
    late = policy.reports[steps // 2 :]
    return {
        "predicted": {each: sum(r.steady_gain[each] for r in late) / len(late) for each in LADDER},
        "delivered": sum(r.measurements[cf].gain("error_fed") for r in late) / len(late),
    }


@pytest.mark.long
@pytest.mark.parametrize("granularity", ["layer", "bucket"])
def test_the_prediction_is_what_the_cf_then_delivers_on_a_real_task(granularity: str) -> None:
    small, large = (run_ranks(2, _real_task, cf, 80, granularity)[0] for cf in (10.0, 100.0))
    assert small["predicted"][100.0] == pytest.approx(large["delivered"], rel=0.15)
    assert large["predicted"][10.0] == pytest.approx(small["delivered"], rel=0.15)


@pytest.mark.parametrize("granularity", quick("bucket", of=["layer", "bucket"]))
def test_the_sample_can_be_the_whole_of_a_large_model(granularity: str) -> None:
    def off(sample: float) -> float:
        found = run_ranks(2, _real_task, 100.0, 6, granularity, "topk+fp32", sample)[0]
        return abs(found["predicted"][100.0] / found["delivered"] - 1)

    assert off(1.0) < 1e-3 < off(1 / 64)
