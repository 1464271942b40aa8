"""How the indices of kept elements travel: by the Elias-Fano code or a bit map, whichever is less.

Elias, "Efficient Storage and Retrieval by Content and Address of Static Files" (JACM 1974), and
Fano, "On the Number of Bits Required to Implement an Associative Memory" (1971).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import lru_cache
from math import lgamma, log

import numpy as np
import torch
from torch import Tensor

from compressors.base import CorruptPayload
from compressors.kernels import device, host
from compressors.kernels.blocks import Array, Flag, is_host
from compressors.wire.packing import bits_nbytes, numbers_nbytes, pack_numbers, unpack_numbers

Decoded = tuple[Tensor, Flag]
"""The indices (int32, flat, ascending), and whether no `encode` can have made their bytes."""


class IndexFormat(ABC):
    """An index format writes at most `capacity` of the positions in range(numel) as bytes.

    The number of bytes depends on (numel, capacity) alone; how many positions there are is told by
    the bytes themselves. Needs 0 <= capacity <= numel < 2**31.

    On a device there are always `capacity` indices: places that hold nothing come last, as `numel`.

    name: used in messages and benchmarks.
    """

    name: str

    @abstractmethod
    def nbytes(self, numel: int, capacity: int) -> int:
        """Bytes that `encode` makes: a pure function, the same on all ranks."""

    @abstractmethod
    def encode_into(
        self, out: Tensor, indices: Tensor, numel: int, capacity: int, exact: bool = False
    ) -> None:
        """Fill `out` (flat uint8 of `nbytes` elements) with what stands for `indices` (int32, flat,
        strictly ascending within [0, numel), not checked).

        exact: there are as many as `capacity`. ValueError if there are more."""

    @abstractmethod
    def decode(self, data: Tensor, numel: int, capacity: int, exact: bool = False) -> Decoded:
        """The indices whose bytes are `data` (uint8, flat).

        On the host CorruptPayload unless `data` is what is made of indices that ascend strictly
        within [0, numel), as many as `capacity` if `exact`. On a device a flag says whether that is
        so, and no index is beyond `numel` (if `exact`, `numel` - 1)."""

    def encode(self, indices: Tensor, numel: int, capacity: int, exact: bool = False) -> Tensor:
        """What `encode_into` makes, as a new tensor."""
        size = self.nbytes(numel, capacity)
        out = torch.empty(size, dtype=torch.uint8, device=indices.device)
        self.encode_into(out, indices, numel, capacity, exact)
        return out


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
        return self._map_nbytes(numel, capacity) + numbers_nbytes(self.low, capacity)

    def encode_into(
        self, out: Tensor, indices: Tensor, numel: int, capacity: int, exact: bool = False
    ) -> None:
        _check_capacity(indices, capacity)
        size, mask = self._map_nbytes(numel, capacity), (1 << self.low) - 1
        if is_host(out.device):
            at = indices.numpy()
            positions = _ranks(at.size, 8 * size)
            positions += at >> self.low
            host.set_bits(torch.from_numpy(positions), None, out[:size])
            pack_numbers(at & mask, self.low, capacity, out[size:].numpy())
            return
        present = None if exact else indices < numel
        high = (indices >> self.low) + torch.arange(capacity, device=out.device)
        device.set_bits(high, present, out[:size])
        slots = indices & mask
        slots = slots if present is None else slots * present
        pack_numbers(slots, self.low, capacity, out[size:])

    def decode(self, data: Tensor, numel: int, capacity: int, exact: bool = False) -> Decoded:
        _check_size(data, self.nbytes(numel, capacity))
        size = self._map_nbytes(numel, capacity)
        if is_host(data.device):
            return self._decode_on_host(data[:size], data[size:], numel, capacity, exact), False
        dtype = torch.uint8 if self.low <= 8 else torch.int32
        slots = torch.zeros(capacity + 1, dtype=dtype, device=data.device)
        filled = unpack_numbers(data[size:], self.low, slots[:-1])
        positions = device.find_bits(data[:size], capacity + 1)
        # Even what nobody sent is below this many, slots included.
        wide = torch.int32 if 8 * size << self.low < 2**31 else torch.int64
        high = positions - torch.arange(capacity + 1, dtype=wide, device=data.device)
        indices = (high << self.low).clamp_(max=numel).add_(slots)
        decoded, corrupt = _checked(indices, positions < 8 * size, numel, exact)
        return decoded, (corrupt if filled is False else corrupt | filled)

    def _decode_on_host(
        self, bits: Tensor, packed: Tensor, numel: int, capacity: int, exact: bool
    ) -> Tensor:
        indices = host.find_bits(bits, capacity + 1).numpy()
        _check_count(indices.size, capacity, exact)
        slots = np.empty(capacity, np.uint8 if self.low <= 8 else np.int32)
        unpack_numbers(packed.numpy(), self.low, slots)
        if slots[indices.size :].any():
            raise CorruptPayload("payload must be zero where it holds nothing")
        indices -= _ranks(indices.size, 8 * bits.numel())
        if indices.size and int(indices[-1]) << self.low >= numel:  # the last one is the largest
            raise CorruptPayload(f"payload must not point beyond the last of {numel} elements")
        indices <<= self.low
        indices |= slots[: indices.size]
        decoded = torch.from_numpy(indices.astype(np.int32))
        check_ascending(decoded, numel)
        return decoded

    def _map_nbytes(self, numel: int, capacity: int) -> int:
        return bits_nbytes(capacity + -(-numel >> self.low))


class Bitmap(IndexFormat):
    """A bit map has a bit for every element of the tensor, set if that element is kept.

    It is the smallest format where about a fourth of the elements or more are kept."""

    name = "bitmap"

    def nbytes(self, numel: int, capacity: int) -> int:
        return bits_nbytes(numel)

    def encode_into(
        self, out: Tensor, indices: Tensor, numel: int, capacity: int, exact: bool = False
    ) -> None:
        _check_capacity(indices, capacity)
        if is_host(out.device):
            host.set_bits(indices, None, out)
        else:
            device.set_bits(indices, None if exact else indices < numel, out)

    def decode(self, data: Tensor, numel: int, capacity: int, exact: bool = False) -> Decoded:
        _check_size(data, self.nbytes(numel, capacity))
        if not is_host(data.device):
            positions = device.find_bits(data, capacity + 1)
            present = positions < 8 * data.numel()
            return _checked(positions.clamp(max=numel), present, numel, exact)
        # Bits from 2**31 on, which only the padding can have, become negative here.
        indices = host.find_bits(data, capacity + 1).int()
        _check_count(indices.numel(), capacity, exact)
        if indices.numel() and not 0 <= int(indices[-1]) < numel:
            raise CorruptPayload(f"payload must not set bits beyond the last of {numel}")
        return indices, False


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


def check_ascending(indices: Tensor, numel: int) -> None:
    """Raise CorruptPayload unless `indices` (of the host) ascend strictly within [0, numel).

    Ascending indices are within bounds if the first and the last one are."""
    at = indices.numpy()
    if at.size and (at[0] < 0 or at[-1] >= numel or not (at[1:] > at[:-1]).all()):
        raise CorruptPayload(f"indices must ascend within [0, {numel}), got {at[0]} ... {at[-1]}")


def _check_capacity(indices: Tensor, capacity: int) -> None:
    """Raise ValueError if there are more `indices` than fit."""
    if indices.numel() > capacity:
        raise ValueError(f"indices must be at most {capacity}, got {indices.numel()}")


def _check_size(data: Tensor, nbytes: int) -> None:
    """Raise CorruptPayload unless `data` is `nbytes` long (flat uint8)."""
    if data.dtype != torch.uint8 or data.dim() != 1 or data.numel() != nbytes:
        raise CorruptPayload(
            f"indices must be {nbytes} bytes (flat uint8), "
            f"got {data.dtype} of shape {tuple(data.shape)}"
        )


def _check_count(count: int, capacity: int, exact: bool) -> None:
    """Raise CorruptPayload if another number of indices was received than can have been sent.

    count: at most one more than `capacity`."""
    if count > capacity or (exact and count < capacity):
        wanted = f"{'' if exact else 'at most '}{capacity}"
        found = f"got {count}" if count <= capacity else "got more"
        raise CorruptPayload(f"payload must hold {wanted} indices, {found}")


def _checked(indices: Tensor, present: Tensor, numel: int, exact: bool) -> Decoded:
    """The indices on a device, and whether they are not those of a compressor.

    indices: one more than there can be. Those that are not `present`, and those beyond the last
        element, are `numel` plus the bits that their slots hold; the last one has no slot.

    So each must be below the next one if it is present, else not above it: then the last one, which
    is `numel`, bounds all of them, and there are no bits in slots that hold nothing."""
    these, following = indices[:-1], indices[1:]
    wrong = these >= following if exact else these + present[:-1] > following
    return these.clamp(max=numel - exact).int(), wrong.any() | present[-1]


def _ranks(count: int, nbits: int) -> Array:
    """0, 1, ... of the dtype that holds positions in so many bits."""
    return np.arange(count, dtype=np.int32 if nbits <= 1 << 31 else np.int64)
