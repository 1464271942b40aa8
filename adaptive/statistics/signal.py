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

from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from adaptive.parameters import ModelParameter
from adaptive.statistics.samples import WIDTH, Sections, inner, products, sketched
from adaptive.statistics.vector import Tally
from policies import state as saved

if TYPE_CHECKING:
    from adaptive.statistics.shadow import ShadowGroup

SHIFTS = 1009
"""Different sets of signs, taken in turn; a prime, as is STRIDE."""

STRIDE = 389


class Peers:
    """The sketches of the steps whose sums over the ranks are under way, each (1 + CFs, WIDTH):
    that of the gradient and those of what each CF keeps."""

    def __init__(self, cfs: int) -> None:
        self._signs: dict[ModelParameter, Tensor] = {}
        self._sketches = torch.zeros(1 + cfs, WIDTH, dtype=torch.float64)  # of the running step
        self._under_way: deque[Tensor] = deque()
        self._found: Tensor | None = None  # the products, (1 + CFs,), to be told of next

    def add(self, parameter: ModelParameter, step: int, rows: Tensor, sections: Sections) -> None:
        """Take in the sample of one parameter or of several from `parameter` on, and what each CF
        keeps of it: (1 + CFs, elements)."""
        numel = rows.shape[1] + SHIFTS
        signs = self._signs.get(parameter)
        if signs is None or signs.numel() != numel or signs.device != rows.device:
            draw = np.random.default_rng(crc32(parameter.name.encode()))
            drawn = torch.from_numpy(draw.integers(0, 2, numel, dtype=np.int8) * 2 - 1)
            signs = self._signs[parameter] = drawn.to(rows.device)
        shift = step * STRIDE % SHIFTS
        now = signs[shift : shift + rows.shape[1]]
        self._sketches = self._sketches.to(rows.device)
        self._sketches.add_(sketched(rows, now, shift, sections))

    def sketch(self) -> Tensor:
        """Of this rank's gradient, (WIDTH,): to be summed over ranks. The step is over."""
        self._under_way.append(self._sketches)
        self._sketches = torch.zeros_like(self._sketches)
        return self._under_way[-1][0]

    def receive(self, total: Tensor) -> None:
        """The sum over ranks of the sketches of the oldest step that is under way."""
        own = self._under_way.popleft()
        self._found = inner(own, total.to(own.device) - own[0])

    def settle(self, tally: Tally) -> None:
        """Add this rank's products with the others' gradients to the tally, if there are new ones.
        A new step begins."""
        if self._found is not None:
            found = self._found.to(tally.at("peers").device)  # a state may have been loaded
            tally.at("peers_total").add_(found[:1])
            tally.at("peers").add_(found[1:])
        self._found = None
        self._sketches.zero_()

    def state_dict(self) -> dict[str, Tensor]:
        """Everything, as tensors, when no step is under way."""
        return {} if self._found is None else {"found": self._found.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict()`."""
        found = None
        if state:
            found, shape = saved.read(state, "found", object), self._sketches.shape[:1]
            fits = isinstance(found, Tensor) and found.shape == shape
            fits = fits and found.dtype == torch.float64 and bool(found.isfinite().all())
            saved.together(fits, f"'peers' needs 'found', finite, float64, of shape {tuple(shape)}")
        self._found = None if found is None else found.clone()
        self._sketches.zero_()
        self._under_way.clear()


class Signal:
    """The products of one step with the one before, and the sketches. cfs: how many."""

    def __init__(self, cfs: int) -> None:
        self.peers = Peers(cfs)

    def step(self, group: ShadowGroup, step: int, g: Tensor, rows: Tensor, tally: Tally) -> None:
        """Take in a group's sample, and in rows the same and what each CF sends of it, as the
        shadow has found it: (1 + CFs, elements)."""
        if "sent" in group.arrays:
            found = products(group.arrays["sent"], g, group.sections)
            tally.at("signal_total").add_(found[:1])
            tally.at("signal").add_(found[1:])
        group.arrays["sent"] = rows
        self.peers.add(group.parameters[0], step, rows, group.sections)
