"""How Triton's kernels are started, and over how many programs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def launch(
    kernel: Any, grid: tuple[int, ...], where: Tensor, *arguments: Any, **sizes: Any
) -> None:
    """Start one of Triton's kernels on the device of `where`. Callbacks of collectives run on
    threads whose current device may be another one. Products and sums are never fused but where a
    kernel says so: what a rank takes off its residual is exactly what the others decode."""
    with torch.cuda.device_of(where):
        kernel[grid](*arguments, **sizes, enable_fp_fusion=False)


def cdiv(count: int, size: int) -> int:
    """How many pieces of `size` hold `count`. Triton's own takes ten times as long."""
    return -(-count // size)


def power_of_2(count: int) -> int:
    """The smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()
