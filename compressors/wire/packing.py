"""The bit packer: packs whole numbers below a power of two, or below 3, into few bytes.

A number is cut into digits of 8, 4, 2 and 1 bits, the lowest bits first; a number below 3 is one
digit of base 3. A byte holds several digits of one base: five of base 3, because 3**5 = 243. The
digits of all numbers are cut into runs of equal length, as many as a byte holds digits. Byte j has
digit j of each run: byte j = sum over i of base**i * digit[j + i * length].

Functions of `Numbers` accept the results of `Kernels.native`.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from compressors.kernels import kernels_for, kernels_of
from compressors.kernels.blocks import CODE_BLOCK, Flag, Numbers, fill_up, scratch

_PER_BYTE = {256: 1, 16: 2, 4: 4, 3: 5, 2: 8}
"""The number of digits of each base in a byte."""


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
        kernels_of(digits).fold(digits, base, runs, folded)


def unpack_numbers(data: Numbers, levels: int, count: int) -> tuple[Numbers, Flag]:
    """(numbers, follows): the numbers (..., count) that `pack_numbers` packed into `data`, as
    uint8, or int32 if `levels` > 256; and whether some number after them is not zero.

    The numbers are valid until the next call, and may be a view of `data`. 1 < levels <= 2**31."""
    kernels, numbers, start, follows = kernels_of(data), None, 0, False
    for low, base in _digits(levels):
        length = -(-count // _PER_BYTE[base])
        folded = data[..., start : start + length]
        digits = kernels.unfold(folded, base, _PER_BYTE[base], "digits" if low else "numbers")
        start += length
        if digits.shape[-1] > count:
            follows = follows | digits[..., count:].any()
            digits = digits[..., :count]
        digits = kernels.wide(digits) if levels > 256 else digits
        if numbers is None:
            numbers = digits
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


# Codes of values ---------------------------------------------------------------------------------
#
# Eight codes of b bits take b bytes, five codes of base 3 one byte. Codes are packed in blocks of
# CODE_BLOCK, each padded to a multiple of eight (five). In memory a block of codes is eight rows,
# and its bytes are b rows. On a device all blocks are packed by the same few operations: the rows
# of the last block are padded to the length of the others, and the padding is cut off again.


def codes_nbytes(count: int, levels: int) -> int:
    """Bytes of `count` codes below `levels`."""
    if levels == 256:
        return count
    rows, byte_rows = _rows(levels)
    blocks, rest = divmod(count, CODE_BLOCK)
    return (blocks * -(-CODE_BLOCK // rows) - (-rest // rows)) * byte_rows


def pack_codes(q: Tensor, levels: int, offset: int, out: Tensor, tensors: int = 1) -> None:
    """Pack the codes q + offset, each below `levels`, into `out`; with 256 levels q in two's
    complement.

    q: flat whole numbers. out: uint8, codes_nbytes elements. tensors: number of tensors of equal
    length in q, each packed separately, on a device all at once."""
    if levels == 256:
        out.view(torch.int8).copy_(q)
        return
    rows, byte_rows = _rows(levels)
    codes = scratch("codes", q.numel(), torch.int8, q.device).copy_(q).add_(offset)
    codes, native = codes.view(torch.uint8), kernels_for(q).native
    if tensors > 1:
        slots = _blocks(out.view(tensors, -1), codes_nbytes(CODE_BLOCK, levels))
        for piece, slot in zip(_blocks(codes.view(tensors, -1), CODE_BLOCK), slots, strict=True):
            pack_numbers(piece, levels, -(-piece.shape[-1] // rows) * rows, slot)
        return
    if q.numel() <= CODE_BLOCK:
        pack_numbers(native(codes), levels, -(-q.numel() // rows) * rows, native(out))
        return
    blocks = _by_columns(codes, CODE_BLOCK, rows)
    packed = out.new_empty(len(blocks), blocks.shape[1] // rows * byte_rows)
    pack_numbers(native(blocks), levels, blocks.shape[1], native(packed))
    out.copy_(_flat(packed, out.numel(), packed.shape[1], byte_rows))


def unpack_codes(packed: Tensor, levels: int, offset: int, out: Tensor, tensors: int = 1) -> None:
    """Fill flat `out` (floating point) with the q that `pack_codes` packed."""
    if levels == 256:
        out.copy_(packed.view(torch.int8))
        return
    rows, byte_rows = _rows(levels)
    if tensors > 1:
        pieces = _blocks(packed.view(tensors, -1), codes_nbytes(CODE_BLOCK, levels))
        for piece, slot in zip(pieces, _blocks(out.view(tensors, -1), CODE_BLOCK), strict=True):
            numbers, _ = unpack_numbers(piece, levels, piece.shape[-1] // byte_rows * rows)
            slot.copy_(numbers[..., : slot.shape[-1]].sub(offset).view(torch.int8))
        return
    several = out.numel() > CODE_BLOCK
    data = _by_columns(packed, codes_nbytes(CODE_BLOCK, levels), byte_rows) if several else packed
    count = data.shape[-1] // byte_rows * rows
    numbers, _ = unpack_numbers(kernels_for(out).native(data), levels, count)
    codes = torch.as_tensor(numbers, device=out.device)
    codes = _flat(codes, out.numel(), CODE_BLOCK, rows) if several else codes[: out.numel()]
    out.copy_(codes.sub_(offset).view(torch.int8))


def pack_bits(bits: Tensor, tensors: int) -> Tensor:
    """`Kernels.pack_bits` for each of `tensors` consecutive tensors of equal length."""
    if tensors > 1:
        each = bits.view(tensors, -1)
        bits = fill_up(each, -(-each.shape[1] // 8) * 8).view(-1)
    return kernels_for(bits).pack_bits(bits)


def unpack_bits(packed: Tensor, out: Tensor, tensors: int) -> None:
    """Fill flat `out` (floating point) with the bits of `pack_bits`, as 1 and 0."""
    if tensors == 1 or out.numel() // tensors % 8 == 0:
        kernels_for(out).unpack_bits(packed, out)
        return
    whole = torch.empty(8 * packed.numel(), dtype=out.dtype, device=out.device)
    kernels_for(out).unpack_bits(packed, whole)
    each = out.view(tensors, -1)
    each.copy_(whole.view(tensors, -1)[:, : each.shape[1]])


def _blocks(tensors: Tensor, size: int) -> list[Tensor]:
    """(tensors, blocks, elements): the rows of a matrix in blocks of `size` elements; then their
    last, shorter blocks. Empty ones are left out."""
    whole = tensors.shape[1] // size * size
    pieces = tensors[:, :whole].unflatten(1, (-1, size)), tensors[:, None, whole:]
    return [piece for piece in pieces if piece.numel()]


def _rows(levels: int) -> tuple[int, int]:
    """(number of codes, number of bytes) of a column."""
    return (5, 1) if levels == 3 else (8, levels.bit_length() - 1)


def _by_columns(x: Tensor, size: int, rows: int) -> Tensor:
    """(blocks, elements): flat `x` in blocks of `size`, each padded to whole columns, and the last
    one to the number of columns of the others."""
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
