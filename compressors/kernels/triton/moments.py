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

from compressors.kernels.triton.launching import cdiv, launch

BLOCK = 2048
PROGRAMS = 256
"""Of each parameter, at most."""

_COLUMNS = tl.constexpr(9)


class Piece(NamedTuple):
    """A parameter's flat tensors, alike in length, float32.

    mean, square: its first and second moments. update: is changed in place. betas: by which the
    moments decay. step: how many there were: a number, or a 0-dim tensor (float32) on the device.
    of_noise: the squared first moment of mere noise, as a part of its second moment."""

    mean: Tensor
    square: Tensor
    update: Tensor
    betas: tuple[float, float]
    step: float | Tensor
    of_noise: float


def enlarge(pieces: Sequence[Piece], ranks: int, least: float) -> None:
    """update /= sqrt(p) for each piece, with p the share of each element's second moment that the
    mean gradient of `ranks` has as well (adaptive/memory/moments.py), in [1 / ranks, 1].

    least: added to second moments."""
    where = pieces[0].update
    table = _table(pieces).to(where.device, non_blocking=True)
    longest = max(piece.update.numel() for piece in pieces)
    grid = min(cdiv(longest, BLOCK), PROGRAMS), len(pieces)
    launch(_enlarge, grid, where, table, 1 / ranks, least, block=BLOCK, num_warps=8)


def _table(pieces: Sequence[Piece]) -> Tensor:
    """A row for each piece, pinned where there is a device to copy it to."""
    table = np.zeros((len(pieces), _COLUMNS.value), np.int64)
    numbers = table.view(np.float64)
    for row, number, piece in zip(table, numbers, pieces, strict=True):
        tensors = (piece.mean, piece.square, piece.update)
        row[:3] = [tensor.data_ptr() for tensor in tensors]
        row[3] = piece.update.numel()
        if isinstance(piece.step, Tensor):
            row[4] = piece.step.data_ptr()
        else:
            number[5] = piece.step
        number[6:8] = [log2(beta) if beta > 0 else -np.inf for beta in piece.betas]
        number[8] = piece.of_noise
    found = torch.from_numpy(table)
    return found.pin_memory() if pieces[0].update.is_cuda else found


@triton.jit
def _enlarge(table, ranks_share, least, block: tl.constexpr):
    row = table + tl.program_id(1) * _COLUMNS
    mean, square, update = _pointer(row), _pointer(row + 1), _pointer(row + 2)
    numel, step = tl.load(row + 3), _number(row + 5)
    if tl.load(row + 4) != 0:
        step = tl.load(_pointer(row + 4)).to(tl.float64)
    of_noise = _number(row + 8)
    bias = _bias(step, _number(row + 6))
    scale = _bias(step, _number(row + 7)) / (bias * bias) / (1 - of_noise)
    shared = 1 - ranks_share
    factor = (scale * shared).to(tl.float32)
    constant = (ranks_share - of_noise / (1 - of_noise) * shared).to(tl.float32)
    lanes = tl.arange(0, block)
    first = tl.program_id(0).to(tl.int64) * block
    for start in range(first, numel, tl.num_programs(0) * block):
        at = start + lanes
        inside = at < numel
        m = tl.load(mean + at, mask=inside, other=0.0)
        v = tl.load(square + at, mask=inside, other=0.0)
        ratio = m / tl.sqrt_rn(v + least)
        share = ratio * ratio * factor + constant
        share = tl.minimum(tl.maximum(share, ranks_share), 1.0)
        u = tl.load(update + at, mask=inside, other=0.0)
        tl.store(update + at, u / tl.sqrt_rn(share), mask=inside)


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
