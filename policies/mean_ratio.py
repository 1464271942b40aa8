"""A ratio of means of noisy products, and whether it means anything.

Products of one step may be negative, so that both means are taken before they are divided. Where
the mean below is not clearly above 0, by its own standard error, there is no ratio.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite, nan, sqrt
from typing import Any

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
        self._total = self._square = 0.0
        self._kept: dict[float, float] = {}

    def add(self, products: Mapping[float, float], total: float, energy: float = 1.0) -> None:
        """Take in one step; one that is not finite, or had none before it (0), is passed over.

        energy: of the step's gradient, by which all is divided: the first gradients may be a
        hundred times as large as later ones, and would hide them."""
        if not energy > 0 or not isfinite(total):
            return
        products = {cf: product / energy for cf, product in products.items()}
        total /= energy
        if not (isfinite(total * total) and all(map(isfinite, products.values()))) or total == 0:
            return
        self.count += 1
        self._weight += WEIGHT * (1 - self._weight)
        self._weight2 = (1 - WEIGHT) ** 2 * self._weight2 + WEIGHT**2
        self._total += WEIGHT * (total - self._total)
        self._square += WEIGHT * (total * total - self._square)
        for cf, product in products.items():
            before = self._kept.get(cf, 0.0)
            self._kept[cf] = before + WEIGHT * (product - before)
        self.clear = self._is_clear()

    @property
    def errors(self) -> float:
        """The mean of the totals in standard errors of itself; nan before there is one."""
        return self._mean / self._error if self._error > 0 else nan

    def value(self, cf: float) -> float:
        """The ratio, clear or not; nan if there is none."""
        return self._kept.get(cf, nan) / self._total if self._total else nan

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
        spread = max(0.0, self._square / self._weight - self._mean * self._mean)
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
            "totals": [self._total, self._square],
            "kept": [list(item) for item in self._kept.items()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict()`."""
        self.clear, self.count = bool(state["clear"]), int(state["count"])
        self._weight, self._weight2 = map(float, state["weights"])
        self._total, self._square = map(float, state["totals"])
        self._kept = {float(cf): float(value) for cf, value in state["kept"]}
