"""Signal gain: which part of the true gradient gets through.

It is E<c_t, g_{t+1}> / E<g_t, g_{t+1}>: inner products with another gradient, whose noise is
independent. c is what *plain* error feedback would send (no momentum, which overshoots), whatever
memory is in use, on the shadow ladder's sample (shadow.py finds these products). Each rank
multiplies its own c_t and g_{t+1}: summed over ranks whose shards are alike that has the
expectation of the product of the workers' averages (with unlike shards it also counts, as signal,
how much the ranks' own gradients differ from their mean).

The other gradient may also be another rank's in the same step, which has not moved along this
step's own noise, as the next step's has: E<c_t of rank i, g_t of rank j>. A rank knows its own c;
of the others' gradients it learns the sum of a small sketch in the statistics: signs drawn alike on
every rank and fresh in every step, elements added up in WIDTH places. Products of sketches are
unbiased, with a relative standard deviation of 1 / sqrt(WIDTH) of the product of the norms
(Charikar and others, 2002), below the noise that a step's product has anyway.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from adaptive.parameters import ModelParameter
from adaptive.statistics.samples import WIDTH, Sections, inner, sketched
from adaptive.statistics.vector import Tally

SHIFTS = 1009
"""Different sets of signs, taken in turn; a prime, as is STRIDE."""

STRIDE = 389


class Peers:
    """Products of what each CF keeps of this rank's gradients with the other ranks' gradients, by
    sketches. Those of a step are (1 + CFs, WIDTH): of the gradient, and of what each CF keeps."""

    def __init__(self, cfs: int) -> None:
        self._signs: dict[ModelParameter, Tensor] = {}
        self._sketches = torch.zeros(1 + cfs, WIDTH, dtype=torch.float64)  # of the running step
        # Products to be told of next: the gradient's own energy, then with the other ranks'.
        self._found = torch.zeros(2 + cfs, dtype=torch.float64)

    def add(self, parameter: ModelParameter, step: int, rows: Tensor, sections: Sections) -> None:
        """Take in the sample of one parameter or of several from `parameter` on, and what each CF
        keeps of it: (1 + CFs, elements)."""
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
        """own: what `end_step` returned. total: the sum over ranks of that step's sketches."""
        self._found = torch.cat([inner(own[:1], own[0]), inner(own, total - own[0])])

    def begin_step(self, tally: Tally) -> None:
        """Add the products of the last step received to the tally, unless that was done before."""
        found = self._found.to(tally.vector.device)  # a state may have been loaded
        if tally.drift:
            tally.at("peers_energy").add_(found[:1])
        tally.at("peers_total").add_(found[1:2])
        tally.at("peers").add_(found[2:])
        self._found = torch.zeros_like(found)
        self._sketches.zero_()

    def state_dict(self) -> dict[str, Tensor]:
        """Everything, when no step is under way."""
        return {"found": self._found.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._found = state["found"].clone()
        self._sketches = torch.zeros_like(self._sketches)
