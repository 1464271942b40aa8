"""Updates made as large as the mean gradient's, of all parameters of a bucket, by one launch in
Triton that reads each moment once.

The tensors of an optimizer's state lie anywhere, so the kernel gets a table of where they are: a
row for each parameter. One small copy to the device brings it there, and nobody waits for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log2
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from compressors.kernels.blocks import cdiv, launch

BLOCK = 2048
PROGRAMS = 256
"""Of each parameter, at most."""

_COLUMNS = tl.constexpr(10)


class Piece(NamedTuple):
    """A parameter's flat tensors, alike in length, float32.

    mean, square: its first and second moments. update: is changed in place. grad: its gradient.
    betas: by which the moments decay. step: how many there were: a number, or a 0-dim tensor
    (float32) on the device. of_noise: the squared first moment of mere noise, as a part of its
    second moment."""

    mean: Tensor
    square: Tensor
    update: Tensor
    grad: Tensor
    betas: tuple[float, float]
    step: float | Tensor
    of_noise: float


def enlarge(pieces: Sequence[Piece], ranks: int, least: float, stride: int) -> Tensor:
    """update /= sqrt(p) for each piece, with p the part of each element's second moment that the
    mean gradient of `ranks` has as well (adaptive/memory/moments.py), in [1 / ranks, 1].

    least: added to second moments. Returns the sum of p * grad^2 over one element in `stride` of
    each piece (0-dim, float64)."""
    where = pieces[0].update
    table = _table(pieces).to(where.device, non_blocking=True)
    longest = max(piece.update.numel() for piece in pieces)
    programs = min(cdiv(longest, BLOCK), PROGRAMS)
    sums = torch.empty(len(pieces), programs, dtype=torch.float64, device=where.device)
    grid, options = (programs, len(pieces)), {"block": BLOCK, "num_warps": 8}
    launch(_enlarge, grid, where, table, sums, 1 / ranks, least, stride, **options)
    return sums.sum()


def _table(pieces: Sequence[Piece]) -> Tensor:
    """A row for each piece, pinned where there is a device to copy it to."""
    table = np.zeros((len(pieces), _COLUMNS.value), np.int64)
    numbers = table.view(np.float64)
    for row, number, piece in zip(table, numbers, pieces, strict=True):
        tensors = (piece.mean, piece.square, piece.update, piece.grad)
        row[:4] = [tensor.data_ptr() for tensor in tensors]
        row[4] = piece.update.numel()
        if isinstance(piece.step, Tensor):
            row[5] = piece.step.data_ptr()
        else:
            number[6] = piece.step
        number[7:9] = [log2(beta) if beta > 0 else -np.inf for beta in piece.betas]
        number[9] = piece.of_noise
    found = torch.from_numpy(table)
    return found.pin_memory() if pieces[0].update.is_cuda else found


@triton.jit(do_not_specialize=["stride"])
def _enlarge(table, sums, ranks_share, least, stride, block: tl.constexpr):
    row = table + tl.program_id(1) * _COLUMNS
    mean, square = _pointer(row), _pointer(row + 1)
    update, grad = _pointer(row + 2), _pointer(row + 3)
    numel, step = tl.load(row + 4), _number(row + 6)
    if tl.load(row + 5) != 0:
        step = tl.load(_pointer(row + 5)).to(tl.float64)
    of_noise = _number(row + 9)
    bias = _bias(step, _number(row + 7))
    scale = _bias(step, _number(row + 8)) / (bias * bias) / (1 - of_noise)
    shared = 1 - ranks_share
    factor = (scale * shared).to(tl.float32)
    constant = (ranks_share - of_noise / (1 - of_noise) * shared).to(tl.float32)
    lanes = tl.arange(0, block)
    total = tl.full((), 0.0, tl.float64)
    first = tl.program_id(0).to(tl.int64) * block
    for start in range(first, numel, tl.num_programs(0) * block):
        at = start + lanes
        inside = at < numel
        m = tl.load(mean + at, mask=inside, other=0.0)
        v = tl.load(square + at, mask=inside, other=0.0)
        part = m * m / (v + least) * factor + constant
        part = tl.minimum(tl.maximum(part, ranks_share), 1.0)
        u = tl.load(update + at, mask=inside, other=0.0)
        tl.store(update + at, u / tl.sqrt_rn(part), mask=inside)
        g = tl.load(grad + at, mask=inside & (at % stride == 0), other=0.0)
        total += tl.sum((part * (g * g)).to(tl.float64))
    tl.store(sums + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), total)


@triton.jit
def _pointer(place):
    return tl.load(place).to(tl.pointer_type(tl.float32))


@triton.jit
def _number(place):
    return tl.load(place).to(tl.float64, bitcast=True)


@triton.jit
def _bias(step, log2_of_beta):
    """How much of its weight an average that began with zeros has by now."""
    begun = 1 - tl.exp2(log2_of_beta)
    return tl.maximum(1 - tl.exp2(step * log2_of_beta), begun)
