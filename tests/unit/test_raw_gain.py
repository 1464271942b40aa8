"""The gain "raw" and the energy ratio, measured by the hook of a real DDP model on one rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import sqrt
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor
from compressors.base import kept
from policies import Measurement, StepReport
from tests.distributed.setting import Scripted
from tests.unit.in_one_process import Given, one_rank

CF = 10.0
DENSE_BELOW = 50


@pytest.fixture(autouse=True, scope="module")
def group() -> Iterator[None]:
    with one_rank():
        yield


def _reports(
    gradients: Sequence[Sequence[Tensor]],
    base: str,
    granularity: str,
    megabytes: float,
    **more: Any,
) -> list[StepReport]:
    """Of a dense step, in which the CF is measured only, and of steps at the CF."""
    model = DDP(Given([g.shape for g in gradients[0]]), bucket_cap_mb=megabytes)
    policy = Scripted([1.0, CF, CF], probe=(CF,))
    policy.gain = "raw"
    compressor = AdaptiveCompressor(
        base, (1, CF), policy=policy, granularity=granularity, **more
    ).attach(model)
    for of_step in gradients:
        model(of_step).backward()
        model.zero_grad()
    compressor.flush()
    compressor.detach()
    return policy.reports


def _sparse(size: int, seed: int) -> Tensor:
    """A gradient with no more elements than top-k keeps of it, all powers of two."""
    made = torch.Generator().manual_seed(seed)
    gradient, k = torch.zeros(size), int(size / CF)
    if k:
        where = torch.randperm(size, generator=made)[:k]
        powers = torch.randint(-6, 7, (k,), generator=made)
        gradient[where] = 2.0**powers * (1 - 2 * torch.randint(0, 2, (k,), generator=made))
    return gradient


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(1, 400), min_size=1, max_size=12),
    base=st.sampled_from(["topk+fp32", "topk+bf16", "threshold+fp32", "bf16", "none"]),
    granularity=st.sampled_from(["layer", "bucket"]),
    megabytes=st.sampled_from([0.0005, 0.002, 25.0]),
    dense_below=st.sampled_from([0, DENSE_BELOW]),
    exchange=st.sampled_from(["auto", "all_gather"]),
    seed=st.integers(0, 1000),
)
def test_it_is_one_where_nothing_is_lost(
    sizes: list[int],
    base: str,
    granularity: str,
    megabytes: float,
    dense_below: int,
    exchange: str,
    seed: int,
) -> None:
    sizes = [*sizes, 100]  # some gradient is not zero
    steps = [[_sparse(n, seed + 100 * i + j) for j, n in enumerate(sizes)] for i in range(3)]
    more: dict[str, Any] = {"dense_below": 0 if base == "bf16" else dense_below}
    more["exchange"] = "auto" if base == "none" else exchange
    reports = _reports(steps, base, granularity, megabytes, **more)
    for report in reports:
        for measured in report.measurements.values():
            assert measured.error <= 1e-6 * measured.total  # the sums are float32
            assert measured.gain("raw") == pytest.approx(1, rel=1e-6)
            assert measured.energy_ratio == pytest.approx(1, rel=1e-6)
            assert measured.kept_norms == pytest.approx(measured.grad_norms, rel=1e-6)
    assert any(report.measurements for report in reports) or base == "none"


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(1, 400), min_size=1, max_size=12),
    granularity=st.sampled_from(["layer", "bucket"]),
    seed=st.integers(0, 1000),
)
def test_it_is_the_norm_kept_over_the_norm_of_what_is_compressed_as_one(
    sizes: list[int], granularity: str, seed: int
) -> None:
    made = torch.Generator().manual_seed(seed)
    first = [_sparse(n, seed + i) for i, n in enumerate(sizes)]
    second = [torch.randn(n, generator=made) for n in sizes]
    # The dense step of the first backward has another cut than all later ones.
    reports = _reports([first, second], "topk+fp32", granularity, 25.0)
    # In a bucket DDP has the gradients in the order in which they are ready: norms do not mind.
    units = [torch.cat(second)] if granularity == "bucket" else second
    largest = [g.abs().topk(kept(len(g), CF)).values for g in units]
    expected = sum(float(c.norm()) for c in largest) / sum(float(g.norm()) for g in units)
    assert reports[1].measurements[CF].gain("raw") == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("kept_energy", "error", "ratio", "decides"),
    [(0.30, 0.34, 0.30, 0.66), (1.98, 1.0, 1.98, 0.0)],
    ids=["2-bit", "TernGrad"],
)
def test_the_papers_ratio_stands_beside_what_decides(
    kept_energy: float, error: float, ratio: float, decides: float
) -> None:
    measured = Measurement(kept=kept_energy, error=error, total=1.0)
    assert measured.energy_ratio == pytest.approx(ratio)
    assert measured.gain("error_fed") == pytest.approx(decides)


def test_energies_of_two_tensors_are_no_sum_of_norms() -> None:
    """The case that was found: two equal tensors compressed as one, and nothing lost."""
    gradients = [torch.zeros(100), torch.zeros(100)]
    for gradient in gradients:
        gradient[0] = 1.0
    report = _reports([gradients, gradients], "topk+fp32", "bucket", 25.0)[1]
    assert report.measurements[CF].grad_norms == pytest.approx(sqrt(2))
    assert report.measurements[CF].gain("raw") == pytest.approx(1)
