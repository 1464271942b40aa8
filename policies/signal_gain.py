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

from math import isfinite, sqrt

from policies.base import StepReport
from policies.estimators import (
    AVERAGES,
    MOMENTS,
    WEIGHT,
    Averages,
    MeanRatio,
    Moments,
    descending,
)
from policies.state import CHILD, Stateful, by_cf, declare, number, saved_as

HUGE = 1e150
"""Gradient norms from here on cannot be squared."""

PEERS, NEXT = "<g, g of a peer>", "<g, g of the next step>"
LAST_CLEAR, ERROR_FED = "what was clear last", "the root of the error-fed gain"
_BASES = (ERROR_FED, LAST_CLEAR, NEXT, PEERS)


class SignalGain(Stateful):
    """The signal gain of every CF of the shadow ladder, and how uncertain it is.

    peers, next: the ratios of products with another rank's and with the next step's gradient.
    """

    _fields = declare(
        peers=CHILD,
        next=CHILD,
        _steady=AVERAGES,
        _clear_gains=saved_as(by_cf),
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
        return "" if self.basis == before else f"{self.basis} decides, {self.described()}"

    @property
    def basis(self) -> str:
        """The estimate that decides, in words: PEERS, NEXT, LAST_CLEAR or ERROR_FED."""
        if self.peers.clear:
            return PEERS
        if self.next.clear:
            return NEXT
        return LAST_CLEAR if self._clear_gains else ERROR_FED

    @property
    def clear(self) -> bool:
        """Whether one of the two ratios is clear now."""
        return self.peers.clear or self.next.clear

    def described(self) -> str:
        """How clear the two ratios are, in words."""
        return f"{PEERS} is {self.peers.described()}, {NEXT} {self.next.described()}"

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
            "signal": float(_BASES.index(self.basis)),
            "peers_errors": self.peers.errors,
            "next_errors": self.next.errors,
        }

    def rescale(self) -> None:
        """Another number of ranks: there are more or fewer pairs, and their products are more or
        less noisy. The gains stay what they are until a ratio is clear again."""
        self.peers, self.next, self._norm = MeanRatio(), MeanRatio(), 0.0
