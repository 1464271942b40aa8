"""The papers' own policies on real ranks: what they decide by is what the papers say it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import Accordion, AdaptiveCompressor, GraVAC
from policies import StepReport
from tests.distributed.processes import run_ranks
from tests.distributed.setting import flat_parameters, local_gradients, loss_of, same, small_net

STEPS, EPOCH, INTERVAL = 14, 3, 5


def _listening(policy: Any) -> list[StepReport]:
    """The reports that a policy is given from now on."""
    reports: list[StepReport] = []
    observe = policy.observe

    def listens(report: StepReport) -> None:
        reports.append(report)
        observe(report)

    policy.observe = listens
    return reports


def _train(rank: int, policy: Any, cf_range: tuple[float, float]) -> Any:
    """Parameters, reports, CFs, and every step's own gradients of this rank."""
    model = DDP(small_net(), bucket_cap_mb=0.004)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    reports = _listening(policy)
    # top-k is exact, unlike dgc's threshold
    compressor = AdaptiveCompressor("topk+fp32", cf_range, policy=policy)
    compressor.attach(model, optimizer=optimizer)
    gradients = []
    for step in range(STEPS):
        gradients.append(local_gradients(model, step, rank))
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        optimizer.step()
    compressor.detach()
    return flat_parameters(model), reports, gradients


def _mean_of_ranks(number: Tensor) -> float:
    number = number.clone()
    dist.all_reduce(number)
    return float(number / dist.get_world_size())


def _accordion(rank: int, low: float) -> tuple[Tensor, list[Any], list[Any]]:
    """Norms by layer as reported, and as the paper has them."""
    policy = Accordion.paper(low, 20.0, interval=INTERVAL, epoch=EPOCH)
    parameters, reports, gradients = _train(rank, policy, (2.0, 20.0))
    told = [dict(r.layer_norms) for r in reports if r.layer_norms]
    wanted = []
    for first in range(0, STEPS - EPOCH, INTERVAL):
        epoch = gradients[first : first + EPOCH]
        wanted.append({n: _mean_of_ranks(sum(g[n] for g in epoch).norm()) for n in epoch[0]})
    return parameters, told, wanted


@pytest.mark.parametrize("low", [1.0, 4.0])
@pytest.mark.parametrize("ranks", [2, 4])
def test_accordion_compares_local_uncompressed_gradients_of_an_epoch(
    ranks: int, low: float
) -> None:
    results = run_ranks(ranks, _accordion, low)
    for parameters, told, wanted in results:
        assert same(parameters, results[0][0])
        assert len(told) == len(wanted) == 3
        for norms, expected in zip(told, wanted, strict=True):
            assert norms == pytest.approx(expected, rel=1e-9)


def _raw(rank: int) -> tuple[list[float], list[float]]:
    """The gain at the CF sent, by step, as reported and as the released code computes it."""
    policy = GraVAC.paper(epsilon=1e-6, window=STEPS, gain="raw")
    _, reports, gradients = _train(rank, policy, (10.0, 40.0))
    residuals: dict[str, Tensor] = {}
    wanted = []
    for own in gradients:
        kept = torch.zeros(2, dtype=torch.float64)  # of what is sent, of the gradient
        for name, gradient in own.items():
            a = residuals.get(name, 0) + gradient
            largest = a.abs().topk(max(1, a.numel() // 10)).indices
            residuals[name] = a.index_fill(0, largest, 0)
            kept += torch.stack([a[largest].norm(), gradient.norm()])
        dist.all_reduce(kept)
        wanted.append(float(kept[0] / kept[1]))
    return [r.measurements[10.0].gain("raw") for r in reports], wanted


def test_the_raw_gain_is_what_the_released_code_computes() -> None:
    for told, wanted in run_ranks(2, _raw):
        assert len(told) == STEPS
        assert told == pytest.approx([min(1.0, gain) for gain in wanted], rel=1e-6)
        assert min(wanted) < 0.9 < max(wanted)
