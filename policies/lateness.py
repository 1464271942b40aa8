"""Lateness: how large a CF may be so that what is not sent does not wait too long.

At CF c a step sends one element in c, so an element waits for some c steps. What waits at the end
of a run is lost, and what waits while training moves on is stale. Beside the length of the training
so far both are small if the wait is. So a CF may be as large as a share of the steps done.

The learning rate tells how much of the training so far counts. What was learnt at another learning
rate is another phase: after a drop, or late in a schedule that falls to 0, training averages noise
out, and gradients that have waited bring the noise of the phase before. So steps count from when
the learning rate was last more than four times, or less than a fourth of, what it is now. These
phases are Accordion's critical regimes (Agarwal and others 2021, section 4: early, and after the
learning rate falls), as a bound in place of a switch.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from policies.state import Stateful, require, saved

SHARE = 0.4
"""A CF may be as large as this share of the steps at about the present learning rate."""

ALIKE = 4.0
"""Learning rates within this factor are about the same."""

NOTED = 1.05
"""A learning rate is noted when it has changed by this factor since the last one noted."""


@dataclass(eq=False)
class Lateness(Stateful):
    """The largest CF that the steps done allow."""

    steps: int = saved(0)
    # (step, learning rate) of every change by NOTED since the present phase began.
    _rates: list[tuple[int, float]] = saved([])

    def observe(self, lr: float, steps: int = 1) -> None:
        """Take in so many steps. lr: their learning rate, nan if it is not known."""
        if isfinite(lr) and lr > 0:
            last = self._rates[-1][1] if self._rates else 0.0
            if not last / NOTED < lr < last * NOTED:
                self._rates.append((self.steps, lr))
                self._rates = self._rates[self._first :]
        self.steps += steps

    @property
    def _first(self) -> int:
        """Index of the rate with which the present phase began."""
        now = self._rates[-1][1]
        for index in range(len(self._rates) - 1, 0, -1):
            if not now / ALIKE <= self._rates[index - 1][1] <= now * ALIKE:
                return index
        return 0

    @property
    def alike(self) -> int:
        """Steps at about the present learning rate."""
        return self.steps - (self._rates[0][0] if self._rates else 0)

    @property
    def largest(self) -> float:
        """The largest CF that they allow; below 1 in the first steps."""
        return SHARE * self.alike

    def _check_loaded(self) -> None:
        steps = [step for step, _ in self._rates]
        whole = steps == sorted(steps) and all(0 <= step <= self.steps for step in steps)
        whole = whole and all(rate > 0 for _, rate in self._rates)
        require(whole, "'rates' of lateness must be learning rates > 0 of ascending steps")
