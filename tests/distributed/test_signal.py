"""The products behind signal gain: against plain error feedback done by hand, in one process."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor, Goodput, GraVAC
from adaptive.bucket.shadow import ShadowLadder
from adaptive.model.parameters import ModelParameter
from adaptive.statistics.signal import Peers, Sections
from tests.distributed.processes import run_ranks
from tests.distributed.setting import Scripted, local_gradients, loss_of, same, small_net
from tests.unit.ladder_tally import make_tally

LADDER = (10.0, 30.0, 100.0)
STEPS = 8


class Watching(Scripted):
    """Sends what it is told and asks for signal gains."""

    shadow = True
    gain = "signal"

    def candidates(self) -> tuple[float, ...]:
        return LADDER


def _run(
    rank: int, cf: float, momentum: float, nonfinite: int, granularity: str = "layer"
) -> dict[str, Any]:
    """nonfinite: the step in which rank 1's gradients are not finite."""
    model = DDP(small_net(), bucket_cap_mb=0.004 if granularity == "layer" else 25)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
    policy = Watching([cf])
    compressor = AdaptiveCompressor("topk", (1, 100), policy=policy, granularity=granularity)
    compressor.attach(model, optimizer=optimizer)
    gradients: list[dict[str, Tensor]] = []
    buckets: list[list[list[str]]] = [[] for _ in range(STEPS)]  # names, by step and bucket
    observe = ShadowLadder.step

    def observed(ladder: ShadowLadder, bucket: Any, tally: Any) -> None:
        buckets[len(gradients) - 1].append([part.parameter.name for part in bucket.parts])
        observe(ladder, bucket, tally)

    with patch.object(ShadowLadder, "step", observed):
        _train(model, optimizer, rank, nonfinite, gradients)
    compressor.flush()
    reports = [
        (dict(r.signal), r.signal_total, dict(r.peers), r.peers_total) for r in policy.reports
    ]
    return {"gradients": gradients, "reports": reports, "buckets": buckets}


def _train(
    model: DDP,
    optimizer: torch.optim.Optimizer,
    rank: int,
    nonfinite: int,
    gradients: list[dict[str, Tensor]],
) -> None:
    """gradients: takes in the local ones of each step."""
    for step in range(STEPS):
        optimizer.zero_grad()
        gradients.append(local_gradients(model, step, rank))
        loss = loss_of(model, step, rank)
        (loss * float("nan") if step == nonfinite and rank == 1 else loss).backward()
        if step != nonfinite:
            optimizer.step()


def _kept(a: Tensor, cf: float) -> Tensor:
    indices = a.abs().topk(max(1, int(a.numel() / cf))).indices
    return torch.zeros_like(a).scatter_(0, indices, a[indices])


def _products(
    everyone: list[dict[str, Any]], cf: float, nonfinite: int, sizes: list[int] | None = None
) -> list[tuple]:
    """(<c, g>, <g before, g>) of each step, summed over parameters and ranks. sizes: of what is
    compressed by itself in the first step."""
    sums = [(0.0, 0.0)] * STEPS
    for rank, one in enumerate(everyone):
        for name in one["gradients"][0]:
            residual = c = before = torch.zeros_like(one["gradients"][0][name])
            for step, gradients in enumerate(one["gradients"]):
                if step == nonfinite and rank == 1:
                    continue
                g = gradients[name]
                top, total = sums[step]
                sums[step] = (top + float(c @ g), total + float(before @ g))
                a = residual + g
                apart = a.split(sizes) if sizes and step == 0 else [a]
                c, before = torch.cat([_kept(piece, cf) for piece in apart]), g
                residual = a - c
    return sums


