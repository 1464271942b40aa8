"""A bit for every element of the tensor: smallest when a fourth of them or more are kept."""

from __future__ import annotations

from torch import Tensor

from compressors.base import CorruptPayload
from compressors.bits import bits_nbytes, find_bits, pack_bits
from compressors.either import as_tensor, cast, native
from compressors.indices.base import IndexFormat, check_count, check_received, received


class Bitmap(IndexFormat):
    """Bit i is set if element i is kept."""

    name = "bitmap"

    def nbytes(self, numel: int, capacity: int) -> int:
        return bits_nbytes(numel)

    def encode(self, indices: Tensor, numel: int, capacity: int) -> Tensor:
        check_count(indices, capacity)
        return as_tensor(pack_bits(native(indices), numel))

    def decode(self, data: Tensor, numel: int, capacity: int) -> Tensor:
        raw = received(data, self.nbytes(numel, capacity))
        indices = cast(find_bits(raw), "int32")  # at most 2**31 + 6: what wraps round is negative
        check_received(len(indices), capacity)
        if len(indices) and not 0 <= int(indices[-1]) < numel:
            raise CorruptPayload(f"payload must not set bits beyond the last of {numel}")
        return as_tensor(indices)
