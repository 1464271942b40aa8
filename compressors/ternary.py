"""Five consecutive digits of base 3 in a byte: 3**5 = 243, so 1.6 bits each (1.585 in theory)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
import torch
from torch import Tensor

from compressors.norms import on_numpy
from compressors.rows import BLOCK, rows

_DIGITS = 5
_PER_BLOCK = -(-BLOCK // _DIGITS)


def ternary_nbytes(count: int) -> int:
    """Bytes of `count` digits: each block is filled up to a multiple of five."""
    whole, rest = divmod(count, BLOCK)
    return whole * _PER_BLOCK - (-rest // _DIGITS)


def pack_digits(digits: Tensor, out: Tensor) -> None:
    """Pack flat `digits` (0, 1 or 2 as floating-point numbers) into flat `out` (uint8)."""
    powers = 3.0 ** torch.arange(_DIGITS, dtype=digits.dtype, device=digits.device)
    for block, share in _blocks(digits, out):
        fives, rest = _fives(block)
        share[:, : fives.shape[1]] = fives @ powers
        if rest.numel():
            share[:, -1] = rest @ powers[: rest.shape[1]]


def unpack_digits(packed: Tensor, values: Tensor, out: Tensor) -> None:
    """Fill flat `out` with the `values` (three) of the digits. Bytes above 242 decode as well."""
    table = values[_digits_of_bytes().to(values.device)]
    for block, share in _blocks(out, packed):
        fives, rest = _fives(block)
        whole = share[:, : fives.shape[1]]
        if on_numpy(out):
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


def _blocks(digits: Tensor, packed: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Whole blocks of digits with their bytes, then the rest."""
    whole = digits.numel() // BLOCK * _PER_BLOCK
    shares = [packed[:whole].view(-1, _PER_BLOCK), packed[whole:].view(1, -1)]
    return zip(rows(digits, BLOCK), (share for share in shares if share.numel()), strict=True)
