"""Signal gain: the share of the true gradient that gets through.

It is E<c_t, g_{t+1}> / E<g_t, g_{t+1}>: inner products with another gradient, whose noise is
independent. c is what *plain* error feedback would send on the shadow ladder's sample, whatever
memory is in use (momentum overshoots). shadow.py finds these products. Each rank multiplies its own
c_t and g_{t+1}. Where the ranks' data are alike, the sum over ranks has the expectation of the
product of the ranks' means. Where they are not, the differences between ranks count as signal, too.

The other gradient may also be another rank's in the same step: E<c_t of rank i, g_t of rank j>.
Unlike g_{t+1} it has not moved along this step's noise. A rank knows its own c. Of the others'
gradients the statistics bring it the sum of a small sketch: elements times random signs, added up
in WIDTH places. The signs are the same on every rank and new in every step. Products of sketches
are unbiased. Their standard deviation is 1 / sqrt(WIDTH) of the product of the norms (Charikar,
Chen and Farach-Colton, 2002), below the noise of a step's product.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from adaptive.parameters import ModelParameter
from adaptive.statistics.samples import WIDTH, Sections, sketched
from adaptive.statistics.vector import Tally

SHIFTS = 1009
"""Number of sets of signs, taken in turn; a prime."""

STRIDE = 389
"""Distance of the sets of two steps in a row; a prime."""


class Peers:
    """Products of what each CF keeps of this rank's gradients with the other ranks' gradients.

    A step's sketches are (1 + CFs, WIDTH): of the gradient, and of what each CF keeps of it."""

    def __init__(self, cfs: int) -> None:
        self._signs: dict[ModelParameter, Tensor] = {}
        self._sketches = torch.zeros(1 + cfs, WIDTH, dtype=torch.float64)  # of the running step
        # Products for the next tally: the gradient with itself, then with the other ranks'.
        self._found = torch.zeros(2 + cfs, dtype=torch.float64)

    def add(self, parameter: ModelParameter, step: int, rows: Tensor, sections: Sections) -> None:
        """Sketch a group's sample and what each CF keeps of it. parameter: the group's first. rows:
        (1 + CFs, elements)."""
        numel = rows.shape[1] + SHIFTS
        signs = self._signs.get(parameter)
        if signs is None or signs.numel() != numel or signs.device != rows.device:
            draw = np.random.default_rng(crc32(f"{parameter.name}{parameter.shard}".encode()))
            drawn = torch.from_numpy(draw.integers(0, 2, numel, dtype=np.int8) * 2 - 1)
            signs = self._signs[parameter] = drawn.to(rows.device)
        shift = step * STRIDE % SHIFTS
        now = signs[shift : shift + rows.shape[1]]
        self._sketches = self._sketches.to(rows.device)
        self._sketches.add_(sketched(rows, now, shift, sections))

    def end_step(self, tally: Tally) -> Tensor:
        """Put the gradient's sketch into the tally; returns all sketches, for `receive`."""
        sketches, self._sketches = self._sketches, torch.zeros_like(self._sketches)
        tally.at("sketch").copy_(sketches[0])
        return sketches

    def receive(self, own: Tensor, total: Tensor) -> None:
        """Find the products of a step. own: its `end_step`'s result, (1 + CFs, WIDTH). total: the
        sum of the ranks' sketches of the gradient, (WIDTH,)."""
        self._found = torch.cat([own[:1] @ own[0], own @ (total - own[0])])

    def begin_step(self, tally: Tally) -> None:
        """Move the products of the last step received into the tally."""
        found = self._found.to(tally.vector.device)  # a state may have been loaded
        if tally.drift:
            tally.at("peers_energy").add_(found[:1])
        tally.at("peers_total").add_(found[1:2])
        tally.at("peers").add_(found[2:])
        self._found = torch.zeros_like(found)
        self._sketches.zero_()

    def state_dict(self) -> dict[str, Tensor]:
        """The state between two steps."""
        return {"found": self._found.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._found = state["found"].clone()
        self._sketches = torch.zeros_like(self._sketches)
