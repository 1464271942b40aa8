"""Signal gain: which part of the true gradient gets through, from products of what is kept with a
gradient of other noise (docs/signal-gain.md).

The other gradient is a peer's of the same step, or, where the ranks' products are not clear, the
next step's: that one has moved along this step's own noise, and turns against it where steps
overshoot. If neither ratio has a meaning the steady-state error-fed gain of the same CF decides,
which is always defined (and smaller, so that a CF goes down sooner than up).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import nan
from typing import Any

from policies.average import Average
from policies.base import StepReport
from policies.mean_ratio import WEIGHT, MeanRatio

HUGE = 1e150
"""Norms from here on have no square."""

PEERS, NEXT, ERROR_FED = "<g, g of a peer>", "<g, g of the next step>", "the error-fed gain"


class SignalGain:
    """peers, next: the two ratios. basis: what decides, one of the three above."""

    def __init__(self) -> None:
        self.peers, self.next = MeanRatio(), MeanRatio()
        self._steady: dict[float, Average] = {}

    def observe(self, report: StepReport) -> str:
        """Take in one step; in words, what decides from now on if that has changed, else ""."""
        before = self.basis
        energy = report.grad_norm**2 if abs(report.grad_norm) < HUGE else nan
        self.peers.add(report.peers, report.peers_total, energy)
        self.next.add(report.signal, report.signal_total, energy)
        for cf, steady in report.steady.items():
            self._steady.setdefault(cf, Average(WEIGHT)).add(steady)
        return "" if self.basis == before else f"{self.basis} decides, {self.numbers()}"

    @property
    def basis(self) -> str:
        if self.peers.clear:
            return PEERS
        return NEXT if self.next.clear else ERROR_FED

    @property
    def clear(self) -> bool:
        """One of the ratios decides."""
        return self.basis != ERROR_FED

    def numbers(self) -> str:
        """How clear the ratios are, in words."""
        return f"{PEERS} is {self.peers.numbers()}, {NEXT} {self.next.numbers()}"

    def gain(self, cf: float) -> float | None:
        """In [0, 1]: of whichever decides; None if nothing is known of this CF."""
        value = {PEERS: self.peers, NEXT: self.next}[self.basis].value(cf) if self.clear else None
        if value is None or value != value:
            steady = self._steady.get(cf)
            if steady is None or not steady.count:
                return None
            value = steady.value
        return min(1.0, max(0.0, value))

    def status(self) -> dict[str, float]:
        """For the timeline: what decides (2: peers, 1: next step, 0: error-fed gain), and by how
        many standard errors the ratios are clear."""
        return {
            "signal": float((ERROR_FED, NEXT, PEERS).index(self.basis)),
            "peers_errors": self.peers.errors,
            "next_errors": self.next.errors,
        }

    def state_dict(self) -> dict[str, Any]:
        """Everything, in JSON-like values: pairs, since JSON has no float keys."""
        return {
            "peers": self.peers.state_dict(),
            "next": self.next.state_dict(),
            "steady": [[cf, average.state_dict()] for cf, average in self._steady.items()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict()`."""
        self.peers.load_state_dict(state["peers"])
        self.next.load_state_dict(state["next"])
        self._steady = {}
        for cf, saved in state["steady"]:
            self._steady[float(cf)] = Average(WEIGHT)
            self._steady[float(cf)].load_state_dict(saved)
