"""Updates made as large as the mean gradient's, by one launch in Triton that reads each moment
once."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from compressors.kernels.triton.launching import cdiv, launch

BLOCK = 2048


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
    `least_share` and not above 1 (adaptive/memory/moments.py). update, mean and square are flat,
    float32, and alike in length. factor: a number, or one for each parameter (flat); ends: then
    where each parameter ends, in elements (int64)."""
    each = isinstance(factor, Tensor)
    tensors = (update, mean, square, factor if each else None, ends if each else None)
    parameters = len(factor) if isinstance(factor, Tensor) else 0
    numbers = (0.0 if each else factor, constant, least_share, least, update.numel(), parameters)
    grid = (cdiv(update.numel(), BLOCK),)
    launch(_enlarge, grid, update, *tensors, *numbers, block=BLOCK, num_warps=8)


@triton.jit(do_not_specialize=["parameters"])
def _enlarge(
    update, mean, square, factors, ends, factor, constant, least_share, least, numel, parameters,
    block: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * block
    at = first + tl.arange(0, block)
    inside = at < numel
    m = tl.load(mean + at, mask=inside, other=0.0)
    v = tl.load(square + at, mask=inside, other=0.0)
    if factors is not None:
        begins_in = _parameter_of(first, ends, parameters)
        factor = tl.load(factors + begins_in) + tl.zeros((block,), tl.float32)
        last = tl.minimum(first + block, numel) - 1
        if last >= tl.load(ends + begins_in):  # the block has elements of several parameters
            of = _parameter_of(tl.minimum(at, last), ends, parameters)
            factor = tl.load(factors + of)
    ratio = m / tl.sqrt_rn(v + least)
    share = tl.minimum(tl.maximum(ratio * ratio * factor + constant, least_share), 1.0)
    u = tl.load(update + at, mask=inside, other=0.0)
    tl.store(update + at, u / tl.sqrt_rn(share), mask=inside)


@triton.jit
def _parameter_of(at, ends, parameters):
    """Which parameter an element is of, by bisection: the first that ends beyond it."""
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
