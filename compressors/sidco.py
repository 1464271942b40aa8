"""SIDCo: the threshold comes from a distribution fitted to the magnitudes, in several stages.

Abdelmoniem, Elzanaty, Alouini and Canini, "An Efficient Statistical-based Gradient Compression
Technique for Distributed Training Systems" (MLSys 2021).

    stage 1: fit all magnitudes; the threshold that a quarter of them should exceed
    stage m: fit by how much the others exceed the last threshold; raise it

The last of M stages ends at k / numel: the ratio of stage 1 is 1/4, of each other stage
(4 k / numel) ** (1 / (M - 1)), as in the authors' code.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, isfinite, log

import numpy as np
from torch import Tensor

from compressors.base import Key
from compressors.fits import exponential, gamma, pareto
from compressors.norms import Array
from compressors.threshold_search import ThresholdSparsifier, sample_size, sampled
from compressors.values import ValueFormat

Fit = Callable[[Array, float], float]

FITS: dict[str, tuple[Fit, Fit]] = {
    "exponential": (exponential, exponential),
    "gamma": (gamma, pareto),
    "pareto": (pareto, pareto),
}
"""The first stage's distribution, and that of the others: SIDCo-E, SIDCo-GP and SIDCo-P."""

_FIRST = 0.25  # the share that stage 1 aims at
_MOST_STAGES = 4
_RANK = 8  # enough to tell how well a number of stages does


class SIDCo(ThresholdSparsifier):
    """Keeps the elements that reach the fitted threshold, at most k = max(1, floor(numel / cf))
    of them (then the largest), and at least one.

    distribution: "exponential" (the paper's choice for speed), "gamma" or "pareto".
    stages: 1 or more; None: the number of stages, up to 4, that comes nearest to k. The paper
        moves to it step by step, from the counts that it saw in the last ones. Here the counts
        are looked at beforehand, in the sample, so nothing is carried from step to step.

    Fitted to evenly spread magnitudes instead of all: one in 32, but 4,096 to 65,536 (1.6 % to
    0.4 % error of their mean), and so many that 8 of them reach the threshold. Zeros, which no
    continuous distribution has, are left out and allowed for in the share.
    """

    name = "sidco"

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

    def estimate(self, tensor: Tensor, k: int, add: Tensor | None, key: Key) -> float:
        size = sample_size(tensor.numel(), k, _RANK)
        sample = sampled(tensor, add, size).double().cpu().numpy()
        x = sample[(sample > 0) & np.isfinite(sample)]
        wanted = k / tensor.numel() * sample.size
        if wanted >= x.size:
            return 0.0
        scale = float(x.max())  # so that squares neither vanish nor overflow
        x /= scale
        fits, share = FITS[self.distribution], wanted / x.size
        if self.stages is not None:
            return scale * staged(x, share, self.stages, fits)
        best, distance = 1.0, inf
        for stages in range(1, _MOST_STAGES + 1):
            threshold = staged(x, share, stages, fits)
            count = int(np.count_nonzero(x >= threshold))
            if count and abs(log(count / wanted)) < distance:
                best, distance = threshold, abs(log(count / wanted))
        return scale * best


def staged(x: Array, share: float, stages: int, fits: tuple[Fit, Fit]) -> float:
    """The threshold that a `share` of `x` should exceed, found in so many stages.

    Fewer if the first has nothing to do, or nothing is left to fit another stage to."""
    if stages == 1 or share >= _FIRST:
        ratios = [share]
    else:
        ratios = [_FIRST] + [(share / _FIRST) ** (1 / (stages - 1))] * (stages - 1)
    threshold = 0.0
    for stage, ratio in enumerate(ratios):
        step = fits[stage > 0](x, ratio)
        threshold += step
        x = x[x > step] - step
        if not x.size or not isfinite(threshold):
            break
    return threshold
