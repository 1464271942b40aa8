"""Natural compression: powers of two, rounded at random."""

from __future__ import annotations

from math import nan
from typing import NamedTuple

import torch
from torch import Tensor

from compressors.base import Key, check_seed
from compressors.kernels import blocks, kernels_for
from compressors.kernels.blocks import CODE_BLOCK, Coding, Encoded, scratch, scratch_like, widened
from compressors.quantizers import OneFormat
from compressors.wire import values
from compressors.wire.values import Cut, Layout, Parts


class _Float(NamedTuple):
    """The bit layout of a floating-point number, read as an integer of the same size."""

    integer: torch.dtype
    sign: int  # the highest bit
    mantissa: int  # bits of the mantissa
    top: int  # largest exponent field of a finite number
    lift: float  # times the smallest normal number: 2**-126


_FLOATS = {
    torch.float32: _Float(torch.int32, 31, 23, 254, 1.0),
    torch.float64: _Float(torch.int64, 63, 52, 2046, 2.0**896),
}


class Natural(OneFormat):
    """Natural compression (CF 4) rounds each element to a power of two, up or down at random.

    Horvath et al., "Natural Compression for Distributed Deep Learning" (2019; MSML 2022),
    definition 1: unbiased, with a variance of at most 1/8 of the energy (theorem 3).

    The paper sends a sign and all 8 bits of the exponent. Here 7 bits count from an offset for each
    CODE_BLOCK elements, so that an element takes one byte. Magnitudes below 2**-126 of the largest
    one in their block become 0, a bias far below the precision of any sum.

    Rounding is done on the bits: adding a random number to the mantissa carries into the exponent
    with a probability equal to the mantissa. Denormal numbers become 0 or the smallest normal one.

    seed: of the random numbers, which also depend on the tensor's name, the step and the rank.
    feeds_back: unbiased, so by default the error is not fed back; it can be (a contraction).

    parts: offsets as powers of two, codes (uint8: sign, 7 bits of exponent; exponent 0 means 0).
    """

    name = "natural"
    only_cf = 4.0
    coding = Coding("natural", 8, CODE_BLOCK)

    def __init__(self, seed: int = 0, feeds_back: bool = False) -> None:
        self.seed = check_seed(seed)
        self.feeds_back = feeds_back
        super().__init__()

    def block_layout(self, count: int, dtype: torch.dtype) -> Layout:
        return ((-(-count // CODE_BLOCK), widened(dtype)), (count, torch.uint8))

    def code(self, x: Tensor, start: int, key: Key, parts: Parts, cut: Cut) -> Tensor:
        offsets, codes = parts
        matrix = blocks.fill_up(x, len(offsets) * min(x.numel(), CODE_BLOCK)).view(len(offsets), -1)
        random = scratch("random", matrix.numel(), _FLOATS[x.dtype].integer, x.device)
        values.fill_random16(random, self.seed, key, start)
        codes.copy_(self._codes(matrix, random.view_as(matrix), offsets).view(-1)[: x.numel()])
        decoded = scratch_like("work", x)
        self.decode_block(parts, decoded, cut)
        return decoded

    def fused(
        self, x: Tensor, add: Tensor | None, key: Key, decode: bool = True, rows: int = 1
    ) -> Encoded | None:
        fused = kernels_for(x).fused(x, add)
        if fused is None:
            return None
        random = torch.empty_like(x, dtype=torch.int32)
        values.fill_random16(random, self.seed, key, 0)
        return fused.encode_natural(x, add, random, decode, rows)

    def _codes(self, x: Tensor, random: Tensor, offsets: Tensor) -> Tensor:
        """The codes of rows, in integers as wide as the elements. Fills `offsets`, one for each
        row. `random`: whole numbers of 16 bits; overwritten."""
        form = _FLOATS[x.dtype]
        bits = x.view(form.integer)
        most = torch.iinfo(form.integer).max
        field = scratch("bits", x.numel(), form.integer, x.device).view(x.shape)
        torch.bitwise_and(bits, most, out=field)
        largest = field.amax(dim=1) >> form.mantissa
        below = (largest - 126).clamp_(0, form.top - 127)  # one above the largest is 127 or less
        offsets.copy_(((below + 127) << form.mantissa).view(offsets.dtype))  # 2**below / lift
        offsets.masked_fill_(largest > form.top, nan)
        field.add_(random, alpha=1 << form.mantissa - 16).bitwise_right_shift_(form.mantissa)
        field.sub_(below[:, None]).clamp_(0, 127)
        negative = torch.bitwise_right_shift(bits, form.sign - 7, out=random)
        return field.bitwise_or_(negative.bitwise_and_(128))

    def decode_block(self, parts: Parts, out: Tensor, cut: Cut) -> None:
        offsets, codes = parts
        form = _FLOATS[out.dtype]
        bits = out.view(form.integer).copy_(codes)
        sign = torch.bitwise_and(bits, 128, out=scratch_like("bits", bits))
        bits.bitwise_and_(127).bitwise_left_shift_(form.mantissa)
        bits.bitwise_or_(sign.bitwise_left_shift_(form.sign - 7))
        if form.lift != 1:
            out.mul_(form.lift)
        columns = blocks.numbers_of_rows(offsets, out, CODE_BLOCK)
        for row, offset in zip(blocks.rows(out, CODE_BLOCK), columns, strict=True):
            row.mul_(offset)
