"""Which elements of an array are the k largest: exact, and faster than sorting or partitioning."""

from __future__ import annotations

from math import inf

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compressors.norms import Array, on_numpy

_SAMPLE = 1 << 13  # elements, at most, from which the k-th largest is bracketed
_STRIDE = 17  # at least; a larger sample costs more than it saves
_PARTITION_BELOW = 1 << 11  # elements; under this a plain partition is as fast


def rank_value(x: Array, rank: int) -> float:
    """The `rank`-th largest element of `x`, 1 <= rank <= x.size. NaN counts as largest."""
    return np.partition(x, x.size - rank)[x.size - rank]


def rank_bounds(sample: int, share: float) -> tuple[int, int]:
    """Ranks (low, high) in a sample that, 4 standard deviations away, should lie on either side of
    the element with `share` of the whole array at or above it. Either may be out of the sample."""
    wanted = sample * share
    margin = 4.0 * (wanted * (1.0 - share)) ** 0.5 + 4.0
    return int(wanted - margin), int(wanted + margin) + 1


def kth_largest(x: Array, k: int) -> float:
    """The `k`-th largest element of `x`, 1 <= k <= x.size.

    1. Bracket it between two elements of a strided sample.
    2. Count what is above the bracket, partition what is inside.
    3. If the sample misled, so that the k-th is not inside, partition all.
    """
    if x.size < _PARTITION_BELOW:
        return rank_value(x, k)
    sample = x[:: max(x.size // _SAMPLE | 1, _STRIDE)]
    above, below = rank_bounds(sample.size, k / x.size)
    top = rank_value(sample, above) if above >= 1 else inf
    bottom = rank_value(sample, below) if below <= sample.size else -inf
    inside = x.take(np.flatnonzero((x >= bottom) & (x <= top)))
    rank = k - int(np.count_nonzero(x > top))
    if 1 <= rank <= inside.size:
        return rank_value(inside, rank)
    return rank_value(x, k)


def largest(x: Array, k: int) -> NDArray[np.intp]:
    """Ascending positions of the `k` largest magnitudes of `x`; the lower one wins a tie."""
    if k >= x.size:
        return np.arange(x.size)
    magnitude = np.abs(x)
    smallest = kth_largest(magnitude, k)
    keep = np.flatnonzero(magnitude >= smallest)
    if keep.size == k:
        return keep
    if keep.size < k:  # NaN, which nothing compares to: as good as infinite
        return largest(np.where(np.isnan(x), inf, x), k)
    above = magnitude.take(keep) > smallest
    ties = np.flatnonzero(~above)
    above[ties[: k - (keep.size - ties.size)]] = True
    return keep[above]


def largest_of(tensor: Tensor, k: int) -> Tensor:
    """Ascending positions (int32) of the `k` largest magnitudes of flat `tensor`."""
    if on_numpy(tensor):
        return torch.from_numpy(largest(tensor.detach().numpy(), k).astype(np.int32))
    return tensor.detach().abs().topk(k, sorted=False).indices.sort().values.to(torch.int32)
