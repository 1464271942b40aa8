"""Sparsifiers that keep the elements at or above a threshold, and ways to find the threshold.

    DGC        the top-k threshold of a sample
    Threshold  a fixed number, or the top-k threshold of a sample
    RedSync    a number between the mean and the maximum of the magnitudes, found by bisection

The first two find their threshold in a sample, and then need one pass over the tensor. At least one
element is kept, and at most k = max(1, floor(numel / cf)): if more reach the threshold, the k
largest are kept (Deep Gradient Compression calls this hierarchical selection).
"""

from __future__ import annotations

from abc import abstractmethod
from math import ceil, inf, isfinite

import numpy as np
import torch
from torch import Tensor

from compressors.base import Key, check_above_0
from compressors.kernels import kernels_for
from compressors.kernels.blocks import Array, Scalar, Selected, ThresholdSearch
from compressors.sparsifier import Sparsifier
from compressors.wire.values import ValueFormat


class ThresholdSparsifier(Sparsifier):
    """The base of sparsifiers that estimate the threshold before they select."""

    def select(self, tensor: Tensor, k: int, add: Tensor | None, key: Key) -> Selected:
        threshold = self.estimate(tensor, k, add, key) if k < tensor.numel() else 0.0
        return kernels_for(tensor).select_above(tensor, threshold, k, add)

    @abstractmethod
    def estimate(self, tensor: Tensor, k: int, add: Tensor | None, key: Key) -> Scalar:
        """The threshold that about `k` elements of `tensor` + `add` reach; 0 < k < numel."""


