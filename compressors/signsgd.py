"""EF-signSGD: the sign of each element, times the mean magnitude.

Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes" (ICML
2019), algorithm 1 and section 4: C(a) = ||a||_1 / n * sign(a) for each tensor, with error feedback.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compressors.formats import Block, BlockFormat, Blocks, Layout, Parts, widened
from compressors.quantizer import Quantizer
from compressors.scratch import like
from compressors.signs import pack_signs, signs_nbytes, unpack_signs


class Signs(BlockFormat):
    """x -> mean|x| * sign(x), the sign of 0 being +.

    parts: mean|x| (one element), signs (one bit each).
    """

    shared = 1
    projection = True  # <x, c> = mean|x| * sum|x| = ||c||^2

    def __init__(self, name: str) -> None:
        self.name = name

    def layout(self, count: int, dtype: torch.dtype) -> Layout:
        return ((min(count, 1), widened(dtype)), (signs_nbytes(count), torch.uint8))

    def survey(self, blocks: Blocks, shared: Parts) -> None:
        count = blocks.x.numel()
        sums = [torch.abs(block.x, out=like("work", block.x)).sum() for block in blocks]
        (scale,) = shared
        scale.copy_(torch.stack(sums).double().sum() / count)
        scale.masked_fill_(scale < torch.finfo(scale.dtype).tiny, 0)  # too coarse for a mean

    def encode_block(self, block: Block, parts: Parts) -> tuple[float, float]:
        scale, packed = parts
        pack_signs(block.x, packed, like("work", block.x))
        return block.x.numel() * float(scale) ** 2, 0.0

    def decode_block(self, parts: Parts, out: Tensor) -> None:
        scale, packed = parts
        unpack_signs(packed, out)
        out.mul_(2 * scale).sub_(scale)


class SignSGD(Quantizer):
    """CF 32. A contraction: it keeps ||a||_1^2 / (n ||a||^2) of the energy, 64% if it is normally
    distributed."""

    name = "signsgd"
    keeps_zeros = False

    def __init__(self) -> None:
        super().__init__({32.0: Signs(self.name)})
