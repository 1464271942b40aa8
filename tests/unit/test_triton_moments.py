"""Updates enlarged by a kernel of Triton against torch's operations."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptive.memory import moments
from adaptive.memory.moments import LEAST, UpdateJob, enlarge
from tests.unit.device_path import device_path, triton_path
from tests.unit.samples import normal
from tests.unit.triton_compile import Kernel, assembly

pytest.importorskip("triton", minversion="3.3")

from compressors.kernels import triton_moments

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _job(numel: int, seed: int, share: float, step: int) -> UpdateJob:
    group = {"betas": (0.9, 0.99), "lr": 1e-3}
    square = normal(numel, seed=seed + 1).square()
    square[::7] = 0.0
    state = {
        "exp_avg": (normal(numel, seed=seed) * 0.3).to(DEVICE),
        "exp_avg_sq": square.to(DEVICE),
        "step": torch.tensor(float(step)),
    }
    weights, grad, update = (normal(numel, seed=seed + i).to(DEVICE) for i in (2, 3, 4))
    return UpdateJob(group, share, weights, grad, update, state)


@settings(max_examples=8, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=3),
    share=st.sampled_from([0.0, 0.5, 1.0]),
    step=st.sampled_from([1, 2, 30, 100_000]),
    ranks=st.sampled_from([2, 8]),
    seed=st.integers(0, 99),
)
def test_updates_are_enlarged_as_by_torch(
    sizes: list[int], share: float, step: int, ranks: int, seed: int
) -> None:
    jobs = [_job(numel, seed + 10 * i, share, step) for i, numel in enumerate(sizes)]
    again = [job._replace(update=job.update.clone()) for job in jobs]
    before = [job.update.clone() for job in jobs]
    with device_path():
        expected = enlarge(jobs, ranks)
    with pytest.MonkeyPatch.context() as patch, triton_path():
        patch.setattr(triton_moments, "PROGRAMS", 2)  # each works on several blocks
        found = enlarge(again, ranks)
    assert (found.dtype, found.shape) == (torch.float64, ())
    assert float(found) == pytest.approx(float(expected), rel=1e-4)
    for job, other, old in zip(jobs, again, before, strict=True):
        torch.testing.assert_close(other.update, job.update, rtol=1e-4, atol=0)
        larger = other.update / old
        assert bool((larger >= 1 - 1e-6).all())
        assert bool((larger <= ranks**0.5 * (1 + 1e-6)).all())


def test_steps_that_a_device_counts_are_as_those_of_the_host() -> None:
    job = _job(700, 3, 0.0, 12)
    updates = []
    with triton_path():
        piece = moments._piece(job)
        for step in (12.0, torch.tensor(12.0, device=DEVICE)):
            update = job.update.clone()
            triton_moments.enlarge([piece._replace(step=step, update=update)], 4, LEAST, 1)
            updates.append(update)
    assert torch.equal(*updates)


def test_what_is_not_in_single_precision_takes_torch() -> None:
    with triton_path():
        assert moments._takes_triton(_job(40, 0, 0.0, 1))
        job = _job(40, 0, 0.0, 1)
        job.state["exp_avg"] = job.state["exp_avg"].bfloat16()
        assert not moments._takes_triton(job)


def test_the_kernel_compiles_for_a_gpu() -> None:
    types = {
        "table": "*i64",
        "sums": "*fp64",
        **dict.fromkeys(("ranks_share", "least"), "fp32"),
        "stride": "i32",
    }
    odd = ("ranks_share", "least", "stride")
    kernel = Kernel("_enlarge", types, {"block": triton_moments.BLOCK}, odd=odd, warps=8)
    (found,) = assembly(triton_moments.__name__, [kernel])
    assert "ld.global" in found
    assert "sqrt.rn.f32" in found