def _peer_products(everyone: list[dict[str, Any]], cf: float) -> list[tuple[float, float]]:
    """(<c, g>, <g, g>) of the step before, of different ranks, by sketches made here."""
    residuals = [
        {n: torch.zeros_like(g) for n, g in one["gradients"][0].items()} for one in everyone
    ]
    found = [(0.0, 0.0)]
    for step in range(STEPS - 1):
        ranks = [Peers(1) for _ in everyone]
        for peers, one, residual in zip(ranks, everyone, residuals, strict=True):
            for names in one["buckets"][step]:
                rows = []
                for name in names:
                    g = one["gradients"][step][name]
                    a = residual[name] + g
                    kept = _kept(a, cf)
                    residual[name] = a - kept
                    rows.append(torch.stack([g, kept]))
                whole = torch.cat(rows, 1)
                first = ModelParameter(names[0], torch.nn.Parameter(rows[0][0]))
                sections = Sections([whole.shape[1]], [[1]], [1.0], whole.device)
                peers.add(first, step, whole, sections)
        tallies = [make_tally(1) for _ in ranks]
        sketches = [peers.end_step(tally) for peers, tally in zip(ranks, tallies, strict=True)]
        total = torch.stack([tally.at("sketch") for tally in tallies]).sum(0)
        for peers, own, tally in zip(ranks, sketches, tallies, strict=True):
            peers.receive(own, total)
            peers.begin_step(tally)
        told = [[float(t.at(name)) for t in tallies] for name in ("peers", "peers_total")]
        found.append((sum(told[0]), sum(told[1])))
    return found


@pytest.mark.parametrize(
    ("cf", "momentum", "nonfinite"), [(1.0, 0.9, -1), (30.0, 0.0, -1), (100.0, 0.9, 4)]
)
def test_where_the_sample_is_the_whole_they_are_those_of_plain_error_feedback(
    cf: float, momentum: float, nonfinite: int
) -> None:
    everyone = run_ranks(2, _run, cf, momentum, nonfinite)
    assert same(*(one["reports"] for one in everyone))
    assert len(everyone[0]["reports"]) == STEPS
    for each in LADDER:
        wanted = _products(everyone, each, nonfinite)
        found = [(signal[each], total) for signal, total, _, _ in everyone[0]["reports"]]
        assert found[0] == (0.0, 0.0)  # nothing came before
        for pair, expected in zip(found, wanted, strict=True):
            assert pair == pytest.approx(expected, rel=1e-9, abs=1e-15)
        if nonfinite < 0:
            crossed = [(peers[each], total) for _, _, peers, total in everyone[0]["reports"]]
            for pair, expected in zip(crossed, _peer_products(everyone, each), strict=True):
                assert pair == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_a_bucket_that_is_compressed_as_one_is_one_vector() -> None:
    everyone = run_ranks(2, _run, 30.0, 0.9, 4, "bucket")
    assert same(*(one["reports"] for one in everyone))
    sizes = [g.numel() for g in everyone[0]["gradients"][0].values()]
    for one in everyone:
        one["gradients"] = [{"all": torch.cat([*g.values()])} for g in one["gradients"]]
    for each in LADDER:
        found = [(signal[each], total) for signal, total, _, _ in everyone[0]["reports"]]
        for pair, expected in zip(found, _products(everyone, each, 4, sizes), strict=True):
            assert pair == pytest.approx(expected, rel=1e-9, abs=1e-15)


def _refused(rank: int, policy: str) -> str:
    model = DDP(small_net())
    chosen = {"gravac": GraVAC, "goodput": Goodput}[policy](gain="signal")
    with pytest.raises(ValueError, match="base") as caught:
        AdaptiveCompressor("powersgd", (2, 8), policy=chosen).attach(model)
    return str(caught.value)


@pytest.mark.parametrize("policy", ["gravac", "goodput"])
def test_a_base_that_does_not_keep_the_largest_is_refused_on_every_rank(policy: str) -> None:
    for message in run_ranks(2, _refused, policy):
        assert f"policy '{policy}' with gain 'signal' needs a base" in message
        assert "base='powersgd'" in message
