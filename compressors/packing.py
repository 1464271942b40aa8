"""Codes of a few bits each, packed into bytes.

Neighbours do not share a byte: eight codes that are an eighth of a block apart do, so that packing
is a handful of operations on whole runs of bytes. A code of b bits is cut into planes of 4, 2 and
1 bits, as b is made up of these, and each plane is folded: its pieces are laid above each other in
the same bytes. The bytes do not depend on the device.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from compressors.rows import BLOCK, rows
from compressors.scratch import like


def padded(count: int) -> int:
    """The number of codes that `pack` takes for `count` of them: the next multiple of 8."""
    return -(-count // 8) * 8


def packed_nbytes(count: int, bits: int) -> int:
    """Bytes of `count` codes of `bits` bits (1 to 7)."""
    return padded(count) // 8 * bits


def pack(codes: Tensor, bits: int, out: Tensor) -> None:
    """Pack `codes` (flat uint8, each below 2**bits, a multiple of 8 of them) into flat `out`
    (uint8), for 1 <= bits <= 7."""
    for block, share in zip(rows(codes, BLOCK), rows(out, BLOCK // 8 * bits), strict=True):
        for low, width, start, stop in _planes(block.shape[1], bits):
            plane = block
            if width != bits:
                plane = torch.bitwise_right_shift(block, low, out=_spare(block))
                plane.bitwise_and_((1 << width) - 1)
            *others, above = plane.chunk(8 // width, dim=1)
            folded = share[:, start:stop]
            for piece in reversed(others):
                above = torch.add(piece, above, alpha=1 << width, out=folded)


def unpack(packed: Tensor, bits: int, codes: Tensor) -> None:
    """The inverse of `pack`: fill `codes`."""
    for block, share in zip(rows(codes, BLOCK), rows(packed, BLOCK // 8 * bits), strict=True):
        for low, width, start, stop in _planes(block.shape[1], bits):
            folded, mask = share[:, start:stop], (1 << width) - 1
            plane = block if low == 0 else _spare(block)
            first, *others = plane.chunk(8 // width, dim=1)
            torch.bitwise_and(folded, mask, out=first)
            for i, piece in enumerate(others, 1):
                torch.bitwise_right_shift(folded, i * width, out=piece)
                if (i + 1) * width < 8:
                    piece.bitwise_and_(mask)
            if low:
                block.add_(plane, alpha=1 << low)


def _planes(count: int, bits: int) -> Iterator[tuple[int, int, int, int]]:
    """(lowest bit, width, first byte, end byte) of each plane of `count` codes."""
    low = start = 0
    for width in (4, 2, 1):
        if bits & width:
            stop = start + count // 8 * width
            yield low, width, start, stop
            low, start = low + width, stop


def _spare(block: Tensor) -> Tensor:
    return like("plane", block.view(-1)).view(block.shape)
