"""Long series made short enough to draw, without losing what matters in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MOST = 600
"""Buckets: about as many as a picture has columns of pixels to tell apart."""


@dataclass(frozen=True)
class Thinned:
    """Float arrays of one length: the middle step of each bucket, and of the values in it the
    mean, the least and the largest (nan where there were none)."""

    steps: NDArray[np.float64]
    mean: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]


def buckets(
    steps: Sequence[float], values: Sequence[float], first: int, last: int, most: int = MOST
) -> Thinned:
    """Split steps first..last into at most `most` buckets of as many steps each.

    steps, values: of one length; values that are not finite are left out.
    """
    span = last - first + 1
    width = -(-span // most)
    count = -(-span // width)
    at, of = np.asarray(steps, dtype=float), np.asarray(values, dtype=float)
    known = np.isfinite(of)
    index = ((at[known] - first) // width).astype(int)
    of = of[known]
    low, high = np.full(count, np.inf), np.full(count, -np.inf)
    np.minimum.at(low, index, of)
    np.maximum.at(high, index, of)
    total = np.bincount(index, weights=of, minlength=count)
    number = np.bincount(index, minlength=count)
    empty = number == 0
    low[empty] = high[empty] = np.nan
    mean = np.where(empty, np.nan, total / np.maximum(number, 1))
    return Thinned(
        first + width * np.arange(count, dtype=np.float64) + (width - 1) / 2, mean, low, high
    )


def corners(steps: Sequence[int], values: Sequence[float]) -> tuple[list[int], list[float]]:
    """Of a step function, the points where it changes, and the last: the same function."""
    kept_steps: list[int] = []
    kept: list[float] = []
    for i, (step, value) in enumerate(zip(steps, values, strict=True)):
        same = kept and (value == kept[-1] or (value != value and kept[-1] != kept[-1]))
        if not same or i == len(values) - 1:
            kept_steps.append(step)
            kept.append(value)
    return kept_steps, kept
