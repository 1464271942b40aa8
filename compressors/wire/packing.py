"""The bit packer: whole numbers below a power of two, or below 3, in as few bytes as they take.

A number is cut into digits of 8, 4, 2 and 1 bits, the lowest bits first; a number below 3 is one
digit of base 3. A byte holds several digits of one base: five of base 3, since 3**5 = 243. The
digits of all numbers are cut into as many runs of equal length, which are laid above each other in
the same bytes: byte j = sum over i of base**i * digit[j + i * length].

What works on `Numbers` takes what `Kernels.native` gives: on the host NumPy arrays, which share the
memory of tensors, since NumPy starts an operation on a small array five times faster.
"""

from __future__ import annotations

from functools import cache
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compressors.kernels import kernels_for
from compressors.kernels.blocks import CODE_BLOCK, Array, Flag, fill_up, scratch

Numbers = Any
"""A NumPy array or a tensor."""

_CPU = torch.device("cpu")
_PER_BYTE = {256: 1, 16: 2, 4: 4, 3: 5, 2: 8}
"""How many digits of a base a byte holds."""


# Numbers -----------------------------------------------------------------------------------------


def numbers_nbytes(count: int, levels: int) -> int:
    """Bytes of `count` numbers below `levels`, which is a power of two up to 2**31, or 3."""
    return sum(-(-count // _PER_BYTE[base]) for _, base in _digits(levels))


def pack_numbers(numbers: Numbers, levels: int, count: int, out: Numbers) -> None:
    """Pack `numbers`, then zeros up to `count` numbers, into `out`.

    numbers: (..., at most `count`), uint8 or int32, each from 0 to `levels` - 1.
    out: (..., numbers_nbytes(count, levels)), uint8."""
    start = 0
    for low, base in _digits(levels):
        runs = _PER_BYTE[base]
        length = -(-count // runs)
        folded = out[..., start : start + length]
        start += length
        digits = numbers >> low if low else numbers
        if base << low < levels:
            digits = digits & (base - 1)
        if isinstance(digits, Tensor):
            digits = fill_up(digits.to(torch.uint8), runs * length).unflatten(-1, (runs, length))
            if runs > 1:
                digits = digits * _powers(base, digits.device)
            torch.sum(digits, -2, dtype=torch.uint8, out=folded)
            continue
        digits = _filled_up(digits, runs * length)
        np.copyto(folded, digits[..., (runs - 1) * length :])
        for i in reversed(range(runs - 1)):
            folded *= base
            folded += digits[..., i * length : (i + 1) * length]


def unpack_numbers(data: Numbers, levels: int, count: int) -> tuple[Numbers, Flag]:
    """The numbers (..., count) that `pack_numbers` packed into `data`, as uint8, or int32 if
    `levels` > 256; and whether more than zeros follows them there.

    They are valid until the next call, and may be a view of `data`. 1 < levels <= 2**31."""
    numbers, start, follows = None, 0, False
    for low, base in _digits(levels):
        length = -(-count // _PER_BYTE[base])
        digits = _unfolded(data[..., start : start + length], base, "digits" if low else "numbers")
        start += length
        if digits.shape[-1] > count:
            follows = follows | digits[..., count:].any()
            digits = digits[..., :count]
        if levels > 256:
            digits = digits.int() if isinstance(digits, Tensor) else digits.astype(np.int32)
        if numbers is None:
            numbers = digits
        elif isinstance(digits, Tensor):
            numbers = numbers.add(digits, alpha=1 << low)
        else:
            numbers |= digits * (1 << low)
    return numbers, follows


@cache
def _digits(levels: int) -> tuple[tuple[int, int], ...]:
    """(lowest bit, base) of each digit that numbers below `levels` are cut into."""
    if levels == 3:
        return ((0, 3),)
    digits, low = [], 0
    while 1 << low < levels:
        base = next(base for base in (256, 16, 4, 2) if base << low <= levels)
        digits.append((low, base))
        low += base.bit_length() - 1
    return tuple(digits)


def _unfolded(folded: Numbers, base: int, use: str) -> Numbers:
    """The digits (..., all that fit) of packed bytes."""
    runs, length = _PER_BYTE[base], folded.shape[-1]
    if runs == 1:
        return folded
    if isinstance(folded, Tensor):
        return (folded.unsqueeze(-2) // _powers(base, folded.device) % base).flatten(-2)
    digits = _spare(use, folded, runs * length)
    for i in range(runs):
        digit = digits[..., i * length : (i + 1) * length]
        np.floor_divide(folded, base**i, out=digit)
        if base == 3:
            digit -= digit // 3 * 3  # much faster than a remainder
        elif i < runs - 1:
            digit &= base - 1
    return digits


def _filled_up(digits: Array, size: int) -> Array:
    """`digits` as uint8, with zeros up to `size`."""
    count = digits.shape[-1]
    if digits.dtype == np.uint8 and count == size:
        return digits
    filled = _spare("digits", digits, size)
    filled[..., :count] = digits  # upper bits are dropped
    filled[..., count:] = 0
    return filled


def _spare(use: str, like: Array, size: int) -> Array:
    """(..., size) uint8 of working memory, with the leading dimensions of `like`."""
    shape = (*like.shape[:-1], size)
    return scratch(use, prod(shape), torch.uint8, _CPU).numpy().reshape(shape)


@cache
def _powers(base: int, where: torch.device) -> Tensor:
    """What the digits of a byte are multiplied by: (digits, 1), uint8."""
    powers = [[base**i] for i in range(_PER_BYTE[base])]
    return torch.tensor(powers, dtype=torch.uint8).to(where)


# Codes of values ---------------------------------------------------------------------------------
#
# Eight codes of b bits take b bytes, five of base 3 one byte. Codes are packed block by block of
# CODE_BLOCK, each filled up to a multiple of eight (five). They lie in memory as eight rows, their
# bytes as b rows. On a device all blocks are packed by the same few operations: the rows of the
# last one are made as long as those of the others, and what that adds is cut off again.


def codes_nbytes(count: int, levels: int) -> int:
    """Bytes of `count` codes below `levels`."""
    rows, byte_rows = _rows(levels)
    blocks, rest = divmod(count, CODE_BLOCK)
    return (blocks * -(-CODE_BLOCK // rows) - (-rest // rows)) * byte_rows


def pack_codes(q: Tensor, levels: int, offset: int, out: Tensor) -> None:
    """Pack the codes q + offset, each below `levels`, into `out`: of a block on the host, of a
    whole tensor on a device.

    q: flat whole numbers. out: uint8, codes_nbytes elements."""
    rows, byte_rows = _rows(levels)
    codes = scratch("codes", q.numel(), torch.int8, q.device).copy_(q).add_(offset)
    if kernels_for(q).by_blocks:
        numbers = codes.numpy().view(np.uint8)
        pack_numbers(numbers, levels, -(-q.numel() // rows) * rows, out.numpy())
        return
    blocks = _by_columns(codes.view(torch.uint8), CODE_BLOCK, rows)
    packed = codes.new_empty(len(blocks), blocks.shape[1] // rows * byte_rows, dtype=torch.uint8)
    pack_numbers(blocks, levels, blocks.shape[1], packed)
    out.copy_(_flat(packed, out.numel(), packed.shape[1], byte_rows))


def unpack_codes(packed: Tensor, levels: int, offset: int, out: Tensor) -> None:
    """Fill flat `out` (floating point) with the q that `pack_codes` packed."""
    rows, byte_rows = _rows(levels)
    if kernels_for(out).by_blocks:
        codes, _ = unpack_numbers(packed.numpy(), levels, packed.numel() // byte_rows * rows)
        codes = torch.from_numpy(codes[: out.numel()])
        out.copy_(codes.sub_(offset).view(torch.int8))
        return
    data = _by_columns(packed, codes_nbytes(CODE_BLOCK, levels), byte_rows)
    byte_row, power, base = _column(levels, packed.device)
    digits = data.unflatten(1, (byte_rows, -1)).index_select(1, byte_row)
    digits = digits.unflatten(1, (-1, rows)) // power % base
    q = digits[:, 0]
    for i, (low, _) in enumerate(_digits(levels)[1:], start=1):
        q = q.add(digits[:, i], alpha=1 << low)
    torch.sub(_flat(q.flatten(1), out.numel(), CODE_BLOCK, rows), float(offset), out=out)


def _rows(levels: int) -> tuple[int, int]:
    """(codes, bytes) of a column."""
    return (5, 1) if levels == 3 else (8, levels.bit_length() - 1)


@cache
def _column(levels: int, where: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Where each digit of each code of a column lies: its byte, what it is multiplied by there (an
    element for each digit and code), and its base (for each digit)."""
    rows, _ = _rows(levels)
    byte_row, power, start = [], [], 0
    bases = [base for _, base in _digits(levels)]
    for base in bases:
        in_row = -(-rows // _PER_BYTE[base])  # bytes of this digit
        byte_row += [start + i % in_row for i in range(rows)]
        power += [base ** (i // in_row) for i in range(rows)]
        start += in_row
    powers = torch.tensor(power, dtype=torch.uint8).view(-1, rows, 1)
    tensors = torch.tensor(byte_row), powers, torch.tensor(bases, dtype=torch.uint8).view(-1, 1, 1)
    return tuple(tensor.to(where) for tensor in tensors)  # type: ignore[return-value]


def _by_columns(x: Tensor, size: int, rows: int) -> Tensor:
    """(blocks, elements): flat `x` in blocks of `size`, each filled up to whole columns, and the
    last one to as many columns as the others have."""
    whole = x.numel() // size * size
    columns = -(-size // rows)
    blocks = fill_up(x[:whole].view(-1, size), columns * rows)
    rest = x[whole:]
    rest = fill_up(rest, -(-rest.numel() // rows) * rows).view(rows, -1)
    if not whole:
        return rest.view(1, -1)
    return torch.cat([blocks, fill_up(rest, columns).view(1, -1)]) if rest.numel() else blocks


def _flat(blocks: Tensor, count: int, size: int, rows: int) -> Tensor:
    """The inverse of `_by_columns`: the first `size` elements of each block, `count` in all."""
    whole = count // size
    if whole == 0 or whole == len(blocks):
        return blocks[:, :size].reshape(-1)[:count]
    columns = -(-(count - whole * size) // rows)
    rest = blocks[whole].view(rows, -1)[:, :columns].reshape(-1)
    return torch.cat([blocks[:whole, :size].reshape(-1), rest])[:count]
