"""What is measured of the gradients only if a policy asks: a shadow ladder, layers, their sum.

A layer is a parameter. Accordion asks for the norm of the sum of the decoded mean gradients over an
interval, policies that give layers CFs of their own for the gains layer by layer: added up locally,
and agreed only in the steps whose plan reads them, since with many layers they would be more than
what a step at a large CF sends.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from math import inf, nan
from typing import Any

import torch
from torch import Tensor

from adaptive.bucket import Bucket
from adaptive.memory.error_feedback import NoMemory
from adaptive.parameters import ModelParameter
from adaptive.state import SavedPart, check_like, flat_tensors
from adaptive.statistics.shadow import ShadowLadder, check_shadow
from adaptive.statistics.signal import Peers
from adaptive.statistics.vector import Tally
from compressors.kernels import squared_norm
from compressors.kernels.blocks import Flag, Scalar
from policies import LayerReport, Policy


class GradientSum:
    """The sum of each parameter's mean gradients over several steps, alike on all ranks: a
    gradient-sized tensor a parameter, made when something is first added to it."""

    def __init__(self) -> None:
        self._totals: dict[ModelParameter, Tensor] = {}

    def add(self, parameter: ModelParameter, mean: Tensor, poisoned: Flag) -> None:
        """Add a step's mean gradient of one parameter (flat), unless it is poisoned."""
        if poisoned is True:
            return
        total = self._totals.get(parameter)
        if total is None:
            total = self._totals[parameter] = parameter.zeros()
        total.add_(mean.masked_fill(poisoned, 0) if isinstance(poisoned, Tensor) else mean)

    def read(self) -> tuple[Tensor, dict[ModelParameter, Tensor]]:
        """Norm of the sum since the last reading, 0-dim and in double, and that of each parameter;
        a new sum begins."""
        total_energy: Scalar = 0.0
        norms = {}
        # Means arrive in an order that differs from run to run.
        for parameter, total in sorted(self._totals.items(), key=lambda item: item[0].name):
            energy = torch.as_tensor(squared_norm(total), dtype=torch.float64)
            norms[parameter] = energy.sqrt()
            total_energy = total_energy + energy
            total.zero_()
        return torch.as_tensor(total_energy, dtype=torch.float64).sqrt(), norms

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
        self._row_of = {parameter: row for row, parameter in enumerate(parameters)}
        self._rows: dict[tuple[ModelParameter, ...], Tensor] = {}  # as tensors on the device
        self._sums = torch.zeros(len(self._row_of), 2 + 2 * len(ladder), dtype=torch.float64)

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
        key = tuple(parameters)
        rows = self._rows.get(key)
        if rows is None:
            found = [self._row_of[parameter] for parameter in parameters]
            rows = self._rows[key] = torch.tensor(found).to(numbers.device)
        self._sums = self._sums.to(numbers.device)
        self._sums[:, columns].index_add_(0, rows, numbers)

    def read(self, sum_norms: Mapping[ModelParameter, Tensor]) -> Tensor:
        """Everything as one flat tensor, to be summed over the ranks; then a new sum begins.

        sum_norms: of the mean gradients; nan of a layer that is not there."""
        read, self._sums = self._sums, torch.zeros_like(self._sums)
        missing = read.new_full((), nan)
        read[:, 1] = torch.stack([sum_norms.get(layer, missing) for layer in self._row_of])
        return read.flatten()

    def reports(self, summed: Sequence[float], world_size: int) -> dict[str, LayerReport]:
        """By layer, from what `read` became after the sum over the ranks; none if that is empty."""
        n, found = len(self._ladder), {}
        for layer, row in self._row_of.items() if summed else ():
            energy, sum_norm, *rest = summed[row * (2 + 2 * n) :][: 2 + 2 * n]
            levels = zip(self._ladder, rest, rest[n:], strict=False)
            steady = {cf: 1 - error / total for cf, error, total in levels if total > 0}
            found[layer.name] = LayerReport(energy, sum_norm / world_size, steady)
        return found

    def state_dict(self) -> dict[str, Tensor]:
        """The row of each layer, by name."""
        return {layer.name: self._sums[row].clone() for layer, row in self._row_of.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._sums = torch.stack([state[layer.name] for layer in self._row_of])


class RequestedStatistics:
    """What is measured of the gradients only because the policy asks for it.

    cfs, whole_buckets, share: of the shadow ladder, if there is to be one.
    """

    def __init__(
        self,
        policy: Policy,
        parameters: Collection[ModelParameter],
        cfs: Sequence[float],
        whole_buckets: bool,
        share: float,
    ) -> None:
        self.ladder = tuple(cfs) if policy.shadow else ()
        """CFs of the shadow ladder."""
        self._shadow: ShadowLadder | None = None
        self.layers = LayerStatistics(parameters, self.ladder) if policy.layerwise else None
        self._options = (policy.gain == "signal", self.layers, whole_buckets, share)
        self.sums = GradientSum()

    def follow(self, memory: NoMemory) -> None:
        """From here on gradients are accumulated by this memory's rule."""
        if self.ladder:
            self._shadow = ShadowLadder(self.ladder, memory, *self._options)

    @property
    def peers(self) -> Peers | None:
        """Of signal gain, if it is wanted."""
        return None if self._shadow is None else self._shadow.peers

    def observe(self, bucket: Bucket, energies: Tensor, tally: Tally) -> None:
        """Take in a bucket's local gradients. energies: ||g||^2 of each part (float64)."""
        if self._shadow is not None and tally.ladder:
            self._shadow.step(bucket, tally)
        if self.layers is not None and bucket.poisoned is not True:
            if isinstance(bucket.poisoned, Tensor):
                energies = energies.masked_fill(bucket.poisoned, 0)
            self.layers.add_energies([part.parameter for part in bucket.parts], energies)

    def parts(self, parameters: Collection[ModelParameter]) -> dict[str, SavedPart]:
        """What is saved when no step is under way, of these parameters; empty of what is not asked
        for."""
        by_name, layers = {p.name: p for p in parameters}, self.layers
        flat = flat_tensors(parameters)
        return {
            "shadow": SavedPart(
                lambda: self._shadow.state_dict() if self._shadow else {},
                lambda state: check_shadow(state, by_name if self.ladder else {}, len(self.ladder)),
                lambda state: self._load_shadow(state, by_name),
            ),
            "sum": SavedPart(
                self.sums.state_dict,
                lambda state: check_like("sum", state, flat, finite=False),
                lambda state: self.sums.load_state_dict(state, by_name),
            ),
            "layers": _as_it_is("layers", lambda: layers),
            "peers": _as_it_is("peers", lambda: self.peers),
        }

    def _load_shadow(self, state: Mapping[str, Any], by_name: Mapping[str, ModelParameter]) -> None:
        if self._shadow is not None:
            self._shadow.load_state_dict(state, by_name)


def _as_it_is(name: str, find: Callable[[], LayerStatistics | Peers | None]) -> SavedPart:
    """Of a part, if there is one, whose state has tensors of the same shapes whenever it is saved.
    find: returns it."""

    def save() -> dict[str, Tensor]:
        part = find()
        return {} if part is None else part.state_dict()

    def load(state: Mapping[str, Any]) -> None:
        part = find()
        if part is not None:
            part.load_state_dict(state)

    return SavedPart(save, lambda state: check_like(name, state, save(), complete=True), load)
