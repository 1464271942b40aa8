"""Quantizers that send hardly more than signs, with a scale for each tensor or column.

OneBit    1-bit SGD: for each column of elements the mean of each sign
SignSGD   EF-signSGD: one mean magnitude
TwoBit    -t, 0 or +t for a threshold t
TernGrad  -s, 0 or +s at random, unbiased

The papers scale tensor by tensor. Here the tensors are the segments of a `Spec`, consecutive in one
flat tensor. Their scales are consecutive, too, and all segments are coded at once.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from compressors.base import Key, Payload, Spec, check_above_0, check_seed
from compressors.kernels import kernels_for
from compressors.kernels.blocks import scratch_like
from compressors.quantizers import OneFormat
from compressors.wire import values
from compressors.wire.packing import pack_bits, unpack_bits
from compressors.wire.values import Cut, Layout, Parts, Pieces, ScaledCodes, pieces


class Signs(OneFormat):
    """The base of quantizers that send one bit, the sign, of each element."""

    only_cf = 32.0
    keeps_zeros = False
    codes_rows = True

    def block_layout(self, count: int, dtype: torch.dtype) -> Layout:
        return ((-(-count // 8), torch.uint8),)

    def code(self, x: Tensor, start: int, key: Key, parts: Parts, cut: Cut) -> Tensor:
        kernels, work = kernels_for(x), scratch_like("work", x)
        parts[-1].copy_(pack_bits(kernels.not_negative(x), cut.rows))
        self.decode_block(parts, work, cut)
        return work


class OneBit(Signs):
    """1-bit SGD (CF 32) sends signs, decoded to the mean of the column's elements of that sign.

    Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel
    Distributed Training of Speech DNNs" (Interspeech 2014), section 3. A contraction.

    column: number of consecutive elements of a column, a power of two. Each column costs 64 more
        bits. The last column of a segment may be shorter. None: the columns of the paper, whose
        layers compute W^T v: the weights of one output, that is a row of PyTorch's matrices (and of
        kernels of convolutions), or a whole tensor of one dimension. Then tensors are compressed
        one by one.

    parts: for each column the mean of the negative values, and the difference of the other mean
    from it; packed signs.
    """

    name = "onebit"
    shared = 2

    def __init__(self, column: int | None = 512) -> None:
        if column is not None:
            values.check_bucket(column)
        self.column = column
        self.sampled = column is not None  # a sample has no columns
        self.one_by_one = column is None
        super().__init__()

    def compress(self, x: Tensor, spec: Spec, add: Tensor | None = None) -> Payload:
        return super().compress(x, self._by_columns(spec), add)

    def nbytes(self, spec: Spec) -> int:
        return super().nbytes(self._by_columns(spec))

    def read(self, data: Tensor, spec: Spec) -> list[Payload]:
        return super().read(data, self._by_columns(spec))

    def _by_columns(self, spec: Spec) -> Spec:
        """The spec; if `column` is None, with a segment for each column."""
        shape = spec.key.shape
        if self.column is not None or len(shape) < 2 or not 0 < prod(shape) == spec.numel:
            return spec
        return spec._replace(segments=(spec.numel // shape[0],) * shape[0])

    def pieces_of(self, segments: tuple[int, ...]) -> Pieces:
        return pieces(segments, self.column)

    def look_at(self, x: Tensor, cut: Cut, sums: Tensor) -> None:
        kernels, work = kernels_for(x), scratch_like("work", x)
        work.copy_(kernels.not_negative(x).view(torch.uint8))  # copied faster than bool
        sums[0, cut.which] += kernels.sum_pieces(work, cut.counts)
        torch.clamp(x, min=0, out=work)
        sums[1, cut.which] += kernels.sum_pieces(work, cut.counts)
        sums[2, cut.which] += kernels.sum_pieces(torch.clamp(x, max=0, out=work), cut.counts)

    def share(self, sums: Tensor, lengths: Tensor, shared: Parts) -> None:
        positive, high, low = sums
        high = _drop_tiny(high / positive.clamp(min=1), shared[0].dtype)
        low = _drop_tiny(low / (lengths - positive).clamp(min=1), shared[0].dtype)
        shared[0].copy_(low)
        shared[1].copy_(high - low)

    def decode_block(self, parts: Parts, out: Tensor, cut: Cut) -> None:
        low, above, packed = parts
        kernels = kernels_for(out)
        unpack_bits(packed, out, cut.rows)
        out.mul_(kernels.spread(above, cut.counts)).add_(kernels.spread(low, cut.counts))


def _drop_tiny(means: Tensor, dtype: torch.dtype) -> Tensor:
    """`means`, with 0 for denormal numbers, which are too coarse for a mean."""
    return means.masked_fill_(means.abs() < torch.finfo(dtype).tiny, 0)


class SignSGD(Signs):
    """EF-signSGD (CF 32) sends the signs of all elements (+ for 0), and one mean magnitude.

    Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes" (ICML
    2019), algorithm 1 and section 4: C(a) = ||a||_1 / n * sign(a), with error feedback. A
    contraction: it keeps 64% of the energy of normally distributed values.

    parts: mean|x| (one for each segment), signs (one bit each).
    """

    name = "signsgd"
    shared = 1

    def pieces_of(self, segments: tuple[int, ...]) -> Pieces:
        return pieces(segments)

    def look_at(self, x: Tensor, cut: Cut, sums: Tensor) -> None:
        magnitude = torch.abs(x, out=scratch_like("work", x))
        sums[0, cut.which] += kernels_for(x).sum_pieces(magnitude, cut.counts)

    def share(self, sums: Tensor, lengths: Tensor, shared: Parts) -> None:
        (scale,) = shared
        scale.copy_(_drop_tiny(sums[0] / lengths, scale.dtype))

    def decode_block(self, parts: Parts, out: Tensor, cut: Cut) -> None:
        scale, packed = parts
        kernels = kernels_for(out)
        unpack_bits(packed, out, cut.rows)
        scale = kernels.spread(scale, cut.counts)
        out.mul_(2 * scale).sub_(scale)


class TwoBit(OneFormat, ScaledCodes):
    """2-bit quantization (CF 16) sends +t for elements at or above t, -t at or below -t, else 0.

    Strom, "Scalable Distributed DNN Training Using Commodity GPU Cloud Computing" (Interspeech
    2015), for the values and the error feedback; MXNet's gradient compression ("2bit"), for sending
    every element in two bits. An element moves by at most t in a step; the rest is fed back.

    threshold: t > 0, the same for all tensors and steps (MXNet's default is 0.5), or None: 0.9
        times the root mean square of the segment, with the smallest error for normally distributed
        values (34% of their energy). C is a contraction only with None, but with either error
        feedback sends all of a gradient in the end.

    parts: t (one for each segment), -1, 0 or 1 for each element (two bits each).
    """

    name = "twobit"
    only_cf = 16.0
    codes = 4

    def __init__(self, threshold: float | None = None) -> None:
        self.threshold = check_above_0("threshold", threshold)
        super().__init__()

    def look_at(self, x: Tensor, cut: Cut, sums: Tensor) -> None:
        values.add_squares(x, cut, sums[0])

    def share(self, sums: Tensor, lengths: Tensor, shared: Parts) -> None:
        (t,) = shared
        rms = (sums[0] / lengths).sqrt_()
        t.copy_(0.9 * rms if self.threshold is None else self.threshold + 0.0 * rms)  # nan stays
        t.clamp_(min=torch.finfo(t.dtype).tiny)

    def round(self, q: Tensor, start: int, key: Key) -> None:
        q.clamp_(-1, 1)
        q.copy_(q.to(torch.int8))  # trunc_ is 20 times slower


class TernGrad(OneFormat, ScaledCodes):
    """TernGrad (CF 20, 1.6 bits an element) sends -s, 0 or +s for each element, at random.

    Wen et al., "TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning"
    (NeurIPS 2017): equation 3 (the rounding), section 3.3 (a scale for each tensor, clipping). Not
    a contraction (the error is several times the gradient), so the error is not fed back.

    clip: s is max|x| over the segment, but at most this many standard deviations (about zero): less
        variance, with a bias. None: no clipping; then C is unbiased.
    seed: of the random numbers, which also depend on the tensor's name, the step and the rank.

    parts: s (one for each segment), -1, 0 or 1 for each element (five to a byte).
    """

    name = "terngrad"
    only_cf = 20.0
    feeds_back = False
    codes = 3

    def __init__(self, clip: float | None = 2.5, seed: int = 0) -> None:
        self.clip, self.seed = check_above_0("clip", clip), check_seed(seed)
        super().__init__()

    def look_at(self, x: Tensor, cut: Cut, sums: Tensor) -> None:
        values.add_largest(x, cut, sums[1])
        if self.clip is not None:
            values.add_squares(x, cut, sums[0])

    def share(self, sums: Tensor, lengths: Tensor, shared: Parts) -> None:
        (scale,) = shared
        squares, largest = sums[:2]
        if self.clip is not None:
            largest = largest.minimum(self.clip * (squares / lengths).sqrt_())
        scale.copy_(largest).mul_(values.WIDER).clamp_(min=torch.finfo(scale.dtype).tiny)

    def round(self, q: Tensor, start: int, key: Key) -> None:
        if self.clip is not None:
            q.clamp_(-1, 1)
        values.round_at_random(q, self.seed, key, start)
