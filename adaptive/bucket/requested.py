"""Measurements that only some policies ask for: a shadow ladder, and the sum of gradients.

Accordion asks for the norm of the sum of the decoded mean gradients over an interval, of the whole
model or of each layer (parameter). Ranks agree on the norms only in the steps whose plan reads
them: with many layers they are more bytes than a step at a large CF sends.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from adaptive.bucket.bucket import Bucket
from adaptive.bucket.shadow import ShadowLadder, check_shadow
from adaptive.memory.error_feedback import NoMemory
from adaptive.model.parameters import ModelParameter
from adaptive.model.state import SavedPart, check_like, flat_tensors
from adaptive.statistics.signal import Peers
from adaptive.statistics.vector import Tally
from compressors.kernels import squared_norm
from compressors.kernels.blocks import Flag, Scalar, zeros_if
from policies import Policy


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
        """The norm of the sum, 0-dim and in double, and each parameter's norm; begins a new sum."""
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


class RequestedStatistics:
    """The measurements that the policy in use asks for.

    cfs, whole_buckets: of the shadow ladder, see `ShadowLadder`.
    """

    def __init__(
        self,
        policy: Policy,
        parameters: Collection[ModelParameter],
        cfs: Sequence[float],
        whole_buckets: bool,
    ) -> None:
        self.ladder = tuple(cfs) if policy.shadow else ()
        """CFs of the shadow ladder; empty without one."""
        self._shadow: ShadowLadder | None = None
        self.layers = tuple(parameters) if policy.layerwise else ()
        """The layers whose norms are read, in the same order on every rank."""
        self._policy = policy
        self._options = (policy.gain == "signal", whole_buckets)
        self.sums = GradientSum()

    def follow(self, memory: NoMemory) -> None:
        """Begin the shadow ladder, which accumulates gradients by this memory's rule."""
        if self.ladder:
            self._shadow = ShadowLadder(self.ladder, memory, *self._options)

    @property
    def peers(self) -> Peers | None:
        """The products with other ranks' gradients; None without signal gain."""
        return None if self._shadow is None else self._shadow.peers

    def observe(self, bucket: Bucket, tally: Tally) -> None:
        """Take in a bucket's local gradients. Those that are not finite are zero."""
        if self._shadow is not None and tally.ladder:
            self._shadow.step(bucket, tally)
        if tally.measures:
            tally.at("measured").add_(self._policy.measure(bucket.work))

    def parts(self, parameters: Collection[ModelParameter]) -> dict[str, SavedPart]:
        """The parts of a saved state, between two steps; empty where a measurement is not asked
        for. (A fallback of the memory replaces the ladder between a check and the loading.)"""
        by_name, flat = {p.name: p for p in parameters}, flat_tensors(parameters)

        def peers() -> dict[str, Tensor]:
            return {} if self.peers is None else self.peers.state_dict()

        def load_shadow(state: Mapping[str, Any]) -> None:
            if self._shadow is not None:
                self._shadow.load_state_dict(state, by_name)

        def load_peers(state: Mapping[str, Any]) -> None:
            if self.peers is not None:
                self.peers.load_state_dict(state)

        return {
            "shadow": SavedPart(
                lambda: self._shadow.state_dict() if self._shadow else {},
                lambda state: check_shadow(state, by_name if self.ladder else {}, len(self.ladder)),
                load_shadow,
            ),
            "sum": SavedPart(
                self.sums.state_dict,
                lambda state: check_like("sum", state, flat, finite=False),
                lambda state: self.sums.load_state_dict(state, by_name),
            ),
            "peers": SavedPart(
                peers, lambda state: check_like("peers", state, peers(), complete=True), load_peers
            ),
        }
