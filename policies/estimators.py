"""Averages and relative changes of the noisy numbers of single steps, and waits that grow with
failures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf, isfinite, nan
from typing import Any

from policies.state import Stateful, declare, read


def relative_change(now: float, before: float) -> float:
    """How much two numbers differ, the same both ways: 0.3 is 1.3 times as much or 1 / 1.3 of it.
    Infinite if they differ and either is not positive."""
    if now == before:
        return 0.0
    if now <= 0 or before <= 0:
        return inf
    return max(now / before, before / now) - 1


class Average(Stateful):
    """An exponentially weighted ratio of means, E[top] / E[bottom]; a plain mean if bottom is 1.

    Both means start from zero and need the same bias correction, 1 / (1 - (1 - weight)^n), which
    cancels in the ratio. So the first values count fully. weight: of a new value, in (0, 1].
    """

    _fields = declare(count=int, _top=float, _bottom=float)

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.count = 0
        self._top = self._bottom = 0.0

    def add(self, top: float, bottom: float = 1.0) -> None:
        """Take in one step. A step that is not finite, or has bottom <= 0, is skipped."""
        if not (isfinite(top) and isfinite(bottom)) or bottom <= 0:
            return
        self.count += 1
        self._top = (1 - self.weight) * self._top + self.weight * top
        self._bottom = (1 - self.weight) * self._bottom + self.weight * bottom

    @property
    def value(self) -> float:
        """The ratio of means; nan before the first value."""
        return self._top / self._bottom if self._bottom > 0 else nan


class Averages(dict[float, Average]):
    """Averages by CF, all with one weight; each begins with the first value added to it."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = weight

    def add(self, cf: float, top: float, bottom: float = 1.0) -> None:
        """Take in one step of a CF, as `Average.add` does."""
        self.setdefault(cf, Average(self.weight)).add(top, bottom)

    def value(self, cf: float) -> float | None:
        """The average of a CF; None before its first value."""
        average = self.get(cf)
        return average.value if average is not None and average.count else None

    def keep_only(self, cfs: Iterable[float]) -> None:
        """Forget the averages of all other CFs."""
        for cf in set(self).difference(cfs):
            del self[cf]

    def state_dict(self) -> dict[str, Any]:
        return {"by_cf": [[cf, average.state_dict()] for cf, average in self.items()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.clear()
        for cf, of_one in read(state, "by_cf", dict[float, Mapping]).items():
            self[cf] = Average(self.weight)
            self[cf].load_state_dict(of_one)


class Backoff(Stateful):
    """A wait that doubles with each failure in a row and is itself again after a success.

    steps: the first wait. max_doublings: the wait grows to 2^max_doublings times the first.
    """

    _fields = declare(steps=int)

    def __init__(self, steps: int, max_doublings: int) -> None:
        self._first = self.steps = steps
        self._longest = steps * 2**max_doublings

    def fail(self) -> None:
        """The next wait is twice as long."""
        self.steps = min(2 * self.steps, self._longest)

    def reset(self) -> None:
        """The next wait is as long as the first."""
        self.steps = self._first

    def judge(self, lasted: int) -> None:
        """A decision was undone after `lasted` steps: a failure if that was within four waits."""
        if lasted <= 4 * self.steps:
            self.fail()
        else:
            self.reset()
