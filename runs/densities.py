"""How gradient values are distributed before and after compression (Harris 2020): histograms."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

LOW, HIGH, PER_DECADE = -9, 2, 8
"""Magnitudes from 10^LOW to 10^HIGH, in so many bins for each power of ten; what is smaller or
larger is in the first or the last bin."""
BINS = (HIGH - LOW) * PER_DECADE


@dataclass(frozen=True)
class Density:
    """A density is a histogram of a gradient's values: how many are 0, and how many negative and
    positive ones have a magnitude in each of BINS bins. ValueError if it has not so many."""

    zeros: int
    negative: tuple[int, ...]
    positive: tuple[int, ...]

    def __post_init__(self) -> None:
        if not len(self.negative) == len(self.positive) == BINS:
            raise ValueError(f"negative and positive must be {BINS} numbers each")

    @property
    def values(self) -> int:
        """All of them."""
        return self.zeros + sum(self.negative) + sum(self.positive)

    def shares(self, which: tuple[int, ...]) -> list[float]:
        """Of all values, those of each bin of `negative` or `positive`."""
        return [count / self.values for count in which]


def edges() -> list[float]:
    """Magnitudes that part the bins, BINS + 1 of them."""
    return [10 ** (LOW + i / PER_DECADE) for i in range(BINS + 1)]


def density(gradients: Iterable[Tensor | None]) -> Density:
    """Of all tensors together; what is not finite is left out, None counts for nothing."""
    zeros, counts = 0, [torch.zeros(BINS, dtype=torch.int64) for _ in range(2)]
    for gradient in gradients:
        if gradient is None:
            continue
        flat = gradient.detach().flatten().float().cpu()
        flat = flat[flat.isfinite()]
        zeros += int((flat == 0).sum())
        for count, signed in zip(counts, (flat[flat < 0], flat[flat > 0]), strict=True):
            places = ((signed.abs().log10() - LOW) * PER_DECADE).floor().long().clamp(0, BINS - 1)
            count += places.bincount(minlength=BINS)
    negative, positive = (tuple(count.tolist()) for count in counts)
    return Density(zeros, negative, positive)


@dataclass(frozen=True)
class Densities:
    """Two densities of one step on rank 0. step: its number from 0. before: of this rank's own
    gradient. after: of the mean that all ranks decoded."""

    step: int
    before: Density
    after: Density
