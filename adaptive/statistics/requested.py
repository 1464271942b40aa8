"""Measurements that only some policies ask for: sums of gradients, and statistics that the policy
measures itself.

Accordion asks for the norm of the sum of the decoded mean gradients over an interval, of the whole
model or of each layer (parameter). Ranks agree on the norms only in the steps whose plan reads
them, because the norms of many layers are more bytes than a step at a large CF sends.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from adaptive.model.parameters import ModelParameter
from adaptive.model.state import SavedPart, check_like, flat_tensors
from adaptive.statistics.vector import Tally
from compressors.kernels import squared_norm
from compressors.kernels.blocks import Flag, Scalar, zeros_if
from policies import Policy


class RequestedStatistics:
    """The measurements that the policy in use asks for.

    sums: of each parameter's mean gradients over several steps. layers: the parameters whose norms
    are read, in the same order on every rank; empty if the policy asks for none."""

    def __init__(self, policy: Policy, parameters: Collection[ModelParameter]) -> None:
        self.sums = GradientSum()
        self.layers = tuple(parameters) if policy.layerwise else ()
        self._policy = policy

    def observe(self, gradients: Tensor, tally: Tally) -> None:
        """Let the policy measure a bucket's local gradients (flat; zeros if the bucket is
        nonfinite)."""
        if tally.measures:
            tally.at("measured").add_(self._policy.measure(gradients))

    def part(self, parameters: Collection[ModelParameter]) -> SavedPart:
        """The sums' part of a saved state, between two steps."""
        by_name, flat = {p.name: p for p in parameters}, flat_tensors(parameters)
        return SavedPart(
            self.sums.state_dict,
            lambda state: check_like("sum", state, flat, finite=False),
            lambda state: self.sums.load_state_dict(state, by_name),
        )


class GradientSum:
    """The sum of each parameter's mean gradients over several steps, the same on all ranks: a
    gradient-sized tensor for each parameter, made at the first `add`."""

    def __init__(self) -> None:
        self._totals: dict[ModelParameter, Tensor] = {}

    def add(self, parameter: ModelParameter, mean: Tensor, nonfinite: Flag) -> None:
        """Add a step's mean gradient of one parameter (flat), unless it is `nonfinite`."""
        if nonfinite is True:
            return
        total = self._totals.get(parameter)
        if total is None:
            total = self._totals[parameter] = parameter.zeros()
        total.add_(zeros_if(nonfinite, mean))

    def read(self) -> tuple[Tensor, dict[ModelParameter, Tensor]]:
        """The norm of the sum over the whole model, and of each parameter's sum (0-dim, float64).
        Starts new sums."""
        total_energy: Scalar = 0.0
        norms = {}
        # By name, because means arrive in another order in every run.
        for parameter, total in sorted(self._totals.items(), key=lambda item: item[0].name):
            energy = torch.as_tensor(squared_norm(total), dtype=torch.float64, device=total.device)
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
