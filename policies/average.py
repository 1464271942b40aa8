"""Averages of gains: exponentially weighted ratios of means (GraVAC section 3)."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite, nan
from typing import Any

from policies import saved


def weight_for(world_size: int) -> float:
    """The paper's weight of a new value, workers / 100, capped so that the past counts too."""
    return min(0.5, world_size / 100)


class Average:
    """E[top] / E[bottom], each mean exponentially weighted.

    Both means start from zero, so each needs the bias correction 1 / (1 - (1 - w)^n); it is the
    same above and below and cancels, which is why no power appears here. The first values count
    fully: after n values the ratio is one of properly weighted means, not one dragged to zero.

    weight: of a new value, in (0, 1].
    """

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.restart()

    def restart(self) -> None:
        """Forget everything."""
        self.count = 0
        self._top = 0.0
        self._bottom = 0.0

    def add(self, top: float, bottom: float = 1.0) -> None:
        """Take in one step. Non-finite steps and steps with nothing to divide by are skipped."""
        if not (isfinite(top) and isfinite(bottom)) or bottom <= 0:
            return
        self.count += 1
        self._top = (1 - self.weight) * self._top + self.weight * top
        self._bottom = (1 - self.weight) * self._bottom + self.weight * bottom

    @property
    def value(self) -> float:
        """The ratio of means; nan before the first value."""
        return self._top / self._bottom if self._bottom > 0 else nan

    def state_dict(self) -> dict[str, Any]:
        """Everything, in JSON-like values."""
        return {"count": self.count, "top": self._top, "bottom": self._bottom}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict()`."""
        self.count = saved.count(state, "count")
        self._top = saved.number(state, "top")
        self._bottom = saved.number(state, "bottom", least=0)


def averages_by_cf(state: Any, name: str, weight: float) -> dict[float, Average]:
    """From pairs of a CF and the state of its average, saved under `name`."""
    found = {}
    for cf, state_of_one in saved.by_any_cf(state, name).items():
        found[cf] = Average(weight)
        found[cf].load_state_dict(state_of_one)
    return found
