"""Triton kernels for sparse payloads: write them, read their indices, and decode the mean of all.

The bytes are those of `compressors.wire.indices`. A payload is written by one launch, those of any
number of ranks are read by two, and one more makes the mean of them. What bytes hold that nobody
sent is never taken for a position: all that is written stays within bounds.

No bit is set by an atomic operation: every byte of the map looks for its indices. No value is added
by one either: a program owns a range of elements, to which it adds the ranks' values one after the
other, so that the same payloads give the same mean on every rank and in every run.

This file is imported only where `compressors.kernels.blocks.takes_triton` holds.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from compressors.kernels.blocks import Flag
from compressors.kernels.triton_codec import (
    Coded,
    decoding,
    decoding_sizes,
    flag_in_memory,
    launch,
    value_at,
)

SLOTS = 1024
"""Indices, or bytes of a payload, that a program works on."""

RANGE = 8192
"""Elements of the mean that a program owns."""

TOGETHER = 256
"""Values that a program adds to its range at a time: at a CF of 32 all that a rank has for it."""


@triton.jit
def _first_from(indices, count, steps, bound, like, SHIFT: tl.constexpr, RANKED: tl.constexpr):
    """For each `bound` the first place whose index, shifted and with RANKED plus the place, is not
    below it, by bisection in `steps`; places from 0 to `count`, of indices that ascend."""
    low = like * 0
    high = low + count
    for _ in range(steps):
        middle = (low + high) // 2
        open_ = low < high
        at = tl.load(indices + middle, mask=open_, other=0).to(tl.int64) >> SHIFT
        if RANKED:
            at += middle
        below = open_ & (at < bound)
        high = tl.where(below, high, middle)
        low = tl.where(below, middle + 1, low)
    return low


# Writing -----------------------------------------------------------------------------------------


@triton.jit
def _slot_digit(
    slots, start, indices, lane, numel, given, capacity, LOW: tl.constexpr, WIDTH: tl.constexpr
):
    """Store the digit of WIDTH bits, from bit LOW on, of what is in slots."""
    length = (capacity + 8 // WIDTH - 1) // (8 // WIDTH)
    byte = (lane * 0).to(tl.int32)
    for run in tl.static_range(8 // WIDTH):
        j = lane + run * length
        index = tl.load(indices + j, mask=(lane < length) & (j < given), other=0).to(tl.int32)
        index = tl.where(index < numel, index, 0)  # a slot that holds nothing
        byte |= ((index >> LOW) & ((1 << WIDTH) - 1)) << (WIDTH * run)
    tl.store(slots + start + lane, byte.to(tl.uint8), mask=lane < length)
    return start + length


@triton.jit
def _write_sparse(
    first, first_nbytes, second, second_nbytes, indices, out, numel, given, capacity, map_nbytes,
    steps, LOW: tl.constexpr, MAP: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(0).to(tl.int64) * SLOTS + tl.arange(0, SLOTS)
    byte = tl.load(first + lane, mask=lane < first_nbytes, other=0)
    tl.store(out + lane, byte, mask=lane < first_nbytes)
    out += first_nbytes
    byte = tl.load(second + lane, mask=lane < second_nbytes, other=0)
    tl.store(out + lane, byte, mask=lane < second_nbytes)
    out += second_nbytes
    # Positions of bits ascend strictly, so at most eight indices, from the first on, are in a byte.
    if tl.program_id(0) * SLOTS < map_nbytes:
        bit = 8 * lane
        j = _first_from(indices, given, steps, bit, lane, LOW, not MAP)
        bits = (lane * 0).to(tl.int32)
        for i in tl.static_range(8):
            index = tl.load(indices + j + i, mask=j + i < given, other=numel).to(tl.int64)
            place = (index if MAP else (index >> LOW) + j + i) - bit
            inside = (index < numel) & (place >= 0) & (place < 8)
            bits |= inside.to(tl.int32) << tl.where(inside, place, 0).to(tl.int32)
        tl.store(out + lane, bits.to(tl.uint8), mask=lane < map_nbytes)
    if LOW:
        out += map_nbytes
        start = tl.cast(0, tl.int64)
        for i in tl.static_range(LOW // 8):
            start = _slot_digit(out, start, indices, lane, numel, given, capacity, 8 * i, 8)
        if LOW & 4:
            start = _slot_digit(out, start, indices, lane, numel, given, capacity, LOW // 8 * 8, 4)
        if LOW & 2:
            start = _slot_digit(out, start, indices, lane, numel, given, capacity, LOW // 4 * 4, 2)
        if LOW & 1:
            start = _slot_digit(out, start, indices, lane, numel, given, capacity, LOW - 1, 1)


def write_sparse(
    indices: Tensor,
    numel: int,
    capacity: int,
    low: int | None,
    map_nbytes: int,
    out: Tensor,
    values: Sequence[Tensor] = (),
) -> None:
    """Fill `out` (uint8, flat) with the parts of coded `values` (at most two), then the indices.

    indices: int32, flat, ascending; those that are `numel` are slots that hold nothing, and come
    last. low, map_nbytes: the format of `wire.indices.IndexFormat` and the bytes of its bit map."""
    raw = [part.detach().contiguous().view(torch.uint8) for part in values if part.numel()]
    sizes = [part.numel() for part in raw]
    first, second, *_ = [*raw, out, out]
    first_nbytes, second_nbytes, *_ = [*sizes, 0, 0]
    digits = 0 if not low else 1 if low >= 8 else 16 >> low.bit_length()  # of the widest, in a byte
    longest = max(first_nbytes, second_nbytes, map_nbytes, -(-capacity // digits) if digits else 0)
    if out.numel():
        launch(
            _write_sparse, (-(-longest // SLOTS),), out, first, first_nbytes, second, second_nbytes,
            indices if indices.numel() else out, out, numel, indices.numel(), capacity, map_nbytes,
            indices.numel().bit_length(), LOW=low or 0, MAP=low is None, SLOTS=SLOTS,
        )  # fmt: skip


# Reading -----------------------------------------------------------------------------------------


@triton.jit
def _set_bits(byte):
    """How many bits are set in bytes (int32)."""
    pairs = byte - ((byte >> 1) & 0x55)
    fours = (pairs & 0x33) + ((pairs >> 2) & 0x33)
    return (fours + (fours >> 4)) & 0x0F


@triton.jit
def _count_bits(rows, row_step, map_nbytes, counts, corrupt, SLOTS: tl.constexpr):
    """The bits that are set in each piece of each rank's map."""
    piece, rank = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    at = piece * SLOTS + tl.arange(0, SLOTS)
    byte = tl.load(rows + rank * row_step + at, mask=at < map_nbytes, other=0).to(tl.int32)
    tl.store(counts + rank * tl.num_programs(0) + piece, tl.sum(_set_bits(byte)))
    if (piece == 0) & (rank == 0):
        tl.store(corrupt, tl.cast(0, tl.uint8))


