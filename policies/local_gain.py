"""The gain of local steps: the worth of H steps between two exchanges, beside H exchanged steps.

Let the ranks take H steps between two exchanges. In its own steps a rank follows its local gradient
alone. Only one step in H averages the noise of N ranks. So the gain is a + (1 - a) / H, where a is
the worth of a lone rank's step beside a step of all ranks: 1 / N where gradients are mere noise, 1
where all ranks have the same.

Let k be noise / signal, in energies. A step of n ranks makes 1 / (1 + k / n) of the progress of a
step without noise (McCandlish and others 2018, section 2), so a = (1 + k / N) / (1 + k). k follows
from how far the ranks drift apart. The cosine of two ranks' gradients is 1 / (1 + k). The cosine of
their changes over H steps is 1 / (1 + k / H), because the signal grows as H and noise as its root.
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.averages import Averages
from policies.base import StepReport
from policies.state import Stateful, saved

WEIGHT = 0.1
"""Weight of a new step in the average of a cosine."""


@dataclass(eq=False)
class LocalGain(Stateful):
    """What the cosines of two ranks' changes say of local steps. ranks: world size."""

    ranks: int
    _cosines: Averages = saved(Averages(WEIGHT))  # by local steps

    def observe(self, report: StepReport, steps: int) -> None:
        """Take in an exchange after so many local steps."""
        if report.peers_energy > 0 and self.ranks > 1:
            cosine = report.peers_total / report.peers_energy / (self.ranks - 1)
            self._cosines.add(steps, cosine)

    def gain(self, steps: int) -> float:
        """Of so many local steps between two exchanges, in (0, 1]."""
        # Gradients of ranks that are apart need not be as much alike as those of ranks together.
        seen = [int(n) for n in self._cosines.cfs() if n > 1] or [1]
        known = min(seen, key=lambda n: max(n / steps, steps / n))
        cosine = self._cosines.value(known)
        alone = 1 / self.ranks
        if cosine is not None and cosine > 0:
            noise = known * (1 / min(1.0, cosine) - 1)
            alone = (1 + noise / self.ranks) / (1 + noise)
        return alone + (1 - alone) / steps
