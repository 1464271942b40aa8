"""The bit packer: single bits, numbers of a few bits each, and digits of base 3.

Single bits lie next to each other, the first one in a byte's lowest bit, so that positions can be
read off block by block.

Numbers of b bits do not share a byte with their neighbours. They are cut into planes of 8, 4, 2 and
1 bits, as b is made up of these, the lowest bits first. A plane of w bits is folded: it is cut into
8 / w runs of equal length, which are laid above each other in the same bytes. So packing is a
handful of operations on whole runs of bytes.

Digits of base 3 go five to a byte: 3**5 = 243, so 1.6 bits each (1.585 in theory).

Values are coded block by block on the host (`pack_signs`, `pack_codes`, `pack_digits`), and all at
once on a device, by few operations (`packed_signs`, ...). The bytes are the same.

Where hundreds of small tensors are coded one by one, NumPy takes a fifth of torch's time, most of
which goes into each call. So functions that take `Numbers` work on a NumPy array that shares a CPU
tensor's memory (see `native`), and on the tensor itself on a device.
"""

from __future__ import annotations

from functools import cache
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compressors.base import CorruptPayload
from compressors.kernels.blocks import (
    CODE_BLOCK,
    Array,
    Flag,
    fill_up,
    is_host,
    on_host,
    scratch,
)
from compressors.kernels.device import pack_bits, unpack_bits

Numbers = Any
"""A NumPy array or a tensor."""

