"""Lateness: the largest CF at which elements do not wait in the residual too long.

At CF c a step sends one element in c, so an element waits for about c steps. Residuals left at the
end of a run are lost, and delayed elements are stale. Both do little harm if the wait is short
compared with the training so far. So the largest CF is a share of the steps done.

Only steps at about the present learning rate count. Training at another learning rate was another
phase: after a drop, or late in a schedule that falls to 0, training averages noise out, and delayed
elements bring back the noise of the phase before. So steps count from the last time when the
learning rate was more than four times the present one, or less than a fourth of it. These phases
are Accordion's critical regimes (Agarwal and others 2021, section 4: early, and after the learning
rate falls), used as a bound instead of a switch.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite, log

from policies.state import Stateful, require, saved

SHARE = 0.4
"""The largest CF / the number of steps at about the present learning rate."""

ALIKE = 4.0
"""Learning rates within this factor are about the same."""

NOTED = 1.05
"""A learning rate is noted when it has changed by this factor since the last one noted."""

MOST = 128
"""The largest number of noted learning rates. One that rises and falls once notes at most half."""


@dataclass(eq=False)
class Lateness(Stateful):
    """A bound of the CF by the steps done."""

    steps: int = saved(0)
    _highest: float = saved(0.0)  # the highest learning rate so far
    # (step, learning rate) of the changes by NOTED since the present phase began: of all, or if
    # these are more than MOST, of the first, and of the last to each learning rate.
    _rates: list[tuple[int, float]] = saved([])

    def observe(self, lr: float, steps: int = 1) -> None:
        """Count `steps` steps. lr: their learning rate, nan if it is not known."""
        if isfinite(lr) and lr > 0:
            self._highest = max(self._highest, lr)
            last = self._rates[-1][1] if self._rates else 0.0
            if not last / NOTED < lr < last * NOTED:
                self._rates.append((self.steps, lr))
                self._rates = self._rates[self._first :]
                if len(self._rates) > MOST:  # a rate that goes up and down, perhaps in every step
                    first, *others = self._rates
                    latest = {round(log(rate) / log(NOTED)): (step, rate) for step, rate in others}
                    self._rates = [first, *sorted(latest.values())]
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
    def rate_is_high(self) -> bool:
        """Whether the learning rate is at least a fourth of the highest so far, or not known."""
        return not self._rates or self._rates[-1][1] >= self._highest / ALIKE

    @property
    def alike(self) -> int:
        """Number of steps at about the present learning rate."""
        return self.steps - (self._rates[0][0] if self._rates else 0)

    @property
    def largest(self) -> float:
        """The largest CF that these steps allow; below 1 in the first steps."""
        return SHARE * self.alike

    def _check_loaded(self) -> None:
        steps = [step for step, _ in self._rates]
        whole = steps == sorted(steps) and all(0 <= step <= self.steps for step in steps)
        whole = whole and all(0 < rate <= self._highest for _, rate in self._rates)
        require(whole, "'rates' of lateness must be of ascending steps, > 0, at most 'highest'")
