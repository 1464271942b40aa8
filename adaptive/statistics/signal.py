"""Signal gain: which part of the true gradient gets through.

It is E<c_t, g_{t+1}> / E<g_t, g_{t+1}>: inner products with another gradient, whose noise is
independent. c is what *plain* error feedback would send (no momentum, which overshoots), whatever
memory is in use, on the shadow ladder's sample. Each rank multiplies its own c_t and g_{t+1}:
summed over ranks whose shards are alike that has the expectation of the product of the workers'
averages (with unlike shards it also counts, as signal, how much the ranks' own gradients differ
from their mean).

The other gradient may also be another rank's in the same step: E<c_t of rank i, g_t of rank j> is
the product of what i keeps with the true gradient *here*, since a peer's gradient has not moved
along this step's own noise, as the next step's has. A rank knows its own c; of the others'
gradients it learns the sum of a small sketch in the statistics: signs drawn alike on every rank and
fresh in every step, elements added up in WIDTH places. Products of sketches are unbiased, with a
relative standard deviation of 1 / sqrt(WIDTH) of the product of the norms (Charikar and others,
2002), below the noise that a step's product has anyway.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np
import torch

from adaptive.parameters import ModelParameter
from adaptive.statistics.vector import Tally
from compressors.kernels import Array
from policies import state as saved

if TYPE_CHECKING:
    from adaptive.statistics.shadow import ShadowGroup

WIDTH = 256
"""Numbers in a sketch: 2 kB in the all-reduce of the statistics."""

SHIFTS = 1009
"""Different sets of signs, taken in turn; a prime, as is STRIDE."""

STRIDE = 389


class Peers:
    """The sketches of one step, until the ranks' sum of them is there."""

    def __init__(self, cfs: int) -> None:
        self._cfs = cfs
        self._signs: dict[ModelParameter, Array] = {}
        self._sum: Array | None = None
        self._restart()

    def _restart(self) -> None:
        self._grad = np.zeros(WIDTH)
        self._kept = np.zeros((self._cfs, WIDTH))

    def add(
        self, parameter: ModelParameter, step: int, g: Array, kept: Array, weight: float
    ) -> None:
        """Take in the sample of one parameter or of several from `parameter` on, (elements,), and
        what each CF keeps, (CFs, elements)."""
        signs = self._signs.get(parameter)
        if signs is None or signs.size != g.size + SHIFTS:
            draw = np.random.default_rng(crc32(parameter.name.encode()))
            signs = draw.integers(0, 2, g.size + SHIFTS, dtype=np.int8) * 2 - 1
            self._signs[parameter] = signs
        shift = step * STRIDE % SHIFTS
        now = signs[shift : shift + g.size].astype(g.dtype)
        now *= weight**0.5  # both factors of a product have it
        self._grad += _rolled(_fold(g * now), shift)
        self._kept += _rolled(_fold(kept * now), shift)

    def sketch(self) -> torch.Tensor:
        """Of this rank's gradient: to be summed over ranks."""
        return torch.from_numpy(self._grad)

    def receive(self, total: Sequence[float]) -> None:
        """The sum over ranks of the last step's sketches."""
        self._sum = np.array(total)

    def settle(self, tally: Tally) -> None:
        """Add this rank's products of the last step to the tally, and begin a new step."""
        if self._sum is not None:
            others = self._sum - self._grad
            tally.at("peers").copy_(torch.from_numpy(self._kept @ others))
            tally.at("peers_total").fill_(float(self._grad @ others))
        self._sum = None
        self._restart()

    def state_dict(self) -> dict[str, Any]:
        """Everything, as tensors."""
        state = {"grad": self._grad, "kept": self._kept}
        if self._sum is not None:
            state["sum"] = self._sum
        return {name: torch.from_numpy(each.copy()) for name, each in state.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict()`."""
        wanted = {"grad": (WIDTH,), "kept": (self._cfs, WIDTH), "sum": (WIDTH,)}
        arrays = {}
        for name, shape in wanted.items():
            if name == "sum" and name not in state:
                continue
            each = saved.field(state, name)
            fits = isinstance(each, torch.Tensor) and each.shape == shape
            fits = fits and each.dtype == torch.float64 and bool(each.isfinite().all())
            saved.together(fits, f"'peers' needs {name!r}, finite, float64, of shape {shape}")
            arrays[name] = each.numpy().copy()
        self._grad, self._kept, self._sum = arrays["grad"], arrays["kept"], arrays.get("sum")


def _rolled(rows: Array, shift: int) -> Array:
    """As np.roll along the last axis, which takes several times as long for rows this short."""
    cut = WIDTH - shift % WIDTH
    return np.concatenate((rows[..., cut:], rows[..., :cut]), axis=-1)


def _fold(rows: Array) -> Array:
    """Elements WIDTH apart added up, along the last axis, in double."""
    whole = rows.shape[-1] // WIDTH * WIDTH
    shape = (*rows.shape[:-1], -1, WIDTH)
    folded = rows[..., :whole].reshape(shape).sum(axis=-2, dtype=np.float64)
    tail = rows[..., whole:]
    folded[..., : tail.shape[-1]] += tail
    return np.asarray(folded)


class Signal:
    """The products of one step with the one before, and the sketches. cfs: how many."""

    def __init__(self, cfs: int) -> None:
        self.peers = Peers(cfs)

    def step(self, group: ShadowGroup, step: int, g: Array, sent: Array, tally: Tally) -> None:
        """Take in a group's sample, and what each CF sends of it as the shadow has found it."""
        before = group.arrays
        if "grad" in before:
            for i, product in enumerate((before["sent"] @ g).tolist()):
                tally.at("signal")[i] += group.weight * product
            tally.at("signal_total").add_(group.weight * float(before["grad"] @ g))
        before["grad"], before["sent"] = g.copy(), sent
        self.peers.add(group.parameters[0], step, g, sent, group.weight)
