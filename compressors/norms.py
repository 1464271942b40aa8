"""Squared norms, accumulated in double, that neither overflow nor vanish in single precision."""

from __future__ import annotations

from math import inf
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]

BLOCK = 1 << 17  # elements that fit the second-level cache together with some scratch
_ROW = 2048  # elements summed in the array's own precision; their sums are carried on in double
_TINY = 1e-20  # squares of float32 below 1e-38 vanish: not to be trusted in a sum this small


def on_numpy(tensor: Tensor) -> bool:
    """Whether NumPy can work on the tensor's own memory, in a type that it is fast at."""
    return tensor.device.type == "cpu" and tensor.dtype in (torch.float32, torch.float64)


def squared_norm(tensor: Tensor) -> float:
    """||tensor||^2 of a flat tensor. On a device other than the CPU this waits for the device."""
    if on_numpy(tensor):
        return array_norm(tensor.detach().numpy())
    return float(tensor.detach().double().square().sum())


def add_and_norm(memory: Tensor, tensor: Tensor) -> float:
    """memory += tensor in place; returns ||memory||^2. One pass over the memory on a CPU."""
    check_same_length(memory, tensor)
    if not on_numpy(memory) or tensor.dtype != memory.dtype or tensor.device != memory.device:
        return squared_norm(memory.detach().add_(tensor))
    x, y = memory.detach().numpy(), tensor.detach().numpy()
    total = 0.0
    with np.errstate(all="ignore"):
        for start in range(0, x.size, BLOCK):
            block = x[start : start + BLOCK]
            block += y[start : start + BLOCK]
            total += block_norm(block)
    return trusted(total, x)


def array_norm(x: Array) -> float:
    """||x||^2 of a flat float32 or float64 array."""
    with np.errstate(all="ignore"):
        total = 0.0
        for start in range(0, x.size, BLOCK):
            total += block_norm(x[start : start + BLOCK])
    return trusted(total, x)


def block_norm(block: Array) -> float:
    """||block||^2, to be passed through `trusted` once the blocks are summed up.

    Rows are too short for BLAS to split among threads, so the result depends on `block` alone."""
    rows = block.size // _ROW
    tail = block[rows * _ROW :]
    norm = float(np.dot(tail, tail))
    if rows:
        head = block[: rows * _ROW].reshape(rows, _ROW)
        norm += float(np.matmul(head[:, None, :], head[:, :, None]).sum(dtype=np.float64))
    return norm


def trusted(total: float, x: Array) -> float:
    """`total`, or ||x||^2 anew in double if float32 may have overflowed or underflowed."""
    if x.dtype != np.float32 or _TINY < total < inf:
        return total
    blocks = (x[start : start + BLOCK].astype(np.float64) for start in range(0, x.size, BLOCK))
    return sum((block_norm(block) for block in blocks), 0.0)


def lost(total: float, energy: float) -> float:
    """total - energy, which is what a projection loses; never below 0, nan stays nan."""
    error = total - energy
    return 0.0 if error < 0.0 else error


def check_same_length(memory: Tensor, tensor: Tensor) -> None:
    """ValueError unless both are flat and equally long."""
    if memory.dim() != 1 or memory.shape != tensor.shape:
        raise ValueError(
            f"memory and tensor must be flat and equally long, got shapes "
            f"{tuple(memory.shape)} and {tuple(tensor.shape)}"
        )
