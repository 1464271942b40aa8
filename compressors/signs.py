"""Quantizers that send hardly more than signs.

OneBit    1-bit SGD: for each column of elements the mean of each sign
SignSGD   EF-signSGD: one mean magnitude for the whole tensor
TwoBit    -t, 0 or +t for a threshold t
TernGrad  -s, 0 or +s at random, right on average
"""

from __future__ import annotations

from math import inf, sqrt

import numpy as np
import torch
from torch import Tensor

from compressors.base import Key
from compressors.kernels import kernels_for
from compressors.kernels.blocks import (
    Scalar,
    fill_up,
    numbers_of_rows,
    reduce_rows,
    rows,
    scratch,
    scratch_like,
    widened,
)
from compressors.kernels.host import block_norm
from compressors.quantizers import OneFormat
from compressors.wire import values
from compressors.wire.packing import codes_nbytes, pack_codes, unpack_codes
from compressors.wire.values import Blocks, Layout, Parts


class OneBit(OneFormat):
    """1-bit SGD (CF 32) sends signs, decoded to the mean of the column's elements of that sign.

    Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel
    Distributed Training of Speech DNNs" (Interspeech 2014), section 3. A contraction.

    column: consecutive elements that make up a column, a power of two; each column costs 64 bits
        more.

    parts: for each column the mean of the negative values, and by how much the other mean exceeds
    it; packed signs.
    """

    name = "onebit"
    only_cf = 32.0
    keeps_zeros = False
    projection = True  # onto what is constant on each column's two sets of elements

    def __init__(self, column: int = 512) -> None:
        values.check_bucket(column)
        self.column = column
        super().__init__()

    def layout(self, count: int, dtype: torch.dtype) -> Layout:
        columns = -(-count // self.column)
        return ((2 * columns, widened(dtype)), (-(-count // 8), torch.uint8))

    def encode_block(self, x: Tensor, start: int, key: Key, parts: Parts) -> tuple[float, float]:
        means, packed = parts
        column = self.column
        work = scratch_like("work", x)
        positive = reduce_rows(work.copy_(_pack_signs(x, packed)), column, _sum)
        negative = torch.full_like(positive, column)
        negative[-1] = x.numel() - (negative.numel() - 1) * column
        negative -= positive
        high = reduce_rows(torch.clamp(x, min=0, out=work), column, _sum) / positive.clamp(min=1)
        low = reduce_rows(torch.clamp(x, max=0, out=work), column, _sum) / negative.clamp(min=1)
        for mean in (high, low):
            _drop_tiny(mean)
        pairs = means.view(-1, 2)
        pairs[:, 0], pairs[:, 1] = low, high - low
        kept = positive * high.double().square() + negative * low.double().square()
        return float(kept.sum()), 0.0

    def encode_whole(self, x: Tensor, key: Key) -> tuple[Parts, Tensor]:
        count, columns = x.numel(), -(-x.numel() // self.column)
        matrix = fill_up(x, columns * self.column).view(columns, self.column)
        is_positive = matrix >= 0
        missing = columns * self.column - count
        if missing:
            is_positive.view(-1)[count:].fill_(False)
        positive = is_positive.sum(dim=1)
        negative = self.column - positive
        negative[-1:] -= missing
        sums = [_sum(matrix.clamp(max=0)), _sum(matrix.clamp(min=0))]
        means = torch.stack(sums).div_(torch.stack([negative, positive]).clamp_(min=1))
        low, high = _drop_tiny(means).unbind()
        kept = torch.where(is_positive, high[:, None], low[:, None]).view(-1)[:count]
        parts = torch.stack([low, high - low], dim=1).view(-1)
        return (parts, kernels_for(x).pack_bits(is_positive.view(-1)[:count])), kept

    def decode_block(self, parts: Parts, out: Tensor) -> None:
        means, packed = parts
        kernels_for(out).unpack_bits(packed, out)
        pairs = numbers_of_rows(means, out, self.column)
        for row, pair in zip(rows(out, self.column), pairs, strict=True):
            row.mul_(pair[:, 1:]).add_(pair[:, :1])


def _sum(matrix: Tensor) -> Tensor:
    return matrix.sum(dim=1)


def _pack_signs(x: Tensor, packed: Tensor) -> Tensor:
    """Fill `packed` with the bits x >= 0 of a block on the host, and return them."""
    positive = scratch("positive", x.numel(), torch.bool, x.device)
    np.greater_equal(x.numpy(), 0, out=positive.numpy())
    packed.copy_(kernels_for(positive).pack_bits(positive))
    return positive.view(torch.uint8)  # copied faster than bool


def _drop_tiny(means: Tensor) -> Tensor:
    """Set to 0, in place, what is below the smallest normal number: too coarse for a mean."""
    return means.masked_fill_(means.abs() < torch.finfo(means.dtype).tiny, 0)


class SignSGD(OneFormat):
    """EF-signSGD (CF 32) sends the signs of all elements (+ for 0), and one mean magnitude.

    Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes" (ICML
    2019), algorithm 1 and section 4: C(a) = ||a||_1 / n * sign(a), with error feedback. A
    contraction: it keeps 64% of the energy of normally distributed values.

    parts: mean|x| (one element), signs (one bit each).
    """

    name = "signsgd"
    only_cf = 32.0
    keeps_zeros = False
    shared = 1
    projection = True  # <x, c> = mean|x| * sum|x| = ||c||^2

    def layout(self, count: int, dtype: torch.dtype) -> Layout:
        return ((min(count, 1), widened(dtype)), (-(-count // 8), torch.uint8))

    def fill_shared(self, blocks: Blocks, shared: Parts) -> None:
        count = blocks.x.numel()
        sums = [torch.abs(x, out=scratch_like("work", x)).sum() for x, _ in blocks]
        (scale,) = shared
        scale.copy_(torch.stack(sums).double().sum() / count)
        _drop_tiny(scale)

    def encode_block(self, x: Tensor, start: int, key: Key, parts: Parts) -> tuple[float, float]:
        scale, packed = parts
        _pack_signs(x, packed)
        return x.numel() * float(scale) ** 2, 0.0

    def encode_whole(self, x: Tensor, key: Key) -> tuple[Parts, Tensor]:
        mean = torch.linalg.vector_norm(x, 1, dtype=torch.float64) / x.numel()
        scale = _drop_tiny(mean.to(x.dtype)).view(1)
        is_positive = x >= 0
        return (scale, kernels_for(x).pack_bits(is_positive)), torch.where(
            is_positive, scale, -scale
        )

    def decode_block(self, parts: Parts, out: Tensor) -> None:
        scale, packed = parts
        kernels_for(out).unpack_bits(packed, out)
        out.mul_(2 * scale).sub_(scale)


def _root_mean_square(x: Tensor) -> Tensor:
    """As a float64 tensor."""
    return torch.linalg.vector_norm(x, dtype=torch.float64) / sqrt(x.numel())


class TwoBit(OneFormat):
    """2-bit quantization (CF 16) sends +t for elements at or above t, -t at or below -t, else 0.

    Strom, "Scalable Distributed DNN Training Using Commodity GPU Cloud Computing" (Interspeech
    2015), for the values and the error feedback; MXNet's gradient compression ("2bit"), for sending
    every element in two bits. An element moves by at most t in a step; the rest is fed back.

    threshold: t > 0, the same for all tensors and steps (MXNet's default is 0.5), or None: 0.9
        times the root mean square of the tensor, which loses least of normally distributed values
        (34% of their energy). C is a contraction only with None, but error feedback sends
        everything in the end with either.

    parts: t (one element), -1, 0 or 1 for each element (two bits each).
    """

    name = "twobit"
    only_cf = 16.0
    shared = 1

    def __init__(self, threshold: float | None = None) -> None:
        if threshold is not None and not 0 < threshold < inf:
            raise ValueError(f"threshold must be None or a number above 0, got {threshold!r}")
        self.threshold = threshold
        super().__init__()

    def layout(self, count: int, dtype: torch.dtype) -> Layout:
        return ((min(count, 1), widened(dtype)), (codes_nbytes(count, 4), torch.uint8))

    def fill_shared(self, blocks: Blocks, shared: Parts) -> None:
        for _ in blocks:
            pass
        self._fill(shared[0], sqrt(blocks.total / blocks.x.numel()))

    def _fill(self, t: Tensor, rms: Scalar) -> None:
        """Set t for this root mean square; to nan, if that is not finite."""
        t.fill_(0.9 * rms if self.threshold is None else self.threshold + 0.0 * rms)
        t.clamp_(min=torch.finfo(t.dtype).tiny)

    def encode_block(self, x: Tensor, start: int, key: Key, parts: Parts) -> tuple[float, float]:
        t, packed = parts
        steps = torch.div(x, t, out=scratch_like("work", x))
        q = torch.clamp(steps, -1, 1, out=scratch_like("levels", steps))
        truncated = scratch("truncated", q.numel(), torch.int8, q.device).copy_(q)
        q.copy_(truncated)  # trunc_ is 20 times slower
        pack_codes(truncated, 4, 1, packed)
        square = float(t) ** 2
        return square * block_norm(q), square * block_norm(steps.sub_(q))

    def encode_whole(self, x: Tensor, key: Key) -> tuple[Parts, Tensor]:
        t = x.new_empty(1)
        self._fill(t, _root_mean_square(x))
        q = (x / t).clamp_(-1, 1).trunc_()
        return (t, pack_codes(q, 4, 1)), q.mul_(t)

    def decode_block(self, parts: Parts, out: Tensor) -> None:
        t, packed = parts
        unpack_codes(packed, 4, 1, out)
        out.mul_(t)


class TernGrad(OneFormat):
    """TernGrad (CF 20, 1.6 bits an element) sends -s, 0 or +s for each element, at random.

    Wen et al., "TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning"
    (NeurIPS 2017): equation 3 (the rounding), section 3.3 (a scale for each tensor, clipping). Not
    a contraction (the error is several times the gradient), so the error is not fed back.

    clip: s is max|x| over the tensor, but at most so many standard deviations, taken about zero:
        less variance, at the price of a bias. None: no clipping; then C is unbiased.
    seed: of the random numbers, which also depend on the tensor's name, the step and the rank.

    parts: s (one element), -1, 0 or 1 for each element (five to a byte).
    """

    name = "terngrad"
    only_cf = 20.0
    error_feedback = False
    shared = 1

    def __init__(self, clip: float | None = 2.5, seed: int = 0) -> None:
        if clip is not None and not clip > 0:
            raise ValueError(f"clip must be None or above 0 (standard deviations), got {clip!r}")
        self.clip, self.seed = clip, seed
        super().__init__()

    def layout(self, count: int, dtype: torch.dtype) -> Layout:
        return ((min(count, 1), widened(dtype)), (codes_nbytes(count, 3), torch.uint8))

    def fill_shared(self, blocks: Blocks, shared: Parts) -> None:
        (scale,) = shared
        scale.zero_()
        for x, _ in blocks:
            magnitude = torch.abs(x, out=scratch_like("work", x))
            torch.maximum(scale, magnitude.amax(), out=scale)
        if self.clip is not None:
            scale.clamp_(max=self.clip * sqrt(blocks.total / blocks.x.numel()))
        scale.mul_(values.WIDER).clamp_(min=torch.finfo(scale.dtype).tiny)

    def encode_block(self, x: Tensor, start: int, key: Key, parts: Parts) -> tuple[float, float]:
        scale, packed = parts
        steps = torch.div(x, scale, out=scratch_like("work", x))
        t = scratch_like("levels", x)
        values.fill_random16(t, self.seed, key, start)
        clipped = steps
        if self.clip is not None:
            clipped = torch.clamp(steps, -1, 1, out=scratch_like("clipped", steps))
        torch.add(clipped, t, alpha=values.STEP, out=t).floor_()
        square, energy = float(scale) ** 2, block_norm(t)
        error = block_norm(steps.sub_(t))
        pack_codes(t, 3, 1, packed)
        return square * energy, square * error

    def encode_whole(self, x: Tensor, key: Key) -> tuple[Parts, Tensor]:
        scale = torch.linalg.vector_norm(x, inf).view(1)
        if self.clip is not None:
            scale = scale.minimum((self.clip * _root_mean_square(x)).to(x.dtype))
        scale = scale.mul_(values.WIDER).clamp_(min=torch.finfo(x.dtype).tiny)
        t = x / scale
        if self.clip is not None:
            t.clamp_(-1, 1)
        t.add_(values.uniform(t, self.seed, key)).floor_()
        return (scale, pack_codes(t, 3, 1)), t.mul_(scale)

    def decode_block(self, parts: Parts, out: Tensor) -> None:
        scale, packed = parts
        unpack_codes(packed, 3, 1, out)
        out.mul_(scale)
