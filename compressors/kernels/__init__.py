"""Kernels: the loops over all elements of a gradient.

`Kernels` (reference.py) is the contract, and does each loop by torch operations on any device.
`Host` (host.py) overrides loops that NumPy does far faster on CPU tensors, `Triton` (triton/) loops
that a kernel does faster on a GPU. `kernels_for` and `kernels_at` choose the kernels for a tensor;
callers never check its device.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np
import torch
from torch import Tensor

from compressors.kernels.blocks import (
    Flag,
    Numbers,
    Scalar,
    check_same_length,
    is_host,
    takes_triton,
    triton_for_flags,
)
from compressors.kernels.host import Host
from compressors.kernels.reference import Kernels as Kernels
from compressors.kernels.triton import Triton

HOST, REFERENCE, TRITON = Host(), Kernels(), Triton()


def kernels_for(x: Tensor) -> Kernels:
    """The kernels for tensor `x`."""
    if is_host(x.device):
        return HOST
    return TRITON if takes_triton(x) else REFERENCE


def kernels_of(numbers: Numbers) -> Kernels:
    """The kernels for native numbers."""
    return HOST if isinstance(numbers, np.ndarray) else REFERENCE


def kernels_at(device: torch.device) -> Kernels:
    """The kernels for new tensors on a device."""
    return HOST if is_host(device) else REFERENCE


def squared_norm(tensor: Tensor) -> Scalar:
    """||tensor||^2 of a flat tensor."""
    return kernels_for(tensor).squared_norm(tensor)


def squared_norms(tensors: Sequence[Tensor]) -> Tensor:
    """The squared norm of each of flat `tensors` on one device: float64, flat, on that device."""
    if not tensors:
        return torch.zeros(0, dtype=torch.float64, device="cpu")
    if is_host(tensors[0].device):
        energies_here = [squared_norm(tensor) for tensor in tensors]
        return torch.tensor(energies_here, dtype=torch.float64, device="cpu")
    norms = torch._foreach_norm([t.detach() for t in tensors], 2, dtype=torch.float64)
    return torch.stack(norms).square()


def judge(energies: Tensor, x: Tensor, total: Tensor, nonfinite: Tensor) -> Flag:
    """Whether `x` has an element that is not finite. energies: the squared norms of its pieces
    (float64). Adds their sum to `total`, and 1 to `nonfinite` if a norm is not finite in x's
    precision (total, nonfinite: float64, one element each)."""
    most = torch.finfo(x.dtype).max
    if triton := triton_for_flags(x):
        return triton.judge(energies, most, total, nonfinite)
    if not is_host(x.device):
        nonfinite.add_(~(energies <= most).all())  # nan is not
        total.add_(energies.sum())
        return ~(energies < inf).all()
    numbers = energies.tolist()
    for energy in numbers:
        total.add_(energy)
    if all(energy <= most for energy in numbers):
        return False
    nonfinite.add_(1)
    return not all_finite(x)


def cut_large(energies: Tensor, x: Tensor, largest: float) -> None:
    """On a device: clamp the elements of x to [-largest, largest] if its squared norm (the sum of
    `energies`) is not finite in its precision. May also clamp otherwise."""
    if triton := triton_for_flags(x):
        triton.clamp_if_above(energies, torch.finfo(x.dtype).max, x, largest)
    else:
        x.clamp_(-largest, largest)


def all_finite(tensor: Tensor) -> Flag:
    """Whether all elements are finite."""
    if not tensor.numel():
        return True
    if is_host(tensor.device):  # a finite sum is faster to check, and needs no copy
        return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())
    return torch.linalg.vector_norm(tensor, inf) < inf  # fewer operations than isfinite


def add_and_norm(memory: Tensor, tensor: Tensor) -> Scalar:
    """memory += tensor in place; returns ||memory||^2, in one pass over the memory on a CPU.

    ValueError unless both are flat and equally long."""
    check_same_length(memory, tensor)
    return kernels_for(memory).add_and_norm(memory, tensor)
