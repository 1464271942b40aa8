"""Signal gain: which part of the true gradient gets through (docs/research/signal-gain.md).

What compression keeps of a step's gradient is multiplied with a second gradient, which has the same
signal and other noise, so that the noise averages out. The second gradient is another rank's of the
same step. Where that product is not clear, it is the next step's gradient. (That one turns against
this step's noise where steps overshoot.) While neither is clear, the gains stay as they were: noise
hides the signal, for instance after a drop of the learning rate, and that is no reason to compress
less. Before a ratio was ever clear, the root of the steady-state error-fed gain decides. It is the
amplitude that gets through, and of the same order.

A larger CF lets no more through than a smaller one. Where the ratios say otherwise, that is noise,
and these CFs get their mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass
from enum import Enum
from math import isfinite, nan, sqrt

from policies.averages import Averages
from policies.base import DENSE, StepReport
from policies.state import Stateful, require, saved

WEIGHT, WEIGHT_OF_UPDATES = 0.02, 0.005
"""Weight of a new step in a `MeanRatio`. Of gradients about fifty steps count, of updates two
hundred. Updates make as much of small elements, and so of noise, as of large elements
(docs/research/signal-gain.md)."""

LEAST = 10
"""Steps that a `MeanRatio` needs before it can be clear."""

CLEAR, LOST = 3.0, 1.5
"""Standard errors by which the mean below must exceed 0 to become clear, and to remain clear."""


class Basis(Enum):
    """The estimates that the signal gain can rest on, in words. The least preferred is first."""

    ERROR_FED = "what compression keeps of gradients and residuals"
    LAST_CLEAR = "what was clear last"
    NEXT = "a comparison with the next step's gradients"
    PEERS = "a comparison of the ranks' gradients"


@dataclass(eq=False)
class MeanRatio(Stateful):
    """A ratio of exponentially weighted means by CF, E[product] / E[total].

    Noise may make single products negative. The ratio means something only while the mean total is
    clearly above 0."""

    weight: float = WEIGHT  # of a new step
    clear: bool = saved(False)  # the mean total is above 0 by enough of its standard errors
    count: int = saved(0)  # steps taken in
    # Weighted sums of the products by CF, and of the products of two of them, in rows of the same
    # order. The total has the CF DENSE. They lack the bias correction: they are divided by
    # `_weight` when read.
    _means: dict[float, float] = saved({})
    _squares: list[list[float]] = saved([])
    _weight: float = saved(0.0)  # sum of the weights
    _weight2: float = saved(0.0)  # sum of their squares

    def add(self, products: Mapping[float, float], total: float, energy: float = 1.0) -> None:
        """Take in one step, unless a number is not finite or the total or the energy is 0. Products
        of other CFs than before begin new means.

        energy: product of the norms of the two gradients. Products are divided by it, because large
        early gradients would hide later ones."""
        if not energy > 0 or not isfinite(total):
            return
        by_cf = {**products, DENSE: total}
        values = {cf: by_cf[cf] / energy for cf in sorted(by_cf)}
        if total == 0 or not all(isfinite(x * x) for x in values.values()):
            return
        if values.keys() != self._means.keys():
            self.clear, self.count, self._weight, self._weight2 = False, 0, 0.0, 0.0
            self._means = dict.fromkeys(values, 0.0)
            self._squares = [[0.0] * len(values) for _ in values]
        old, new = 1 - self.weight, self.weight
        self.count += 1
        self._means = {cf: old * self._means[cf] + new * x for cf, x in values.items()}
        numbers = values.values()
        self._squares = [
            [old * square + new * x * y for square, y in zip(row, numbers, strict=True)]
            for row, x in zip(self._squares, numbers, strict=True)
        ]
        self._weight = old * self._weight + new
        self._weight2 = old * old * self._weight2 + new * new
        least = (LOST if self.clear else CLEAR) * self.error
        self.clear = self.count >= LEAST and self.mean(DENSE) > least

    def mean(self, cf: float) -> float:
        """Mean product of a CF. DENSE: mean total. nan: none yet."""
        return self._means[cf] / self._weight if cf in self._means else nan

    def value(self, cf: float) -> float:
        """The ratio of a CF, clear or not. nan: none yet."""
        total = self.mean(DENSE)
        return self.mean(cf) / total if total else nan

    def doubt(self, a: float, b: float) -> float:
        """Relative standard error of the ratio of two CFs' means, at most 1; 0 before the first."""
        if not self.count:
            return 0.0
        x, y = self.mean(a), self.mean(b)
        if not (x > 0 and y > 0):
            return 1.0
        aa, ab, bb = self._square(a, a), self._square(a, b), self._square(b, b)
        variance = aa / x / x - 2 * ab / x / y + bb / y / y
        return min(1.0, self._error(variance)) if isfinite(variance) else 1.0

    @property
    def error(self) -> float:
        """Standard error of the mean total; nan before there is one."""
        mean = self.mean(DENSE)
        return self._error(self._square(DENSE, DENSE) - mean * mean) if self.count else nan

    @property
    def errors(self) -> float:
        """The mean total in its standard errors; nan before there is one."""
        return self.mean(DENSE) / self.error if self.error > 0 else nan

    def _square(self, a: float, b: float) -> float:
        """Mean of the product of the products of two CFs."""
        cfs = list(self._means)
        return self._squares[cfs.index(a)][cfs.index(b)] / self._weight

    def _error(self, variance: float) -> float:
        """Standard error of a weighted mean, if the steps are independent."""
        return sqrt(max(0.0, variance) * self._weight2) / self._weight

    def _check_loaded(self) -> None:
        size = len(self._means)
        whole = [len(row) for row in self._squares] == [size] * size
        require(whole, "'squares' and 'means' of signal gain are of different CFs")


