"""Triton's kernels that enlarge an optimizer's updates to the size of the mean gradient's update
(adaptive/memory/moments.py), in one launch that reads each moment once."""

from __future__ import annotations

from typing import Any

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
) -> None:
    """update /= sqrt(p), with p = factor * mean^2 / (square + least) + constant, not below
    `least_share` and not above 1 (adaptive/memory/moments.py); mean^2 and square are summed over a
    cell. update, mean and square are flat, float32, of equal length. factor: a number, or one for
    each parameter (flat); ends: then the end of each parameter, in elements (int64). A cell takes
    the factor of the parameter in which it begins."""
    share = factor, constant, least_share, least, ends
    _launch(update, mean, square, None, None, None, share)


def take_step(
    before: Tensor,
    now: Tensor,
    mean: Tensor,
    square: Tensor,
    old_mean: Tensor | None,
    shrink: float,
    rate: float,
    weight: float,
    factor: float | Tensor,
    constant: float,
    least_share: float,
    least: float,
    ends: Tensor | None,
) -> Tensor:
    """before *= shrink; now = rate * (before - now), enlarged as by `enlarge`. Before that mean =
    old_mean + weight * (mean - old_mean), unless `old_mean` is None.

    All tensors are flat, float32, of equal length. Returns the squared norm of `now` in pieces
    (float64)."""
    squares = now.new_empty(cdiv(now.numel(), BLOCK), dtype=torch.float64)
    share = factor, constant, least_share, least, ends
    _launch(now, mean, square, before, old_mean, squares, share, shrink, rate, weight)
    return squares


def _launch(
    update: Tensor,
    mean: Tensor,
    square: Tensor,
    before: Tensor | None,
    old_mean: Tensor | None,
    squares: Tensor | None,
    share: tuple[Any, ...],
    *numbers: float,
) -> None:
    factor, constant, least_share, least, ends = share
    each = isinstance(factor, Tensor)
    factors = (factor, ends, 0.0) if each else (None, None, factor)
    shrink, rate, weight = numbers or (1.0, 1.0, 1.0)
    launch(
        _enlarge, (cdiv(update.numel(), BLOCK),), update, update, mean, square, before, old_mean,
        squares, *factors, constant, least_share, least, shrink, rate, weight, update.numel(),
        len(factor) if each else 0, shrinks=shrink != 1, block=BLOCK, num_warps=4,
    )  # fmt: skip


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
