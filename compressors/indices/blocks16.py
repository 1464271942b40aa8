"""Two bytes an index: positions inside blocks of 65,536 elements."""

from __future__ import annotations

import torch
from torch import Tensor

from compressors.base import CorruptPayload
from compressors.either import native
from compressors.indices.base import (
    IndexFormat,
    check_ascending,
    check_count,
    check_received,
    check_zero,
)
from compressors.wire import split

_BITS = 16
_MASK = (1 << _BITS) - 1


class Blocks16(IndexFormat):
    """How many indices lie in each block, then the 16-bit positions inside the blocks.

    A count can reach 65,536, which 16 bits do not hold: counts take 16 bits if `capacity` rules
    that out, else 32."""

    name = "blocks16"

    def nbytes(self, numel: int, capacity: int) -> int:
        return sum(count * dtype.itemsize for count, dtype in _layout(numel, capacity))

    def encode(self, indices: Tensor, numel: int, capacity: int) -> Tensor:
        check_count(indices, capacity)
        (blocks, wide), _ = _layout(numel, capacity)
        starts = torch.arange(blocks, dtype=torch.int32, device=indices.device) << _BITS
        ends = torch.full((blocks + 1,), indices.numel(), device=indices.device)
        ends[:-1] = torch.searchsorted(indices, starts)
        slots = torch.zeros(capacity, dtype=torch.int16, device=indices.device)
        slots[: indices.numel()] = indices  # the cast drops the block, which is what is wanted
        counts = ends.diff().to(wide)
        return torch.cat([counts.view(torch.uint8), slots.view(torch.uint8)])

    def decode(self, data: Tensor, numel: int, capacity: int) -> Tensor:
        counts, slots = split(data, *_layout(numel, capacity))
        counts = counts.long() & _MASK if counts.dtype == torch.int16 else counts.long()
        if bool((counts < 0).any()):
            raise CorruptPayload("payload must not hold a negative count")
        count = int(counts.sum())
        check_received(count, capacity)
        check_zero(slots[count:])
        blocks = torch.arange(counts.numel(), dtype=torch.int32, device=data.device) << _BITS
        indices = blocks.repeat_interleave(counts, output_size=count)
        indices |= slots[:count].int() & _MASK
        check_ascending(native(indices), numel)
        return indices


def _layout(numel: int, capacity: int) -> tuple[tuple[int, torch.dtype], tuple[int, torch.dtype]]:
    """(elements, dtype) of the counts and of the positions."""
    wide = torch.int16 if capacity <= _MASK else torch.int32
    return (-(-numel >> _BITS), wide), (capacity, torch.int16)
