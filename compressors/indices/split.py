"""A byte an index, more or less: the code of Elias and Fano.

Elias, "Efficient Storage and Retrieval by Content and Address of Static Files" (JACM 1974), and
Fano, "On the Number of Bits Required to Implement an Associative Memory" (1971). With the
best `low` it takes some 0.6 bits an index more than the least that is possible.
"""

from __future__ import annotations

from torch import Tensor

from compressors.base import CorruptPayload
from compressors.bits import (
    bits_nbytes,
    find_bits,
    numbers_nbytes,
    pack_bits,
    pack_numbers,
    unpack_numbers,
)
from compressors.either import Numbers, as_tensor, cast, count_up, join, native
from compressors.indices.base import (
    IndexFormat,
    check_ascending,
    check_count,
    check_received,
    check_zero,
    received,
)


class Split(IndexFormat):
    """The `low` lowest bits of an index as they are, the others (its high part) in unary.

    The high parts never fall, so bit (high part + rank) of a map of
    capacity + number of high parts bits is set for each index: no two meet, and the rank is
    the number of bits set below. The map comes first, then the low parts, a slot each.

    low: 0 to 31.
    """

    def __init__(self, low: int) -> None:
        self.low = low
        self.name = f"split{low}"

    def nbytes(self, numel: int, capacity: int) -> int:
        return bits_nbytes(self._nbits(numel, capacity)) + numbers_nbytes(self.low, capacity)

    def encode(self, indices: Tensor, numel: int, capacity: int) -> Tensor:
        check_count(indices, capacity)
        nbits, at = self._nbits(numel, capacity), native(indices)
        position = _ranks(at, nbits)
        position += at >> self.low
        return as_tensor(join([pack_bits(position, nbits), pack_numbers(at, self.low, capacity)]))

    def decode(self, data: Tensor, numel: int, capacity: int) -> Tensor:
        size = bits_nbytes(self._nbits(numel, capacity))
        raw = received(data, self.nbytes(numel, capacity))
        indices = find_bits(raw[:size])
        count = len(indices)
        check_received(count, capacity)
        slots = unpack_numbers(raw[size:], self.low, capacity)
        check_zero(slots[count:])
        indices -= _ranks(indices, 8 * size)
        if count and int(indices[-1]) << self.low >= numel:  # the last is the largest
            raise CorruptPayload(f"payload must not point beyond the last of {numel} elements")
        indices <<= self.low
        indices |= slots[:count]
        indices = cast(indices, "int32")
        check_ascending(indices, numel)
        return as_tensor(indices)

    def _nbits(self, numel: int, capacity: int) -> int:
        """Bits of the map."""
        return capacity + -(-numel >> self.low)


def _ranks(indices: Numbers, nbits: int) -> Numbers:
    """0, 1, ... for each of `indices`, of the type that holds positions in so many bits."""
    return count_up(len(indices), "int32" if nbits <= 1 << 31 else "int64", indices)
