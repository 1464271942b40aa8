"""The kernels as torch operations on whole tensors, for every device and dtype.

The functions are those of `compressors.kernels.Kernels`. Among equal magnitudes any may be chosen.
Several of them still wait for the device: they return numbers, or shapes that depend on the data.
"""

from __future__ import annotations

from math import ceil

import torch
from torch import Tensor

from compressors.kernels.blocks import Scalar, Selected, ThresholdSearch


def squared_norm(x: Tensor) -> Scalar:
    return torch.linalg.vector_norm(x.detach(), dtype=torch.float64).square()


def add_and_norm(memory: Tensor, tensor: Tensor) -> Scalar:
    memory = memory.detach().add_(tensor)
    return squared_norm(memory)


def largest(x: Tensor, k: int) -> Tensor:
    return x.detach().abs().topk(k, sorted=False).indices.sort().values.to(torch.int32)


def kth_largest(x: Tensor, k: int) -> float:
    return float(x.topk(k).values[-1])


def select(x: Tensor, k: int, add: Tensor | None) -> Selected:
    if add is not None:
        x.add_(add)
    indices = largest(x, k)
    return Selected(indices, x.index_select(0, indices), squared_norm(x))


def select_above(x: Tensor, threshold: float, k: int, add: Tensor | None) -> Selected:
    if add is not None:
        x.add_(add)
    return _select_masked(x, x.abs() >= x.new_tensor(threshold), k)


def select_by_count(x: Tensor, k: int, add: Tensor | None, search: ThresholdSearch) -> Selected:
    if add is not None:
        x.add_(add)
    magnitude = x.abs()

    def reached(threshold: float) -> Tensor:
        return magnitude >= magnitude.new_tensor(threshold)

    mean, most = float(magnitude.mean(dtype=torch.float64)), float(magnitude.max())
    threshold = search(lambda t: int(reached(t).sum()), mean, most, k)
    return _select_masked(x, reached(threshold), k)


def select_bins(x: Tensor, bin_size: int, k: int, add: Tensor | None) -> Selected:
    latest = x if add is None else add
    if add is not None:
        x.add_(add)
    numel = x.numel()
    bins = x.new_zeros(ceil(numel / bin_size) * bin_size)
    bins[:numel] = x.abs()
    peaks = bins.view(-1, bin_size).amax(1) if numel else bins
    predicted = (x + latest).abs()
    mask = (predicted >= peaks.repeat_interleave(bin_size)[:numel]) & (x != 0)
    return _select_masked(x, mask, k)


def _select_masked(x: Tensor, mask: Tensor, k: int) -> Selected:
    """The elements where `mask` is set; of more than `k` the `k` largest; of none the largest."""
    indices = mask.nonzero().flatten().int()
    if not indices.numel():
        indices = largest(x, min(k, 1))
    values = x.index_select(0, indices)
    if indices.numel() > k:
        positions = largest(values, k)
        indices, values = indices.index_select(0, positions), values.index_select(0, positions)
    return Selected(indices, values, squared_norm(x))
