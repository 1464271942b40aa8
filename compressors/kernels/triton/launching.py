"""The launch of Triton's kernels, and the number of programs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def launch(
    kernel: Any, grid: tuple[int, ...], where: Tensor, *arguments: Any, **sizes: Any
) -> None:
    """Launch one of Triton's kernels on the device of `where`. (Callbacks of collectives run on
    threads whose current device may be another one.) Products and sums are only fused if a kernel
    says so, so that a rank subtracts from its residual exactly the values that others decode."""
    with torch.cuda.device_of(where):
        kernel[grid](*arguments, **sizes, enable_fp_fusion=False)


def cdiv(count: int, size: int) -> int:
    """count / size, rounded up. Triton's own function takes ten times as long."""
    return -(-count // size)


def power_of_2(count: int) -> int:
    """The smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()