@triton.jit
def _read_digit(slots, start, j, capacity, present, LOW: tl.constexpr, WIDTH: tl.constexpr):
    length = (capacity + 8 // WIDTH - 1) // (8 // WIDTH)
    byte = tl.load(slots + start + j % length, mask=present, other=0).to(tl.int32)
    shift = (WIDTH * (j // length)).to(tl.int32)
    return start + length, ((byte >> shift) & ((1 << WIDTH) - 1)) << LOW


@triton.jit
def _slot(slots, j, capacity, present, LOW: tl.constexpr):
    """The number in slot `j` (int64), or in the place for one after the last slot; 0 where not
    `present`."""
    number = (j * 0).to(tl.int32)
    start = tl.cast(0, tl.int64)
    for i in tl.static_range(LOW // 8):
        inside = present & (j < capacity)
        start, digit = _read_digit(slots, start, j, capacity, inside, 8 * i, 8)
        number |= digit
    if LOW & 4:
        inside = present & (j < 2 * ((capacity + 1) // 2))
        start, digit = _read_digit(slots, start, j, capacity, inside, LOW // 8 * 8, 4)
        number |= digit
    if LOW & 2:
        inside = present & (j < 4 * ((capacity + 3) // 4))
        start, digit = _read_digit(slots, start, j, capacity, inside, LOW // 4 * 4, 2)
        number |= digit
    if LOW & 1:
        inside = present & (j < 8 * ((capacity + 7) // 8))
        start, digit = _read_digit(slots, start, j, capacity, inside, LOW - 1, 1)
        number |= digit
    return number


@triton.jit
def _read_indices(
    rows, row_step, map_nbytes, counts, indices, corrupt, numel, capacity, pieces,
    LOW: tl.constexpr, MAP: tl.constexpr, EXACT: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    piece, rank = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    lane = tl.arange(0, SLOTS).to(tl.int64)
    before, total = tl.cast(0, tl.int64), tl.cast(0, tl.int64)  # bits that are set
    for start in range(0, pieces, SLOTS):
        at = start + lane
        count = tl.load(counts + rank * pieces + at, mask=at < pieces, other=0).to(tl.int64)
        before += tl.sum(tl.where(at < piece, count, 0))
        total += tl.sum(count)
    row = rows + rank * row_step
    slots, out = row + map_nbytes, indices + rank * capacity
    at = piece * SLOTS + lane
    byte = tl.load(row + at, mask=at < map_nbytes, other=0).to(tl.int32)
    after = tl.load(row + at + 1, mask=at + 1 < map_nbytes, other=0).to(tl.int32)
    byte |= (after & 1) << 8  # the bit that follows those of this byte
    count = _set_bits(byte & 255).to(tl.int64)
    j = before + tl.cumsum(count, 0) - count
    wrong = (j * 0).to(tl.int32)
    for i in tl.static_range(8):
        is_set = ((byte >> i) & 1) == 1
        present = is_set & (j < capacity)
        index = 8 * at + i
        if not MAP:
            slot = _slot(slots, j, capacity, present, LOW)
            index = ((index - j) << LOW) + slot
            # Neighbouring bits have the same high part.
            neighbours = present & (((byte >> (i + 1)) & 1) == 1) & (j + 1 < capacity)
            following = _slot(slots, j + 1, capacity, neighbours, LOW)
            wrong |= (neighbours & (slot >= following)).to(tl.int32)
        wrong |= (present & (index >= numel)).to(tl.int32)
        tl.store(out + j, tl.minimum(index, numel - EXACT).to(tl.int32), mask=present)
        j += is_set.to(tl.int64)
    for start in range(total + piece * SLOTS, capacity, pieces * SLOTS):  # slots that hold nothing
        j = start + lane
        tl.store(out + j, (j * 0 + (numel - EXACT)).to(tl.int32), mask=j < capacity)
        if LOW:
            wrong |= _slot(slots, j, capacity, j < capacity, LOW)
    if LOW:
        wrong |= _slot(slots, capacity + lane, capacity, lane < 8, LOW)  # what follows the last one
    bad = (tl.max((wrong != 0).to(tl.int32)) > 0) | (total > capacity)
    if EXACT:
        bad = bad | (total < capacity)
    tl.store(corrupt, tl.cast(1, tl.uint8), mask=bad)


def read_indices(
    rows: Tensor, numel: int, capacity: int, low: int | None, map_nbytes: int, exact: bool
) -> tuple[Tensor, Tensor]:
    """The indices (ranks, capacity; int32) whose bytes are `rows` (ranks, bytes; uint8), and a flag
    that says whether any of these are corrupt (`wire.indices.IndexFormat.decode`).

    numel and capacity are at least 1."""
    ranks, pieces = len(rows), -(-map_nbytes // SLOTS)
    indices = rows.new_empty((ranks, capacity), dtype=torch.int32)
    counts = rows.new_empty((ranks, pieces), dtype=torch.int32)
    corrupt = rows.new_empty(1)
    step, grid = rows.stride(0), (pieces, ranks)
    launch(_count_bits, grid, rows, rows, step, map_nbytes, counts, corrupt, SLOTS=SLOTS)
    launch(
        _read_indices, grid, rows, rows, step, map_nbytes, counts, indices, corrupt, numel,
        capacity, pieces, LOW=low or 0, MAP=low is None, EXACT=exact, SLOTS=SLOTS,
    )  # fmt: skip
    return indices, corrupt.view(torch.bool)[0]


# The mean ----------------------------------------------------------------------------------------


@triton.jit
def _add_sparse(
    out, indices, given, numbers, number_step, codes, code_step, numel, count, scale,
    KIND: tl.constexpr, BITS: tl.constexpr, BUCKET: tl.constexpr, BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
):  # fmt: skip
    j = tl.program_id(0).to(tl.int64) * SLOTS + tl.arange(0, SLOTS)
    index = tl.load(indices + j, mask=j < given, other=0)
    present = (j < given) & (index >= 0) & (index < numel)
    value = value_at(numbers, codes, j, count, present, KIND, BITS, BUCKET, BLOCK)
    there = tl.load(out + index, mask=present, other=0.0)
    tl.store(out + index, there + value * scale, mask=present)


def add_sparse(out: Tensor, indices: Tensor, values: Coded, scale: float) -> None:
    """out[indices] += scale * values of one rank; nothing for an index beyond the last element.

    out: flat, float32. indices: int32, none of them twice."""
    if indices.numel():
        launch(
            _add_sparse, (-(-indices.numel() // SLOTS),), out, out, indices, indices.numel(),
            *decoding(values), out.numel(), values.size, scale, **decoding_sizes(values),
            SLOTS=SLOTS,
        )  # fmt: skip


@triton.jit
def _sparse_mean(
    out, indices, numbers, number_step, codes, code_step, void, numel, slots, count, ranks, steps,
    scale, VOID: tl.constexpr, KIND: tl.constexpr, BITS: tl.constexpr, BUCKET: tl.constexpr,
    BLOCK: tl.constexpr, RANKS: tl.constexpr, RANGE: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * RANGE
    last = tl.minimum(first + RANGE, numel)
    at = first + tl.arange(0, RANGE)
    tl.store(out + at, tl.zeros([RANGE], tl.float32), mask=at < numel)
    known = tl.arange(0, RANKS).to(tl.int64)
    rows = tl.minimum(known, ranks - 1) * slots
    starts = _first_from(indices + rows, slots, steps, first, known, 0, False)
    stops = _first_from(indices + rows, slots, steps, last, known, 0, False)
    if VOID:
        stops = tl.where(tl.load(void) != 0, starts, stops)
    for rank in range(ranks):
        tl.debug_barrier()  # what is stored so far is there for all threads of the program
        own = tl.cast(rank, tl.int64)
        start = tl.sum(tl.where(known == rank, starts, 0))
        stop = tl.sum(tl.where(known == rank, stops, 0))
        own_numbers, own_codes = numbers + own * number_step, codes + own * code_step
        for j0 in range(start, stop, TOGETHER):
            j = j0 + tl.arange(0, TOGETHER)
            index = tl.load(indices + own * slots + j, mask=j < stop, other=-1)
            present = (index >= first) & (index < last)
            value = value_at(own_numbers, own_codes, j, count, present, KIND, BITS, BUCKET, BLOCK)
            there = tl.load(out + index, mask=present, other=0.0)
            tl.store(out + index, there + value * scale, mask=present)


def write_sparse_mean(
    out: Tensor, indices: Tensor, values: Coded, scale: float, void: Flag = False
) -> None:
    """out = 0, then out[indices] += scale * values for each rank, in their order; zeros if `void`.

    out: flat, float32. indices: (ranks, slots), int32; each rank's ascend, but for those beyond the
    last element, which stand for nothing."""
    ranks, slots = indices.shape
    launch(
        _sparse_mean, (-(-out.numel() // RANGE),), out, out, indices, *decoding(values),
        flag_in_memory(void, out), out.numel(), slots, values.size, ranks, slots.bit_length(),
        scale, VOID=isinstance(void, Tensor), **decoding_sizes(values),
        RANKS=triton.next_power_of_2(ranks), RANGE=RANGE, TOGETHER=TOGETHER,
    )  # fmt: skip


# Energies ----------------------------------------------------------------------------------------


@triton.jit
def _sum_energies(total, norms, programs, energies, PROJECTION: tl.constexpr, SLOTS: tl.constexpr):
    lane = tl.arange(0, SLOTS)
    inner = tl.zeros([SLOTS], tl.float64)
    kept = tl.zeros([SLOTS], tl.float64)
    lost = tl.zeros([SLOTS], tl.float64)
    for start in range(0, programs, SLOTS):
        at = norms + 3 * (start + lane)
        here = start + lane < programs
        inner += tl.load(at, mask=here, other=0.0)
        kept += tl.load(at + 1, mask=here, other=0.0)
        lost += tl.load(at + 2, mask=here, other=0.0)
    whole, error = tl.load(total), tl.sum(lost)
    if PROJECTION:
        left_out = whole - tl.sum(inner)
        error += tl.where(left_out < 0.0, 0.0, left_out)
    tl.store(energies, whole)
    tl.store(energies + 1, tl.sum(kept))
    tl.store(energies + 2, error)


def sum_energies(total: Tensor, norms: Tensor, projection: bool) -> Tensor:
    """`Payload.energies` of elements that are kept of a tensor whose squared norm is `total`.

    norms: (programs, 3), of their values: `triton_codec.Encoded`. projection: some are left out."""
    energies = total.new_empty(3)
    launch(
        _sum_energies, (1,), total, total, norms, len(norms), energies, PROJECTION=projection,
        SLOTS=128,
    )  # fmt: skip
    return energies
