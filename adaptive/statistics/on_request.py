"""What is measured of the gradients only if a policy asks: a shadow ladder, layers, their sum."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from adaptive.bucket import Bucket
from adaptive.memory.error_feedback import NoMemory
from adaptive.parameters import ModelParameter
from adaptive.statistics.layers import GradientSum, LayerStatistics
from adaptive.statistics.shadow import ShadowLadder
from adaptive.statistics.signal import Peers
from adaptive.statistics.vector import Tally
from policies import Policy


class RequestedStatistics:
    """What is measured of the gradients only because the policy asks for it.

    cfs: of the shadow ladder, if there is to be one. joined: a bucket is compressed as one. share:
    of a shadow ladder's elements, see ShadowLadder."""

    def __init__(
        self,
        policy: Policy,
        parameters: Collection[ModelParameter],
        cfs: Sequence[float],
        joined: bool,
        share: float,
    ) -> None:
        self._cfs = tuple(cfs) if policy.shadow else None
        self._signal = policy.gain == "signal"
        self._joined, self._share = joined, share
        self._shadow: ShadowLadder | None = None
        self.layers = LayerStatistics(parameters, self._cfs or ()) if policy.layerwise else None
        self.sums = GradientSum(parameters)

    def begin(self, memory: NoMemory) -> None:
        """From here on gradients are accumulated by this memory's rule."""
        if self._cfs is not None:
            self._shadow = ShadowLadder(
                self._cfs, memory, self._signal, self.layers, self._joined, self._share
            )

    @property
    def ladder(self) -> tuple[float, ...]:
        """CFs of the shadow ladder."""
        return self._shadow.cfs if self._shadow else ()

    @property
    def peers(self) -> Peers | None:
        """Of signal gain, if it is wanted."""
        signal = None if self._shadow is None else self._shadow.signal
        return None if signal is None else signal.peers

    def observe(self, bucket: Bucket, energies: Tensor, tally: Tally) -> None:
        """Take in a bucket's local gradients. energies: ||g||^2 of each part (float64)."""
        if self._shadow is not None and tally.asked.ladder:
            self._shadow.step(bucket, tally)
        if self.layers is not None and bucket.poisoned is not True:
            if isinstance(bucket.poisoned, Tensor):
                energies = energies.masked_fill(bucket.poisoned, 0)
            self.layers.add_energies([part.parameter for part in bucket.parts], energies)

    def state_dict(self) -> dict[str, Any]:
        """By parameter name; that of the layers and the sketches is in the controller's."""
        shadow = self._shadow.state_dict() if self._shadow else {}
        return {"shadow": shadow, "sum": self.sums.state_dict()}

    def load_state_dict(
        self, state: Mapping[str, Any], by_name: Mapping[str, ModelParameter]
    ) -> None:
        self.sums.load_state_dict(state["sum"], by_name)
        if self._shadow is not None:
            self._shadow.load_state_dict(state["shadow"], by_name)
