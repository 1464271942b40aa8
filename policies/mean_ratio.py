"""A ratio of means of noisy products, and whether it means anything.

Products of one step may be negative, so that both means are taken before they are divided. Where
the mean below is not clearly above 0, by its own standard error, there is no ratio.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite, nan, sqrt
from typing import Any, NamedTuple

from policies import saved
from policies.base import DENSE

WEIGHT = 0.02
"""Of a new step in the means: some fifty steps count."""

LEAST = 10
"""Steps before any judgement."""

CLEAR, LOST = 3.0, 1.5
"""Standard errors by which the mean must exceed 0 to become clear, and to remain so."""


class Moments(NamedTuple):
    """Weighted means, each too small by the weights' sum, `weight`. cfs: DENSE, for the total, and
    those with products. squares: (CFs, CFs), of the products of two. weight2: sum of the squares of
    the weights."""

    cfs: Sequence[float] = ()
    means: Sequence[float] = ()
    squares: Sequence[Sequence[float]] = ()
    weight: float = 0.0
    weight2: float = 0.0

    @classmethod
    def saved_in(cls, state: Any) -> Moments:
        """Those saved under "moments", as a list."""
        fields = dict(zip(cls._fields, saved.values(state, "moments"), strict=False))
        cfs, means = saved.numbers(fields, "cfs", least=1), saved.numbers(fields, "means")
        rows = saved.entries(fields, "squares", len(cfs))
        squares = [saved.numbers({"squares": row}, "squares") for row in rows]
        saved.together(len(cfs) == len(means) == len(rows), "'moments' has lost some CFs")
        saved.together(not cfs or DENSE in cfs, "'moments' has no total")
        weight = saved.number(fields, "weight", **({"above": 0} if cfs else {"least": 0}))
        return cls(cfs, means, squares, weight, saved.number(fields, "weight2", least=0))

    def mean(self, cf: float) -> float:
        """nan if nothing is known."""
        return self.means[self.cfs.index(cf)] / self.weight if cf in self.cfs else nan

    def square(self, a: float, b: float) -> float:
        """Of the products of two CFs that are known."""
        return self.squares[self.cfs.index(a)][self.cfs.index(b)] / self.weight

    def taken_in(self, values: Sequence[float]) -> Moments:
        """With one step more."""
        old, new = 1 - WEIGHT, WEIGHT
        return Moments(
            self.cfs,
            [old * mean + new * x for mean, x in zip(self.means, values, strict=True)],
            [
                [old * square + new * x * y for square, y in zip(row, values, strict=True)]
                for row, x in zip(self.squares, values, strict=True)
            ],
            old * self.weight + new,
            old * old * self.weight2 + new * new,
        )

    def error(self, spread: float) -> float:
        """Standard error of a weighted mean, the steps taken as independent."""
        return sqrt(max(0.0, spread) * self.weight2) / self.weight

    def doubt(self, a: float, b: float) -> float:
        """Relative standard error of what one CF lets through in what another does, at most 1. Both
        rise and fall with the total, so that it is smaller than that of either ratio."""
        x, y = self.mean(a), self.mean(b)
        if not (x > 0 and y > 0):
            return 1.0
        spread = (
            self.square(a, a) / x / x - 2 * self.square(a, b) / x / y + self.square(b, b) / y / y
        )
        return min(1.0, self.error(spread)) if isfinite(spread) else 1.0


class MeanRatio:
    """E[product] / E[total], by CF, the means exponentially weighted. clear: it has a meaning.
    moments: what it is made of."""

    def __init__(self) -> None:
        self.clear = False
        self.count = 0
        self.moments = Moments()

    def add(self, products: Mapping[float, float], total: float, energy: float = 1.0) -> None:
        """Take in one step; one that is not finite, or had none before it (0), is passed over. With
        products of other CFs than before it begins afresh.

        energy: of the two gradients that are multiplied, the product of their norms, by which all
        is divided: the first may be a hundred times as large as later ones, and would hide them."""
        if not energy > 0 or not isfinite(total):
            return
        by_cf = {**products, DENSE: total}
        cfs = sorted(by_cf)
        values = [by_cf[cf] / energy for cf in cfs]
        if total == 0 or not all(isfinite(x * x) for x in values):
            return
        if cfs != list(self.moments.cfs):
            zeros = [0.0] * len(cfs)
            self.clear, self.count, self.moments = False, 0, Moments(cfs, zeros, [zeros] * len(cfs))
        self.count += 1
        self.moments = self.moments.taken_in(values)
        self.clear = self._is_clear()

    @property
    def errors(self) -> float:
        """The mean of the totals in standard errors of itself; nan before there is one."""
        return self._mean / self._error if self._error > 0 else nan

    def value(self, cf: float) -> float:
        """The ratio, clear or not; nan if there is none."""
        return self.moments.mean(cf) / self._mean if self._mean else nan

    def numbers(self) -> str:
        """How clear it is, in words."""
        return (
            f"{self._mean:.3g} +- {self._error:.2g}, {self.errors:.2g} standard errors (clear from "
            f"{CLEAR:g}, lost below {LOST:g})"
        )

    @property
    def _mean(self) -> float:
        return self.moments.mean(DENSE)

    @property
    def _error(self) -> float:
        if not self.count:
            return nan
        return self.moments.error(self.moments.square(DENSE, DENSE) - self._mean * self._mean)

    def _is_clear(self) -> bool:
        if self.count < LEAST:
            return False
        return self._mean > (LOST if self.clear else CLEAR) * self._error

    def state_dict(self) -> dict[str, Any]:
        """Everything, in JSON-like values."""
        return {"clear": self.clear, "count": self.count, "moments": list(self.moments)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict()`."""
        self.clear, self.count = saved.flag(state, "clear"), saved.count(state, "count")
        self.moments = Moments.saved_in(state)
        known = bool(self.moments.cfs)
        saved.together((self.count > 0) == known, "'count' and 'moments' do not go together")
