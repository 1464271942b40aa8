"""The bit packer: single bits, numbers of a few bits each, and digits of base 3.

Single bits lie next to each other, the first one in a byte's lowest bit, so that positions can be
read off block by block.

Numbers of b bits do not share a byte with their neighbours. They are cut into planes of 8, 4, 2 and
1 bits, as b is made up of these, the lowest bits first. A plane of w bits is folded: it is cut into
8 / w runs of equal length, which are laid above each other in the same bytes. So packing is a
handful of operations on whole runs of bytes.

Digits of base 3 go five to a byte: 3**5 = 243, so 1.6 bits each (1.585 in theory).

Where hundreds of small tensors are coded one by one, NumPy takes a fifth of torch's time, most of
which goes into each call. So functions that take `Numbers` work on a NumPy array that shares a CPU
tensor's memory (see `native`), and on the tensor itself on other devices. The bytes are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compressors.base import CorruptPayload
from compressors.kernels.blocks import CODE_BLOCK, Flag, on_host, rows, scratch
from compressors.kernels.device import pack_bits, unpack_bits

Numbers = Any
"""A NumPy array or a tensor."""

_CPU = torch.device("cpu")
_WIDTHS = (8, 4, 2, 1)  # bits of a plane, so that no number is torn in two
_DIGITS = 5  # digits of base 3 in a byte
_DIGIT_BYTES = -(-CODE_BLOCK // _DIGITS)  # bytes of a whole block of digits


# Arrays and tensors ------------------------------------------------------------------------------


def native(tensor: Tensor) -> Numbers:
    """The NumPy array of a CPU tensor; a tensor of another device as it is."""
    return tensor.detach().numpy() if tensor.device.type == "cpu" else tensor.detach()


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
    """Pack the signs of flat `x`, a bit each, 1 where x >= 0.

    packed: uint8, is filled with the bits. positive: like `x`, is filled with 1 where x >= 0 and
    with 0 elsewhere."""
    if on_host(x):  # several times faster than torch
        bits = scratch("bits", x.numel(), torch.bool, x.device).numpy()
        np.greater_equal(x.numpy(), 0, out=bits)
        packed.numpy()[:] = np.packbits(bits, bitorder="little")
        np.copyto(positive.numpy(), bits.view(np.uint8))
        return
    positive.copy_(x >= 0)
    filled = torch.zeros(packed.numel() * 8, dtype=torch.uint8, device=x.device)
    filled[: x.numel()] = positive
    packed.copy_(pack_bits(filled))


def unpack_signs(packed: Tensor, out: Tensor) -> None:
    """Fill `out` (floating point) with 1 where a sign is positive, else 0."""
    if on_host(out):
        bits = np.unpackbits(packed.numpy(), count=out.numel(), bitorder="little")
        np.copyto(out.numpy(), bits)
        return
    out.copy_(unpack_bits(packed)[: out.numel()])


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
        plane = _plane(numbers, low, bits, width, run * (last + 1))
        if last == 0:
            folded[...] = plane
        else:
            _multiply(plane[..., last * run :], 1 << bits, folded)
            for i in reversed(range(last)):
                folded |= plane[..., i * run : (i + 1) * run]
                if i:
                    folded *= 1 << bits
        start += run


def unpack_numbers(data: Numbers, width: int, numbers: Numbers) -> Flag:
    """Fill `numbers` (..., count) with what `pack_numbers` packed into `data`.

    numbers: uint8, or int32 if width > 8. CorruptPayload if the bits that fill up a plane are not
    zero."""
    count, start = numbers.shape[-1], 0
    corrupt: Flag = False
    if width == 0:
        numbers[...] = 0
    for low, bits in _planes(width):
        run = bits_nbytes(count * bits)
        size, mask = run * (8 // bits), (1 << bits) - 1
        in_place = low == 0 and size == count and _is_uint8(numbers)
        plane = numbers if in_place else _spare(numbers, size)
        folded = data[..., start : start + run]
        for i in range(8 // bits):
            piece = plane[..., i * run : (i + 1) * run]
            if i:
                _shift_right(folded, i * bits, piece)
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
        start += run
    return corrupt


def codes_nbytes(count: int, bits: int) -> int:
    """Bytes that `count` codes of `bits` bits (1 to 7) take with `pack_codes`."""
    return padded(count) // 8 * bits


def padded(count: int) -> int:
    """The number of codes that `pack_codes` takes for `count` of them: the next multiple of 8."""
    return -(-count // 8) * 8


def pack_codes(codes: Tensor, bits: int, out: Tensor) -> None:
    """Pack `codes` (flat uint8, each below 2**bits, a multiple of 8 of them) into flat `out`
    (uint8), one block of `CODE_BLOCK` after the other."""
    for block, share in _code_blocks(codes, out, bits):
        pack_numbers(block, bits, block.shape[-1], share)


def unpack_codes(packed: Tensor, bits: int, codes: Tensor) -> None:
    """The inverse of `pack_codes`: fill `codes`."""
    for block, share in _code_blocks(codes, packed, bits):
        unpack_numbers(share, bits, block)


def _code_blocks(codes: Tensor, packed: Tensor, bits: int) -> Iterator[tuple[Numbers, Numbers]]:
    """Whole blocks of codes with their bytes, then the rest."""
    pairs = zip(rows(codes, CODE_BLOCK), rows(packed, CODE_BLOCK // 8 * bits), strict=True)
    return ((native(block), native(share)) for block, share in pairs)


@cache
def _planes(width: int) -> tuple[tuple[int, int], ...]:
    """How numbers are cut: (lowest bit, bits) of each plane."""
    planes, low = [], 0
    while low < width:
        bits = next(bits for bits in _WIDTHS if bits <= width - low)
        planes.append((low, bits))
        low += bits
    return tuple(planes)


def _plane(numbers: Numbers, low: int, bits: int, width: int, size: int) -> Numbers:
    """(..., size) uint8: the `bits` bits from `low` on of each number, then zeros."""
    count = numbers.shape[-1]
    if bits == width and count == size and _is_uint8(numbers):
        return numbers
    plane = _spare(numbers, size)
    own = plane[..., :count]
    if _is_uint8(numbers):
        _shift_right(numbers, low, own)
    else:
        own[...] = numbers >> low if low else numbers  # upper bits are dropped
    if low + bits < width and bits < 8:
        own &= (1 << bits) - 1
    plane[..., count:] = 0
    return plane


def _merge(numbers: Numbers, plane: Numbers, low: int) -> None:
    """Set the bits of `numbers` from `low` on to `plane`; those below are set already."""
    if low == 0:
        numbers[...] = plane
    elif _is_uint8(numbers):
        plane *= 1 << low  # NumPy takes nine times as long to shift to the left
        numbers |= plane
    else:
        numbers |= cast(plane, "int32") * (1 << low)


def _is_uint8(x: Numbers) -> bool:
    return x.dtype in (np.uint8, torch.uint8)


def _spare(like: Numbers, size: int) -> Numbers:
    """(..., size) uint8 of working memory, with the leading dimensions of `like`."""
    shape = (*like.shape[:-1], size)
    if isinstance(like, np.ndarray):
        return scratch("plane", prod(shape), torch.uint8, _CPU).numpy().reshape(shape)
    return torch.empty(shape, dtype=torch.uint8, device=like.device)


def _multiply(x: Numbers, factor: int, out: Numbers) -> None:
    if isinstance(x, np.ndarray):
        np.multiply(x, np.uint8(factor), out=out)
    else:
        torch.mul(x, factor, out=out)


def _shift_right(x: Numbers, bits: int, out: Numbers) -> None:
    if isinstance(x, np.ndarray):
        np.right_shift(x, np.uint8(bits), out=out)
    else:
        torch.bitwise_right_shift(x, bits, out=out)


# Digits of base 3 --------------------------------------------------------------------------------


def digits_nbytes(count: int) -> int:
    """Bytes of `count` digits: each block of `CODE_BLOCK` is filled up to a multiple of five."""
    whole, rest = divmod(count, CODE_BLOCK)
    return whole * _DIGIT_BYTES - (-rest // _DIGITS)


def pack_digits(digits: Tensor, out: Tensor) -> None:
    """Pack flat `digits` (0, 1 or 2 as floating-point numbers) into flat `out` (uint8)."""
    powers = 3.0 ** torch.arange(_DIGITS, dtype=digits.dtype, device=digits.device)
    for block, share in _digit_blocks(digits, out):
        fives, rest = _fives(block)
        share[:, : fives.shape[1]] = fives @ powers
        if rest.numel():
            share[:, -1] = rest @ powers[: rest.shape[1]]


def unpack_digits(packed: Tensor, values: Tensor, out: Tensor) -> None:
    """Fill flat `out` with the one of `values` (three) that each digit stands for.

    Bytes above 242 decode as well."""
    table = values[_digits_of_bytes().to(values.device)]
    for block, share in _digit_blocks(out, packed):
        fives, rest = _fives(block)
        whole = share[:, : fives.shape[1]]
        if on_host(out):
            for row, codes in zip(fives.numpy(), whole.numpy(), strict=True):
                np.take(table.numpy(), codes, axis=0, out=row, mode="clip")
        else:
            fives.copy_(table[whole.long()])
        if rest.numel():
            rest.copy_(table[share[:, -1].long()][:, : rest.shape[1]])


@cache
def _digits_of_bytes() -> Tensor:
    """The five digits of each of the 256 bytes (int64)."""
    return torch.arange(256)[:, None] // 3 ** torch.arange(_DIGITS) % 3


def _fives(block: Tensor) -> tuple[Tensor, Tensor]:
    """The digits of each row that fill whole bytes, as (rows, bytes, 5), and those left over."""
    whole = block.shape[1] // _DIGITS * _DIGITS
    return block[:, :whole].unflatten(1, (whole // _DIGITS, _DIGITS)), block[:, whole:]


def _digit_blocks(digits: Tensor, packed: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Whole blocks of digits with their bytes, then the rest."""
    whole = digits.numel() // CODE_BLOCK * _DIGIT_BYTES
    shares = [packed[:whole].view(-1, _DIGIT_BYTES), packed[whole:].view(1, -1)]
    full = (share for share in shares if share.numel())
    return zip(rows(digits, CODE_BLOCK), full, strict=True)
