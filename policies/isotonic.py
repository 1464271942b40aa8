"""Numbers that can only fall, from noisy ones: pool adjacent violators (Ayer and others, 1955)."""

from __future__ import annotations

from collections.abc import Iterable


def descending(values: Iterable[float]) -> list[float]:
    """The sequence that never rises and is nearest by squares: where some rise, their mean."""
    pools: list[tuple[float, int]] = []  # mean, how many
    for value in values:
        mean, count = value, 1
        while pools and pools[-1][0] < mean:
            before, more = pools.pop()
            mean = (mean * count + before * more) / (count + more)
            count += more
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]
