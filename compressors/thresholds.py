"""Sparsifiers that keep the elements at or above a threshold, and the ways to find one.

    DGC        the top-k threshold of a sample
    Threshold  a fixed number, or the top-k threshold of a sample
    SIDCo      a quantile of a distribution that is fitted to the magnitudes, in several stages
    RedSync    a number between the mean and the maximum of the magnitudes, found by bisection
    AdaComp    in each small bin of neighbours, the maximum of that bin

The first three find their threshold in a sample, before the tensor is gone through; one pass over
the tensor then does all the rest. No more than k = max(1, floor(numel / cf)) elements are ever
kept: if more of them reach the threshold, the k largest are (Deep Gradient Compression calls this
hierarchical selection). At least one element is kept. Values are sent as they are, not as signs
times a mean.

On the host thresholds are floats, on a device 0-dim tensors: nobody waits for their values.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from math import ceil, expm1, inf, isfinite, lgamma, log, sqrt

import numpy as np
import torch
from torch import Tensor

from compressors.base import Key
from compressors.kernels import Array, Scalar, Selected, kernels_for, on_host
from compressors.kernels.blocks import CACHE_BLOCK
from compressors.sparsifier import Sparsifier
from compressors.wire.values import ValueFormat

_SAMPLE = 1 << 16  # magnitudes from which a threshold is estimated: no more without need
_SMALL_SAMPLE = 1 << 12  # and no fewer, if there are as many
_SAMPLED_SHARE = 32  # one in so many elements: more cost more than they tell


class ThresholdSparsifier(Sparsifier):
    """This is the base of the sparsifiers that estimate their threshold beforehand.

    Keeps the elements whose magnitude reaches the threshold, at most
    k = max(1, floor(numel / cf)) of them; all of them at CF 1."""

    def select(self, tensor: Tensor, k: int, add: Tensor | None, key: Key) -> Selected:
        threshold = self.estimate(tensor, k, add, key) if k < tensor.numel() else 0.0
        return kernels_for(tensor).select_above(tensor, threshold, k, add)

    @abstractmethod
    def estimate(self, tensor: Tensor, k: int, add: Tensor | None, key: Key) -> Scalar:
        """The threshold that about `k` elements of `tensor` + `add` reach; 0 < k < numel."""


def sample_size(numel: int, k: int, rank: int) -> int:
    """How many of `numel` magnitudes to look at, to estimate a threshold that `k` of them reach.

    One in 32, but 4,096 to 65,536, and so many that about `rank` of the sample reach it."""
    wanted = max(_SMALL_SAMPLE, min(_SAMPLE, numel // _SAMPLED_SHARE), ceil(rank * numel / k))
    return min(numel, wanted)


def sample_magnitudes(tensor: Tensor, add: Tensor | None, size: int, start: int = 0) -> Tensor:
    """Magnitudes of `size` or somewhat more evenly spread elements of `tensor` + `add`.

    start: position of the first of them, modulo the stride. The stride is odd, so that patterns of
    the usual even layer widths do not fall in step with it."""
    stride = (max(1, tensor.numel() // size) - 1) | 1
    part = slice(start % stride, None, stride)
    return (tensor[part] if add is None else tensor[part] + add[part]).abs()


def sample_threshold(sample: Tensor, share: float) -> Scalar:
    """The magnitude that a `share` of the sample reaches, and at least one of its elements."""
    rank = min(sample.numel(), max(1, round(share * sample.numel())))
    return kernels_for(sample).kth_largest(sample, rank)


# Deep Gradient Compression -----------------------------------------------------------------------


class DGC(ThresholdSparsifier):
    """Deep Gradient Compression is top-k with a threshold that is estimated from a sample.

    Lin, Han, Mao, Wang and Dally, "Deep Gradient Compression: Reducing the Communication Bandwidth
    for Distributed Training" (ICLR 2018), sections 3 and 5: sample 0.1% to 1% of the magnitudes,
    take the top-k threshold of the sample, and if far more than k elements reach it, select once
    more among those. Momentum correction, momentum factor masking, clipping and warm-up are the
    business of the memory and the policy.

    Keeps at most k = max(1, floor(numel / cf)) elements, and about k. The sample is evenly spread
    and starts at another element in each step, as a function of the step number, where the paper
    samples at random. If 1% of a tensor is too little to tell a threshold, more is sampled; a small
    tensor is sampled whole, and then this is top-k."""

    name = "dgc"
    masking = 1.0

    _SHARES = (0.001, 0.01)  # of the elements: what the paper samples
    _RANK = 32  # elements of the sample, at least, that reach the threshold: 18% standard error

    def momentum_lag(self, cf: float) -> float:
        return 1.0

    def estimate(self, tensor: Tensor, k: int, add: Tensor | None, key: Key) -> Scalar:
        sample = sample_magnitudes(tensor, add, self.sample_size(tensor.numel(), k), start=key.step)
        return sample_threshold(sample, k / tensor.numel())

    def sample_size(self, numel: int, k: int) -> int:
        """How many of `numel` elements to look at, to find a threshold that `k` of them reach."""
        least, most = (share * numel for share in self._SHARES)
        return min(numel, int(max(least, min(most, _SAMPLE), self._RANK * numel / k)))


# Hard threshold ----------------------------------------------------------------------------------


class Threshold(ThresholdSparsifier):
    """The hard threshold keeps the elements whose magnitude reaches a given or estimated threshold.

    Strom, "Scalable Distributed DNN Training Using Commodity GPU Cloud Computing" (Interspeech
    2015), with a fixed threshold; Aji and Heafield, "Sparse Communication for Distributed Gradient
    Descent" (EMNLP 2017), with one that is estimated from a sample. Keeps at most
    k = max(1, floor(numel / cf)) elements, then the largest ones, and at least one.

    threshold: a number > 0, the same for every tensor, in the unit of the gradients (at CF 1
        everything is kept all the same); None: in each step the magnitude that k elements of the
        tensor reach, estimated from a sample: one in 32 elements, but 4,096 to 65,536, and so many
        that 32 of them reach it (18% standard error of the count).
    """

    name = "threshold"

    _RANK = 32

    def __init__(self, threshold: float | None = None, values: str | ValueFormat = "fp32") -> None:
        super().__init__(values)
        if threshold is not None and not (isfinite(threshold) and threshold > 0):
            raise ValueError(f"threshold must be a finite number > 0 or None, got {threshold!r}")
        self.threshold = threshold

    def estimate(self, tensor: Tensor, k: int, add: Tensor | None, key: Key) -> Scalar:
        if self.threshold is not None:
            return self.threshold
        numel = tensor.numel()
        sample = sample_magnitudes(tensor, add, sample_size(numel, k, self._RANK))
        return sample_threshold(sample, k / numel)


# SIDCo -------------------------------------------------------------------------------------------

Fit = Callable[[Array, float], float]
"""(magnitudes, share) -> the threshold that this share of the fitted distribution exceeds."""


class SIDCo(ThresholdSparsifier):
    """SIDCo takes a quantile of a distribution, fitted in several stages, as its threshold.

    Abdelmoniem, Elzanaty, Alouini and Canini, "An Efficient Statistical-based Gradient Compression
    Technique for Distributed Training Systems" (MLSys 2021):

        stage 1: fit all magnitudes; the threshold is what a quarter of them should exceed
        stage m: fit by how much the others exceed the last threshold; raise it

    The last of M stages ends at the share k / numel: stage 1 keeps 1/4, each other stage
    (4 k / numel) ** (1 / (M - 1)), as in the authors' code. At most k = max(1, floor(numel / cf))
    elements are kept, then the largest ones, and at least one.

    distribution: "exponential" (the paper's choice for speed), "gamma" (then generalised Pareto) or
        "pareto" (generalised Pareto): SIDCo-E, SIDCo-GP and SIDCo-P.
    stages: 1 or more; None: the number of stages, up to 4, that comes nearest to k. The paper
        moves to it step by step, from the counts that it saw in the last steps. Here the counts
        are looked at beforehand, in the sample, so nothing is carried from step to step.

    The distribution is fitted to evenly spread magnitudes instead of all: one in 32, but 4,096 to
    65,536 (1.6% to 0.4% error of their mean), and so many that 8 of them reach the threshold.
    Zeros, which no continuous distribution has, are left out and allowed for in the share.
    """

    name = "sidco"

    _MOST_STAGES = 4
    _RANK = 8  # enough to tell how well a number of stages does

    def __init__(
        self,
        distribution: str = "exponential",
        stages: int | None = None,
        values: str | ValueFormat = "fp32",
    ) -> None:
        super().__init__(values)
        if distribution not in FITS:
            raise ValueError(f"distribution must be one of {', '.join(FITS)}; got {distribution!r}")
        if stages is not None and (not isinstance(stages, int) or stages < 1):
            raise ValueError(f"stages must be an integer >= 1 or None, got {stages!r}")
        self.distribution = distribution
        self.stages = stages

    def estimate(self, tensor: Tensor, k: int, add: Tensor | None, key: Key) -> Scalar:
        size = sample_size(tensor.numel(), k, self._RANK)
        magnitudes = sample_magnitudes(tensor, add, size).double()
        wanted = k / tensor.numel() * magnitudes.numel()
        if not on_host(tensor):
            most = self.stages or self._MOST_STAGES
            return fitted_on_device(magnitudes, wanted, self.stages or 1, most, self.distribution)
        sample = magnitudes.numpy()
        x = sample[(sample > 0) & np.isfinite(sample)]
        if wanted >= x.size:
            return 0.0
        scale = float(x.max())  # so that squares neither vanish nor overflow
        x /= scale
        fits, share = FITS[self.distribution], wanted / x.size
        if self.stages is not None:
            return scale * staged_threshold(x, share, self.stages, fits)
        best, distance = 1.0, inf
        for stages in range(1, self._MOST_STAGES + 1):
            threshold = staged_threshold(x, share, stages, fits)
            count = int(np.count_nonzero(x >= threshold))
            if count and abs(log(count / wanted)) < distance:
                best, distance = threshold, abs(log(count / wanted))
        return scale * best


def staged_threshold(x: Array, share: float, stages: int, fits: tuple[Fit, Fit]) -> float:
    """The threshold that a `share` of the magnitudes `x` should exceed, found in `stages` stages.

    fits: of the first stage, and of the others. There are fewer stages if the first one has nothing
    to do, or if nothing is left to fit another stage to."""
    first = 0.25
    if stages == 1 or share >= first:
        ratios = [share]
    else:
        ratios = [first] + [(share / first) ** (1 / (stages - 1))] * (stages - 1)
    threshold = 0.0
    for stage, ratio in enumerate(ratios):
        step = fits[stage > 0](x, ratio)
        threshold += step
        x = x[x > step] - step
        if not x.size or not isfinite(threshold):
            break
    return threshold


# The fits are by moments, in closed form (section 2 of the paper): `x` are positive magnitudes of
# any scale, as float64, and the result is what a `share` of the distribution exceeds.


def exponential_threshold(x: Array, share: float) -> float:
    """Of the exponential distribution: -mean ln(share)."""
    return -float(x.mean()) * log(share)


def gamma_threshold(x: Array, share: float) -> float:
    """Of the gamma distribution: -scale (ln(share) + ln Gamma(shape)), by Minka's estimate of both.

    An approximation that is meant for shapes <= 1; 0 where it would be negative."""
    mean = float(x.mean())
    s = log(mean) - float(np.log(x).mean())
    if s <= 0:  # all magnitudes are equal, but for rounding
        return exponential_threshold(x, share)
    shape = (3 - s + sqrt((s - 3) ** 2 + 24 * s)) / (12 * s)
    return max(0.0, -mean / shape * (log(share) + lgamma(shape)))


def pareto_threshold(x: Array, share: float) -> float:
    """Of the generalised Pareto distribution: scale (share**-shape - 1) / shape."""
    mean, variance = float(x.mean()), float(x.var())
    if variance == 0:
        return exponential_threshold(x, share)
    ratio = mean**2 / variance
    shape, scale = 0.5 * (1 - ratio), 0.5 * mean * (1 + ratio)
    if abs(shape) < 1e-9:  # the limit is the exponential distribution
        return -scale * log(share)
    return scale * expm1(min(-shape * log(share), 700.0)) / shape


FITS: dict[str, tuple[Fit, Fit]] = {
    "exponential": (exponential_threshold, exponential_threshold),
    "gamma": (gamma_threshold, pareto_threshold),
    "pareto": (pareto_threshold, pareto_threshold),
}
"""By name of the distribution: the fit of the first stage, and that of the others."""

LATER = {"exponential": "exponential", "gamma": "pareto", "pareto": "pareto"}
"""By name of the distribution: the name of that which the later stages fit."""


def fitted_on_device(
    sample: Tensor, wanted: float, fewest: int, most: int, distribution: str
) -> Tensor:
    """What `SIDCo.estimate` finds on the host, in tensor arithmetic: the threshold that about
    `wanted` of the magnitudes `sample` (float64) reach.

    There is a row for each number of stages from `fewest` to `most`, and what a stage leaves out is
    0. Of several rows the one that comes nearest to `wanted` is taken."""
    x = sample.nan_to_num(nan=0.0, posinf=0.0)
    count, scale = x.count_nonzero().double(), x.amax()
    whole = x = (x / scale).expand(most - fewest + 1, -1)
    stages = torch.arange(fewest, most + 1, dtype=x.dtype, device=x.device)
    share, first = wanted / count, 0.25
    once = (stages == 1) | (share >= first)
    later = (share / first) ** (1 / (stages - 1))
    threshold, going = torch.zeros_like(later), torch.ones_like(once)
    for stage in range(most):
        ratio = later if stage else torch.where(once, share, first)
        step = fit_on_device(x, ratio, distribution if stage == 0 else LATER[distribution])
        threshold = torch.where(going, threshold + step, threshold)
        x = (x - step[:, None]).clamp(min=0.0)
        going = going & ~once & (stages > stage + 1) & x.any(1) & threshold.isfinite()
    if fewest < most:
        reached = ((whole >= threshold[:, None]) & (whole > 0)).sum(1).double()
        distance = (reached / wanted).log().abs()  # infinite if none is reached
        threshold = torch.where(distance.isinf(), 1.0, threshold).gather(
            0, distance.argmin(0, True)
        )
    return (scale * threshold[0]).masked_fill(count <= wanted, 0.0)


def fit_on_device(x: Tensor, share: Tensor, distribution: str) -> Tensor:
    """For each row of `x` what a `share` of the distribution exceeds that is fitted to what is not
    0 there: the three functions above, with the same formulas."""
    present = x > 0
    count = present.sum(1)
    mean, log_share = x.sum(1) / count, share.log()
    exponential = -mean * log_share
    if distribution == "gamma":
        s = mean.log() - torch.where(present, x, 1.0).log().sum(1) / count
        shape = (3 - s + ((s - 3) ** 2 + 24 * s).sqrt()) / (12 * s)
        gamma = -mean / shape * (log_share + shape.lgamma())
        return torch.where(s > 0, gamma.clamp(min=0.0), exponential)
    if distribution == "pareto":
        variance = ((x - mean[:, None]) * present).square().sum(1) / count
        ratio = mean.square() / variance
        shape, scale = 0.5 * (1 - ratio), 0.5 * mean * (1 + ratio)
        pareto = scale * (-shape * log_share).clamp(max=700.0).expm1() / shape
        pareto = torch.where(shape.abs() < 1e-9, -scale * log_share, pareto)
        return torch.where(variance > 0, pareto, exponential)
    return exponential


# RedSync -----------------------------------------------------------------------------------------


_ROUNDS = 30
_ENOUGH = 0.9  # of k


class RedSync(Sparsifier):
    """RedSync finds a threshold between the mean and the maximum of the magnitudes by bisection.

    Fang, Fu, Yang and Hsieh, "RedSync: Reducing Synchronization Bandwidth for Distributed Deep
    Learning Training System" (JPDC 2019; arXiv 1808.04357, 2018), its threshold binary search:
    threshold = mean + ratio (max - mean), the ratio bisected until the count of elements above
    fits. The paper accepts k to 2k elements. What is sent here has k = max(1, floor(numel / cf))
    slots, so 0.9k to k elements are accepted.

    If 30 bisections do not lead there (many equal magnitudes, or a maximum beyond all proportion),
    the count nearest below k that was seen is taken, or, if more than k elements equal the maximum,
    k of those. If fewer than k elements reach the mean (CF below 2.4 for a normal distribution),
    the threshold is sought between 0 and the mean. At CF 1 all elements are kept.
    """

    name = "redsync"

    def select(self, tensor: Tensor, k: int, add: Tensor | None, key: Key) -> Selected:
        kernels = kernels_for(tensor)
        if k == tensor.numel():
            return kernels.select_above(tensor, 0.0, k, add)
        return kernels.select_by_count(
            tensor, k, add, bisect if on_host(tensor) else bisect_at_once
        )


def bisect(magnitudes: Array, mean: float, k: int) -> float:
    """A threshold that at most `k` magnitudes reach (more if more than `k` equal the maximum).

    magnitudes: the `k` + 1 largest are among them. mean: of all magnitudes. If it or the maximum is
    not finite, the result is 0."""

    def count(threshold: float) -> int:
        return int(np.count_nonzero(magnitudes >= magnitudes.dtype.type(threshold)))

    most = float(magnitudes.max())
    if not isfinite(mean) or not isfinite(most):
        return 0.0
    mean = min(mean, most)  # which rounding may have changed
    low, best = mean, most
    if count(mean) <= k:
        low, best = 0.0, mean
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
    """What `bisect` finds, in tensor arithmetic.

    largest: the k + 1 largest magnitudes, descending.

    Round j ends at the lowest of 2**j + 1 evenly spaced thresholds that at most `k` magnitudes
    reach, so the lowest above the last of `largest`: there all rounds are computed at once."""
    most, beyond = largest[0].double(), largest[-1]
    mean = torch.minimum(mean, most)
    few = mean.to(largest.dtype) > beyond
    low, high = mean.masked_fill(few, 0.0), torch.where(few, mean, most)
    parts = 2.0 ** torch.arange(_ROUNDS + 1, dtype=torch.float64, device=mean.device)
    below = ((beyond - low) / (high - low) * parts).floor()
    near = below[:, None] + torch.arange(3, device=mean.device)  # rounding may move it by one
    grid = torch.minimum(low + near / parts[:, None] * (high - low), high).to(largest.dtype)
    lowest = torch.where(grid > beyond, grid, most.to(grid.dtype)).amin(1).cummin(0).values
    count = k + 1 - torch.searchsorted(largest.flip(0), lowest)
    rounds = (count < _ENOUGH * k).sum().clamp(max=_ROUNDS)
    return lowest.gather(0, rounds[None])[0]


# AdaComp -----------------------------------------------------------------------------------------


class AdaComp(Sparsifier):
    """AdaComp sends from each small bin of neighbours the elements that come near its maximum.

    Chen, Choi, Brand, Agrawal, Zhang and Gopalakrishnan, "AdaComp: Adaptive Residual Gradient
    Compression for Data-Parallel Distributed Training" (AAAI 2018), its pack():

        G = residual + latest gradient
        H = G + latest gradient          (the soft threshold: what G is about to become)
        an element is sent if |H| >= the maximum of |G| over its bin

    Zeros are not sent; if the rule lets more than k = max(1, floor(numel / cf)) elements through,
    the k with the largest |G| are sent, and at least one element always is. The latest gradient is
    what `compress_sum` adds. `compress`, which knows of none, takes the tensor itself for it, so
    the two do not keep the same elements.

    bin_size: elements a bin, up to 131,072 (the paper: 50 in convolutions, 500 elsewhere); None:
        numel / k, so that there are as many bins as slots.
    """

    name = "adacomp"
    comparable = False
    """The latest gradient, which the rule needs, is not at hand where tensors are joined."""

    def __init__(self, bin_size: int | None = None, values: str | ValueFormat = "fp32") -> None:
        super().__init__(values)
        largest = CACHE_BLOCK
        if bin_size is not None and (not isinstance(bin_size, int) or not 1 <= bin_size <= largest):
            raise ValueError(
                f"bin_size must be an integer from 1 to {largest} or None, got {bin_size!r}"
            )
        self.bin_size = bin_size

    def select(self, tensor: Tensor, k: int, add: Tensor | None, key: Key) -> Selected:
        numel = tensor.numel()
        size = self.bin_size or min(CACHE_BLOCK, ceil(numel / max(k, 1)), numel) or 1
        return kernels_for(tensor).select_bins(tensor, size, k, add)
