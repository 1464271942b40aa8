"""RedSync: a threshold between the mean and the maximum of the magnitudes, found by bisection.

Fang, Fu, Yang and Hsieh, "RedSync: Reducing Synchronization Bandwidth for Distributed Deep
Learning Training System" (JPDC 2019; arXiv 1808.04357, 2018), its threshold binary search:
threshold = mean + ratio (max - mean), the ratio bisected until the count of elements above fits.

The paper accepts k to 2k elements; what is sent here has k slots, so 0.9k to k are accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite

import numpy as np
import torch
from torch import Tensor

from compressors.base import Key
from compressors.norms import Array, on_numpy
from compressors.ranking import largest
from compressors.selection import select_superset
from compressors.sparsifier import Selected, Sparsifier
from compressors.threshold_search import keep, keep_above

_ENOUGH = 0.9  # of k elements
_TRIES = 30
_ROW = 2048  # magnitudes summed in their own precision; their sums are carried on in double


class RedSync(Sparsifier):
    """Keeps at most k = max(1, floor(numel / cf)) elements: those that reach the threshold.

    0.9k to k of them, unless 30 bisections do not lead there (many equal magnitudes, or a maximum
    beyond all proportion): then the count nearest below k that was seen, or, if more than k equal
    the maximum, k of those. Where k elements are more than reach the mean (CF below 2.4 if they
    are normally distributed) the threshold is sought between 0 and the mean. All are kept at CF 1.

    The search counts among the k + 1 largest elements, or some more, which the one pass over the
    tensor has gathered: there every count up to k is that of the whole tensor.
    """

    name = "redsync"

    def select(self, tensor: Tensor, k: int, add: Tensor | None, key: Key) -> Selected:
        if k == tensor.numel():
            return keep_above(tensor, 0.0, k, add)
        if on_numpy(tensor):
            return _select(tensor.numpy(), k, None if add is None else add.numpy())
        if add is not None:
            tensor.add_(add)
        magnitude = tensor.abs()
        mean, most = float(magnitude.mean(dtype=torch.float64)), float(magnitude.max())

        def reaching(threshold: float) -> Tensor:
            return magnitude >= magnitude.new_tensor(threshold)

        threshold = bisect(lambda t: int(reaching(t).sum()), mean, most, k)
        return keep(tensor, reaching(threshold), k)


def bisect(count: Callable[[float], int], mean: float, most: float, k: int) -> float:
    """A threshold that at most `k` magnitudes reach (more if more than `k` equal the maximum).

    count: how many magnitudes reach a threshold; right up to `k`, and more than `k` beyond.
    mean, most: mean and maximum of the magnitudes. If either is not finite, the result is 0."""
    if not isfinite(mean) or not isfinite(most):
        return 0.0
    mean = min(mean, most)  # which rounding may have changed
    low, best = mean, most
    if count(mean) <= k:
        low, best = 0.0, mean
    enough = _ENOUGH * k
    reached = count(best)
    for _ in range(_TRIES):
        if enough <= reached <= k:
            break
        threshold = low + (best - low) / 2
        found = count(threshold)
        if found > k:
            low = threshold
        else:
            best, reached = threshold, found
    return best


def _select(x: Array, k: int, add: Array | None) -> Selected:
    total = _Sum()
    found = select_superset(x, k + 1, add, total.add)
    magnitude = np.abs(found.values)

    def reaching(threshold: float) -> Array:
        return magnitude >= x.dtype.type(threshold)

    with np.errstate(all="ignore"):
        mean, most = total.value / x.size, float(magnitude.max())
        threshold = bisect(lambda t: int(np.count_nonzero(reaching(t))), mean, most, k)
        at = np.flatnonzero(reaching(threshold))
    if at.size > k or not at.size:
        at = largest(found.values, k)
    indices, values = found.indices.take(at), found.values.take(at)
    return Selected(torch.from_numpy(indices), torch.from_numpy(values), found.total)


class _Sum:
    """Sum of what it is shown."""

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, block: Array) -> None:
        rows = block.size // _ROW
        head, tail = block[: rows * _ROW].reshape(rows, 1, _ROW), block[rows * _ROW :]
        ones = np.ones((_ROW, 1), block.dtype)  # a product with ones is the fastest sum
        self.value += float(tail.sum(dtype=np.float64))
        self.value += float(np.matmul(head, ones).sum(dtype=np.float64))
