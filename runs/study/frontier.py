"""What a quality costs at a fixed CF: bytes at equal quality."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import exp, log, nan


def bytes_at(
    points: Sequence[tuple[float, float]], quality: float, higher_is_better: bool
) -> float:
    """Bytes that fixed CFs would have needed for this quality, by interpolation of log bytes
    between the (bytes, quality) of those that no other beats; nan outside of them."""
    sign = 1 if higher_is_better else -1
    best: list[tuple[float, float]] = []
    for sent, reached in sorted((sent, sign * reached) for sent, reached in points):
        if not best or reached > best[-1][1]:
            best.append((sent, reached))
    wanted = sign * quality
    for (less, low), (more, high) in pairwise(best):
        if low <= wanted <= high:
            part = (wanted - low) / (high - low)
            return exp(log(less) + part * (log(more) - log(less)))
    return nan
