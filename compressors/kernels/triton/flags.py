"""Triton's kernels that make flags, and that change a tensor only if a flag is set.

torch's operations on a flag read and write the whole tensor whether the flag is set or not. These
kernels read the flag first, and do not touch the tensor if there is nothing to do. Nonfinite
buckets are rare, so the kernels cost next to nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from compressors.kernels.triton.launching import cdiv, launch

BLOCK = 4096
PROGRAMS = 1024
_OPTIONS: dict[str, Any] = {"block": BLOCK, "num_warps": 8}


def fill_if(flag: Tensor, x: Tensor, value: float) -> None:
    """See `blocks.fill_if`. x: contiguous float32, as in all functions here."""
    launch(_fill_if, _grid(x), x, flag, x, value, x.numel(), **_OPTIONS)


def add_if(flag: Tensor, x: Tensor, y: Tensor, alpha: float) -> None:
    """See `blocks.add_if`."""
    launch(_add_if, _grid(x), x, flag, x, y, alpha, x.numel(), **_OPTIONS)


def scale_if(flag: Tensor, x: Tensor, factor: float) -> None:
    """See `blocks.scale_if`."""
    launch(_scale_if, _grid(x), x, flag, x, factor, x.numel(), **_OPTIONS)


def clamp_if_above(energies: Tensor, most: float, x: Tensor, largest: float) -> None:
    """Clamp the elements of x to [-largest, largest] unless the sum of `energies` (float64, flat)
    is at most `most`."""
    sizes = (energies.numel(), x.numel())
    launch(_clamp_if_above, _grid(x), x, energies, most, x, largest, *sizes, **_OPTIONS)


def any_nan(x: Tensor) -> Tensor:
    """Whether an element is NaN (0-dim, bool)."""
    found = torch.empty((), dtype=torch.bool, device=x.device)
    launch(_any_nan, (1,), x, x, found, x.numel(), block=1024)
    return found


def judge(energies: Tensor, most: float, total: Tensor, nonfinite: Tensor) -> Tensor:
    """See `kernels.judge`."""
    found = torch.empty((), dtype=torch.bool, device=energies.device)
    launch(
        *(_judge, (1,), energies),
        *(energies, most, total, nonfinite, found, energies.numel()),
        block=1024,
    )
    return found


def _grid(x: Tensor) -> tuple[int]:
    return (min(cdiv(x.numel(), BLOCK), PROGRAMS),)


@triton.jit
def _fill_if(flag, x, value, numel, block: tl.constexpr):
    if tl.load(flag):
        lanes = tl.arange(0, block)
        first = tl.program_id(0).to(tl.int64) * block
        for start in range(first, numel, tl.num_programs(0) * block):
            tl.store(x + start + lanes, lanes * 0.0 + value, mask=lanes < numel - start)


@triton.jit
def _add_if(flag, x, y, alpha, numel, block: tl.constexpr):
    if tl.load(flag):
        lanes = tl.arange(0, block)
        first = tl.program_id(0).to(tl.int64) * block
        for start in range(first, numel, tl.num_programs(0) * block):
            inside = lanes < numel - start
            added = alpha * tl.load(y + start + lanes, mask=inside, other=0.0)
            value = tl.load(x + start + lanes, mask=inside, other=0.0)
            tl.store(x + start + lanes, value + added, mask=inside)


@triton.jit
def _scale_if(flag, x, factor, numel, block: tl.constexpr):
    if tl.load(flag):
        lanes = tl.arange(0, block)
        first = tl.program_id(0).to(tl.int64) * block
        for start in range(first, numel, tl.num_programs(0) * block):
            inside = lanes < numel - start
            value = tl.load(x + start + lanes, mask=inside, other=0.0)
            tl.store(x + start + lanes, value * factor, mask=inside)


@triton.jit
def _clamp_if_above(energies, most, x, largest, count, numel, block: tl.constexpr):
    lanes = tl.arange(0, block)
    total = tl.zeros((block,), tl.float64)
    for some in range(0, count, block):
        total += tl.load(energies + some + lanes, mask=lanes < count - some, other=0.0)
    if (tl.sum(total) <= most) == 0:  # NaN is not
        first = tl.program_id(0).to(tl.int64) * block
        for start in range(first, numel, tl.num_programs(0) * block):
            inside = lanes < numel - start
            value = tl.load(x + start + lanes, mask=inside, other=0.0)
            # NaN stays.
            value = tl.where(value > largest, largest, tl.where(value < -largest, -largest, value))
            tl.store(x + start + lanes, value, mask=inside)


@triton.jit
def _any_nan(x, found, numel, block: tl.constexpr):
    lanes = tl.arange(0, block)
    nans = tl.full((), 0, tl.int32)
    for start in range(0, numel, block):
        value = tl.load(x + start + lanes, mask=lanes < numel - start, other=0.0)
        nans += tl.sum((value != value).to(tl.int32))
    tl.store(found, nans > 0)


@triton.jit
def _judge(energies, most, total, nonfinite, found, numel, block: tl.constexpr):
    lanes = tl.arange(0, block)
    added, bad = tl.full((), 0.0, tl.float64), tl.full((), 0, tl.int32)
    infinite = tl.full((), 0, tl.int32)
    for start in range(0, numel, block):
        energy = tl.load(energies + start + lanes, mask=lanes < numel - start, other=0.0)
        added += tl.sum(energy)
        bad += tl.sum(1 - (energy <= most).to(tl.int32))  # nan is not
        infinite += tl.sum(1 - (energy < float("inf")).to(tl.int32))
    tl.store(total, tl.load(total) + added)
    tl.store(nonfinite, tl.load(nonfinite) + (bad > 0).to(tl.float64))
    tl.store(found, infinite > 0)
