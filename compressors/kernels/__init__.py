"""Kernels: the loops over all elements of a gradient, once for the host and once for a device.

`host` works with NumPy on the memory of CPU tensors, in blocks that fit the cache; `device` works
with torch operations on tensors of any device. Both hold the functions that `Kernels` declares,
with the same arguments and results, and `kernels_for` says which of them a tensor is for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from compressors.kernels import device, host
from compressors.kernels.blocks import (
    Array,
    Flag,
    Scalar,
    Selected,
    ThresholdSearch,
    check_same_length,
    fresh,
    is_host,
    on_host,
)

__all__ = [
    "Array",
    "Flag",
    "Kernels",
    "Scalar",
    "Selected",
    "add_and_norm",
    "all_finite",
    "check_same_length",
    "fresh",
    "kernels_for",
    "on_host",
    "squared_norm",
    "squared_norms",
]


class Kernels(Protocol):
    """This declares the functions that both modules hold.

    All tensors are flat. `add`, where it is not None, has the dtype, length and device of `x` and
    is added to it in place first. Counts satisfy 1 <= k <= numel < 2**31, or k = 0 if numel is 0.
    """

    def squared_norm(self, x: Tensor) -> Scalar:
        """||x||^2, accumulated in double precision."""

    def add_and_norm(self, memory: Tensor, tensor: Tensor) -> Scalar:
        """memory += tensor in place; returns ||memory||^2."""

    def largest(self, x: Tensor, k: int) -> Tensor:
        """Ascending positions (int32) of the `k` elements of largest magnitude."""

    def kth_largest(self, x: Tensor, k: int) -> Scalar:
        """The k-th largest element of `x`; NaN counts as the largest."""

    def select(self, x: Tensor, k: int, add: Tensor | None) -> Selected:
        """The `k` elements of largest magnitude."""

    def select_above(self, x: Tensor, threshold: Scalar, k: int, add: Tensor | None) -> Selected:
        """The elements whose magnitude reaches `threshold` (rounded to the dtype of `x`).

        If there are more than `k` of them, the `k` largest; if there are none, the largest of all
        elements."""

    def select_by_count(
        self, x: Tensor, k: int, add: Tensor | None, search: ThresholdSearch
    ) -> Selected:
        """As `select_above`, with the threshold that `search` finds by counting; k < numel.

        Where the threshold is reached by more than `k` elements, the `k` largest."""

    def select_bins(self, x: Tensor, bin_size: int, k: int, add: Tensor | None) -> Selected:
        """The elements x_i != 0 with |x_i + latest_i| at or above the maximum of |x| over their bin
        of `bin_size` neighbours (1 to CACHE_BLOCK); latest is `add`, or `x` if that is None.

        If there are more than `k` of them, the `k` largest; if there are none, the largest of all
        elements."""

    def set_bits(self, positions: Tensor, present: Tensor | None, out: Tensor) -> None:
        """Make `out` (uint8) a bit map, the first bit in a byte's lowest, with those set that are
        at `positions` (ascending).

        present: of which positions that is so (bool); None: of all. On the host always None."""

    def find_bits(self, data: Tensor, count: int) -> Tensor:
        """Ascending positions of the first `count` bits that are set in `data` (uint8).

        If fewer are set, there are as many positions as those, on a device followed by
        8 * len(data) up to `count`. On the host int32 if that can hold them, else int64."""


def kernels_for(tensor: Tensor) -> Kernels:
    """The module whose functions `tensor` is for: `host` for CPU tensors of float32 or float64,
    `device` for all others."""
    return host if on_host(tensor) else device


def squared_norm(tensor: Tensor) -> Scalar:
    """||tensor||^2 of a flat tensor."""
    return kernels_for(tensor).squared_norm(tensor)


def squared_norms(tensors: Sequence[Tensor]) -> Tensor:
    """The squared norm of each of flat `tensors`, of one device: float64, flat, where they are."""
    if not tensors:
        return torch.zeros(0, dtype=torch.float64)
    if is_host(tensors[0].device):
        return torch.tensor([squared_norm(tensor) for tensor in tensors], dtype=torch.float64)
    norms = torch._foreach_norm([t.detach() for t in tensors], 2, dtype=torch.float64)
    return torch.stack(norms).square()


def all_finite(tensor: Tensor) -> Flag:
    """Whether all elements are finite."""
    total = tensor.sum(dtype=torch.float64).isfinite()
    if is_host(tensor.device):
        return bool(total) or bool(tensor.isfinite().all())
    return total if tensor.dtype != torch.float64 else tensor.isfinite().all()


def add_and_norm(memory: Tensor, tensor: Tensor) -> Scalar:
    """memory += tensor in place; returns ||memory||^2, in one pass over the memory on a CPU.

    ValueError unless both are flat and equally long."""
    check_same_length(memory, tensor)
    same = tensor.dtype == memory.dtype and tensor.device == memory.device
    return (kernels_for(memory) if same else device).add_and_norm(memory, tensor)
