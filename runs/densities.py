"""How gradient values are distributed before and after compression (Harris 2020): histograms."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from runs.records import whole_number

LOW, HIGH, PER_DECADE = -9, 2, 8
"""Magnitudes from 10^LOW to 10^HIGH, in so many bins for each power of ten; what is smaller or
larger is in the first or the last bin."""
BINS = (HIGH - LOW) * PER_DECADE


@dataclass(frozen=True)
class Density:
    """A density is a histogram of a gradient's values: how many are 0, and how many negative and
    positive ones have a magnitude in each of BINS bins."""

    zeros: int
    negative: tuple[int, ...]
    positive: tuple[int, ...]

    @property
    def values(self) -> int:
        """All of them."""
        return self.zeros + sum(self.negative) + sum(self.positive)

    def shares(self, which: tuple[int, ...]) -> list[float]:
        """Of all values, those of each bin of `negative` or `positive`."""
        return [count / self.values for count in which]

    def as_json(self) -> dict[str, Any]:
        return {"zeros": self.zeros, "negative": self.negative, "positive": self.positive}

    @classmethod
    def from_json(cls, value: Any) -> Density:
        """Inverse of `as_json`. ValueError if it is none."""
        if not isinstance(value, dict):
            raise ValueError("a density must be an object")
        counts = {}
        for name in ("negative", "positive"):
            listed = value.get(name)
            if not isinstance(listed, list) or len(listed) != BINS:
                raise ValueError(f"{name} of a density must be {BINS} numbers")
            counts[name] = tuple(whole_number(name, count) for count in listed)
        return cls(whole_number("zeros", value.get("zeros")), **counts)


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

    def as_json(self) -> dict[str, Any]:
        return {"before": self.before.as_json(), "after": self.after.as_json()}

    @classmethod
    def from_json(cls, step: int, value: Any) -> Densities:
        """ValueError if it is none."""
        if not isinstance(value, dict):
            raise ValueError("densities must be an object")
        before, after = (Density.from_json(value.get(name)) for name in ("before", "after"))
        return cls(step, before, after)
