"""What the sparsifiers share that keep the elements at or above a threshold.

The threshold is estimated before the tensor is gone through, from a sample; one pass then does all
the rest. No more than k elements are ever kept: where more reach the threshold, the k largest of
them (Deep Gradient Compression calls this hierarchical selection). At least one is kept.
"""

from __future__ import annotations

from abc import abstractmethod
from math import ceil

import torch
from torch import Tensor

from compressors.base import Key
from compressors.norms import on_numpy, squared_norm
from compressors.ranking import largest_of, rank_value
from compressors.selection import select_above
from compressors.sparse import take
from compressors.sparsifier import Selected, Sparsifier

SAMPLE = 1 << 16  # magnitudes from which a threshold is estimated: no more without need
_SMALL = 1 << 12  # no fewer, if there are as many
_SPARE = 32  # one in so many elements: more cost more than they tell


class ThresholdSparsifier(Sparsifier):
    """Keeps the elements whose magnitude reaches a threshold, at most k = max(1, floor(numel / cf))
    of them; all of them at CF 1."""

    def select(self, tensor: Tensor, k: int, add: Tensor | None, key: Key) -> Selected:
        threshold = self.estimate(tensor, k, add, key) if k < tensor.numel() else 0.0
        return keep_above(tensor, threshold, k, add)

    @abstractmethod
    def estimate(self, tensor: Tensor, k: int, add: Tensor | None, key: Key) -> float:
        """The threshold that about `k` elements of `tensor` + `add` reach; 0 < k < numel."""


def keep_above(tensor: Tensor, threshold: float, k: int, add: Tensor | None) -> Selected:
    """tensor += add in place (if given); then the elements whose magnitude reaches `threshold`.

    Of more than `k` the `k` largest; of none the largest of all elements."""
    if on_numpy(tensor):
        found = select_above(tensor.numpy(), threshold, k, None if add is None else add.numpy())
        return Selected(
            torch.from_numpy(found.indices), torch.from_numpy(found.values), found.total
        )
    if add is not None:
        tensor.add_(add)
    return keep(tensor, tensor.abs() >= tensor.new_tensor(threshold), k)


def keep(tensor: Tensor, mask: Tensor, k: int) -> Selected:
    """The elements where `mask` is set; of more than `k` the `k` largest; of none the largest."""
    indices = mask.nonzero().flatten().int()
    if not indices.numel():
        indices = largest_of(tensor, min(k, 1))
    values = take(tensor, indices)
    if indices.numel() > k:
        positions = largest_of(values, k)
        indices, values = take(indices, positions), take(values, positions)
    return Selected(indices, values, squared_norm(tensor))


def sample_size(numel: int, k: int, rank: int) -> int:
    """How many of `numel` magnitudes to estimate a threshold from that `k` of them reach.

    One in 32, but 4,096 to 65,536, and so many that about `rank` of the sample reach it."""
    return min(numel, max(_SMALL, min(SAMPLE, numel // _SPARE), ceil(rank * numel / k)))


def sampled(tensor: Tensor, add: Tensor | None, size: int, start: int = 0) -> Tensor:
    """Magnitudes of evenly spread elements of `tensor` + `add`: `size` of them or some more.

    start: which one comes first, modulo the stride. The stride is odd, so that patterns of the
    usual even layer widths do not fall in step with it."""
    stride = (max(1, tensor.numel() // size) - 1) | 1
    part = slice(start % stride, None, stride)
    return (tensor[part] if add is None else tensor[part] + add[part]).abs()


def reached_by(sample: Tensor, share: float) -> float:
    """The magnitude that a `share` of the sample reaches, and at least one."""
    rank = min(sample.numel(), max(1, round(share * sample.numel())))
    if on_numpy(sample):
        return float(rank_value(sample.numpy(), rank))
    return float(sample.topk(rank).values[-1])
