"""Signal gain: which part of the true gradient gets through, from products of what is kept with a
gradient of other noise (docs/signal-gain.md).

The other gradient is a peer's of the same step, or, where the ranks' products are not clear, the
next step's: that one has moved along this step's own noise, and turns against it where steps
overshoot. If neither ratio has a meaning, the gains stay what they were when one last had: noise
hides the signal where it is most of the gradient, after a learning rate drop for instance, and that
is no reason to compress less. Before there was ever one, the root of the steady-state error-fed
gain decides, which is always defined: the amplitude that gets through, of the same order.

Products count in relation to the norms of the gradients that are in them, those of the very steps.

A larger CF lets no more through than a smaller one. Where the ratios say so it is noise, and the
CFs concerned get their mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite, sqrt
from typing import Any

from policies import saved
from policies.average import Average, averages_by_cf
from policies.base import StepReport
from policies.isotonic import descending
from policies.mean_ratio import WEIGHT, MeanRatio, Moments

HUGE = 1e150
"""Norms from here on have no square."""

PEERS, NEXT = "<g, g of a peer>", "<g, g of the next step>"
HELD, ERROR_FED = "what was clear last", "the root of the error-fed gain"
_LEVELS = (ERROR_FED, HELD, NEXT, PEERS)


class SignalGain:
    """peers, next: the two ratios. basis: what decides, one of the four above."""

    def __init__(self) -> None:
        self.peers, self.next = MeanRatio(), MeanRatio()
        self._steady: dict[float, Average] = {}
        self._held: dict[float, float] = {}  # the gains when a ratio was last clear
        self._moments = Moments()  # of the ratio that decides, or did last
        self._norm = 0.0  # of the last step's gradient

    def observe(self, report: StepReport) -> str:
        """Take in one step; in words, what decides from now on if that has changed, else ""."""
        before = self.basis
        last, now = self._norm, report.grad_norm if 0 < report.grad_norm < HUGE else 0.0
        self.peers.add(report.peers, report.peers_total, last * last)  # both are the last step's
        self.next.add(report.signal, report.signal_total, last * now)  # one of each
        self._norm = now
        for cf, steady in report.steady.items():
            self._steady.setdefault(cf, Average(WEIGHT)).add(steady)
        if self.clear:
            ratio = self.peers if self.peers.clear else self.next
            known = {cf: gain for cf in sorted(self._steady) if isfinite(gain := ratio.value(cf))}
            self._held.update(zip(known, descending(known.values()), strict=True))
            self._moments = ratio.moments
        return "" if self.basis == before else f"{self.basis} decides, {self.numbers()}"

    @property
    def basis(self) -> str:
        if self.peers.clear:
            return PEERS
        if self.next.clear:
            return NEXT
        return HELD if self._held else ERROR_FED

    @property
    def clear(self) -> bool:
        """One of the ratios decides."""
        return self.peers.clear or self.next.clear

    def numbers(self) -> str:
        """How clear the ratios are, in words."""
        return f"{PEERS} is {self.peers.numbers()}, {NEXT} {self.next.numbers()}"

    def gain(self, cf: float) -> float | None:
        """In [0, 1]: of whichever decides; None if nothing is known of this CF."""
        held, steady = self._held.get(cf), self._steady.get(cf)
        if held is not None:
            return min(1.0, max(0.0, held))
        if steady is None or not steady.count:
            return None
        return sqrt(min(1.0, max(0.0, steady.value)))

    def doubt(self, a: float, b: float) -> float:
        """Relative standard error of one CF's gain in another's, by the ratio that decides or did
        last: gains that are held are no surer than they were. 0 before there was one."""
        return self._moments.doubt(a, b) if self._moments.cfs else 0.0

    def status(self) -> dict[str, float]:
        """For the timeline: what decides (3: peers, 2: next step, 1: what was clear last, 0: the
        root of the error-fed gain), and by how many standard errors the ratios are clear."""
        return {
            "signal": float(_LEVELS.index(self.basis)),
            "peers_errors": self.peers.errors,
            "next_errors": self.next.errors,
        }

    def rescale(self) -> None:
        """Another number of ranks: pairs of ranks are as many, and their products as noisy, as
        never before. The gains are held until a ratio is clear again."""
        self.peers, self.next, self._norm = MeanRatio(), MeanRatio(), 0.0

    def state_dict(self) -> dict[str, Any]:
        """Everything, in JSON-like values: pairs, since JSON has no float keys."""
        return {
            "peers": self.peers.state_dict(),
            "next": self.next.state_dict(),
            "steady": [[cf, average.state_dict()] for cf, average in self._steady.items()],
            "held": [list(item) for item in self._held.items()],
            "moments": list(self._moments),
            "norm": self._norm,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict()`."""
        self.peers.load_state_dict(saved.part(state, "peers"))
        self.next.load_state_dict(saved.part(state, "next"))
        self._steady = averages_by_cf(state, "steady", WEIGHT)
        self._held = saved.by_cf(state, "held")
        self._moments = Moments.saved_in(state)
        self._norm = saved.number(state, "norm", least=0)