@dataclass(eq=False)
class SignalGain(Stateful):
    """The signal gain of every CF of the shadow ladder, and how uncertain it is."""

    weight: float = WEIGHT  # of a new step
    peers: MeanRatio = saved(MeanRatio())  # of products with another rank's gradient
    next: MeanRatio = saved(MeanRatio())  # of products with the next step's
    _steady: Averages = saved(Averages(WEIGHT))
    _last_clear: MeanRatio = saved(MeanRatio())  # the ratio that was clear last, as it was then
    _clear_gains: dict[float, float] = saved({})  # by CF, from that ratio
    _norm: float = saved(0.0)  # of the last step's gradient

    def __post_init__(self) -> None:
        self.rescale()

    def observe(self, report: StepReport) -> str:
        """Take in one step. Returns which estimate decides, in words, if that has changed, else
        ""."""
        before, last = self.basis, self._norm
        # Norms from 1e150 on cannot be squared.
        self._norm = report.grad_norm if 0 < report.grad_norm < 1e150 else 0.0
        self.peers.add(report.peers, report.peers_total, last * last)  # both are the last step's
        self.next.add(report.signal, report.signal_total, last * self._norm)  # one of each step
        for cf, steady in report.steady_gain.items():
            self._steady.add(cf, steady)
        if self.clear:
            ratio = self.peers if self.peers.clear else self.next
            known = {
                cf: gain for cf in sorted(self._steady.cfs()) if isfinite(gain := ratio.value(cf))
            }
            self._clear_gains.update(zip(known, descending(known.values()), strict=True))
            self._last_clear = copy(ratio)
        return "" if self.basis == before else f"gains now rest on {self.basis.value}"

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
        return self.peers.clear or self.next.clear

    def gain(self, cf: float) -> float | None:
        """The gain of a CF, in [0, 1]; None if nothing is known of this CF."""
        clear, steady = self._clear_gains.get(cf), self._steady.value(cf)
        if clear is not None:
            return min(1.0, max(0.0, clear))
        return None if steady is None else sqrt(min(1.0, max(0.0, steady)))

    def doubt(self, a: float, b: float) -> float:
        """Relative standard error of the ratio of two CFs' gains, from the `MeanRatio` that was
        clear last. 0 before any was clear."""
        return self._last_clear.doubt(a, b)

    def status(self) -> dict[str, float]:
        """signal: the number of the `Basis`, from 0. peers_errors, next_errors: the mean totals in
        their standard errors."""
        return {
            "signal": float(list(Basis).index(self.basis)),
            "peers_errors": self.peers.errors,
            "next_errors": self.next.errors,
        }

    def rescale(self) -> None:
        """Begin new means, because other pairs of ranks have other noise. The gains stay until a
        ratio is clear again."""
        self.peers, self.next = MeanRatio(self.weight), MeanRatio(self.weight)
        self._norm = 0.0


def descending(values: Iterable[float]) -> list[float]:
    """The sequence that never rises and is nearest to `values` by least squares.

    Neighbours that rise are replaced by their mean (pool adjacent violators: Ayer and others,
    1955)."""
    pools: list[tuple[float, int]] = []  # mean, number of values
    for value in values:
        mean, size = value, 1
        while pools and pools[-1][0] < mean:
            before, more = pools.pop()
            mean = (mean * size + before * more) / (size + more)
            size += more
        pools.append((mean, size))
    return [mean for mean, size in pools for _ in range(size)]
