"""What is known of each layer: sums of its gradients, and what each CF would keep of it.

A layer is a parameter. Only policies ask for these: Accordion for the norm of the sum of the
decoded mean gradients over an interval (one gradient-sized tensor a parameter, made when it is
first asked for), those that give layers CFs of their own for the gains layer by layer. The latter
are added up
locally, step by step, and agreed only in the steps whose plan reads them: with many layers they
would be more than what a step at a large CF sends.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, nan, sqrt
from typing import Any

import torch
from torch import Tensor

from adaptive.parameters import ModelParameter
from compressors.kernels import Flag, squared_norm
from policies import LayerReport
from policies import state as saved


class GradientSum:
    """Alike on all ranks, since every rank decodes the same mean."""

    def __init__(self) -> None:
        self._totals: dict[ModelParameter, Tensor] = {}
        self.by_layer: dict[str, float] = {}
        """Norms at the last reading, by parameter name."""

    def add(self, parameter: ModelParameter, mean: Tensor, poisoned: Flag) -> None:
        """Add a step's mean gradient of one parameter (flat)."""
        if poisoned is True:
            return
        total = self._totals.get(parameter)
        if total is None:
            total = self._totals[parameter] = parameter.zeros()
        total.add_(mean)

    def read(self) -> Tensor:
        """Norm of the sum since the last reading; a new sum begins."""
        energy = 0.0
        # Means arrive in an order that differs from run to run.
        for parameter, total in sorted(self._totals.items(), key=lambda item: item[0].name):
            of_layer = float(squared_norm(total))
            self.by_layer[parameter.name] = sqrt(of_layer)
            energy += of_layer
            total.zero_()
        return torch.tensor(sqrt(energy), dtype=torch.float64)

    def state_dict(self) -> dict[str, Tensor]:
        return {parameter.name: total.clone() for parameter, total in self._totals.items()}

    def load_state_dict(
        self, state: Mapping[str, Tensor], by_name: Mapping[str, ModelParameter]
    ) -> None:
        self._totals = {by_name[n]: by_name[n].zeros().copy_(t) for n, t in state.items()}


@dataclass
class _Sums:
    """Of one layer, on this rank, since the last reading. error, total: a number for each CF of
    the shadow ladder."""

    energy: float = 0.0
    error: list[float] = field(default_factory=list)
    total: list[float] = field(default_factory=list)


class LayerStatistics:
    """Sums of each layer's energies, since they were last read.

    parameters: of the layers, in an order that is the same on every rank. ladder: the CFs of the
    shadow ladder, if there is one.
    """

    def __init__(self, parameters: Collection[ModelParameter], ladder: Sequence[float]) -> None:
        self._ladder = tuple(ladder)
        self._sums = {parameter.name: self._empty() for parameter in parameters}

    def add_energy(self, parameter: ModelParameter, energy: float) -> None:
        """||g||^2 of a layer in this step; left out if it is not finite."""
        if isfinite(energy) and parameter.name in self._sums:
            self._sums[parameter.name].energy += energy

    def add_levels(
        self, parameter: ModelParameter, error: Sequence[float], total: Sequence[float]
    ) -> None:
        """What each CF of the ladder would have lost of a layer in this step, and of how much."""
        if parameter.name in self._sums:
            sums = self._sums[parameter.name]
            sums.error = [a + b for a, b in zip(sums.error, error, strict=True)]
            sums.total = [a + b for a, b in zip(sums.total, total, strict=True)]

    @property
    def count(self) -> int:
        return len(self._sums) * (2 + 2 * len(self._ladder))

    def read(self, sums: GradientSum | None) -> Tensor:
        """Everything as one list, to be summed over the ranks; then a new sum begins.

        sum_norms: of the mean gradients, by layer, if they were asked for."""
        numbers: list[float] = []
        sum_norms = sums.by_layer if sums else {}
        for name, sums in self._sums.items():
            numbers += [sums.energy, sum_norms.get(name, nan), *sums.error, *sums.total]
            self._sums[name] = self._empty()
        return torch.tensor(numbers, dtype=torch.float64)

    def reports(self, summed: Sequence[float], world_size: int) -> dict[str, LayerReport]:
        """By layer, from what `read` became after the sum over the ranks."""
        n = len(self._ladder)
        found = {}
        for i, name in enumerate(self._sums):
            energy, sum_norm, *rest = summed[i * (2 + 2 * n) :][: 2 + 2 * n]
            levels = zip(self._ladder, rest, rest[n:], strict=False)
            steady = {cf: 1 - error / total for cf, error, total in levels if total > 0}
            found[name] = LayerReport(energy, sum_norm / world_size, steady)
        return found

    def state_dict(self) -> dict[str, Any]:
        return {name: [s.energy, list(s.error), list(s.total)] for name, s in self._sums.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        found = {}
        saved.together(state.keys() == self._sums.keys(), "'layers' are not those of the model")
        for name, each in state.items():
            energy, error, total = saved.entries({name: [each]}, name, 3)[0]
            row = {"energy": energy, "error": error, "total": total}
            lists = saved.numbers(row, "error"), saved.numbers(row, "total")
            fits = all(len(each) == len(self._ladder) for each in lists)
            saved.together(fits, f"'layers' has another ladder for {name!r}")
            found[name] = _Sums(saved.number(row, "energy", least=0), *lists)
        self._sums = found

    def _empty(self) -> _Sums:
        return _Sums(0.0, [0.0] * len(self._ladder), [0.0] * len(self._ladder))
