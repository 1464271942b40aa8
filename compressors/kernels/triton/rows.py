"""The largest elements of each section of each row of a matrix, all found by one launch in Triton.

One program looks at one section of one row: once for every bit of the key of its k-th largest
element (`select.py` says what a key is), and once more to mark the largest and to add up. As a
single program reads a section again and again, sections must fit a cache (`LONGEST`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from compressors.kernels.triton.launching import launch
from compressors.kernels.triton.select import ALONE, _key, _kth_of

LONGEST = 1 << 17
"""Elements of a section. Beyond this one program takes longer than torch's operations do together
(by its number of blocks: this is an estimate)."""


def split_largest(
    rows: Tensor, ends: Tensor, wanted: Tensor, block: int = ALONE
) -> tuple[Tensor, Tensor]:
    """Which elements are the largest of their section, and the energy of those that are not.

    rows: (rows, columns), float32. ends: (1 + sections,), int64: section i has the columns from
    ends[i] up to ends[i + 1]. wanted: (rows, sections), int32: how many elements are to be found
    there, at least 1 and at most all.

    Returns a mask (rows, columns) of these and of all that equal the smallest of them, and
    (2, rows, sections), float64: the squared norm of the elements outside the mask, and of all."""
    count, sections = wanted.shape
    mask = torch.empty(rows.shape, dtype=torch.bool, device=rows.device)
    norms = torch.empty(2, count, sections, dtype=torch.float64, device=rows.device)
    parts, options = (rows, ends, wanted, mask, norms), {"num_warps": block // 512 or 1}
    launch(_split_largest, (sections, count), rows, *parts, rows.shape[1], block=block, **options)
    return mask, norms


@triton.jit
def _split_largest(rows, ends, wanted, mask, norms, columns, block: tl.constexpr):
    section, row = tl.program_id(0), tl.program_id(1)
    number = row * tl.num_programs(0) + section
    begin = tl.load(ends + section) + row.to(tl.int64) * columns
    length = (tl.load(ends + section + 1) - tl.load(ends + section)).to(tl.int32)
    lanes = tl.arange(0, block)
    smallest, _ = _kth_of(rows + begin, length, tl.load(wanted + number), block)
    kept, lost = tl.zeros((block,), tl.float64), tl.zeros((block,), tl.float64)
    for start in range(0, length, block):
        inside = lanes < length - start
        value = tl.load(rows + begin + start + lanes, mask=inside, other=0.0)
        large = _key(value) >= smallest
        tl.store(mask + begin + start + lanes, large, mask=inside)
        wide = value.to(tl.float64)
        kept += tl.where(large, wide * wide, 0.0)
        lost += tl.where(large, 0.0, wide * wide)
    tl.store(norms + number, tl.sum(lost))
    tl.store(norms + tl.num_programs(0) * tl.num_programs(1) + number, tl.sum(lost) + tl.sum(kept))
