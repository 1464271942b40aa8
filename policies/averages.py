"""Averages of the noisy numbers of single steps."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import isfinite

from policies.state import Stateful, saved


@dataclass(eq=False)
class Averages(Stateful):
    """Exponentially weighted ratios of means by CF, E[top] / E[bottom]. With bottom 1: plain means.

    Both means start from zero and need the same bias correction, 1 / (1 - (1 - weight)^n). It
    cancels in the ratio, so the first values count fully.

    weight: weight of a new value, in (0, 1].
    """

    weight: float
    _means: dict[float, tuple[int, float, float]] = saved({})  # steps, top, bottom

    def add(self, cf: float, top: float, bottom: float = 1.0) -> None:
        """Take in one step. A step that is not finite, or has bottom <= 0, is skipped."""
        known = isfinite(top) and isfinite(bottom)
        if not known or self.weight * bottom <= 0:
            return
        steps, mean_top, mean_bottom = self._means.get(cf, (0, 0.0, 0.0))
        mean_top = (1 - self.weight) * mean_top + self.weight * top
        mean_bottom = (1 - self.weight) * mean_bottom + self.weight * bottom
        self._means[cf] = steps + 1, mean_top, mean_bottom

    def steps(self, cf: float) -> int:
        """Steps of a CF that were taken in."""
        return self._means[cf][0] if cf in self._means else 0

    def __getitem__(self, cf: float) -> float:
        """The average of a CF that has one."""
        _, top, bottom = self._means[cf]
        return top / bottom

    def keep_only(self, cfs: Collection[float]) -> None:
        """Forget the averages of all other CFs."""
        self._means = {cf: means for cf, means in self._means.items() if cf in cfs}
