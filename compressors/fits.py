"""Thresholds of fitted distributions: what a given share of some magnitudes should exceed.

Abdelmoniem, Elzanaty, Alouini and Canini, "An Efficient Statistical-based Gradient Compression
Technique for Distributed Training Systems" (MLSys 2021), section 2: each distribution is fitted
by moments, in closed form. Magnitudes are positive, of any scale, as float64.
"""

from __future__ import annotations

from math import expm1, lgamma, log, sqrt

import numpy as np

from compressors.norms import Array

_FLAT = 1e-9  # a shape so near to 0 that the Pareto distribution is the exponential one


def exponential(x: Array, share: float) -> float:
    """The exponential distribution: -mean ln(share)."""
    return -float(x.mean()) * log(share)


def gamma(x: Array, share: float) -> float:
    """The gamma distribution: -scale (ln(share) + ln Gamma(shape)), by Minka's estimate of both.

    An approximation that is meant for shapes <= 1; 0 where it has left its ground."""
    mean = float(x.mean())
    s = log(mean) - float(np.log(x).mean())
    if s <= 0:  # all equal, but for rounding
        return exponential(x, share)
    shape = (3 - s + sqrt((s - 3) ** 2 + 24 * s)) / (12 * s)
    return max(0.0, -mean / shape * (log(share) + lgamma(shape)))


def pareto(x: Array, share: float) -> float:
    """The generalised Pareto distribution: scale (share**-shape - 1) / shape."""
    mean, variance = float(x.mean()), float(x.var())
    if variance == 0:
        return exponential(x, share)
    ratio = mean**2 / variance
    shape, scale = 0.5 * (1 - ratio), 0.5 * mean * (1 + ratio)
    if abs(shape) < _FLAT:
        return -scale * log(share)
    return scale * expm1(min(-shape * log(share), 700.0)) / shape
