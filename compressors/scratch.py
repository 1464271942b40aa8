"""Working memory for one block, kept from call to call by each thread, and memory for payloads."""

from __future__ import annotations

import threading

import numpy as np
import torch
from torch import Tensor

from compressors.rows import BLOCK

_local = threading.local()


def scratch(use: str, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`count` elements to write to, with anything in them. The next call with the same `use` (a
    name) and dtype gives the same memory. New memory on devices other than the CPU, whose
    allocators keep what was freed."""
    if device.type != "cpu":
        return torch.empty(count, dtype=dtype, device=device)
    buffers: dict[tuple[str, torch.dtype], Tensor] = _local.__dict__.setdefault("buffers", {})
    buffer = buffers.get((use, dtype))
    if buffer is None or buffer.numel() < count:
        # With some more than a block: packing pads it.
        buffer = buffers[use, dtype] = torch.empty(max(count, BLOCK + 64), dtype=dtype)
    return buffer[:count]


def like(use: str, tensor: Tensor) -> Tensor:
    """Scratch of the length, dtype and device of a flat `tensor`."""
    return scratch(use, tensor.numel(), tensor.dtype, tensor.device)


def fresh(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A new tensor of `count` elements with anything in them.

    NumPy asks Linux for large pages, which `torch.empty` does not: to write 50 MB for the first
    time then takes 8 ms instead of 24 (the copy of a gradient of 100 MB: 7)."""
    if device.type != "cpu" or count == 0:
        return torch.empty(count, dtype=dtype, device=device)
    return torch.from_numpy(np.empty(count * dtype.itemsize, np.uint8)).view(dtype)
