"""`compressor.explain()`: the CF and why, and the numbers of the rule."""

from __future__ import annotations

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import Accordion, AdaptiveCompressor, Fixed, Goodput, GraVAC, Ladder, Network, Warmup
from policies import Policy
from tests.distributed.processes import run_ranks
from tests.distributed.setting import Clock, loss_of, small_net


def _explained(rank: int, policy: Policy, steps: int) -> list[str]:
    model = DDP(small_net(torch.float32))
    clock = Clock()
    compressor = AdaptiveCompressor(
        "topk", (4, 100), policy=policy, network=Network(clock=clock)
    ).attach(model)
    told = [compressor.explain()]
    for step in range(steps):
        clock.now += 0.1 + 1 / compressor.cf
        loss_of(model, step, rank).backward()
    told.append(compressor.explain(detail=True))
    compressor.detach()
    told.append(compressor.explain())
    return told


@pytest.mark.parametrize(
    ("policy", "wanted"),
    [
        (Fixed(cf=10), ["CF 10 since step 0"]),
        (Warmup(steps=3), ["CF 16 since step 3: ", "scheduled"]),
        (Accordion(interval=4), ["since step", "numbers of the rule: critical 1"]),
        (GraVAC(window=4, dense_window=2), ["on this network", "since step 2: ", "epsilon 0.3"]),
        (
            Goodput(goal="time", opening=2),
            [
                *("since step", "progress a second", "dense was not timed", "rule: candidate"),
                "candidates: dense, bf16 (CF 2), and CF 4 to 100",
            ],
        ),
    ],
    ids=lambda v: v.name if isinstance(v, Policy) else "",
)
def test_every_policy_says_where_it_stands(policy: Policy, wanted: list[str]) -> None:
    first, second = run_ranks(2, _explained, policy, 5)
    assert first == second  # all ranks tell the same
    assert "since step 0" in first[0]
    for part in wanted:
        assert part in first[1]
    assert "detached" in first[2]


def _rung(rank: int) -> tuple[str, str]:
    model = DDP(small_net(torch.float32))
    base = Ladder({2: "bf16"}, "topk")
    compressor = AdaptiveCompressor(base, (4, 100), policy=Fixed(2)).attach(model)
    for step in range(2):
        loss_of(model, step, rank).backward()
    return compressor.explain(), str(compressor.summary())


def test_a_rung_is_named_by_its_compressor() -> None:
    explained, summary = run_ranks(2, _rung)[0]
    assert "bf16 (CF 2), gain assumed, since step 0" in explained.splitlines()
    assert "bf16 (CF 2) in use" in summary


def _link(rank: int) -> tuple[float, float]:
    model = DDP(torch.nn.Linear(8, 8))
    compressor = AdaptiveCompressor(policy=Fixed(10)).attach(model)
    link = compressor.running()._choice.link
    return link.alpha, link.beta


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_real_network_is_measured_alike_on_all_ranks(ranks: int) -> None:
    """Else a dense step's time would not be known where none is run."""
    found = run_ranks(ranks, _link)
    assert found == found[:1] * ranks
    alpha, beta = found[0]
    assert alpha > 0
    assert beta > 0
