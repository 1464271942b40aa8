"""Updates enlarged by a kernel of Triton against torch's operations."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from adaptive.memory.moments import Run, enlarge, noise_of
from tests.unit.device_path import device_path, triton_path
from tests.unit.samples import normal
from tests.unit.triton_compile import Kernel, assembly

pytest.importorskip("triton", minversion="3.3")

from compressors.kernels.triton import moments as triton_moments

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _moments(numel: int, seed: int, step: Tensor) -> tuple[Tensor, Run]:
    """An update, and the moments of its parameters."""
    square = normal(numel, seed=seed + 1).square()
    square[::7] = 0.0
    tensors = {
        "exp_avg": (normal(numel, seed=seed) * 0.3).to(DEVICE),
        "exp_avg_sq": square.to(DEVICE),
    }
    return normal(numel, seed=seed + 4).to(DEVICE), Run({"betas": (0.9, 0.99)}, step, tensors)


@settings(max_examples=8, deadline=None)
@given(
    numel=st.integers(1, 5000),
    share=st.sampled_from([0.0, 0.5, 1.0]),
    step=st.sampled_from([1.0, 2.0, 30.0, 100_000.0]),
    ranks=st.sampled_from([2, 8]),
    seed=st.integers(0, 99),
    overflown=st.booleans(),
    counted_on_device=st.booleans(),
)
def test_updates_are_enlarged_as_by_torch(
    numel: int,
    share: float,
    step: float,
    ranks: int,
    seed: int,
    overflown: bool,
    counted_on_device: bool,
) -> None:
    steps = torch.full((numel,), step, device=DEVICE) if counted_on_device else torch.tensor(step)
    update, run = _moments(numel, seed, steps)
    if overflown:
        run.mean[0], run.square[0] = 1e37, torch.inf
    expected, found, noise = update.clone(), update.clone(), noise_of(run, share)
    with device_path():
        enlarge(expected, run.mean, run.square, noise, ranks)
    with triton_path():
        enlarge(found, run.mean, run.square, noise, ranks)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=0)
    larger = found / update
    assert bool((larger >= 1 - 1e-6).all())
    assert bool((larger <= ranks**0.5 * (1 + 1e-6)).all())


def test_the_kernel_compiles_for_a_gpu() -> None:
    tensors = dict.fromkeys(("update", "mean", "square", "factors"), "*fp32")
    odd = ("factor", "constant", "least_share", "least")
    types = {**tensors, **dict.fromkeys(odd, "fp32"), "numel": "i32"}
    constants = {"each": False, "block": triton_moments.BLOCK}
    kernel = Kernel("_enlarge", types, constants, odd=odd, warps=8)
    (found,) = assembly(triton_moments.__name__, [kernel])
    assert "ld.global" in found
    assert "sqrt.rn.f32" in found
