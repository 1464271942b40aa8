"""Hard threshold: whatever is large enough is sent.

Strom, "Scalable Distributed DNN Training Using Commodity GPU Cloud Computing" (Interspeech 2015),
with a fixed threshold; Aji and Heafield, "Sparse Communication for Distributed Gradient Descent"
(EMNLP 2017), with one that is estimated from a sample. Values are sent as they are, not as signs.
"""

from __future__ import annotations

from math import isfinite

from torch import Tensor

from compressors.base import Key
from compressors.threshold_search import ThresholdSparsifier, reached_by, sample_size, sampled
from compressors.values import ValueFormat

_RANK = 32  # 18 % standard error of the count


class Threshold(ThresholdSparsifier):
    """Keeps the elements whose magnitude reaches a threshold, at most
    k = max(1, floor(numel / cf)) of them (then the largest), and at least one.

    threshold: a number > 0, the same for every tensor, in the unit of the gradients (at CF 1
        everything is kept all the same); None: fitted anew in each step to what k elements
        of the tensor reach, as told by a sample: one in 32 elements, but 4,096 to 65,536, and
        so many that 32 of them reach it.
    """

    name = "threshold"

    def __init__(self, threshold: float | None = None, values: str | ValueFormat = "fp32") -> None:
        super().__init__(values)
        if threshold is not None and not (isfinite(threshold) and threshold > 0):
            raise ValueError(f"threshold must be a finite number > 0 or None, got {threshold!r}")
        self.threshold = threshold

    def estimate(self, tensor: Tensor, k: int, add: Tensor | None, key: Key) -> float:
        if self.threshold is not None:
            return self.threshold
        numel = tensor.numel()
        sample = sampled(tensor, add, sample_size(numel, k, _RANK))
        return reached_by(sample, k / numel)
