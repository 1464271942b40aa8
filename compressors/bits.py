"""Bits in bytes: bit maps, and numbers of a few bits each. The first bit is a byte's lowest.

Everything is flat, and a NumPy array on a CPU, a tensor elsewhere (`compressors.either`).
"""

from __future__ import annotations

import numpy as np

from compressors.base import CorruptPayload
from compressors.either import Numbers, cast, join, view, zeros

_BLOCK = 1 << 17  # bits unpacked at a time, a byte each: they fit the cache
_WIDTHS = (8, 4, 2, 1)  # what divides a byte, so that no number is torn in two


def bits_nbytes(nbits: int) -> int:
    """Bytes that hold `nbits` bits."""
    return -(-nbits // 8)


def pack_bits(positions: Numbers, nbits: int) -> Numbers:
    """A map (uint8) of `nbits` bits, those at `positions` (ascending, int32 or int64) set."""
    size = bits_nbytes(nbits)
    if not isinstance(positions, np.ndarray):
        bits = zeros(8 * size, "uint8", positions)
        bits.index_fill_(0, positions.long(), 1)
        return pack_numbers(bits, 1, 8 * size)
    packed = np.empty(size, np.uint8)
    scratch = np.empty(min(_BLOCK, 8 * size), np.bool_)
    starts = range(0, 8 * size, _BLOCK)
    # Starts of another type than the positions would have all of those converted.
    cuts = [*np.searchsorted(positions, np.array(starts, positions.dtype)), positions.size]
    for start, low, high in zip(starts, cuts, cuts[1:], strict=False):
        block = scratch[: 8 * size - start]
        block[:] = False
        block[positions[low:high].astype(np.int64) - start] = True  # int32 subscripts are slower
        packed[start // 8 : (start + _BLOCK) // 8] = np.packbits(block, bitorder="little")
    return packed


def find_bits(data: Numbers) -> Numbers:
    """Ascending positions of the bits that are set in uint8 `data`: int32 if that can hold them,
    else int64.

    On a device other than the CPU this waits for the device."""
    dtype = "int32" if 8 * len(data) <= 1 << 31 else "int64"
    if not isinstance(data, np.ndarray):
        return cast(unpack_numbers(data, 1, 8 * len(data)).nonzero().flatten(), dtype)
    parts = [np.empty(0, dtype)]
    for start in range(0, data.size, _BLOCK // 8):
        block = np.unpackbits(data[start : start + _BLOCK // 8], bitorder="little")
        parts.append((np.flatnonzero(block.view(np.bool_)) + 8 * start).astype(dtype))
    return np.concatenate(parts)


def numbers_nbytes(width: int, count: int) -> int:
    """Bytes that `count` numbers of `width` bits take."""
    return sum(bits_nbytes(count * part) for _, part in _parts(width))


def pack_numbers(numbers: Numbers, width: int, count: int) -> Numbers:
    """The lowest `width` bits of each of the integer `numbers`, then zeros up to `count` numbers,
    packed (uint8).

    The bits are cut into parts of 8, 4, 2 or 1 bits; each part of all numbers comes before the
    next part, the lowest first."""
    packed = [zeros(0, "uint8", numbers)]
    for shift, part in _parts(width):
        packed.append(_pack(cast(numbers >> shift, "uint8"), part, count))
    return join(packed)


def unpack_numbers(data: Numbers, width: int, count: int) -> Numbers:
    """The `count` numbers (int32, or uint8 if width <= 8) of `width` <= 31 bits that
    `pack_numbers` packed into `data`. CorruptPayload if what pads a last byte is not zero."""
    dtype = "uint8" if width <= 8 else "int32"
    numbers = zeros(count, dtype, data)
    start = 0
    for shift, part in _parts(width):
        end = start + bits_nbytes(count * part)
        used = count * part % 8
        if used and int(data[end - 1]) >> used:
            raise CorruptPayload("payload must be zero where it holds nothing")
        numbers |= cast(_unpack(data[start:end], part)[:count], dtype) << shift
        start = end
    return numbers


def _parts(width: int) -> list[tuple[int, int]]:
    """How numbers are cut: (lowest bit, bits) of each part."""
    parts, shift = [], 0
    while shift < width:
        part = next(bits for bits in _WIDTHS if bits <= width - shift)
        parts.append((shift, part))
        shift += part
    return parts


def _pack(numbers: Numbers, width: int, count: int) -> Numbers:
    """The lowest `width` bits (8, 4, 2 or 1) of uint8 `numbers`, zeros up to `count` of them."""
    if width == 8 and len(numbers) == count:
        return numbers
    rows = zeros(bits_nbytes(count * width) * (8 // width), "uint8", numbers)
    rows[: len(numbers)] = numbers & ((1 << width) - 1)
    while width < 8:  # two neighbours become one of twice the width
        pairs = view(rows, "int16")
        rows = cast(pairs | (pairs >> (8 - width)), "uint8")
        width *= 2
    return rows


def _unpack(data: Numbers, width: int) -> Numbers:
    """Every number of `width` bits (8, 4, 2 or 1) in `data`, the padding included."""
    half = 4
    while half >= width:  # each becomes two of half the width
        pairs = cast(data, "int16")
        pairs |= pairs << (8 - half)
        pairs &= ((1 << half) - 1) * 0x0101
        data = view(pairs, "uint8")
        half //= 2
    return data
