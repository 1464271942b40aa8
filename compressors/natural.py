"""Natural compression: each element is rounded up or down to a power of two, at random.

Horvath et al., "Natural Compression for Distributed Deep Learning" (2019; MSML 2022), definition 1:
unbiased, with a variance of at most 1/8 of the energy (theorem 3).
"""

from __future__ import annotations

from math import nan
from typing import NamedTuple

import torch
from torch import Tensor

from compressors.dither import fill_random16
from compressors.formats import Block, BlockFormat, Layout, Parts, norm2, widened
from compressors.quantizer import Quantizer
from compressors.rows import BLOCK, beside, per_row, rows
from compressors.scratch import like


class _Float(NamedTuple):
    """How a floating-point number lies in an integer of as many bits."""

    integer: torch.dtype
    mantissa: int  # bits
    top: int  # largest exponent field of a finite number
    lift: float  # times the smallest normal number: 2**-126


_FLOATS = {
    torch.float32: _Float(torch.int32, 23, 254, 1.0),
    torch.float64: _Float(torch.int64, 52, 2046, 2.0**896),
}


class PowersOfTwo(BlockFormat):
    """x -> a power of two next to it, with its sign, E = x.

    The paper sends a sign and all 8 bits of the exponent. Here 7 bits count from an offset for each
    BLOCK elements, so that an element takes one byte. What is below 2**-126 of the largest
    magnitude there becomes 0, a bias far beyond the precision of any sum.

    Rounding is done on the bits: adding a random number to the mantissa carries into the exponent
    with a probability equal to the mantissa, as definition 1 wants. It is right for denormal
    numbers too, which become 0 or the smallest normal one.

    parts: offsets as powers of two, codes (uint8: sign, 7 bits of exponent; exponent 0 means 0).
    """

    def __init__(self, name: str, seed: int) -> None:
        self.name, self.seed = name, seed

    def layout(self, count: int, dtype: torch.dtype) -> Layout:
        return ((-(-count // BLOCK), widened(dtype)), (count, torch.uint8))

    def encode_block(self, block: Block, parts: Parts) -> tuple[float, float]:
        offsets, codes = parts
        form = _FLOATS[block.x.dtype]
        bits = block.x.view(form.integer)
        field = torch.bitwise_and(bits, torch.iinfo(form.integer).max, out=like("bits", bits))
        largest = per_row(field, BLOCK, lambda row: row.amax(dim=1))
        largest.bitwise_right_shift_(form.mantissa)
        below = (largest - 126).clamp_(0, form.top - 127)  # one above the largest is 127 or less
        offsets.copy_(((below + 127) << form.mantissa).view(block.x.dtype))  # 2**below / lift
        offsets.masked_fill_(largest > form.top, nan)
        random = like("random", bits)
        fill_random16(random, self.seed, block.key.name, block.key.step, block.start, block.norm)
        field.add_(random.bitwise_left_shift_(form.mantissa - 16))
        field.bitwise_right_shift_(form.mantissa)
        for row, offset in zip(rows(field, BLOCK), beside(below, field, BLOCK), strict=True):
            row.sub_(offset).clamp_(0, 127)
        negative = torch.bitwise_right_shift(bits, bits.element_size() * 8 - 8, out=random)
        codes.copy_(field.bitwise_or_(negative.bitwise_and_(128)))
        kept = like("kept", block.x)
        self.decode_block(parts, kept)
        energy = norm2(kept)
        return energy, norm2(torch.sub(block.x, kept, out=kept))

    def decode_block(self, parts: Parts, out: Tensor) -> None:
        offsets, codes = parts
        form = _FLOATS[out.dtype]
        bits = out.view(form.integer)
        bits.copy_(codes)
        sign = torch.bitwise_and(bits, 128, out=like("bits", bits))
        sign.bitwise_left_shift_(bits.element_size() * 8 - 8)
        bits.bitwise_and_(127).bitwise_left_shift_(form.mantissa).bitwise_or_(sign)
        if form.lift != 1:
            out.mul_(form.lift)
        for row, offset in zip(rows(out, BLOCK), beside(offsets, out, BLOCK), strict=True):
            row.mul_(offset)


class Natural(Quantizer):
    """CF 4: one byte an element.

    seed: of the random numbers, which also depend on the tensor's name, the step and the data.
    error_feedback: unbiased, so by default the error is not fed back; but it is a contraction, and
        can be.
    """

    name = "natural"

    def __init__(self, seed: int = 0, error_feedback: bool = False) -> None:
        self.seed = seed
        self.error_feedback = error_feedback
        super().__init__({4.0: PowersOfTwo(self.name, seed)})
