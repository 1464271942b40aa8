"""A ratio of means of noisy products, and whether it means anything.

Products of one step may be negative, so that both means are taken before they are divided. Where
the mean below is not clearly above 0, by its own standard error, there is no ratio.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations_with_replacement
from math import isfinite, nan, sqrt
from typing import Any

from policies.base import DENSE

WEIGHT = 0.02
"""Of a new step in the means: some fifty steps count."""

LEAST = 10
"""Steps before any judgement."""

CLEAR, LOST = 3.0, 1.5
"""Standard errors by which the mean must exceed 0 to become clear, and to remain so."""


class MeanRatio:
    """E[product] / E[total], by CF, the means exponentially weighted. clear: it has a meaning."""

    def __init__(self) -> None:
        self.clear = False
        self.count = 0
        self._weight = self._weight2 = 0.0  # sums of the steps' weights, and of their squares
        self._total = 0.0
        self._kept: dict[float, float] = {}
        self._squares: dict[tuple[float, float], float] = {}  # of two CFs; DENSE: the totals

    def add(self, products: Mapping[float, float], total: float, energy: float = 1.0) -> None:
        """Take in one step; one that is not finite, or had none before it (0), is passed over.

        energy: of the step's gradient, by which all is divided: the first gradients may be a
        hundred times as large as later ones, and would hide them."""
        if not energy > 0 or not isfinite(total):
            return
        products = {cf: product / energy for cf, product in products.items()}
        total /= energy
        if total == 0 or not all(isfinite(x * x) for x in (total, *products.values())):
            return
        self.count += 1
        self._weight += WEIGHT * (1 - self._weight)
        self._weight2 = (1 - WEIGHT) ** 2 * self._weight2 + WEIGHT**2
        self._total += WEIGHT * (total - self._total)
        for cf, product in products.items():
            before = self._kept.get(cf, 0.0)
            self._kept[cf] = before + WEIGHT * (product - before)
        products[DENSE] = total
        for a, b in combinations_with_replacement(sorted(products), 2):
            before = self._squares.get((a, b), 0.0)
            self._squares[a, b] = before + WEIGHT * (products[a] * products[b] - before)
        self.clear = self._is_clear()

    @property
    def errors(self) -> float:
        """The mean of the totals in standard errors of itself; nan before there is one."""
        return self._mean / self._error if self._error > 0 else nan

    def value(self, cf: float) -> float:
        """The ratio, clear or not; nan if there is none."""
        return self._kept.get(cf, nan) / self._total if self._total else nan

    def doubt(self, a: float, b: float) -> float:
        """Relative standard error of what one CF lets through in what another does, at most 1. Both
        rise and fall with the total, so that it is smaller than that of either ratio."""
        means = [self._total if cf == DENSE else self._kept.get(cf, nan) for cf in (a, b)]
        if not min(means) > 0:
            return 1.0
        (x, y), low, high = means, min(a, b), max(a, b)
        spread = (
            self._squares[a, a] / x / x
            - 2 * self._squares[low, high] / x / y
            + self._squares[b, b] / y / y
        )
        if not isfinite(spread):
            return 1.0
        return min(1.0, sqrt(max(0.0, spread) * self._weight2 / self._weight))

    def numbers(self) -> str:
        """How clear it is, in words."""
        return (
            f"{self._mean:.3g} +- {self._error:.2g}, {self.errors:.2g} standard errors (clear from "
            f"{CLEAR:g}, lost below {LOST:g})"
        )

    @property
    def _mean(self) -> float:
        return self._total / self._weight if self._weight else nan

    @property
    def _error(self) -> float:
        """Standard error of the weighted mean, the steps taken as independent."""
        if not self._weight:
            return nan
        square = self._squares.get((DENSE, DENSE), 0.0) / self._weight
        spread = max(0.0, square - self._mean * self._mean)
        return sqrt(spread * self._weight2) / self._weight

    def _is_clear(self) -> bool:
        if self.count < LEAST:
            return False
        return self._mean > (LOST if self.clear else CLEAR) * self._error

    def state_dict(self) -> dict[str, Any]:
        """Everything, in JSON-like values: pairs, since JSON has no float keys."""
        return {
            "clear": self.clear,
            "count": self.count,
            "weights": [self._weight, self._weight2],
            "total": self._total,
            "kept": [list(item) for item in self._kept.items()],
            "squares": [[*pair, value] for pair, value in self._squares.items()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict()`."""
        self.clear, self.count = bool(state["clear"]), int(state["count"])
        self._weight, self._weight2 = map(float, state["weights"])
        self._total = float(state["total"])
        self._kept = {float(cf): float(value) for cf, value in state["kept"]}
        self._squares = {(float(a), float(b)): float(value) for a, b, value in state["squares"]}
