"""Signal gain: the part of the true gradient that gets through compression (docs/signal-gain.md).

A step's gradient is signal and noise. What compression keeps of it is multiplied with a gradient
that has the same signal and other noise, so that the noise averages out.

1. The other gradient is that of another rank in the same step ("peers").
2. Where the products of ranks are not clear, it is the next step's. That one was taken at
   parameters that have moved along this step's noise, and turns against it where steps overshoot.
3. If neither ratio is clear, the gains stay what they were when one last was. Noise hides the
   signal where it is most of the gradient, for instance after the learning rate has dropped, and
   that is no reason to compress less.
4. Before a ratio was ever clear, the root of the steady-state error-fed gain decides, which is
   always defined: the amplitude that gets through, of the same order.

Products are divided by the norms of the gradients in them. A larger CF lets no more through than a
smaller one: where the ratios say so it is noise, and these CFs get their mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from math import isfinite, nan, sqrt
from typing import Any, NamedTuple

from policies.base import DENSE, StepReport
from policies.estimators import AVERAGES, Averages
from policies.state import (
    CHILD,
    Field,
    Stateful,
    by_cf,
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

HUGE = 1e150
"""Gradient norms from here on cannot be squared."""

WEIGHT = 0.02
"""Weight of a new step in a `MeanRatio`: about fifty steps count."""

LEAST = 10
"""Steps that a `MeanRatio` needs before it can be clear."""

CLEAR, LOST = 3.0, 1.5
"""Standard errors by which the mean below must exceed 0 to become clear, and to remain clear."""


class Basis(IntEnum):
    """An estimate that the signal gain can rest on, the least preferred first."""

    ERROR_FED = 0
    LAST_CLEAR = 1
    NEXT = 2
    PEERS = 3

    @property
    def words(self) -> str:
        """The basis in words."""
        return _WORDS[self]


_WORDS = {
    Basis.ERROR_FED: "the root of the error-fed gain",
    Basis.LAST_CLEAR: "what was clear last",
    Basis.NEXT: "<g, g of the next step>",
    Basis.PEERS: "<g, g of a peer>",
}


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

    _fields = declare(clear=flag, count=count, moments=MOMENTS)

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


class SignalGain(Stateful):
    """The signal gain of every CF of the shadow ladder, and how uncertain it is.

    peers, next: the ratios of products with another rank's and with the next step's gradient.
    """

    _fields = declare(
        peers=CHILD,
        next=CHILD,
        _steady=AVERAGES,
        _clear_gains=by_cf,
        _moments=MOMENTS,
        _norm=saved_as(number, least=0),
    )

    def __init__(self) -> None:
        self.peers, self.next = MeanRatio(), MeanRatio()
        self._steady = Averages(WEIGHT)
        self._clear_gains: dict[float, float] = {}  # by CF, when a ratio was last clear
        self._moments = Moments()  # of the ratio that was clear last
        self._norm = 0.0  # of the last step's gradient

    def observe(self, report: StepReport) -> str:
        """Take in one step. Returns which estimate decides from now on if that has changed, in
        words; else ""."""
        before = self.basis
        last, now = self._norm, report.grad_norm if 0 < report.grad_norm < HUGE else 0.0
        self.peers.add(report.peers, report.peers_total, last * last)  # both are the last step's
        self.next.add(report.signal, report.signal_total, last * now)  # one of each step
        self._norm = now
        for cf, steady in report.steady.items():
            self._steady.add(cf, steady)
        if self.clear:
            ratio = self.peers if self.peers.clear else self.next
            known = {cf: gain for cf in sorted(self._steady) if isfinite(gain := ratio.value(cf))}
            self._clear_gains.update(zip(known, descending(known.values()), strict=True))
            self._moments = ratio.moments
        return "" if self.basis == before else f"{self.basis.words} decides, {self.described()}"

    @property
    def basis(self) -> Basis:
        """The estimate that decides."""
        if self.peers.clear:
            return Basis.PEERS
        if self.next.clear:
            return Basis.NEXT
        return Basis.LAST_CLEAR if self._clear_gains else Basis.ERROR_FED

    @property
    def clear(self) -> bool:
        """Whether one of the two ratios is clear now."""
        return self.peers.clear or self.next.clear

    def described(self) -> str:
        """How clear the two ratios are, in words."""
        peers, following = Basis.PEERS.words, Basis.NEXT.words
        return f"{peers} is {self.peers.described()}, {following} {self.next.described()}"

    def gain(self, cf: float) -> float | None:
        """The gain of a CF, in [0, 1]; None if nothing is known of this CF."""
        clear, steady = self._clear_gains.get(cf), self._steady.value(cf)
        if clear is not None:
            return min(1.0, max(0.0, clear))
        return None if steady is None else sqrt(min(1.0, max(0.0, steady)))

    def doubt(self, a: float, b: float) -> float:
        """Relative standard error of the ratio of two CFs' gains, by the ratio that is clear or was
        last: gains that were kept are no more certain than they were. 0 before there was one."""
        return self._moments.doubt(a, b) if self._moments.cfs else 0.0

    def status(self) -> dict[str, float]:
        """Numbers for the timeline.

        signal: what decides (3: peers, 2: next step, 1: what was clear last, 0: root of the
        error-fed gain). peers_errors, next_errors: the mean totals in their standard errors.
        """
        return {
            "signal": float(self.basis),
            "peers_errors": self.peers.errors,
            "next_errors": self.next.errors,
        }

    def rescale(self) -> None:
        """Another number of ranks: there are more or fewer pairs, and their products are more or
        less noisy. The gains stay what they are until a ratio is clear again."""
        self.peers, self.next, self._norm = MeanRatio(), MeanRatio(), 0.0


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
