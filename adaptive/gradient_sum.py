"""The sum of the decoded mean gradients over an interval: Accordion's accumulator.

One gradient-sized tensor a parameter, made only when a policy asks for the sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt

from torch import Tensor

from adaptive.residual import Slot
from compressors.kernels import squared_norm


class GradientSum:
    """Alike on all ranks, since every rank decodes the same mean."""

    def __init__(self) -> None:
        self._totals: dict[Slot, Tensor] = {}
        self.by_layer: dict[str, float] = {}
        """Norms at the last reading, by parameter name."""

    def add(self, slot: Slot, mean: Tensor) -> None:
        """Add a step's mean gradient of one parameter (flat)."""
        total = self._totals.get(slot)
        if total is None:
            total = self._totals[slot] = slot.zeros()
        total.add_(mean)

    def read(self) -> float:
        """Norm of the sum since the last reading; a new sum begins."""
        energy = 0.0
        # Means arrive in an order that differs from run to run.
        for slot, total in sorted(self._totals.items(), key=lambda item: item[0].name):
            of_layer = squared_norm(total)
            self.by_layer[slot.name] = sqrt(of_layer)
            energy += of_layer
            total.zero_()
        return sqrt(energy)

    def state_dict(self) -> dict[str, Tensor]:
        return {slot.name: total.clone() for slot, total in self._totals.items()}

    def load_state_dict(self, state: Mapping[str, Tensor], by_name: Mapping[str, Slot]) -> None:
        self._totals = {by_name[n]: by_name[n].zeros().copy_(t) for n, t in state.items()}
