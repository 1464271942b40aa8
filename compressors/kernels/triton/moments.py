"""Triton's kernels that enlarge an optimizer's updates to the size of the mean gradient's update
(adaptive/memory/moments.py), in one launch that reads each moment once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from compressors.kernels.blocks import CELL
from compressors.kernels.triton.launching import cdiv, launch

BLOCK = CELL  # a program has one cell


def enlarge(
    update: Tensor,
    mean: Tensor,
    square: Tensor,
    factor: float | Tensor,
    constant: float,
    least_share: float,
    least: float,
    ends: Tensor | None,
    before: Tensor | None = None,
    old_mean: Tensor | None = None,
    shrink: float = 1.0,
    rate: float = 1.0,
    weight: float = 1.0,
) -> Tensor | None:
    """update /= sqrt(p), with p = factor * mean^2 / (square + least) + constant, not below
    `least_share` and not above 1 (adaptive/memory/moments.py); mean^2 and square are summed over a
    cell. factor: a number, or one for each parameter (flat); ends: then the end of each parameter,
    in elements (int64). A cell takes the factor of the parameter in which it begins.

    With `before`, first: before *= shrink; update = rate * (before - update). With `old_mean`,
    first: mean = old_mean + weight * (mean - old_mean).

    All these tensors are flat, float32, of equal length. Returns, with `before`, the squared norm
    of `update` in pieces (float64)."""
    programs = cdiv(update.numel(), BLOCK)
    squares = None if before is None else update.new_empty(programs, dtype=torch.float64)
    factors = (factor, ends, 0.0) if isinstance(factor, Tensor) else (None, None, factor)
    parameters = len(factor) if isinstance(factor, Tensor) else 0
    launch(
        _enlarge, (programs,), update, update, mean, square, before, old_mean, squares, *factors,
        constant, least_share, least, shrink, rate, weight, update.numel(), parameters,
        shrinks=shrink != 1, block=BLOCK, num_warps=4,
    )  # fmt: skip
    return squares


@triton.jit(do_not_specialize=["parameters"])
def _enlarge(
    update, mean, square, before, old_mean, squares, factors, ends, factor, constant, least_share,
    least, shrink, rate, weight, numel, parameters, shrinks: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * block
    at = first + tl.arange(0, block)
    inside = at < numel
    u = tl.load(update + at, mask=inside, other=0.0)
    if before is not None:
        stood = tl.load(before + at, mask=inside, other=0.0)
        if shrinks:
            stood *= shrink
            tl.store(before + at, stood, mask=inside)
        u = (stood - u) * rate
    m = tl.load(mean + at, mask=inside, other=0.0)
    if old_mean is not None:
        old = tl.load(old_mean + at, mask=inside, other=0.0)
        m = old + weight * (m - old)
        tl.store(mean + at, m, mask=inside)
    v = tl.load(square + at, mask=inside, other=0.0)
    if factors is not None:
        factor = tl.load(factors + _parameter_of(first, ends, parameters))
    ratio = tl.sum(m * m) / (tl.sum(v) + least)
    ratio = tl.where(ratio == ratio, ratio, 0.0)  # both sums have overflown
    share = tl.minimum(tl.maximum(ratio * factor + constant, least_share), 1.0)
    u = u / tl.sqrt_rn(share)
    tl.store(update + at, u, mask=inside)
    if squares is not None:
        wide = u.to(tl.float64)
        tl.store(squares + tl.program_id(0), tl.sum(wide * wide))


@triton.jit
def _parameter_of(at, ends, parameters):
    """The parameter of an element, by bisection: the first that ends after it."""
    low = (at * 0).to(tl.int32)
    high = low + parameters - 1
    width = parameters
    while width > 1:
        middle = (low + high) // 2
        beyond = tl.load(ends + middle) > at
        high = tl.where(beyond, middle, high)
        low = tl.where(beyond, low, tl.minimum(middle + 1, high))
        width = (width + 1) // 2
    return low
