"""Flat tensors cut into blocks, and seen as rows of equal length, the last of which may be
shorter."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# Elements that quantizers work on at once on a CPU: 2 MB of float32, so that it and some scratch
# stay in the last-level cache, and starting some 20 operations for it costs little beside doing
# them (measured: a quarter of this takes 1.3 to 1.8 times as long). The wire depends on it.
BLOCK = 1 << 19


def rows(x: Tensor, width: int) -> list[Tensor]:
    """Flat `x` as matrices of `width` columns, and what is left at the end as one of one row."""
    whole = x.numel() // width * width
    if whole and whole == x.numel():
        return [x.view(-1, width)]
    parts = []
    if whole:
        parts.append(x[:whole].view(-1, width))
    if whole < x.numel():
        parts.append(x[whole:].view(1, -1))
    return parts


def beside(numbers: Tensor, x: Tensor, width: int) -> list[Tensor]:
    """`numbers`, equally many for each row of `x`, split as `rows(x, width)` is: for each of its
    matrices one with as many rows."""
    whole = x.numel() // width
    if whole * width == x.numel():
        return [numbers.view(whole, -1)] if whole else []
    each = numbers.numel() // (whole + 1)
    parts = [numbers[whole * each :].view(1, -1)]
    return [numbers[: whole * each].view(whole, -1), *parts] if whole else parts


def per_row(x: Tensor, width: int, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """reduce(matrix) gives a number for each of its rows; here of all rows of flat `x`."""
    parts = [reduce(matrix) for matrix in rows(x, width)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
