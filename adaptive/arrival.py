"""The order in which the gradients of the first backward are ready. DDP fills its buckets in that
order from then on, so what is kept for a bucket can lie together in memory from the start."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count

from torch import Tensor

from adaptive.residual import Slot


class Arrival:
    """Counts, until `end()`: `slot.arrived` is the place of each parameter."""

    def __init__(self, slots: Mapping[Tensor, Slot]) -> None:
        self._places = count()
        self._handles = [p.register_hook(self._counted(slot)) for p, slot in slots.items()]

    def _counted(self, slot: Slot) -> Callable[[Tensor], None]:
        def arrive(_: Tensor) -> None:
            slot.arrived = min(slot.arrived, next(self._places))

        return arrive

    def end(self) -> None:
        """The first backward is over. May be called again."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
