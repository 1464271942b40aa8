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
from math import inf, nan
from typing import Any

import torch
from torch import Tensor

from adaptive.parameters import ModelParameter
from compressors.kernels import squared_norm
from compressors.kernels.blocks import Flag
from policies import LayerReport
from policies import state as saved


class GradientSum:
    """The sum of each parameter's mean gradients over several steps. It is alike on all ranks,
    since every rank decodes the same mean.

    layers: the parameters whose norms are told one by one, in order."""

    def __init__(self, layers: Collection[ModelParameter] = ()) -> None:
        self._layers = tuple(layers)
        self._totals: dict[ModelParameter, Tensor] = {}
        self.by_layer = torch.full((len(self._layers),), nan, dtype=torch.float64)
        """Norms at the last reading; nan of a layer that nothing was added to."""

    def add(self, parameter: ModelParameter, mean: Tensor, poisoned: Flag) -> None:
        """Add a step's mean gradient of one parameter (flat), unless it is poisoned."""
        if poisoned is True:
            return
        total = self._totals.get(parameter)
        if total is None:
            total = self._totals[parameter] = parameter.zeros()
        total.add_(mean.masked_fill(poisoned, 0) if isinstance(poisoned, Tensor) else mean)

    def read(self) -> Tensor:
        """Norm of the sum since the last reading, 0-dim and in double; a new sum begins."""
        norm = torch.zeros((), dtype=torch.float64)
        norms = {}
        # Means arrive in an order that differs from run to run.
        for parameter, total in sorted(self._totals.items(), key=lambda item: item[0].name):
            energy = torch.as_tensor(squared_norm(total), dtype=torch.float64)
            norms[parameter] = energy.sqrt()
            norm = norm.to(energy.device) + energy
            total.zero_()
        missing = norm.new_full((), nan)
        if self._layers:
            self.by_layer = torch.stack([norms.get(layer, missing) for layer in self._layers])
        return norm.sqrt()

    def state_dict(self) -> dict[str, Tensor]:
        return {parameter.name: total.clone() for parameter, total in self._totals.items()}

    def load_state_dict(
        self, state: Mapping[str, Tensor], by_name: Mapping[str, ModelParameter]
    ) -> None:
        self._totals = {by_name[n]: by_name[n].zeros().copy_(t) for n, t in state.items()}


class LayerStatistics:
    """The energies of each layer on this rank, added up since they were last read.

    They are a matrix: a row for each layer, which holds ||g||^2, the norm of the sum of the mean
    gradients, and for each CF of the shadow ladder what it would have lost and of how much.

    parameters: of the layers, in an order that is the same on every rank. ladder: the CFs of the
    shadow ladder, if there is one.
    """

    def __init__(self, parameters: Collection[ModelParameter], ladder: Sequence[float]) -> None:
        self._ladder = tuple(ladder)
        self._row_of = {parameter.name: row for row, parameter in enumerate(parameters)}
        self._rows: dict[tuple[ModelParameter, ...], Tensor] = {}  # as tensors on the device
        shape = len(self._row_of), 2 + 2 * len(self._ladder)
        self._sums = torch.zeros(shape, dtype=torch.float64)

    @property
    def numel(self) -> int:
        """How many numbers `read` gives."""
        return self._sums.numel()

    def add_energies(self, parameters: Sequence[ModelParameter], energies: Tensor) -> None:
        """||g||^2 of layers in this step, (layers,); what is not finite is left out."""
        finite = energies.masked_fill(~(energies < inf), 0)
        self._add(parameters, finite[:, None], slice(1))

    def add_levels(self, parameters: Sequence[ModelParameter], levels: Tensor) -> None:
        """What each CF of the ladder would have lost of layers in this step, and of how much:
        (2, CFs, layers)."""
        self._add(parameters, levels.flatten(0, 1).T, slice(2, None))

    def _add(self, parameters: Sequence[ModelParameter], numbers: Tensor, columns: slice) -> None:
        if not self._row_of:
            return  # the hook was registered without a model
        key = tuple(parameters)
        rows = self._rows.get(key)
        if rows is None:
            found = [self._row_of[parameter.name] for parameter in parameters]
            rows = self._rows[key] = torch.tensor(found).to(numbers.device)
        self._sums = self._sums.to(numbers.device)
        self._sums[:, columns].index_add_(0, rows, numbers)

    def read(self, sum_norms: Tensor | None) -> Tensor:
        """Everything as one flat tensor, to be summed over the ranks; then a new sum begins.

        sum_norms: of the mean gradients, by layer, if they were asked for."""
        read, self._sums = self._sums, torch.zeros_like(self._sums)
        if sum_norms is None:
            read[:, 1] = nan
        else:
            read[:, 1] = sum_norms
        return read.flatten()

    def reports(self, summed: Sequence[float], world_size: int) -> dict[str, LayerReport]:
        """By layer, from what `read` became after the sum over the ranks."""
        n = len(self._ladder)
        found = {}
        for name, row in self._row_of.items():
            energy, sum_norm, *rest = summed[row * (2 + 2 * n) :][: 2 + 2 * n]
            levels = zip(self._ladder, rest, rest[n:], strict=False)
            steady = {cf: 1 - error / total for cf, error, total in levels if total > 0}
            found[name] = LayerReport(energy, sum_norm / world_size, steady)
        return found

    def state_dict(self) -> dict[str, Tensor]:
        """The row of each layer, by name."""
        return {name: self._sums[row].clone() for name, row in self._row_of.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        saved.together(state.keys() == self._row_of.keys(), "'layers' are not those of the model")
        rows = []
        for name in self._row_of:
            row, numbers = state[name], self._sums.shape[1]
            fits = isinstance(row, Tensor) and row.shape == (numbers,)
            fits = fits and row.dtype == torch.float64 and bool((row.isfinite() & (row >= 0)).all())
            saved.together(
                fits,
                f"'layers' needs {numbers} finite numbers >= 0 (float64) for {name!r}: another "
                f"ladder has others",
            )
            rows.append(row)
        self._sums = torch.stack(rows) if rows else torch.zeros_like(self._sums)
