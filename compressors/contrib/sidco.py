"""SIDCo: a threshold from a distribution that is fitted to the magnitudes, in several stages."""

from __future__ import annotations

from math import inf, log
from typing import Any

import numpy as np
from torch import Tensor

from compressors.base import Key
from compressors.kernels import kernels_for
from compressors.kernels.blocks import Scalar
from compressors.thresholds import ThresholdSparsifier, sample_magnitudes, sample_size

_FIRST_SHARE = log(0.25)  # the logarithm, as of all shares below


class SIDCo(ThresholdSparsifier):
    """SIDCo takes a quantile of an exponential distribution, fitted in several stages, as its
    threshold.

    Abdelmoniem, Elzanaty, Alouini and Canini, "An Efficient Statistical-based Gradient Compression
    Technique for Distributed Training Systems" (MLSys 2021):

        stage 1: fit all magnitudes; a quarter of them should exceed the threshold
        stage m: fit the excess of the remaining magnitudes over the last threshold, and raise it

    Stage 1 keeps 1/4, each other of M stages (4 k / numel) ** (1 / (M - 1)), as in the authors'
    code. The paper changes M by one from step to step. Here the best of M = 1 to 4 (nearest to k in
    the sample) is taken in each step, so there is no state. Zeros, which no continuous distribution
    has, are left out, and the share is corrected for them. This is SIDCo-E, the paper's choice for
    speed.
    """

    name = "sidco"

    def estimate(self, tensor: Tensor, k: int, add: Tensor | None, key: Key) -> Scalar:
        sample = sample_magnitudes(tensor, add, sample_size(tensor.numel(), k, 8)).double()
        wanted = k / tensor.numel() * sample.numel()
        kernels = kernels_for(sample)
        with np.errstate(all="ignore"):
            found = fitted_threshold(kernels.xp, kernels.native(sample), wanted)
        return kernels.scalar(found)


# `xp` is NumPy on the host and torch on a device: `Kernels.xp`.


def fitted_threshold(xp: Any, x: Any, wanted: float) -> Any:
    """The threshold that about `wanted` of the magnitudes `x` (float64) reach."""
    x = xp.where(x < inf, x, 0.0)
    count, scale = xp.count_nonzero(x), x.max()
    x = x / scale  # so that squares neither vanish nor overflow
    thresholds = staged_thresholds(xp, x, xp.log(wanted / count))
    reached = xp.count_nonzero(x >= thresholds[:, None], 1).clip(max=count)
    distance = abs(xp.log(reached / wanted))  # infinite if none is reached
    thresholds = xp.where(xp.isinf(distance), 1.0, thresholds)
    best = xp.take(thresholds, distance.argmin())
    return xp.where(count <= wanted, 0.0, scale * best)


def staged_thresholds(xp: Any, x: Any, log_share: Any) -> Any:
    """The thresholds that this share of the magnitudes `x` should exceed, fitted in 1, 2, 3 and 4
    stages. If the share is above that of the first stage, all are fitted in one stage."""
    shares = xp.stack([log_share, xp.full_like(log_share, _FIRST_SHARE)])
    alone, first = fitted_quantiles(xp, x[None], shares)
    x = (x - first).clip(min=0.0)
    rows = xp.stack([x[x > 0] if xp is np else x] * 3)  # a device has no sizes that depend on data
    thresholds = xp.stack([first] * 3)
    shares = xp.stack([(log_share - _FIRST_SHARE) / later for later in (1, 2, 3)])
    for stage in range(3):
        steps = fitted_quantiles(xp, rows, shares[stage:])
        steps = xp.where(steps > 0, steps, 0.0)  # nan where nothing is left to fit to
        thresholds[stage:] += steps
        rows = (rows[1:] - steps[1:, None]).clip(min=0.0)
    thresholds = xp.where(log_share < _FIRST_SHARE, thresholds, alone)
    return xp.concatenate([alone[None], thresholds])


def fitted_quantiles(xp: Any, x: Any, log_shares: Any) -> Any:
    """The quantile that a share of an exponential distribution exceeds. The distribution is fitted,
    by its mean, to the nonzero numbers in a row of `x` (float64) (section 2 of the paper). nan if
    all are 0."""
    mean = x.sum(1) / xp.count_nonzero(x, 1)
    return -mean * log_shares
