"""Kernels: the loops over all elements of a gradient, once for the host and once for a device.

`host` works with NumPy on the memory of CPU tensors, in blocks that fit the cache; `device` works
with torch operations on tensors of any device. Both hold the functions that are described in
`host`, with the same arguments and results, and `kernels_for` says which of them a tensor is for.
Where Triton is installed and a tensor is on a GPU, `device` leaves norms and selections to
`triton_select`; `triton_rows` selects for the shadow ladder, `triton_flags` is for what depends
on a flag.
`triton_codec` and `triton_sparse` write and read payloads on a device where Triton is at hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from types import ModuleType

import torch
from torch import Tensor

from compressors.kernels import device, host
from compressors.kernels.blocks import (
    Flag,
    Scalar,
    check_same_length,
    is_host,
    on_host,
    triton_for_flags,
)


def kernels_for(tensor: Tensor) -> ModuleType:
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


def judge(energies: Tensor, x: Tensor, total: Tensor, spoiled: Tensor) -> Flag:
    """Whether `x` has an element that is not finite. energies: the squared norms of its pieces, of
    a device in float64. Adds them to `total`, and 1 to `spoiled` if one of them is not finite in
    x's precision (float64, one element each)."""
    most = torch.finfo(x.dtype).max
    if triton := triton_for_flags(x):
        return triton.judge(energies, most, total, spoiled)
    fits = (energies <= most).all()  # nan does not
    for energy in energies.tolist() if is_host(x.device) else (energies.sum(),):
        total.add_(energy)
    spoiled.add_(~fits)
    if is_host(x.device):
        return not bool(fits) and not all_finite(x)
    return ~(energies < inf).all()


def all_finite(tensor: Tensor) -> Flag:
    """Whether all elements are finite."""
    if not tensor.numel():
        return True
    if is_host(tensor.device):  # a finite sum is faster found, and needs no copy
        return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())
    return torch.linalg.vector_norm(tensor, inf) < inf  # fewer operations than isfinite


def add_and_norm(memory: Tensor, tensor: Tensor) -> Scalar:
    """memory += tensor in place; returns ||memory||^2, in one pass over the memory on a CPU.

    ValueError unless both are flat and equally long."""
    check_same_length(memory, tensor)
    same = tensor.dtype == memory.dtype and tensor.device == memory.device
    return (kernels_for(memory) if same else device).add_and_norm(memory, tensor)
