"""Updates enlarged by a kernel of Triton against torch's operations."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from adaptive.memory.moments import Run, enlarge, fused_updates
from adaptive.memory.own_moments import average
from compressors.kernels.blocks import CELL
from tests.unit.device_path import device_path, triton_path
from tests.unit.samples import norm2, normal
from tests.unit.triton_compile import Kernel, assembly

pytest.importorskip("triton", minversion="3.3")

from compressors.kernels.triton import moments as triton_moments

DEVICE = "cpu"


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
    for start in range(0, sum(sizes), CELL):  # each cell by itself, with the steps at its start
        cell = slice(start, start + CELL)
        before = sum(end <= start for end in accumulate(sizes))
        count = torch.tensor(step + before * counted_on_device)
        one = Run(run.group, count, {name: x[cell] for name, x in run.tensors.items()})
        enlarge(update[cell], one, slice(0, CELL), share, ranks)
    torch.testing.assert_close(found, update, rtol=1e-4, atol=0)


@settings(max_examples=10, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 2500), min_size=1, max_size=4),
    several=st.booleans(),
    had_mean=st.booleans(),
    shrink=st.sampled_from([1, 0.999]),
    seed=st.integers(0, 99),
)
def test_a_step_in_one_pass_is_that_of_several(
    sizes: list[int], several: bool, had_mean: bool, shrink: float, seed: int
) -> None:
    """Updates, decay, first moments that take in their gradients, and the norm."""
    numel, share, ranks = sum(sizes), 0.0, 4
    now, whole = _moments(numel, seed, torch.tensor(3.0))
    before, old_mean = (normal(numel, seed=seed + i).to(DEVICE) for i in (5, 6))
    ends = [0, *accumulate(sizes)] if several else [0, numel]

    def runs() -> list[Run]:
        tensors = {name: x.clone() for name, x in whole.tensors.items()}
        return [
            Run(whole.group, whole.step, {n: x[a:b] for n, x in tensors.items()}, a, b)
            for a, b in pairwise(ends)
        ]

    expected, stood, those = now.clone(), before * shrink, runs()
    torch.sub(stood, expected, out=expected)
    expected.mul_(200.0)
    for run in those:
        part = slice(run.start, run.stop)
        every = slice(0, run.stop - run.start)
        if had_mean:
            average(run, old_mean, every)
        with device_path():
            enlarge(expected[part], run, every, share, ranks)
    found, here, these = now.clone(), before.clone(), runs()
    old = old_mean if had_mean else None
    arguments = here, found, lambda out: out, these, old, shrink, 200.0, share, ranks
    assert fused_updates(*arguments) is None  # on a host
    with triton_path():
        norm = fused_updates(*arguments)
        assert fused_updates(*arguments[:3], these[1:], *arguments[4:]) is None
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(here, stood)
    for a, b in zip(these, those, strict=True):
        torch.testing.assert_close(a.mean, b.mean)
    assert norm is not None
    assert float(norm) == pytest.approx(norm2(found), rel=1e-9)


def test_the_kernel_compiles_for_a_gpu() -> None:
    pointers = ("update", "mean", "square", "before", "old_mean", "factors")
    odd = ("factor", "constant", "least_share", "least", "shrink", "rate", "weight")
    types = {**dict.fromkeys(pointers, "*fp32"), **dict.fromkeys(odd, "fp32")}
    types |= {"squares": "*fp64", "ends": "*i64", "numel": "i32", "parameters": "i32"}
    fixed = {"shrinks": True, "block": triton_moments.BLOCK}
    alone = dict.fromkeys(("before", "old_mean", "squares", "factors", "ends"))
    kernels = [
        Kernel("_enlarge", types, constants, odd=(*odd, "parameters"), warps=8)
        for constants in (fixed, {**fixed, **alone})
    ]
    for found in assembly(triton_moments.__name__, kernels):
        assert "ld.global" in found
        assert "sqrt.rn.f32" in found
