"""Four bytes an index: what most sparsifiers send."""

from __future__ import annotations

import torch
from torch import Tensor

from compressors.base import CorruptPayload
from compressors.either import native
from compressors.indices.base import IndexFormat, check_ascending, check_count
from compressors.wire import split


class Offsets32(IndexFormat):
    """A 32-bit integer a slot; unused slots hold `numel`."""

    name = "offsets32"

    def nbytes(self, numel: int, capacity: int) -> int:
        return 4 * capacity

    def encode(self, indices: Tensor, numel: int, capacity: int) -> Tensor:
        check_count(indices, capacity)
        slots = indices.new_full((capacity,), numel)
        slots[: indices.numel()] = indices
        return slots.view(torch.uint8)

    def decode(self, data: Tensor, numel: int, capacity: int) -> Tensor:
        (slots,) = split(data, (capacity, torch.int32))
        count = int((slots != numel).sum())
        indices, unused = slots[:count], slots[count:]
        if bool((unused != numel).any()):
            raise CorruptPayload("unused slots must come last")
        check_ascending(native(indices), numel)
        return indices
