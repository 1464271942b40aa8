"""The strided sample, and the statistics vector that is summed over the ranks."""

from __future__ import annotations

from dataclasses import fields
from math import isnan, nan

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adaptive.exchange.bucket import SAMPLED, WHOLE, strided_sample
from adaptive.statistics.vector import Statistics, Tally
from compressors import TopK
from compressors.base import Key, Spec
from policies import Measurement, StepReport
from tests.unit.samples import compressed


@given(st.integers(0, 50_000_000))
def test_the_sample_is_large_enough_and_small_enough(numel: int) -> None:
    taken = strided_sample(torch.empty(numel, device="meta")).numel()
    assert taken >= min(numel, WHOLE)
    assert taken <= 2 * (WHOLE + numel // SAMPLED) + 1


def test_a_small_tensor_is_its_own_sample() -> None:
    grad = torch.randn(WHOLE)
    assert strided_sample(grad) is grad


def test_the_sampled_gain_tells_the_gain_of_the_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    grad = torch.randn(1_000_000, generator=generator) ** 3
    key = Key("g")
    for cf in (10.0, 100.0):
        whole = TopK().compress(grad, Spec.of(grad, cf, key))
        sample = compressed(TopK(), strided_sample(grad), cf, key)
        gains = [float(p.energy / (p.energy + p.error)) for p in (whole, sample)]
        assert gains[1] == pytest.approx(gains[0], rel=0.1)


def test_what_is_summed_over_ranks_is_read_back() -> None:
    vectors = []
    for rank in range(3):
        tally = Tally((10.0, 20.0), 2, ranks=3, rank=rank, norms=True)
        _fill(tally, grad=[4.0], grad_norms=[4.0])
        levels = torch.tensor([[8.0, 6.0, 2.0], [8.0, 4.0, 4.0]], dtype=torch.float64)
        sampled = torch.tensor([[2.0, 1.0, 1.0], [2.0, 0.5, 1.5]], dtype=torch.float64)
        tally.add_levels(levels, sampled)
        tally.known |= {"seconds": 0.1 * (rank + 1), "median_seconds": 0.2, "lr": 0.5}
        tally.known |= {"compress_seconds": 0.01, "exchange_seconds": 0.03 - 0.01 * rank}
        _fill(tally, layers=[1.0, 2.0 * rank])
        vectors.append(tally.complete())
    agreed = Statistics.agreed(tally, torch.stack(vectors).sum(0))
    assert agreed.seconds == pytest.approx(0.2)  # the mean over ranks
    assert agreed.exchange_seconds == pytest.approx(0.02)
    reported = agreed.reported()
    assert reported["network_seconds"] == pytest.approx(0.01)  # the last one to be ready
    assert reported["grad_norm"] == pytest.approx(2.0)  # root of the mean square
    assert agreed.lr == pytest.approx(0.5)
    assert isnan(agreed.sum_norm)
    assert agreed.layers == [3.0, 6.0]
    assert reported["measurements"][20.0].gain("error_fed") == pytest.approx(0.5)
    assert reported["measurements"][10.0].gain("gradient") == pytest.approx(0.5)
    assert reported["measurements"][20.0].gain("raw") == pytest.approx(0.5)  # 3 * 2 / (3 * 4)


def test_the_times_of_the_network_are_known_on_every_rank_or_not_at_all() -> None:
    vectors = []
    for rank in range(2):
        tally = Tally(cfs=(10.0,), layers=1, ranks=2, rank=rank)
        tally.known["exchange_seconds"] = nan if rank else 0.01
        _fill(tally, layers=[1.0 + rank])
        vectors.append(tally.complete())
    agreed = Statistics.agreed(tally, torch.stack(vectors).sum(0))
    assert isnan(agreed.reported()["network_seconds"])  # not known on every rank
    assert agreed.layers == [3.0]


def _fill(tally: Tally, **numbers: list[float]) -> None:
    for name, values in numbers.items():
        tally.at(name).copy_(torch.tensor(values))


def test_a_spoiled_bucket_makes_the_energies_nan_whatever_comes_after_it() -> None:
    for flag in (True, torch.tensor(True)):
        tally = Tally(cfs=(10.0,))
        for each in (False, flag):
            tally.at("nonfinite").add_(each)
        tally.add_levels(torch.ones(1, 3).double(), torch.ones(1, 3).double())
        agreed = Statistics.agreed(tally, tally.complete())
        assert all(map(isnan, (agreed.total, agreed.sample_total, agreed.grad)))
        assert agreed.nonfinite == 1


def test_what_a_second_compression_loses_is_taken_off_what_the_first_has_kept() -> None:
    tally = Tally(cfs=(10.0, 20.0))
    before = tally.copy_of_levels()
    levels = torch.tensor([[8.0, 6.0, 2.0], [8.0, 4.0, 4.0]], dtype=torch.float64)
    sampled = torch.tensor([[2.0, 1.0, 1.0], [2.0, 0.5, 1.5]], dtype=torch.float64)
    tally.add_levels(levels, sampled)
    tally.lose(tally.copy_of_levels() - before, 0.5)
    agreed = Statistics.agreed(tally, tally.complete())
    assert (agreed.kept, agreed.error) == ([3.0, 2.0], [5.0, 6.0])
    assert agreed.sample_error == [1.5, 1.75]
    assert (agreed.total, agreed.sample_total) == (8.0, 2.0)


def test_what_is_declared_as_reported_is_in_the_policies_report() -> None:
    reported = {each.name for each in fields(Statistics) if each.metadata.get("reported")}
    measured = {each.name for each in fields(Measurement)}
    assert measured < reported
    assert reported - measured <= {each.name for each in fields(StepReport)}
