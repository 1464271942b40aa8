"""Estimators: what policies conclude from noisy numbers of single steps.

Averages (`Average`, `Averages`), a ratio of means with its standard error (`MeanRatio`), medians,
relative changes, falling sequences (`descending`), and waits that grow with failures (`Backoff`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf, isfinite, nan, sqrt
from typing import Any, NamedTuple

from policies.base import DENSE
from policies.state import (
    Field,
    Stateful,
    by_any_cf,
    count,
    declare,
    entries,
    flag,
    number,
    numbers,
    saved_as,
    together,
    values,
)


def median(values: Sequence[float]) -> float:
    """The middle value; of an even number the lower of the two, so that it was really measured."""
    return sorted(values)[(len(values) - 1) // 2]


def relative_change(now: float, before: float) -> float:
    """How much two numbers differ, the same both ways: 0.3 is 1.3 times as much or 1 / 1.3 of it.
    Infinite if they differ and either is not positive."""
    if now == before:
        return 0.0
    if now <= 0 or before <= 0:
        return inf
    return max(now / before, before / now) - 1


def descending(values: Iterable[float]) -> list[float]:
    """The sequence that never rises and is nearest by least squares.

    Where values rise, they are replaced by their mean (pool adjacent violators: Ayer and others,
    1955).
    """
    pools: list[tuple[float, int]] = []  # mean, number of values
    for value in values:
        mean, size = value, 1
        while pools and pools[-1][0] < mean:
            before, more = pools.pop()
            mean = (mean * size + before * more) / (size + more)
            size += more
        pools.append((mean, size))
    return [mean for mean, size in pools for _ in range(size)]


def weight_for(world_size: int) -> float:
    """GraVAC's weight of a new value in an average (section 3): workers / 100, at most 0.5, so that
    the past counts too."""
    return min(0.5, world_size / 100)


class Average(Stateful):
    """An exponentially weighted ratio of means, E[top] / E[bottom]; a plain mean if bottom is 1.

    Both means start from zero and need the same bias correction, 1 / (1 - (1 - weight)^n), which
    cancels in the ratio. So the first values count fully.

    weight: of a new value, in (0, 1].
    """

    _fields = declare(
        count=saved_as(count),
        _top=saved_as(number),
        _bottom=saved_as(number, least=0),
    )

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.count = 0
        self._top = 0.0
        self._bottom = 0.0

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
    """Averages by CF, each of which begins with the first value that is added to it.

    weight: of a new value in each of them, in (0, 1].
    """

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


def _load_averages(state: Any, key: str, present: Averages) -> Averages:
    loaded = Averages(present.weight)
    for cf, state_of_one in by_any_cf(state, key).items():
        loaded[cf] = Average(present.weight)
        loaded[cf].load_state_dict(state_of_one)
    return loaded


AVERAGES = Field(
    _load_averages, lambda averages: [[cf, each.state_dict()] for cf, each in averages.items()]
)
"""A field that holds `Averages`, saved as pairs of a CF and the state of its average."""


class Backoff(Stateful):
    """A wait that doubles with each failure in a row and is itself again after a success.

    steps: the first wait. max_doublings: the wait grows to 2^max_doublings times the first.
    """

    SOON = 4
    """What lasted no longer than so many waits has failed (see `judge`)."""

    _fields = declare(steps=saved_as(count, least=1))

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
        """A decision was undone after `lasted` steps: a failure if that was soon."""
        if lasted <= self.SOON * self.steps:
            self.fail()
        else:
            self.reset()


WEIGHT = 0.02
"""Weight of a new step in a `MeanRatio`: about fifty steps count."""

LEAST = 10
"""Steps that a `MeanRatio` needs before it can be clear."""

CLEAR, LOST = 3.0, 1.5
"""Standard errors by which the mean below must exceed 0 to become clear, and to remain clear."""


class Moments(NamedTuple):
    """Exponentially weighted first and second moments of products, one product for each CF.

    All sums lack the bias correction: they are divided by `weight` where they are read.

    cfs: the CFs with products, and DENSE for the total that they are compared with.
    means: by CF. squares: (CFs, CFs), of the products of two CFs.
    weight, weight2: sums of the weights and of their squares.
    """

    cfs: Sequence[float] = ()
    means: Sequence[float] = ()
    squares: Sequence[Sequence[float]] = ()
    weight: float = 0.0
    weight2: float = 0.0

    def mean(self, cf: float) -> float:
        """Mean product of a CF; nan if there is none."""
        return self.means[self.cfs.index(cf)] / self.weight if cf in self.cfs else nan

    def square(self, a: float, b: float) -> float:
        """Mean of the product of the products of two known CFs."""
        return self.squares[self.cfs.index(a)][self.cfs.index(b)] / self.weight

    def updated(self, values: Sequence[float]) -> Moments:
        """These moments with one step more, whose products are `values`."""
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

    def error(self, variance: float) -> float:
        """Standard error of a weighted mean, if the steps are independent."""
        return sqrt(max(0.0, variance) * self.weight2) / self.weight

    def doubt(self, a: float, b: float) -> float:
        """Relative standard error of the ratio of two CFs' means, at most 1.

        Both means rise and fall together with the total, so this error is smaller than that of
        either mean over the total.
        """
        x, y = self.mean(a), self.mean(b)
        if not (x > 0 and y > 0):
            return 1.0
        variance = (
            self.square(a, a) / x / x - 2 * self.square(a, b) / x / y + self.square(b, b) / y / y
        )
        return min(1.0, self.error(variance)) if isfinite(variance) else 1.0


def _load_moments(state: Any, key: str, _: Any) -> Moments:
    fields = dict(zip(Moments._fields, values(state, key), strict=False))
    cfs, means = numbers(fields, "cfs", least=1), numbers(fields, "means")
    rows = entries(fields, "squares", len(cfs))
    squares = [numbers({"squares": row}, "squares") for row in rows]
    together(len(cfs) == len(means) == len(rows), f"{key!r} has lost some CFs")
    together(not cfs or DENSE in cfs, f"{key!r} has no total")
    weight = number(fields, "weight", **({"above": 0} if cfs else {"least": 0}))
    return Moments(cfs, means, squares, weight, number(fields, "weight2", least=0))


MOMENTS = Field(_load_moments, list)
"""A field that holds `Moments`, saved as a list."""


class MeanRatio(Stateful):
    """A ratio of means by CF, E[product] / E[total], of products that noise may make negative.

    Both means are exponentially weighted and taken before they are divided. The ratio means
    something only while the mean total is clearly above 0, measured by its own standard error.

    clear: whether it is. count: steps taken in. moments: the means, and those of the squares.
    """

    _fields = declare(clear=saved_as(flag), count=saved_as(count), moments=MOMENTS)

    def __init__(self) -> None:
        self.clear = False
        self.count = 0
        self.moments = Moments()

    def add(self, products: Mapping[float, float], total: float, energy: float = 1.0) -> None:
        """Take in one step. It is skipped if a number is not finite or the total or the energy is
        0. Products of other CFs than before begin new means.

        energy: product of the norms of the two gradients that were multiplied. All products are
        divided by it: the first gradients may be a hundred times as large as later ones, and would
        hide these.
        """
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
        self.moments = self.moments.updated(values)
        self.clear = self._is_clear()

    @property
    def errors(self) -> float:
        """The mean total in its standard errors; nan before there is one."""
        return self._mean / self._error if self._error > 0 else nan

    def value(self, cf: float) -> float:
        """The ratio of a CF, clear or not; nan if there is none."""
        return self.moments.mean(cf) / self._mean if self._mean else nan

    def described(self) -> str:
        """The mean total, its standard error, and how clear that is, in words."""
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

    def _check_loaded(self) -> None:
        known = bool(self.moments.cfs)
        together((self.count > 0) == known, "'count' and 'moments' do not go together")
