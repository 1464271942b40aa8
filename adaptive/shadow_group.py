"""What the shadow ladder keeps of the parameters whose gradients are compressed as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from adaptive.residual import Slot
from compressors.base import kept
from compressors.kernels import Array


class ShadowGroup:
    """Arrays over the samples of all slots, one after the other: residual (CFs, elements), and
    where they are wanted velocity (CFs, elements), the last step's grad (elements,) and what was
    kept of it, sent (CFs, elements).

    slots: in order. strides: of each one's sample. weight: elements that a sampled one stands for.
    wanted: sampled elements that each CF keeps. above: where to look for these first; speed, not
    state.
    """

    def __init__(self, slots: Sequence[Slot], strides: Sequence[int], cfs: Sequence[float]) -> None:
        self.slots, self.strides = tuple(slots), tuple(strides)
        sizes = [
            -(-slot.param.numel() // stride) for slot, stride in zip(slots, strides, strict=True)
        ]
        ends = np.cumsum([0, *sizes]).tolist()
        self._places = {
            slot: slice(a, b) for slot, a, b in zip(slots, ends[:-1], ends[1:], strict=True)
        }
        self.size = ends[-1]
        numel = sum(slot.param.numel() for slot in slots)
        self.weight = numel / self.size  # what is large is sampled more thinly
        self.wanted = [max(1, round(kept(numel, cf) * self.size / numel)) for cf in cfs]
        self.above = np.zeros(len(cfs))
        self.arrays: dict[str, Array] = {}

    def place(self, slot: Slot) -> slice:
        """Where a slot's sample is among the elements."""
        return self._places[slot]

    def of(self, slot: Slot) -> dict[str, Array]:
        """What is kept of one slot, as views."""
        place = self._places[slot]
        return {name: array[..., place] for name, array in self.arrays.items()}

    def take_over(self, slot: Slot, arrays: Mapping[str, Array]) -> None:
        """Go on from what was kept of a slot before, in another group."""
        for name, array in arrays.items():
            if name not in self.arrays:
                self.arrays[name] = np.zeros((*array.shape[:-1], self.size), array.dtype)
            self.arrays[name][..., self._places[slot]] = array

    def restart(self) -> None:
        """Nothing is kept any more."""
        for array in self.arrays.values():
            array.fill(0)

    def array(self, name: str, rows: int, dtype: np.dtype[np.floating]) -> Array:
        """(rows, elements), zeros if it was not there."""
        if name not in self.arrays:
            self.arrays[name] = np.zeros((rows, self.size), dtype)
        return self.arrays[name]
