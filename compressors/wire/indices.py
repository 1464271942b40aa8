"""How the indices of kept elements travel: by the Elias-Fano code or a bit map, whichever is less.

Elias, "Efficient Storage and Retrieval by Content and Address of Static Files" (JACM 1974), and
Fano, "On the Number of Bits Required to Implement an Associative Memory" (1971).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import lru_cache
from math import lgamma, log

import torch
from torch import Tensor

from compressors.base import CorruptPayload
from compressors.wire.packing import (
    Numbers,
    as_tensor,
    bits_nbytes,
    cast,
    count_up,
    empty,
    find_bits,
    native,
    numbers_nbytes,
    pack_numbers,
    set_bits,
    unpack_numbers,
)


class IndexFormat(ABC):
    """An index format writes at most `capacity` of the positions in range(numel) as bytes.

    The number of bytes depends on (numel, capacity) alone; how many positions there are is told by
    the bytes themselves. Needs 0 <= capacity <= numel < 2**31.

    name: used in messages and benchmarks.
    """

    name: str

    @abstractmethod
    def nbytes(self, numel: int, capacity: int) -> int:
        """Bytes that `encode` makes: a pure function, the same on all ranks."""

    @abstractmethod
    def encode(self, indices: Tensor, numel: int, capacity: int) -> Tensor:
        """`indices` (int32, flat, strictly ascending within [0, numel), not checked) as flat uint8.

        ValueError if there are more than `capacity`."""

    @abstractmethod
    def decode(self, data: Tensor, numel: int, capacity: int) -> Tensor:
        """The indices (int32, flat, ascending) whose bytes are `data` (uint8, flat).

        CorruptPayload unless `data` is what `encode` makes of indices that ascend strictly
        within [0, numel). On a device other than the CPU this waits for the device."""


class EliasFano(IndexFormat):
    """The Elias-Fano code takes, with the best `low`, about 0.6 bits an index more than the least
    that is possible.

    The `low` lowest bits (0 to 31) of an index are written as they are, the others (its high part)
    in unary. High parts never fall, so in a map of (capacity + number of high parts) bits, bit
    (high part + rank) is set for each index: no two meet, and the rank is the number of bits set
    below. The map comes first, then the low bits, with a slot for each of `capacity` indices.
    """

    def __init__(self, low: int) -> None:
        self.low = low
        self.name = f"elias-fano{low}"

    def nbytes(self, numel: int, capacity: int) -> int:
        return bits_nbytes(self._nbits(numel, capacity)) + numbers_nbytes(self.low, capacity)

    def encode(self, indices: Tensor, numel: int, capacity: int) -> Tensor:
        _check_count(indices, capacity)
        nbits, at = self._nbits(numel, capacity), native(indices)
        positions = _ranks(at, nbits)
        positions += at >> self.low
        size = bits_nbytes(nbits)
        packed = empty(self.nbytes(numel, capacity), "uint8", at)
        packed[:size] = set_bits(positions, nbits)
        pack_numbers(at & ((1 << self.low) - 1), self.low, capacity, packed[size:])
        return as_tensor(packed)

    def decode(self, data: Tensor, numel: int, capacity: int) -> Tensor:
        size = bits_nbytes(self._nbits(numel, capacity))
        raw = _received(data, self.nbytes(numel, capacity))
        indices = find_bits(raw[:size])
        count = len(indices)
        _check_received(count, capacity)
        slots = empty(capacity, "uint8" if self.low <= 8 else "int32", raw)
        unpack_numbers(raw[size:], self.low, slots)
        if bool(slots[count:].any()):
            raise CorruptPayload("payload must be zero where it holds nothing")
        indices -= _ranks(indices, 8 * size)
        if count and int(indices[-1]) << self.low >= numel:  # the last one is the largest
            raise CorruptPayload(f"payload must not point beyond the last of {numel} elements")
        indices <<= self.low
        indices |= slots[:count]
        indices = cast(indices, "int32")
        check_ascending(indices, numel)
        return as_tensor(indices)

    def _nbits(self, numel: int, capacity: int) -> int:
        """Bits of the map."""
        return capacity + -(-numel >> self.low)


class Bitmap(IndexFormat):
    """A bit map has a bit for every element of the tensor, set if that element is kept.

    It is the smallest format where about a fourth of the elements or more are kept."""

    name = "bitmap"

    def nbytes(self, numel: int, capacity: int) -> int:
        return bits_nbytes(numel)

    def encode(self, indices: Tensor, numel: int, capacity: int) -> Tensor:
        _check_count(indices, capacity)
        return as_tensor(set_bits(native(indices), numel))

    def decode(self, data: Tensor, numel: int, capacity: int) -> Tensor:
        raw = _received(data, self.nbytes(numel, capacity))
        # Bits from 2**31 on, which only the padding can have, become negative here.
        indices = cast(find_bits(raw), "int32")
        _check_received(len(indices), capacity)
        if len(indices) and not 0 <= int(indices[-1]) < numel:
            raise CorruptPayload(f"payload must not set bits beyond the last of {numel}")
        return as_tensor(indices)


_LOW = (8, 16, 24, *(bits for bits in range(1, 31) if bits % 8))  # whole bytes are faster

FORMATS: tuple[IndexFormat, ...] = (*map(EliasFano, _LOW), Bitmap())
"""Every format, the faster ones first."""


@lru_cache(maxsize=1 << 14)
def choose_format(numel: int, capacity: int) -> IndexFormat:
    """The format with the fewest bytes for at most `capacity` of `numel` elements.

    Among equally small ones the first of `FORMATS`. A pure function, the same on all ranks."""
    return min(FORMATS, key=lambda form: form.nbytes(numel, capacity))


def bound_nbytes(numel: int, k: int) -> float:
    """Bytes that no format can beat on average: log2 of the number of subsets of `k` of `numel`
    elements, divided by 8."""
    subsets = lgamma(numel + 1) - lgamma(k + 1) - lgamma(numel - k + 1)
    return subsets / log(2) / 8


def check_ascending(indices: Numbers, numel: int) -> None:
    """Raise CorruptPayload unless `indices` (array or tensor) ascend strictly within [0, numel).

    Ascending indices are within bounds if the first and the last one are. On a device other than
    the CPU this waits for the device."""
    if not len(indices):
        return
    first, last = int(indices[0]), int(indices[-1])
    if first < 0 or last >= numel or not bool((indices[1:] > indices[:-1]).all()):
        raise CorruptPayload(f"indices must ascend within [0, {numel}), got {first} ... {last}")


def _check_count(indices: Tensor, capacity: int) -> None:
    """Raise ValueError if there are more `indices` than fit."""
    if indices.numel() > capacity:
        raise ValueError(f"indices must be at most {capacity}, got {indices.numel()}")


def _received(data: Tensor, nbytes: int) -> Numbers:
    """`data`; CorruptPayload unless it is `nbytes` long (flat uint8)."""
    if data.dtype != torch.uint8 or data.dim() != 1 or data.numel() != nbytes:
        raise CorruptPayload(
            f"indices must be {nbytes} bytes (flat uint8), "
            f"got {data.dtype} of shape {tuple(data.shape)}"
        )
    return native(data)


def _check_received(count: int, capacity: int) -> None:
    """Raise CorruptPayload if more indices were received than could have been sent."""
    if count > capacity:
        raise CorruptPayload(f"payload must hold at most {capacity} indices, got {count}")


def _ranks(indices: Numbers, nbits: int) -> Numbers:
    """0, 1, ... for each of `indices`, in the dtype that holds positions in so many bits."""
    return count_up(len(indices), "int32" if nbits <= 1 << 31 else "int64", indices)
