"""Updates enlarged by a kernel of Triton against torch's operations."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from adaptive.memory.moments import Run, enlarge
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


@settings(max_examples=10, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 3000), min_size=1, max_size=9).filter(sum),
    share=st.sampled_from([0.0, 0.5, 1.0]),
    step=st.sampled_from([1.0, 2.0, 30.0, 100_000.0]),
    ranks=st.sampled_from([2, 8]),
    seed=st.integers(0, 99),
    overflown=st.booleans(),
    counted_on_device=st.booleans(),
)
def test_updates_are_enlarged_as_by_torch(
    sizes: list[int],
    share: float,
    step: float,
    ranks: int,
    seed: int,
    overflown: bool,
    counted_on_device: bool,
) -> None:
    update, run = _moments(sum(sizes), seed, torch.tensor(step))
    if counted_on_device:  # by parameter
        steps = (step + torch.arange(len(sizes)).float()).to(DEVICE)
        ends = torch.tensor(sizes).cumsum(0).to(DEVICE)
        run = run._replace(step=steps, sizes=sizes, ends=ends)
    if overflown:
        run.mean[0], run.square[0] = 1e37, torch.inf
    expected, found, every = update.clone(), update.clone(), slice(0, sum(sizes))
    with device_path():
        enlarge(expected, run, every, share, ranks)
    with triton_path():
        enlarge(found, run, every, share, ranks)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=0)
    larger = found / update
    assert bool((larger >= 1 - 1e-6).all())
    assert bool((larger <= ranks**0.5 * (1 + 1e-6)).all())
    if counted_on_device:  # each parameter by itself, as if it were the only one
        pieces = zip(*(x.split(sizes) for x in (update, run.mean, run.square)), strict=True)
        for i, (piece, mean, square) in enumerate(pieces):
            tensors = {"exp_avg": mean, "exp_avg_sq": square}
            one = Run(run.group, torch.tensor(step + i), tensors)
            enlarge(piece, one, slice(0, sizes[i]), share, ranks)
        torch.testing.assert_close(found, update, rtol=1e-4, atol=0)


def test_the_kernel_compiles_for_a_gpu() -> None:
    tensors = dict.fromkeys(("update", "mean", "square", "factors"), "*fp32")
    odd = ("factor", "constant", "least_share", "least")
    types = {**tensors, **dict.fromkeys(odd, "fp32"), "numel": "i32"}
    types |= {"ends": "*i64", "parameters": "i32"}
    by_element = {"block": triton_moments.BLOCK}
    kernels = [
        Kernel("_enlarge", types, constants, odd=(*odd, "parameters"), warps=8)
        for constants in (by_element, {**by_element, "factors": None, "ends": None})
    ]
    for found in assembly(triton_moments.__name__, kernels):
        assert "ld.global" in found
        assert "sqrt.rn.f32" in found
