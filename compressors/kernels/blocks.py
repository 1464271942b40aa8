"""What the kernels for the host and for a device share: blocks, working memory, results.

Everything here works on flat tensors of any device. Two block sizes matter: selection reads
`CACHE_BLOCK` elements at a time, coding works on `CODE_BLOCK` elements at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]

Count = Callable[[float], int]
"""How many magnitudes reach a threshold: right up to k, and anything above k beyond."""

ThresholdSearch = Callable[[Count, float, float, int], float]
"""(count, mean magnitude, largest magnitude, k) -> a threshold."""

# Elements that fit the second-level cache together with some scratch.
CACHE_BLOCK = 1 << 17

# Elements that quantizers work on at once on a CPU: 2 MB of float32, so that a block and its
# scratch stay in the last-level cache, and starting some 20 operations for it costs little beside
# doing them (measured: a quarter of this takes 1.3 to 1.8 times as long). The bytes on the wire are
# laid out by these blocks, so the number is part of the wire format.
CODE_BLOCK = 1 << 19

_local = threading.local()


class Selected(NamedTuple):
    """This is the result of a selection: the elements that are kept of a flat tensor x.

    indices: their positions (int32, ascending). values: the elements at those positions.
    total: ||x||^2 over all elements of x.
    """

    indices: Tensor
    values: Tensor
    total: float


def on_host(tensor: Tensor) -> bool:
    """Whether NumPy can work on the tensor's own memory, in a dtype that it is fast at."""
    return tensor.device.type == "cpu" and tensor.dtype in (torch.float32, torch.float64)


def check_same_length(memory: Tensor, tensor: Tensor) -> None:
    """Raise ValueError unless both tensors are flat and equally long."""
    if memory.dim() != 1 or memory.shape != tensor.shape:
        raise ValueError(
            f"memory and tensor must be flat and equally long, got shapes "
            f"{tuple(memory.shape)} and {tuple(tensor.shape)}"
        )


def widened(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in: float64 for float64, float32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def scratch(use: str, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Working memory of `count` elements with arbitrary contents, reused from call to call.

    The next call of the same thread with the same `use` (a name) and dtype returns the same memory.
    On devices other than the CPU the memory is new: their allocators keep what was freed."""
    if device.type != "cpu":
        return torch.empty(count, dtype=dtype, device=device)
    buffers: dict[tuple[str, torch.dtype], Tensor] = _local.__dict__.setdefault("buffers", {})
    buffer = buffers.get((use, dtype))
    if buffer is None or buffer.numel() < count:
        # Somewhat more than a block, because packing pads it.
        buffer = buffers[use, dtype] = torch.empty(max(count, CODE_BLOCK + 64), dtype=dtype)
    return buffer[:count]


def scratch_like(use: str, tensor: Tensor) -> Tensor:
    """Scratch memory with the length, dtype and device of a flat `tensor`."""
    return scratch(use, tensor.numel(), tensor.dtype, tensor.device)


def fresh(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A new tensor of `count` elements with arbitrary contents.

    NumPy asks Linux for large pages, which `torch.empty` does not: to write 50 MB for the first
    time then takes 8 ms instead of 24 (the copy of a gradient of 100 MB: 7)."""
    if device.type != "cpu" or count == 0:
        return torch.empty(count, dtype=dtype, device=device)
    return torch.from_numpy(np.empty(count * dtype.itemsize, np.uint8)).view(dtype)


def block_bounds(x: Tensor) -> Iterator[tuple[int, int]]:
    """(start, stop) of each block of `CODE_BLOCK` elements of flat `x`.

    On a device other than the CPU the whole tensor is one block: starting an operation is what
    costs there."""
    size = CODE_BLOCK if x.device.type == "cpu" else max(x.numel(), 1)
    return ((start, min(start + size, x.numel())) for start in range(0, x.numel(), size))


def rows(x: Tensor, width: int) -> list[Tensor]:
    """Flat `x` as a matrix of `width` columns, followed by a matrix of one row for the elements
    that do not fill a row. Only the matrices that have elements are in the list."""
    whole = x.numel() // width * width
    if whole and whole == x.numel():
        return [x.view(-1, width)]
    parts = []
    if whole:
        parts.append(x[:whole].view(-1, width))
    if whole < x.numel():
        parts.append(x[whole:].view(1, -1))
    return parts


def numbers_of_rows(numbers: Tensor, x: Tensor, width: int) -> list[Tensor]:
    """`numbers` holds equally many numbers for each row of `x`; split it as `rows(x, width)` is
    split: for each of those matrices one that has as many rows."""
    whole = x.numel() // width
    if whole * width == x.numel():
        return [numbers.view(whole, -1)] if whole else []
    each = numbers.numel() // (whole + 1)
    parts = [numbers[whole * each :].view(1, -1)]
    return [numbers[: whole * each].view(whole, -1), *parts] if whole else parts


def reduce_rows(x: Tensor, width: int, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """One number for each row of flat `x` (see `rows`), the last of which may be shorter.

    reduce: takes a matrix and gives one number for each of its rows."""
    parts = [reduce(matrix) for matrix in rows(x, width)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
