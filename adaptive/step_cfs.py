"""The CFs of one step: what is sent, what is measured, and what that means for each layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from policies import DENSE


@dataclass(frozen=True)
class StepCFs:
    """The same on every rank.

    send: the CF of the step. measured: ascending; with `send`, unless that is dense or a foreign
        hook's.
    layers: for a CF of these, the CFs of the layers (by parameter name) that have another.
    """

    send: float = DENSE
    measured: tuple[float, ...] = ()
    layers: Mapping[float, Mapping[str, float]] = field(default_factory=dict)

    @property
    def sent_layers(self) -> Mapping[str, float]:
        """The layers that do not send at `send`, and their CFs."""
        return self.layers.get(self.send, {})

    def sent(self, layer: str) -> float:
        """What a layer sends at."""
        return self.sent_layers.get(layer, self.send)

    def levels(self, layer: str) -> tuple[float, ...]:
        """What a layer is to be compressed at for each of the CFs measured."""
        if not self.layers:
            return self.measured
        return tuple(self.layers.get(cf, {}).get(layer, cf) for cf in self.measured)
