"""Evenly spaced levels, with a scale of its own for each bucket of consecutive values."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from compressors.dither import STEP, fill_random16
from compressors.formats import Block, BlockFormat, Layout, Parts, widened
from compressors.norms import on_numpy
from compressors.packing import pack, packed_nbytes, padded, unpack
from compressors.rows import BLOCK, beside, per_row, rows
from compressors.scratch import like, scratch

NORMS = ("max", "l2")
_WIDER = 1 + 2.0**-20  # so that rounding errors never put a value past the last level


class Levels(BlockFormat):
    """x -> scale * q with whole q from -levels to levels, levels = 2**(bits - 1) - 1.

    bits: 2 to 8 per value. bucket: values that share a scale, a power of two.
    norm: scale = max|x| / levels over the bucket, or ||x|| / levels ("l2").
    seed: q is x / scale rounded up or down at random so that E[scale * q] = x.
        None: to the nearest.

    A scale is never below the smallest normal number, so that values of 0 are no special case:
    what is smaller than half of it is lost (and fed back).
    parts: scales (float64 for float64, else float32), codes (uint8): q in 8 bits of two's
    complement, or q + levels packed.
    """

    def __init__(
        self, name: str, bits: int, bucket: int, norm: str = "max", seed: int | None = None
    ) -> None:
        if isinstance(bits, bool) or not isinstance(bits, int) or not 2 <= bits <= 8:
            raise ValueError(f"bits must be a whole number from 2 to 8, got {bits!r}")
        check_bucket(bucket)
        if norm not in NORMS:
            raise ValueError(f"norm must be one of {', '.join(NORMS)}; got {norm!r}")
        self.name, self.bits, self.bucket, self.norm, self.seed = name, bits, bucket, norm, seed
        self.levels = 2 ** (bits - 1) - 1

    def layout(self, count: int, dtype: torch.dtype) -> Layout:
        size = count if self.bits == 8 else packed_nbytes(count, self.bits)
        return ((-(-count // self.bucket), widened(dtype)), (size, torch.uint8))

    def encode_block(self, block: Block, parts: Parts) -> tuple[float, float]:
        scales, packed = parts
        steps, q = like("work", block.x), like("levels", block.x)
        columns = beside(scales, block.x, self.bucket)
        matrices = rows(block.x, self.bucket), columns, rows(steps, self.bucket)
        for x, scale, row in zip(*matrices, strict=True):
            self._scale(x, scale, row)
            torch.div(x, scale, out=row)
        self._round(block, steps, q)
        squares = scales.double().square()
        energy = _weighted(squares, q, self.bucket)
        codes = packed if self.bits == 8 else _codes(q)
        codes[: q.numel()].view(torch.int8).copy_(q)
        if self.bits < 8:
            codes.add_(self.levels)
            pack(codes, self.bits, packed)
        return energy, _weighted(squares, steps.sub_(q), self.bucket)

    def decode_block(self, parts: Parts, out: Tensor) -> None:
        scales, codes = parts
        if self.bits < 8:
            packed, codes = codes, _codes(out)
            unpack(packed, self.bits, codes)
            codes.sub_(self.levels)
        out.copy_(codes[: out.numel()].view(torch.int8))
        columns = beside(scales, out, self.bucket)
        for values, scale in zip(rows(out, self.bucket), columns, strict=True):
            values.mul_(scale)

    def _scale(self, x: Tensor, scale: Tensor, work: Tensor) -> None:
        """Fill `scale`, a column, for the rows of `x`."""
        torch.abs(x, out=work)
        torch.amax(work, dim=1, keepdim=True, out=scale)
        if self.norm == "l2":  # of x / max|x|, which neither overflows nor vanishes
            torch.div(x, scale.clamp(min=torch.finfo(x.dtype).tiny), out=work)
            scale.mul_(work.square_().sum(dim=1, keepdim=True).sqrt_())
        scale.div_(self.levels if self.seed is None else self.levels / _WIDER)
        scale.clamp_(min=torch.finfo(x.dtype).tiny)

    def _round(self, block: Block, steps: Tensor, q: Tensor) -> None:
        if self.seed is None:
            torch.round(steps, out=q)
            return
        fill_random16(q, self.seed, block.key.name, block.key.step, block.start, block.norm)
        torch.add(steps, q, alpha=STEP, out=q).floor_()


def check_bucket(bucket: int) -> None:
    """ValueError unless so many values can share a scale."""
    if isinstance(bucket, bool) or not isinstance(bucket, int) or bucket not in _BUCKETS:
        raise ValueError(f"bucket must be a power of two from 8 to {BLOCK}, got {bucket!r}")


_BUCKETS = [8 << i for i in range(BLOCK.bit_length() - 3)]


def _codes(x: Tensor) -> Tensor:
    """Scratch for the codes of `x`, zeros where they are padded."""
    codes = scratch("codes", padded(x.numel()), torch.uint8, x.device)
    codes[x.numel() :] = 0
    return codes


def _weighted(squares: Tensor, x: Tensor, bucket: int) -> float:
    """Sum of ||bucket of x||^2 times the bucket's squared scale."""
    if x.numel() % bucket or not on_numpy(x):
        norms = per_row(x, bucket, lambda row: row.double().square().sum(dim=1))
        return float(torch.dot(norms, squares))
    array = x.numpy().reshape(-1, bucket)
    norms = np.matmul(array[:, None, :], array[:, :, None]).reshape(-1)
    return float(np.dot(norms.astype(np.float64), squares.numpy()))
