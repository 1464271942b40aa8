"""The kernels as torch operations on whole tensors, for every device and dtype.

The functions are those that `compressors.kernels.host` describes. None of them reads a value, and
the number of operations does not depend on the number of elements. Results have as many places as
were asked for, whatever the data (see `Selected`). Among equal magnitudes any may be chosen. NaN
counts as larger than every threshold, so that it is not hidden. Where Triton's kernels may work on
a tensor (`takes_triton`), they do what they can of this in fewer passes over it.
"""

from __future__ import annotations

from functools import cache
from math import ceil
from types import ModuleType

import torch
from torch import Tensor

from compressors.kernels.blocks import Scalar, Selected, ThresholdSearch, takes_triton

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
_TO_TOP_BYTE = 0x0102040810204080  # times this, bit 8 i of an int64 becomes bit 56 + i


def _triton(*tensors: Tensor | None) -> ModuleType | None:
    """The module that does norms and selections in Triton, if it may for these tensors (all flat,
    equally long). Where one element is all, there is nothing to gain."""
    given = [tensor for tensor in tensors if tensor is not None]
    for x in given:
        if not takes_triton(x) or x.dtype != torch.float32 or x.numel() < 2:
            return None
        if x.device != given[0].device or not x.is_contiguous():
            return None
    from compressors.kernels import triton_select  # here, as Triton need not be installed

    return triton_select


# Norms -------------------------------------------------------------------------------------------


def squared_norm(x: Tensor) -> Scalar:
    if triton := _triton(x):
        return triton.squared_norm(x)
    return torch.linalg.vector_norm(x.detach(), dtype=torch.float64).square()


def add_and_norm(memory: Tensor, tensor: Tensor) -> Scalar:
    if triton := _triton(memory, tensor):
        return triton.add_and_norm(memory, tensor)
    memory = memory.detach().add_(tensor)
    return squared_norm(memory)


# Selection ---------------------------------------------------------------------------------------


def largest(x: Tensor, k: int) -> Tensor:
    if triton := _triton(x):
        return triton.largest(x, k)
    return x.detach().abs().topk(k, sorted=False).indices.sort().values.to(torch.int32)


def kth_largest(x: Tensor, k: int) -> Scalar:
    return x.topk(k).values[-1]


def select(x: Tensor, k: int, add: Tensor | None) -> Selected:
    if triton := _triton(x, add):
        return triton.select(x, k, add)
    total = _added(x, add)
    indices = largest(x, k)
    return Selected(indices, x.index_select(0, indices), total)


def select_above(x: Tensor, threshold: Scalar, k: int, add: Tensor | None) -> Selected:
    if triton := _triton(x, add):
        return triton.select_above(x, threshold, k, add)
    total, magnitude = _added(x, add), x.abs()
    return _largest_except(x, magnitude, magnitude < threshold, k, total)


def select_by_count(x: Tensor, k: int, add: Tensor | None, search: ThresholdSearch) -> Selected:
    if triton := _triton(x, add):
        return triton.select_by_count(x, k, add, search)
    total, magnitude = _added(x, add), x.abs()
    most = magnitude.topk(min(k + 1, x.numel())).values
    threshold = search(most, magnitude.mean(dtype=torch.float64), k)
    return _largest_except(x, magnitude, magnitude < threshold, k, total)


def select_bins(x: Tensor, bin_size: int, k: int, add: Tensor | None) -> Selected:
    latest = x if add is None else add
    total = _added(x, add)
    numel, bins = x.numel(), ceil(x.numel() / bin_size)
    magnitude = x.abs()
    padded = magnitude.new_zeros(bins, bin_size)
    padded.view(-1)[:numel] = magnitude
    peaks = padded.amax(1, keepdim=True).expand(-1, bin_size).reshape(-1)[:numel]
    return _largest_except(x, magnitude, ((x + latest).abs() < peaks) | (x == 0), k, total)


def _added(x: Tensor, add: Tensor | None) -> Scalar:
    """x += add, in place; ||x||^2."""
    return squared_norm(x) if add is None else add_and_norm(x, add)


def _largest_except(
    x: Tensor, magnitude: Tensor, excepted: Tensor, k: int, total: Scalar
) -> Selected:
    """The `k` largest elements that are not `excepted`; if all are, the largest one.

    The bits of numbers that are not negative, read as integers, are ordered as the numbers are.
    With the sign bit set they are negative, and still in this order."""
    bits = magnitude.view(_INTEGERS[x.element_size()])
    sign = torch.iinfo(bits.dtype).min
    best = bits.add(excepted, alpha=sign).topk(k)
    empty = best.values < 0
    empty[:1].fill_(False)
    indices = best.indices.masked_fill(empty, x.numel()).sort().values.to(torch.int32)
    return Selected(indices, take_present(x, indices), total)


def take_present(x: Tensor, indices: Tensor) -> Tensor:
    """The elements of `x` at `indices`, and 0 for every index beyond the last element."""
    values = x.index_select(0, indices.clamp(max=x.numel() - 1))
    return values.masked_fill_(indices >= x.numel(), 0)


# Single bits -------------------------------------------------------------------------------------


def set_bits(positions: Tensor, present: Tensor | None, out: Tensor) -> None:
    bits = torch.zeros(8 * out.numel() + 8, dtype=torch.bool, device=out.device)
    at = positions.long()
    if present is None:
        bits.index_fill_(0, at, True)
    else:
        bits.index_copy_(0, at, present)
    out.copy_(pack_bits(bits)[:-1])


def find_bits(data: Tensor, count: int) -> Tensor:
    rank = torch.arange(count, dtype=torch.int32, device=data.device)
    found = unpack_bits(data).cumsum(0, dtype=torch.int32)
    return torch.searchsorted(found, rank, right=True, out_int32=8 * data.numel() < 2**31)


def pack_bits(bits: Tensor) -> Tensor:
    """Flat `bits` (uint8, 0 or 1, or bool; a multiple of 8 of them), eight to a byte."""
    return (bits.view(torch.int64) * _TO_TOP_BYTE).view(torch.uint8)[7::8]


def unpack_bits(packed: Tensor) -> Tensor:
    """The inverse of `pack_bits`, as uint8."""
    return ((packed[:, None] >> _shifts(packed.device)) & 1).view(-1)


@cache
def _shifts(device: torch.device) -> Tensor:
    """0 to 7."""
    return torch.arange(8, dtype=torch.uint8, device=device)