def sample_size(numel: int, k: int, rank: int) -> int:
    """The size of a sample of `numel` magnitudes, to estimate the threshold that `k` of them reach:
    one in 32, but 4,096 to 65,536, and enough that about `rank` of the sample reach it."""
    return min(numel, max(4096, min(65_536, numel // 32), ceil(rank * numel / k)))


def sample_magnitudes(tensor: Tensor, add: Tensor | None, size: int, start: int = 0) -> Tensor:
    """Magnitudes of `size` or somewhat more evenly spread elements of `tensor` + `add`, from
    position `start` on. The stride is odd, because usual layer widths are even: an even stride
    would sample the same columns again and again."""
    stride = (max(1, tensor.numel() // size) - 1) | 1
    part = slice(start % stride, None, stride)
    return (tensor[part] if add is None else tensor[part] + add[part]).abs()


def sample_threshold(sample: Tensor, share: float) -> Scalar:
    """The magnitude that a `share` of the sample reaches, at least one element."""
    rank = min(sample.numel(), max(1, round(share * sample.numel())))
    return kernels_for(sample).kth_largest(sample, rank)


class DGC(ThresholdSparsifier):
    """Deep Gradient Compression is top-k with a threshold that is estimated from a sample.

    Lin, Han, Mao, Wang and Dally, "Deep Gradient Compression: Reducing the Communication Bandwidth
    for Distributed Training" (ICLR 2018), sections 3 and 5. Momentum correction, momentum factor
    masking, clipping and warm-up belong to the memory and the policy.

    The paper samples at random. Here the sample is evenly spread, and starts at another element in
    each step. A small tensor is sampled whole: then DGC is exact top-k."""

    name = "dgc"
    masking = 1.0
    momentum_factor = inf

    def estimate(self, tensor: Tensor, k: int, add: Tensor | None, key: Key) -> Scalar:
        sample = sample_magnitudes(tensor, add, self.sample_size(tensor.numel(), k), start=key.step)
        return sample_threshold(sample, k / tensor.numel())

    def sample_size(self, numel: int, k: int) -> int:
        """0.1% to 1% of the elements, and enough that 32 of the sample reach the threshold (18%
        standard error of the count)."""
        return min(numel, int(max(0.001 * numel, min(0.01 * numel, 65_536), 32 * numel / k)))


class Threshold(ThresholdSparsifier):
    """The hard threshold keeps the elements whose magnitude reaches a given or estimated threshold.

    Strom, "Scalable Distributed DNN Training Using Commodity GPU Cloud Computing" (Interspeech
    2015), with a fixed threshold; Aji and Heafield, "Sparse Communication for Distributed Gradient
    Descent" (EMNLP 2017), with one that is estimated from a sample.

    threshold: a number > 0, the same for every tensor, in units of the gradients (at CF 1 all
        elements are kept all the same); None: the threshold that k elements reach, estimated in
        each step.
    """

    name = "threshold"

    def __init__(self, threshold: float | None = None, values: str | ValueFormat = "fp32") -> None:
        super().__init__(values)
        self.threshold = check_above_0("threshold", threshold)

    def estimate(self, tensor: Tensor, k: int, add: Tensor | None, key: Key) -> Scalar:
        if self.threshold is not None:
            return self.threshold
        sample = sample_magnitudes(tensor, add, sample_size(tensor.numel(), k, 32))
        return sample_threshold(sample, k / tensor.numel())


# RedSync -----------------------------------------------------------------------------------------

_ROUNDS = 30
_ENOUGH = 0.9  # of k


class RedSync(Sparsifier):
    """RedSync finds a threshold between the mean and the maximum of the magnitudes by bisection.

    Fang, Fu, Yang and Hsieh, "RedSync: Reducing Synchronization Bandwidth for Distributed Deep
    Learning Training System" (JPDC 2019; arXiv 1808.04357, 2018), its threshold binary search:
    threshold = mean + ratio (max - mean), where the ratio is bisected until the number of elements
    above fits. The paper accepts k to 2k elements. Payloads here have k slots, so 0.9k to k are
    accepted.

    If 30 bisections do not reach this, the threshold with the largest number up to k is taken. If
    fewer than k elements reach the mean (CF below 2.4 for a normal distribution), the threshold is
    searched between 0 and the mean. At CF 1 all elements are kept.
    """

    name = "redsync"

    def select(self, tensor: Tensor, k: int, add: Tensor | None, key: Key) -> Selected:
        kernels = kernels_for(tensor)
        if k == tensor.numel():
            return kernels.select_above(tensor, 0.0, k, add)
        return kernels.select_by_count(tensor, k, add, ThresholdSearch(bisect, bisect_at_once))


def bisect(magnitudes: Array, mean: float, k: int) -> float:
    """A threshold that at most `k` magnitudes reach (more if more than `k` equal the maximum); 0 if
    the mean or the maximum is not finite. magnitudes: the `k` + 1 largest are among them."""

    def count(threshold: float) -> int:
        return int(np.count_nonzero(magnitudes >= magnitudes.dtype.type(threshold)))

    most = float(magnitudes.max())
    if not isfinite(mean) or not isfinite(most):
        return 0.0
    mean = min(mean, most)  # by rounding the mean may be above the maximum
    low, best = (0.0, mean) if count(mean) <= k else (mean, most)
    reached = count(best)
    for _ in range(_ROUNDS):
        if _ENOUGH * k <= reached <= k:
            break
        threshold = low + (best - low) / 2
        found = count(threshold)
        if found > k:
            low = threshold
        else:
            best, reached = threshold, found
    return best


def bisect_at_once(largest: Tensor, mean: Tensor, k: int) -> Tensor:
    """The result of `bisect`, in tensor arithmetic. largest: the k + 1 largest magnitudes,
    descending.

    Round j ends at the lowest of 2**j + 1 evenly spaced thresholds that at most `k` magnitudes
    reach: the lowest one above the last of `largest`. So all rounds are computed at once."""
    most, beyond = largest[0].double(), largest[-1]
    mean = torch.minimum(mean, most)
    few = mean.to(largest.dtype) > beyond
    low, high = mean.masked_fill(few, 0.0), torch.where(few, mean, most)
    parts = 2.0 ** torch.arange(_ROUNDS + 1, dtype=torch.float64, device=mean.device)
    below = ((beyond - low) / (high - low) * parts).floor()
    near = below[:, None] + torch.arange(3, device=mean.device)  # rounding may change it by one
    grid = torch.minimum(low + near / parts[:, None] * (high - low), high).to(largest.dtype)
    lowest = torch.where(grid > beyond, grid, most.to(grid.dtype)).amin(1).cummin(0).values
    count = k + 1 - torch.searchsorted(largest.flip(0), lowest)
    rounds = (count < _ENOUGH * k).sum().clamp(max=_ROUNDS)
    return lowest.gather(0, rounds[None])[0]
