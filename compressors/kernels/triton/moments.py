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
) -> None:
    """update /= sqrt(p), with p = factor * mean^2 / (square + least) + constant, not below
    `least_share` and not above 1 (adaptive/memory/moments.py). All are flat, float32, and alike in
    length. factor: a number, or one for each element."""
    each = isinstance(factor, Tensor)
    tensors = (update, mean, square, factor if each else update)
    numbers = (0.0 if each else factor, constant, least_share, least, update.numel())
    grid = (cdiv(update.numel(), BLOCK),)
    launch(_enlarge, grid, update, *tensors, *numbers, each=each, block=BLOCK, num_warps=8)


@triton.jit
def _enlarge(
    update,
    mean,
    square,
    factors,
    factor,
    constant,
    least_share,
    least,
    numel,
    each: tl.constexpr,
    block: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < numel
    m = tl.load(mean + at, mask=inside, other=0.0)
    v = tl.load(square + at, mask=inside, other=0.0)
    if each:
        factor = tl.load(factors + at, mask=inside, other=0.0)
    ratio = m / tl.sqrt_rn(v + least)
    share = tl.minimum(tl.maximum(ratio * ratio * factor + constant, least_share), 1.0)
    u = tl.load(update + at, mask=inside, other=0.0)
    tl.store(update + at, u / tl.sqrt_rn(share), mask=inside)
