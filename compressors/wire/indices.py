"""The wire formats of the indices of kept elements: the Elias-Fano code or a bit map.

Elias, "Efficient Storage and Retrieval by Content and Address of Static Files" (JACM 1974), and
Fano, "On the Number of Bits Required to Implement an Associative Memory" (1971).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from compressors.base import InvalidPayload
from compressors.kernels import kernels_for
from compressors.kernels.blocks import Flag, either
from compressors.wire.packing import numbers_nbytes, pack_numbers, unpack_numbers


@dataclass(frozen=True)
class IndexFormat:
    """An index format writes at most `capacity` of the positions in range(numel) as bytes.

    The bytes tell the number of positions. 0 <= capacity <= numel < 2**31. On a device there are
    always `capacity` indices: empty places come last, as `numel`.

    low: None for a bit map, with a bit for every element of the tensor: the smallest format if
        about a fourth or more are kept. A number for the Elias-Fano code: the `low` lowest bits (0
        to 30) of an index are written unchanged, the other bits (its high part) in unary. High
        parts never descend, so in a map of (capacity + number of high parts) bits, bit (high part +
        rank) is set for each index: no bit is set twice, and the rank of an index is the number of
        bits set below. The low bits follow the map, in `capacity` slots.
    """

    low: int | None

    def nbytes(self, numel: int, capacity: int) -> int:
        """Bytes that `encode` makes: a pure function, the same on all ranks."""
        slots = numbers_nbytes(capacity, 1 << self.low) if self.low else 0
        return self._map_nbytes(numel, capacity) + slots

    def encode(
        self,
        indices: Tensor,
        numel: int,
        capacity: int,
        exact: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        """The bytes (flat uint8), in `out` if given, of `indices` (int32, flat, strictly ascending
        within [0, numel), not checked).

        exact: there are as many as `capacity`. ValueError if there are more."""
        if out is None:
            out = indices.new_empty(self.nbytes(numel, capacity), dtype=torch.uint8)
        if self.write(indices, numel, capacity, out):
            return out
        bits, at = out[: self._map_nbytes(numel, capacity)], kernels_for(indices).native(indices)
        kernels = kernels_for(out)
        present = None if exact else kernels.filled(indices, numel)
        positions = at if self.low is None else (at >> self.low) + kernels.ranks(at, 8 * len(bits))
        kernels.set_bits(torch.as_tensor(positions, device=out.device), present, bits)
        if self.low:
            slots = at & ((1 << self.low) - 1)
            slots = slots if present is None else slots * present
            pack_numbers(slots, 1 << self.low, capacity, kernels.native(out[bits.numel() :]))
        return out

    def write(
        self,
        indices: Tensor,
        numel: int,
        capacity: int,
        out: Tensor,
        values: Sequence[Tensor] = (),
        rows: int = 1,
    ) -> bool:
        """Fill `out` with the parts of coded `values`, at most two, and then the bytes of
        `indices`, by one of Triton's kernels. False, and nothing is done, if it cannot. rows:
        number of consecutive payloads in `out`; `indices` and each part hold theirs in turn."""
        if indices.numel() > rows * capacity:
            raise ValueError(f"indices must be at most {capacity}, got {indices.numel() // rows}")
        size = rows * self.nbytes(numel, capacity) + sum(part.nbytes for part in values)
        fits = out.numel() == size and out.dtype == torch.uint8 and out.is_contiguous()
        fused = kernels_for(out).fused(out, indices)
        if fused is None or not fits or len(values) > 2:
            return False
        map_nbytes, at = self._map_nbytes(numel, capacity), indices.detach().contiguous()
        fused.write_sparse(at, numel, capacity, self.low, map_nbytes, out, values, rows)
        return True

    def decode(
        self, data: Tensor, numel: int, capacity: int, exact: bool = False
    ) -> list[tuple[Tensor, Flag]]:
        """For each row of `data` (ranks, bytes; uint8): the indices (int32, flat), and whether the
        bytes are invalid. From Triton's kernels all rows have the same flag: some row is invalid.

        Bytes are valid if they encode indices that ascend strictly within [0, numel), exactly
        `capacity` of them if `exact`. The host raises InvalidPayload for invalid bytes. A device
        sets the flag, and no index is beyond `numel` (if `exact`, `numel` - 1)."""
        nbytes = self.nbytes(numel, capacity)
        if data.dtype != torch.uint8 or data.dim() != 2 or data.shape[1] != nbytes:
            raise InvalidPayload(
                f"indices must be {nbytes} bytes (ranks, bytes; uint8), "
                f"got {data.dtype} of shape {tuple(data.shape)}"
            )
        fused = kernels_for(data).fused(data)
        if fused is None or not capacity or not len(data) or data.stride(1) != 1:
            return [self._decode(row, numel, capacity, exact) for row in data]
        map_nbytes = self._map_nbytes(numel, capacity)
        indices, invalid = fused.read_indices(data, numel, capacity, self.low, map_nbytes, exact)
        return [(row, invalid) for row in indices.unbind()]

    def _decode(self, data: Tensor, numel: int, capacity: int, exact: bool) -> tuple[Tensor, Flag]:
        """Decode one row. One index more than `capacity` is decoded, and counts as `numel`. Each
        index must be below the next one, so the last one bounds all. Unless `exact`, an index that
        is missing, or beyond the last element, becomes `numel` plus the bits in its slot, and must
        not be above the next one: so empty slots must have no bits."""
        kernels, size = kernels_for(data), self._map_nbytes(numel, capacity)
        positions = kernels.native(kernels.find_bits(data[:size], capacity + 1))
        follows: Flag = False
        indices = positions
        if self.low is not None:
            ranks = kernels.ranks(positions, 8 * size << self.low)
            indices = positions - ranks << self.low
        present = positions < 8 * size
        excess = present[-1]
        if exact:
            indices[-1] = numel
        else:
            indices = indices.clip(max=numel)
        if self.low:
            packed = kernels.native(data[size:])
            slots, follows = unpack_numbers(packed, 1 << self.low, capacity)
            indices[:-1] += slots
        these, following = indices[:-1], indices[1:]
        wrong = these >= following if exact else these + present[:-1] > following
        invalid = either(wrong.any() | excess, follows)
        return kernels.received(these, numel, exact, invalid)

    def _map_nbytes(self, numel: int, capacity: int) -> int:
        nbits = numel if self.low is None else capacity + -(-numel >> self.low)
        return -(-nbits // 8)


_LOW = (8, 16, 24, *(bits for bits in range(1, 31) if bits % 8))  # whole bytes are faster

FORMATS = (*map(IndexFormat, _LOW), IndexFormat(None))
"""Every format, the faster ones first."""


@lru_cache(maxsize=1 << 14)
def choose_format(numel: int, capacity: int) -> IndexFormat:
    """The format with the fewest bytes for at most `capacity` of `numel` elements.

    Among equally small ones the first of `FORMATS`. A pure function, the same on all ranks."""
    return min(FORMATS, key=lambda form: form.nbytes(numel, capacity))
