"""1-bit SGD: the sign of each element, decoded to the mean of those of its column with that sign.

Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed
Training of Speech DNNs" (Interspeech 2014), section 3: threshold 0, two reconstruction values for
each column, error feedback.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compressors.formats import Block, BlockFormat, Layout, Parts, widened
from compressors.levels import check_bucket
from compressors.quantizer import Quantizer
from compressors.rows import beside, per_row, rows
from compressors.scratch import like
from compressors.signs import pack_signs, signs_nbytes, unpack_signs


class ColumnMeans(BlockFormat):
    """x -> the mean of its column's values >= 0, or of those < 0.

    A column is a run of `column` consecutive elements (a power of two): payload sizes have to
    follow from the number of elements alone, so columns cannot follow the shape of the matrix.

    parts: for each column the mean below 0 and how far the other one is above it, packed signs.
    """

    projection = True  # onto what is constant on each column's two sets of elements

    def __init__(self, name: str, column: int) -> None:
        check_bucket(column)
        self.name, self.column = name, column

    def layout(self, count: int, dtype: torch.dtype) -> Layout:
        columns = -(-count // self.column)
        return ((2 * columns, widened(dtype)), (signs_nbytes(count), torch.uint8))

    def encode_block(self, block: Block, parts: Parts) -> tuple[float, float]:
        means, packed = parts
        x, column = block.x, self.column
        work = like("work", x)
        pack_signs(x, packed, work)
        positive = per_row(work, column, _sum)
        negative = torch.full_like(positive, column)
        negative[-1] = x.numel() - (negative.numel() - 1) * column
        negative -= positive
        high = per_row(torch.clamp(x, min=0, out=work), column, _sum) / positive.clamp(min=1)
        low = per_row(torch.clamp(x, max=0, out=work), column, _sum) / negative.clamp(min=1)
        for mean in (high, low):
            mean.masked_fill_(mean.abs() < torch.finfo(x.dtype).tiny, 0)  # too coarse for a mean
        pairs = means.view(-1, 2)
        pairs[:, 0], pairs[:, 1] = low, high - low
        kept = positive * high.double().square() + negative * low.double().square()
        return float(kept.sum()), 0.0

    def decode_block(self, parts: Parts, out: Tensor) -> None:
        means, packed = parts
        unpack_signs(packed, out)
        pairs = beside(means, out, self.column)
        for values, pair in zip(rows(out, self.column), pairs, strict=True):
            values.mul_(pair[:, 1:]).add_(pair[:, :1])


def _sum(matrix: Tensor) -> Tensor:
    return matrix.sum(dim=1)


class OneBit(Quantizer):
    """CF 32, and 64 bits more for each column of `column` consecutive elements. A contraction."""

    name = "onebit"
    keeps_zeros = False

    def __init__(self, column: int = 512) -> None:
        self.column = column
        super().__init__({32.0: ColumnMeans(self.name, column)})
