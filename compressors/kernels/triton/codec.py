"""Triton kernels for coded values: encode them with their energies, decode the mean of all ranks.

The bytes are those of `compressors.wire.values`, which every path writes and reads. An encoder is
one or two launches, and the mean of any number of payloads is one. No kernel adds with float
atomics, so the same payloads give the same mean on every rank and in every run.

This file is imported only where `compressors.kernels.blocks.takes_triton` holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from compressors.kernels.blocks import CODE_BLOCK, Coding, Encoded, Flag
from compressors.kernels.triton.launching import launch, power_of_2

ELEMENTS = 2048
"""The number of elements that a program works on."""

COLUMNS = 256
"""The number of columns of eight codes that a program packs."""

_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
_TO_WHOLE = tl.constexpr(1.5 * 2.0**23)  # adding and subtracting it rounds to the nearest even


class Coded(NamedTuple):
    """The coded values of several ranks, the same number for each.

    numbers: (ranks, numbers of one): scales, or the values themselves. codes: (ranks, bytes of
    one), uint8. size: number of values of a rank. coding: how they are decoded. Consecutive shards
    of one tensor are represented in the same way: a row for each shard."""

    numbers: Tensor
    codes: Tensor
    size: int
    coding: Coding


def coded(parts: Sequence[Sequence[Tensor]], count: int, coding: Coding) -> Coded:
    """The coded values in `parts` (one or two for each rank)."""
    columns = [as_rows(column) for column in zip(*parts, strict=True)]
    return Coded(columns[0], columns[-1], count, coding)


def coded_rows(parts: Sequence[Tensor], count: int, coding: Coding, rows: int) -> Coded:
    """The coded values of `rows` tensors of `count` elements, with consecutive parts."""
    return Coded(parts[0].view(rows, -1), parts[-1].view(rows, -1), count, coding)


def as_rows(tensors: Sequence[Tensor]) -> Tensor:
    """Flat tensors of equal length as the rows of a matrix. Without a copy if they are at equal
    distances in one memory, as after an all-gather."""
    first = tensors[0]
    if len(tensors) == 1:
        return first[None]
    memory, step = first.untyped_storage().data_ptr(), tensors[1].storage_offset()
    step -= first.storage_offset()
    for rank, tensor in enumerate(tensors):
        there = tensor.storage_offset() == first.storage_offset() + rank * step
        if not (there and step > 0 and tensor.untyped_storage().data_ptr() == memory):
            return torch.stack(list(tensors))
    return first.as_strided((len(tensors), first.numel()), (step, 1))


# Decoding ----------------------------------------------------------------------------------------


@triton.jit
def _digit(packed, i, columns, present, BITS: tl.constexpr, WIDTH: tl.constexpr):
    """The digit of WIDTH bits of the code at place `i` of its block, where it belongs in the code;
    0 if codes of BITS bits have no such digit."""
    if BITS & WIDTH:
        low = BITS & ~(2 * WIDTH - 1)  # wider digits hold the lower bits
        length = WIDTH * columns
        byte = tl.load(packed + low * columns + i % length, mask=present, other=0).to(tl.int32)
        shift = (WIDTH * (i // length)).to(tl.int32)
        return ((byte >> shift) & ((1 << WIDTH) - 1)) << low
    else:
        return (i * 0).to(tl.int32)


@triton.jit
def value_at(
    numbers, codes, i, count, present, KIND: tl.constexpr, BITS: tl.constexpr,
    BUCKET: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Value `i` (int64) of `count` coded ones, as float32."""
    if KIND == "floats":
        return tl.load(numbers + i, mask=present, other=0.0).to(tl.float32)
    elif KIND == "bfloat16":
        high = tl.load(numbers + i, mask=present, other=0).to(tl.int32) << 16
        return high.to(tl.float32, bitcast=True)
    elif KIND == "natural":
        code = tl.load(codes + i, mask=present, other=0).to(tl.int32)
        power = ((code & 127) << 23) | ((code & 128) << 24)
        offset = tl.load(numbers + i // BUCKET, mask=present, other=0.0)
        return power.to(tl.float32, bitcast=True) * offset
    else:
        scale = tl.load(numbers + i // BUCKET, mask=present, other=0.0)
        if BITS == 8:
            q = tl.load(codes + i, mask=present, other=0).to(tl.int8, bitcast=True).to(tl.int32)
        else:
            block = i // BLOCK
            columns = (tl.minimum(count - block * BLOCK, BLOCK) + 7) // 8
            packed, place = codes + block * (BLOCK // 8 * BITS), i - block * BLOCK
            q = _digit(packed, place, columns, present, BITS, 4)
            q += _digit(packed, place, columns, present, BITS, 2)
            q += _digit(packed, place, columns, present, BITS, 1)
            q -= (1 << (BITS - 1)) - 1
        return q.to(tl.float32) * scale


@triton.jit
def _dense_mean(
    out, numbers, number_step, codes, code_step, as_zeros, count, ranks, scale,
    ADD: tl.constexpr, VOID: tl.constexpr, KIND: tl.constexpr, BITS: tl.constexpr,
    BUCKET: tl.constexpr, BLOCK: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    present = i < count
    row = tl.program_id(1).to(tl.int64)
    out += row * count
    numbers += row * number_step
    codes += row * code_step
    total = tl.zeros([ELEMENTS], tl.float32)
    if ADD:
        total = tl.load(out + i, mask=present, other=0.0)
    for rank in range(ranks):
        at = tl.cast(rank, tl.int64)
        own_numbers, own_codes = numbers + at * number_step, codes + at * code_step
        value = value_at(own_numbers, own_codes, i, count, present, KIND, BITS, BUCKET, BLOCK)
        total = tl.fma(value, tl.full([ELEMENTS], 1.0, tl.float32) * scale, total)
    if VOID:
        total = tl.where(tl.load(as_zeros) != 0, 0.0, total)
    tl.store(out + i, total, mask=present)


def write_values(
    out: Tensor,
    values: Coded,
    scale: float,
    add: bool,
    as_zeros: Flag = False,
    side_by_side: bool = False,
) -> None:
    """out = scale * (sum over the ranks of their values), in the ranks' order; zeros if `as_zeros`.

    out: flat, float32, as many elements as a rank has values. add: `out` += instead of `out` =.
    side_by_side: the rows of values are consecutive in `out`, and not summed."""
    rows, ranks = (len(values.numbers), 1) if side_by_side else (1, len(values.numbers))
    launch(
        _dense_mean, (-(-values.size // ELEMENTS), rows), out, out, *decoding(values),
        flag_in_memory(as_zeros, out), values.size, ranks, scale, ADD=add,
        VOID=isinstance(as_zeros, Tensor), **decoding_sizes(values), ELEMENTS=ELEMENTS,
    )  # fmt: skip


def decoding(values: Coded) -> tuple[Tensor, int, Tensor, int]:
    """Arguments of kernels that decode values: the tensors, and the distances between ranks."""
    numbers = values.numbers
    if numbers.dtype == torch.bfloat16:
        numbers = numbers.view(torch.int16)
    return numbers, numbers.stride(0), values.codes, values.codes.stride(0)


def decoding_sizes(values: Coded) -> dict[str, Any]:
    """Compile-time arguments of kernels that decode values."""
    kind, bits, bucket = values.coding
    if values.numbers.dtype == torch.bfloat16:
        kind = "bfloat16"
    return {"KIND": kind, "BITS": bits, "BUCKET": bucket, "BLOCK": CODE_BLOCK}


def flag_in_memory(flag: Flag, otherwise: Tensor) -> Tensor:
    """A flag as a tensor for a kernel; `otherwise`, which the kernel does not read, for a bool."""
    return flag.view(torch.uint8) if isinstance(flag, Tensor) else otherwise


# Encoding ----------------------------------------------------------------------------------------


@triton.jit
def _sum_squares(x):
    wide = x.to(tl.float64)
    return tl.sum(wide * wide)


@triton.jit
def _store_norms(norms, program, x, kept):
    at = norms + 3 * program
    tl.store(at, _sum_squares(x))
    tl.store(at + 1, _sum_squares(kept))
    tl.store(at + 2, _sum_squares(x - kept))


@triton.jit
def _load_sum(x, add, i, present, ADD: tl.constexpr):
    """Elements of x; with ADD of x + add, which are also stored there."""
    values = tl.load(x + i, mask=present, other=0.0)
    if ADD:
        values += tl.load(add + i, mask=present, other=0.0)
        tl.store(x + i, values, mask=present)
    return values


@triton.jit
def _quantized(x, scale, random, i, present, RANDOM: tl.constexpr):
    """Levels (float32, whole) of x for its scale; 0 if the level is NaN (because x or the scale
    is), so that the bytes are the same everywhere."""
    exact = tl.div_rn(x, scale)
    if RANDOM:
        exact += tl.load(random + i, mask=present, other=0.0)
    level = (exact + _TO_WHOLE) - _TO_WHOLE
    if RANDOM:
        level = tl.where(level > exact, level - 1.0, level)  # down, as `floor` but for denormals
    return tl.where(level == level, level, 0.0)


@triton.jit
def _bucket_levels(
    x, add, random, scales, codes, decoded, norms, count, steps,
    ADD: tl.constexpr, RANDOM: tl.constexpr, CODES: tl.constexpr, DECODED: tl.constexpr,
    BUCKET: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The scale of each bucket; with CODES also the codes and all results, for codes of a byte."""
    program, tensor = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    x += tensor * count
    add += tensor * count
    random += tensor * count
    decoded += tensor * count
    codes += tensor * count  # a byte each, or none are written here
    scales += tensor * ((count + BUCKET - 1) // BUCKET)
    row = program * ROWS + tl.arange(0, ROWS)
    i = row[:, None] * BUCKET + tl.arange(0, BUCKET)[None, :]
    present = i < count
    values = _load_sum(x, add, i, present, ADD)
    is_number = values == values
    largest = tl.max(tl.where(is_number, tl.abs(values), 0.0), axis=1)
    scale = tl.div_rn(largest, tl.full([ROWS], 1.0, tl.float32) * steps)
    scale = tl.where(scale < _TINY, _TINY, scale)
    scale = tl.where(tl.min(is_number.to(tl.int32), axis=1) == 0, float("nan"), scale)
    tl.store(scales + row, scale, mask=row * BUCKET < count)
    if CODES:
        wide = tl.broadcast_to(scale[:, None], [ROWS, BUCKET])
        level = _quantized(values, wide, random, i, present, RANDOM)
        kept = level * wide
        tl.store(codes + i, level.to(tl.int32).to(tl.uint8), mask=present)
        if DECODED:
            tl.store(decoded + i, kept, mask=present)
        program += tensor * tl.num_programs(0)
        _store_norms(norms, program, values, tl.where(present, kept, 0.0))


@triton.jit
def _pack_digit(packed, codes, column, columns, BITS: tl.constexpr, WIDTH: tl.constexpr):
    """Store the digit of WIDTH bits of codes (8, columns of the program), if they have one."""
    if BITS & WIDTH:
        low = BITS & ~(2 * WIDTH - 1)
        row = tl.arange(0, 8)[:, None]
        digits = ((codes >> low) & ((1 << WIDTH) - 1)) << (WIDTH * (row // WIDTH))
        for i in tl.static_range(WIDTH):
            byte = tl.sum(tl.where(row % WIDTH == i, digits, 0), axis=0)
            tl.store(
                packed + (low + i) * columns + column, byte.to(tl.uint8), mask=column < columns
            )


@triton.jit
def _pack_levels(
    x, random, scales, codes, decoded, norms, count, code_step,
    RANDOM: tl.constexpr, DECODED: tl.constexpr, BITS: tl.constexpr, BUCKET: tl.constexpr,
    BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Codes of less than a byte, once scales are computed: columns of eight (`wire.packing`)."""
    block, tensor = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    x += tensor * count
    random += tensor * count
    decoded += tensor * count
    codes += tensor * code_step
    scales += tensor * ((count + BUCKET - 1) // BUCKET)
    first = block * BLOCK
    size = tl.minimum(count - first, BLOCK)
    columns = (size + 7) // 8
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    place = tl.arange(0, 8)[:, None] * columns + column[None, :]
    i = first + place
    present = (column < columns)[None, :] & (place < size)
    values = tl.load(x + i, mask=present, other=0.0)
    scale = tl.load(scales + i // BUCKET, mask=present, other=1.0)
    level = _quantized(values, scale, random, i, present, RANDOM)
    kept = tl.where(present, level * scale, 0.0)
    if DECODED:
        tl.store(decoded + i, kept, mask=present)
    program = (tensor * tl.num_programs(1) + block) * tl.num_programs(0) + tl.program_id(0)
    _store_norms(norms, program, values, kept)
    code = tl.where(present, level.to(tl.int32) + ((1 << (BITS - 1)) - 1), 0)
    packed = codes + block * (BLOCK // 8 * BITS)
    _pack_digit(packed, code, column, columns, BITS, 4)
    _pack_digit(packed, code, column, columns, BITS, 2)
    _pack_digit(packed, code, column, columns, BITS, 1)


def encode_levels(
    x: Tensor,
    add: Tensor | None,
    bits: int,
    bucket: int,
    steps: float,
    codes_nbytes: int,
    random: Tensor | None,
    decode: bool,
    tensors: int = 1,
) -> Encoded:
    """x += add, then levels of x with a scale for each bucket (`values.Levels`, norm "max").

    steps: the largest magnitude of a bucket / scale. random: numbers in (0, 1) for rounding, at
    least one for each element; None: rounding to the nearest. tensors: number of tensors of equal
    length in x, each coded separately. codes_nbytes: of each tensor."""
    count = x.numel() // tensors
    buckets = -(-count // bucket)
    scales = x.new_empty(tensors * buckets)
    codes = x.new_empty(tensors * codes_nbytes, dtype=torch.uint8)
    decoded = torch.empty_like(x) if decode else None
    rows = max(1, ELEMENTS // bucket)
    programs, in_bytes = -(-buckets // rows), bits == 8
    drawn, kept = x if random is None else random, x if decoded is None else decoded
    norms = x.new_empty((programs * tensors, 3), dtype=torch.float64)
    launch(
        _bucket_levels, (programs, tensors), x, x, x if add is None else add, drawn, scales, codes,
        kept, norms, count, steps, ADD=add is not None, RANDOM=random is not None, CODES=in_bytes,
        DECODED=decode, BUCKET=bucket, ROWS=rows,
    )  # fmt: skip
    if not in_bytes:
        blocks = -(-count // CODE_BLOCK)
        grid = -(-min(count, CODE_BLOCK) // (8 * COLUMNS)), blocks, tensors
        norms = x.new_empty((grid[0] * blocks * tensors, 3), dtype=torch.float64)
        launch(
            _pack_levels, grid, x, x, drawn, scales, codes, kept, norms, count, codes_nbytes,
            RANDOM=random is not None, DECODED=decode, BITS=bits, BUCKET=bucket, BLOCK=CODE_BLOCK,
            COLUMNS=COLUMNS,
        )  # fmt: skip
    return Encoded((scales, codes), decoded, norms)


@triton.jit
def _floats(
    x, add, values, decoded, norms, count, limit,
    ADD: tl.constexpr, KIND: tl.constexpr, DECODED: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    i = program * ELEMENTS + tl.arange(0, ELEMENTS)
    present = i < count
    exact = _load_sum(x, add, i, present, ADD)
    kept = exact
    if KIND != "float32":
        kept = tl.where(kept > limit, limit, kept)  # keeps NaN, unlike a minimum
        kept = tl.where(kept < -limit, -limit, kept)
        if KIND == "bfloat16":
            bits = kept.to(tl.int32, bitcast=True)
            bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # to the nearest even
            bits = tl.where(kept == kept, bits, 0x7FC0)
            tl.store(values + i, bits.to(tl.int16), mask=present)
            kept = (bits << 16).to(tl.float32, bitcast=True)
        else:
            half = kept.to(tl.float16)
            tl.store(values + i, half, mask=present)
            kept = half.to(tl.float32)
        if DECODED:
            tl.store(decoded + i, kept, mask=present)
    _store_norms(norms, program, exact, kept)


def encode_floats(
    x: Tensor, add: Tensor | None, dtype: torch.dtype, limit: float, decode: bool
) -> Encoded:
    """x += add, then x cut to +-limit and rounded to `dtype`; float32 is x itself, not a copy."""
    same = dtype == x.dtype
    values = x if same else x.new_empty(x.numel(), dtype=dtype)
    decoded = x if same else torch.empty_like(x) if decode else None
    norms = x.new_empty((-(-x.numel() // ELEMENTS), 3), dtype=torch.float64)
    launch(
        _floats, (len(norms),), x, x, x if add is None else add,
        values.view(torch.int16) if dtype == torch.bfloat16 else values,
        x if decoded is None else decoded, norms, x.numel(), limit, ADD=add is not None,
        KIND=str(dtype).removeprefix("torch."), DECODED=decode and not same, ELEMENTS=ELEMENTS,
    )  # fmt: skip
    return Encoded((values,), decoded, norms)


@triton.jit
def _largest_bits(
    x, add, largest, count, ADD: tl.constexpr, BLOCK: tl.constexpr, ELEMENTS: tl.constexpr
):
    """The largest magnitude among the elements of a program, as an integer; NaN is above all."""
    place = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    block, tensor = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    x += tensor * count
    add += tensor * count
    largest += tensor * tl.num_programs(1) * tl.num_programs(0)
    i = block * BLOCK + place
    values = _load_sum(x, add, i, (i < count) & (place < BLOCK), ADD)
    most = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    tl.store(largest + block * tl.num_programs(0) + tl.program_id(0), most)


@triton.jit
def _powers_of_two(
    x, random, largest, offsets, codes, decoded, norms, count, pieces,
    DECODED: tl.constexpr, BLOCK: tl.constexpr, ELEMENTS: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    block, tensor = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    x += tensor * count
    random += tensor * count
    codes += tensor * count
    decoded += tensor * count
    largest += tensor * tl.num_programs(1) * pieces
    offsets += tensor * tl.num_programs(1)
    i = block * BLOCK + place
    present = (i < count) & (place < BLOCK)
    piece = tl.arange(0, PIECES)
    most = tl.load(largest + block * pieces + piece, mask=piece < pieces, other=0)
    top = tl.max(most) >> 23
    below = tl.minimum(tl.maximum(top - 126, 0), 127)
    offset = ((below + 127) << 23).to(tl.float32, bitcast=True)
    offset = tl.where(top > 254, float("nan"), offset)
    tl.store(offsets + block, offset, mask=tl.program_id(0) == 0)
    exact = tl.load(x + i, mask=present, other=0.0)
    bits = exact.to(tl.int32, bitcast=True)
    drawn = tl.load(random + i, mask=present, other=0)
    field = (((bits & 0x7FFFFFFF) + (drawn << 7)) >> 23) - below  # a carry rounds up
    field = tl.minimum(tl.maximum(field, 0), 127)
    sign = (bits >> 24) & 128
    tl.store(codes + i, (field | sign).to(tl.uint8), mask=present)
    kept = ((field << 23) | (sign << 24)).to(tl.float32, bitcast=True) * offset
    if DECODED:
        tl.store(decoded + i, kept, mask=present)
    program = (tensor * tl.num_programs(1) + block) * tl.num_programs(0) + tl.program_id(0)
    _store_norms(norms, program, exact, tl.where(present, kept, 0.0))


def encode_natural(
    x: Tensor, add: Tensor | None, random: Tensor, decode: bool, tensors: int = 1
) -> Encoded:
    """x += add, then powers of two (`compressors.contrib.natural.Natural`).

    random: whole numbers of 16 bits (int32), at least one for each element. tensors: number of
    tensors of equal length in x, each coded separately."""
    count = x.numel() // tensors
    blocks = -(-count // CODE_BLOCK)
    grid = -(-min(count, CODE_BLOCK) // ELEMENTS), blocks, tensors
    largest = x.new_empty(grid[0] * blocks * tensors, dtype=torch.int32)
    launch(
        _largest_bits, grid, x, x, x if add is None else add, largest, count, ADD=add is not None,
        BLOCK=CODE_BLOCK, ELEMENTS=ELEMENTS,
    )  # fmt: skip
    offsets, codes = x.new_empty(blocks * tensors), x.new_empty(x.numel(), dtype=torch.uint8)
    decoded = torch.empty_like(x) if decode else None
    norms = x.new_empty((largest.numel(), 3), dtype=torch.float64)
    launch(
        _powers_of_two, grid, x, x, random, largest, offsets, codes,
        x if decoded is None else decoded, norms, count, grid[0], DECODED=decode, BLOCK=CODE_BLOCK,
        ELEMENTS=ELEMENTS, PIECES=power_of_2(grid[0]),
    )  # fmt: skip
    return Encoded((offsets, codes), decoded, norms)
