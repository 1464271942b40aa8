"""Deep Gradient Compression: top-k with a threshold estimated from a sample.

Lin, Han, Mao, Wang and Dally, "Deep Gradient Compression: Reducing the Communication Bandwidth for
Distributed Training" (ICLR 2018), sections 3 and 5: sample 0.1 % to 1 % of the magnitudes, take
the top-k threshold of the sample, and where far more than wanted reach it, select once more among
those (hierarchical selection). Momentum correction, momentum factor masking, clipping and warm-up
are the memory's and the policy's.
"""

from __future__ import annotations

from torch import Tensor

from compressors.base import Key
from compressors.threshold_search import SAMPLE, ThresholdSparsifier, reached_by, sampled

_SHARES = (0.001, 0.01)  # of the elements: as many as the paper samples, SAMPLE if it may choose
_RANK = 32  # elements of the sample, at least, that reach the threshold: 18 % standard error


class DGC(ThresholdSparsifier):
    """Keeps at most k = max(1, floor(numel / cf)) elements: those that reach the sample's
    threshold, about k of them, or the k largest of them.

    The sample is evenly spread, and starts at another element in each step: a function of the step
    number instead of the paper's random choice. A tensor of which 1 % is too little to tell a
    threshold is sampled more, a small one whole: then this is top-k."""

    name = "dgc"
    masking = 1.0

    def momentum_lag(self, cf: float) -> float:
        return 1.0

    def estimate(self, tensor: Tensor, k: int, add: Tensor | None, key: Key) -> float:
        size = sample_of(tensor.numel(), k)
        sample = sampled(tensor, add, size, start=key.step)
        return reached_by(sample, k / tensor.numel())


def sample_of(numel: int, k: int) -> int:
    """Elements that are sampled to find a threshold that `k` of `numel` reach."""
    least, most = (share * numel for share in _SHARES)
    return min(numel, int(max(least, min(most, SAMPLE), _RANK * numel / k)))