_CPU = torch.device("cpu")
_WIDTHS = (8, 4, 2, 1)  # bits of a plane, so that no number is torn in two
_DIGITS = 5  # digits of base 3 in a byte
_DIGIT_BYTES = -(-CODE_BLOCK // _DIGITS)  # bytes of a whole block of digits


# Arrays and tensors ------------------------------------------------------------------------------


def native(tensor: Tensor) -> Numbers:
    """The NumPy array of a tensor on the host; a tensor of a device as it is."""
    return tensor.detach().numpy() if is_host(tensor.device) else tensor.detach()


def as_tensor(x: Numbers) -> Tensor:
    """The inverse of `native`."""
    return torch.from_numpy(x) if isinstance(x, np.ndarray) else x


def empty(count: int, dtype: str, like: Numbers) -> Numbers:
    """`count` elements with arbitrary contents: an array if `like` is one, else a tensor on its
    device."""
    if isinstance(like, np.ndarray):
        return np.empty(count, dtype)
    return torch.empty(count, dtype=getattr(torch, dtype), device=like.device)


def count_up(count: int, dtype: str, like: Numbers) -> Numbers:
    """0, 1, ... count - 1: an array if `like` is one, else a tensor on its device."""
    if isinstance(like, np.ndarray):
        return np.arange(count, dtype=dtype)
    return torch.arange(count, dtype=getattr(torch, dtype), device=like.device)


def cast(x: Numbers, dtype: str) -> Numbers:
    """The same numbers in another dtype; upper bits that do not fit are dropped."""
    return x.astype(dtype) if isinstance(x, np.ndarray) else x.to(getattr(torch, dtype))


# Single bits -------------------------------------------------------------------------------------


def bits_nbytes(nbits: int) -> int:
    """Bytes that hold `nbits` bits."""
    return -(-nbits // 8)


def pack_signs(x: Tensor, packed: Tensor, positive: Tensor) -> None:
    """Pack the signs of a block on the host, a bit each, 1 where x >= 0.

    packed: uint8, is filled with the bits. positive: like `x`, is filled with 1 where x >= 0 and
    with 0 elsewhere."""
    bits = scratch("bits", x.numel(), torch.bool, x.device).numpy()
    np.greater_equal(x.numpy(), 0, out=bits)
    packed.numpy()[:] = np.packbits(bits, bitorder="little")
    np.copyto(positive.numpy(), bits.view(np.uint8))


def packed_signs(positive: Tensor) -> Tensor:
    """What `pack_signs` makes of a whole tensor on a device: a bit each of flat bool `positive`."""
    bits = positive.view(torch.uint8)
    return pack_bits(fill_up(bits, 8 * bits_nbytes(bits.numel())))


def unpack_signs(packed: Tensor, out: Tensor) -> None:
    """Fill `out` (floating point) with 1 where a sign is positive, else 0."""
    if on_host(out):
        bits = np.unpackbits(packed.numpy(), count=out.numel(), bitorder="little")
        np.copyto(out.numpy(), bits)
    else:
        out.copy_(unpack_bits(packed)[: out.numel()])


@cache
def _shifts(bits: int, device: torch.device) -> Tensor:
    """0, bits, 2 * bits, ... below 8."""
    return torch.arange(0, 8, bits, dtype=torch.uint8).to(device)


# Numbers of a few bits ---------------------------------------------------------------------------


def numbers_nbytes(width: int, count: int) -> int:
    """Bytes that `count` numbers of `width` bits take: every plane is filled up to whole bytes."""
    return sum(bits_nbytes(count * bits) for _, bits in _planes(width))


def pack_numbers(numbers: Numbers, width: int, count: int, out: Numbers) -> None:
    """Pack whole numbers of `width` bits, then zeros up to `count` numbers, into `out`.

    numbers: (..., at most `count`), uint8 or int32, each from 0 to 2**width - 1; 0 <= width <= 31.
    out: (..., numbers_nbytes(width, count)), uint8."""
    start = 0
    for low, bits in _planes(width):
        run, last = bits_nbytes(count * bits), 8 // bits - 1
        folded = out[..., start : start + run]
        start += run
        if isinstance(numbers, Tensor):
            rest = numbers >> low if low else numbers
            _fold(rest & ((1 << bits) - 1) if low + bits < width else rest, bits, folded)
            continue
        plane = _plane(numbers, low, bits, width, run * (last + 1))
        if last == 0:
            folded[...] = plane
        else:
            np.multiply(plane[..., last * run :], np.uint8(1 << bits), out=folded)
            for i in reversed(range(last)):
                folded |= plane[..., i * run : (i + 1) * run]
                if i:
                    folded *= 1 << bits


def unpack_numbers(data: Numbers, width: int, numbers: Numbers) -> Flag:
    """Fill `numbers` (..., count) with what `pack_numbers` packed into `data`.

    numbers: uint8, or int32 if width > 8. CorruptPayload if the bits that fill up a plane are not
    zero; on a device it is returned whether that is so."""
    count, start = numbers.shape[-1], 0
    corrupt: Flag = False
    if width == 0:
        numbers[...] = 0
    for low, bits in _planes(width):
        run = bits_nbytes(count * bits)
        size, mask = run * (8 // bits), (1 << bits) - 1
        folded = data[..., start : start + run]
        start += run
        if isinstance(numbers, Tensor):
            unfolded = _unfold(folded, bits)
            own, rest = unfolded[..., :count], unfolded[..., count:]
            numbers.add_(own, alpha=1 << low) if low else numbers.copy_(own)
            if size > count:
                corrupt = corrupt | rest.any()
            continue
        in_place = low == 0 and size == count and numbers.dtype == np.uint8
        plane = numbers if in_place else _spare(numbers, size)
        for i in range(8 // bits):
            piece = plane[..., i * run : (i + 1) * run]
            if i:
                np.right_shift(folded, np.uint8(i * bits), out=piece)
            else:
                piece[...] = folded
            if (i + 1) * bits < 8:
                piece &= mask
        if size > count:
            filled = plane[..., count:].any()
            if isinstance(filled, Tensor):
                corrupt = corrupt | filled
            elif filled:
                raise CorruptPayload("payload must be zero where it holds nothing")
        if not in_place:
            _merge(numbers, plane[..., :count], low)
    return corrupt


@cache
def _planes(width: int) -> tuple[tuple[int, int], ...]:
    """How numbers are cut: (lowest bit, bits) of each plane."""
    planes, low = [], 0
    while low < width:
        bits = next(bits for bits in _WIDTHS if bits <= width - low)
        planes.append((low, bits))
        low += bits
    return tuple(planes)


def _plane(numbers: Array, low: int, bits: int, width: int, size: int) -> Array:
    """(..., size) uint8: the `bits` bits from `low` on of each number, then zeros."""
    count = numbers.shape[-1]
    if bits == width and count == size and numbers.dtype == np.uint8:
        return numbers
    plane = _spare(numbers, size)
    own = plane[..., :count]
    if numbers.dtype == np.uint8:
        np.right_shift(numbers, np.uint8(low), out=own)
    else:
        own[...] = numbers >> low if low else numbers  # upper bits are dropped
    if low + bits < width and bits < 8:
        own &= (1 << bits) - 1
    plane[..., count:] = 0
    return plane


def _merge(numbers: Array, plane: Array, low: int) -> None:
    """Set the bits of `numbers` from `low` on to `plane`; those below are set already."""
    if low == 0:
        numbers[...] = plane
    elif numbers.dtype == np.uint8:
        plane *= 1 << low  # NumPy takes nine times as long to shift to the left
        numbers |= plane
    else:
        numbers |= plane.astype(np.int32) * (1 << low)


def _fold(plane: Tensor, bits: int, out: Tensor) -> None:
    """Fold (..., at most count) numbers below 2**bits into `out`, on a device."""
    runs = 8 // bits
    plane = fill_up(plane.to(torch.uint8), out.shape[-1] * runs).unflatten(-1, (runs, -1))
    shifts = _shifts(bits, plane.device)[:, None]
    torch.sum(plane << shifts if runs > 1 else plane, -2, dtype=torch.uint8, out=out)


def _unfold(folded: Tensor, bits: int) -> Tensor:
    """The inverse of `_fold`, with the zeros that fill the plane up."""
    if bits == 8:
        return folded
    shifts = _shifts(bits, folded.device)[:, None]
    return ((folded.unsqueeze(-2) >> shifts) & ((1 << bits) - 1)).flatten(-2)


def _spare(like: Array, size: int) -> Array:
    """(..., size) uint8 of working memory, with the leading dimensions of `like`."""
    shape = (*like.shape[:-1], size)
    return scratch("plane", prod(shape), torch.uint8, _CPU).numpy().reshape(shape)


# Codes of 1 to 7 bits ----------------------------------------------------------------------------
#
# Codes are packed as numbers are, one block of CODE_BLOCK after the other; the last block is filled
# up to a multiple of 8 codes. So a block of 8 * n codes lies in memory as 8 rows of n, its bytes as
# `bits` rows of n, and column j of the bytes depends on column j of the codes alone. On a device
# all columns of all blocks are made by the same few operations: the last block is filled up to the
# length of the others, and what that adds to the columns is cut off again.


def codes_nbytes(count: int, bits: int) -> int:
    """Bytes that `count` codes of `bits` bits (1 to 7) take."""
    return padded(count) // 8 * bits


def padded(count: int) -> int:
    """The number of codes that are packed for `count` of them: the next multiple of 8."""
    return -(-count // 8) * 8


def scratch_codes(x: Tensor) -> Tensor:
    """Scratch memory for the codes of a block `x` on the host, filled up with zeros."""
    codes = scratch("codes", padded(x.numel()), torch.uint8, x.device)
    codes[x.numel() :] = 0
    return codes


def pack_codes(codes: Tensor, bits: int, out: Tensor) -> None:
    """Pack `codes` (flat uint8, each below 2**bits, a multiple of 8 of them and no more than a
    block) on the host into flat `out` (uint8)."""
    pack_numbers(codes.numpy(), bits, codes.numel(), out.numpy())


def packed_codes(q: Tensor, offset: int, bits: int) -> Tensor:
    """What `pack_codes` makes of the codes q + offset of a whole tensor on a device.

    q: whole numbers, flat, floating point."""
    size = padded(q.numel())
    codes = _columns(fill_up(q, size), 8).to(torch.int8)
    if offset:
        codes.add_(offset)
    planes = codes.view(torch.uint8).unsqueeze(1)
    low, mask, shift, _ = _layout_of_columns(bits, q.device)
    if len(low) > 1:
        planes = (planes >> low) & mask
    planes = planes << shift
    rows = [
        planes[:, i].unflatten(1, (8 // width, width)).sum(1, dtype=torch.uint8)
        for i, (_, width) in enumerate(_planes(bits))
    ]
    columns = torch.cat(rows, 1) if len(rows) > 1 else rows[0]
    rest = size % CODE_BLOCK // 8
    if len(columns) == 1 or not rest:
        return columns.view(-1)
    return torch.cat([columns[:-1].view(-1), columns[-1, :, :rest].reshape(-1)])


def unpack_codes(packed: Tensor, bits: int, offset: int, out: Tensor) -> None:
    """Fill flat `out` (floating point) with the q that were packed into `packed` with `offset`: on
    the host those of a block, on a device of a whole tensor."""
    if on_host(out):
        codes = scratch_codes(out)
        unpack_numbers(packed.numpy(), bits, codes.numpy())
        out.copy_(codes.sub_(offset)[: out.numel()].view(torch.int8))
        return
    columns = _columns(packed, bits)
    if len(_planes(bits)) == 1:
        columns = _unfold(columns.flatten(1), bits).unflatten(1, (8, -1))
    else:
        _, mask, shift, row = _layout_of_columns(bits, out.device)
        planes = columns.index_select(1, row).unflatten(1, (-1, 8))
        planes = (planes >> shift) & mask
        columns = planes[:, 0]
        for i, (low, _) in enumerate(_planes(bits)[1:], start=1):
            columns = torch.add(columns, planes[:, i], alpha=1 << low)
    whole = out.numel() // CODE_BLOCK * CODE_BLOCK
    if whole:
        blocks = columns[: whole // CODE_BLOCK].view(-1)
        torch.sub(blocks, float(offset), out=out[:whole])
    if whole < out.numel():
        rest = columns[-1, :, : padded(out.numel() - whole) // 8].reshape(-1)
        torch.sub(rest[: out.numel() - whole], float(offset), out=out[whole:])


def _columns(x: Tensor, height: int) -> Tensor:
    """Flat `x` as (blocks, height, columns of a block); the last block is filled up with zeros."""
    width = CODE_BLOCK // 8
    whole = x.numel() // (height * width) * height * width
    blocks, rest = x[:whole].view(-1, height, width), x[whole:].view(1, height, -1)
    if not whole:
        return rest
    return torch.cat([blocks, fill_up(rest, width)]) if rest.numel() else blocks


@cache
def _layout_of_columns(bits: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Where the eight codes of a column lie in its `bits` bytes, for each plane that codes are cut
    into: (lowest bit, mask, how far code i is shifted in its byte, which byte that is)."""
    planes = _planes(bits)
    low = torch.tensor([[[at]] for at, _ in planes], dtype=torch.uint8)
    mask = torch.tensor([[[(1 << width) - 1]] for _, width in planes], dtype=torch.uint8)
    shift = [[[i // width * width] for i in range(8)] for _, width in planes]
    row = [at + i % width for at, width in planes for i in range(8)]
    tensors = low, mask, torch.tensor(shift, dtype=torch.uint8), torch.tensor(row)
    return tuple(tensor.to(device) for tensor in tensors)  # type: ignore[return-value]


# Digits of base 3 --------------------------------------------------------------------------------


def digits_nbytes(count: int) -> int:
    """Bytes of `count` digits: each block of `CODE_BLOCK` is filled up to a multiple of five."""
    whole, rest = divmod(count, CODE_BLOCK)
    return whole * _DIGIT_BYTES - (-rest // _DIGITS)


def pack_digits(digits: Tensor, out: Tensor) -> None:
    """Pack a block of flat `digits` (0, 1 or 2 as floating-point numbers) on the host into flat
    `out` (uint8)."""
    powers, whole = _powers(digits.dtype, digits.device), digits.numel() // _DIGITS
    out[:whole] = digits[: whole * _DIGITS].view(-1, _DIGITS) @ powers
    rest = digits[whole * _DIGITS :]
    if rest.numel():
        out[-1] = rest @ powers[: rest.numel()]


def packed_digits(digits: Tensor) -> Tensor:
    """What `pack_digits` makes of a whole tensor of any length on a device, block by block."""
    whole = digits.numel() // CODE_BLOCK * CODE_BLOCK
    pieces = [fill_up(digits[whole:], digits_nbytes(digits.numel() - whole) * _DIGITS)]
    if whole:
        blocks = fill_up(digits[:whole].view(-1, CODE_BLOCK), _DIGIT_BYTES * _DIGITS)
        pieces = [torch.cat([blocks.view(-1), *pieces])]
    powers = _powers(digits.dtype, digits.device)
    return (pieces[0].view(-1, _DIGITS) @ powers).to(torch.uint8)


def unpack_digits(packed: Tensor, values: Tensor, out: Tensor) -> None:
    """Fill flat `out` with the one of `values` (three) that each digit stands for: on the host
    those of a block, on a device of a whole tensor.

    Bytes above 242 decode as well."""
    table = values[_digits_of_bytes(values.device)]
    if not on_host(out):
        _unpack_all_digits(table.index_select(0, packed.int()), out)
        return
    whole = out.numel() // _DIGITS
    fives = out[: whole * _DIGITS].view(-1, _DIGITS).numpy()
    np.take(table.numpy(), packed[:whole].numpy(), axis=0, out=fives, mode="clip")
    rest = out[whole * _DIGITS :]
    if rest.numel():
        rest.copy_(table[int(packed[-1])][: rest.numel()])


def _unpack_all_digits(fives: Tensor, out: Tensor) -> None:
    """Fill `out` with the values of all bytes, without those that fill up each block."""
    blocks = out.numel() // CODE_BLOCK
    if blocks:
        filled = fives[: blocks * _DIGIT_BYTES].view(blocks, -1)
        out[: blocks * CODE_BLOCK].view(blocks, -1).copy_(filled[:, :CODE_BLOCK])
    rest = out[blocks * CODE_BLOCK :]
    if rest.numel():
        rest.copy_(fives[blocks * _DIGIT_BYTES :].view(-1)[: rest.numel()])


@cache
def _powers(dtype: torch.dtype, device: torch.device) -> Tensor:
    """What each of the five digits of a byte is multiplied by."""
    return (3.0 ** torch.arange(_DIGITS, dtype=dtype)).to(device)


@cache
def _digits_of_bytes(device: torch.device) -> Tensor:
    """The five digits of each of the 256 bytes (int64)."""
    return (torch.arange(256)[:, None] // 3 ** torch.arange(_DIGITS) % 3).to(device)
