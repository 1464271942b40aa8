"""Signal gain: the share of the true gradient that gets through compression.

It is E<c_t, g_{t+1}> / E<g_t, g_{t+1}>. Both are inner products with a second gradient, whose noise
is independent. g is the gradient on the shadow ladder's sample. c is what *plain* error feedback
would send there, whatever memory is in use (momentum overshoots). shadow.py computes these
products. Each rank multiplies its own c_t and g_{t+1}, and the ranks sum the products. If the
ranks' data are alike, the expected sum is the number of ranks times the expected product of the
ranks' means. If not, differences between ranks count as signal, too.

The second gradient may also be another rank's in the same step: E<c_t of rank i, g_t of rank j>.
Unlike g_{t+1} it was not computed after a step along the noise of g_t. This file computes these
products from sketches, because a rank does not have the other ranks' gradients. A sketch is a
gradient's elements times random signs, added up in WIDTH places. The ranks sum their sketches with
their statistics. The signs are the same on every rank, and others in the next step. Products of
sketches are unbiased. Their standard deviation is about 1 / sqrt(WIDTH) of the product of the norms
(Charikar, Chen and Farach-Colton, 2002). This is less than the noise of a step's product.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from adaptive.model.parameters import ModelParameter
from adaptive.statistics.samples import WIDTH, Sections, sketched
from adaptive.statistics.vector import Tally

SHIFTS = 1009
"""Number of sets of signs; a prime. Set i is one row of random signs, from its i-th sign on."""

STRIDE = 389
"""Places between the sets of two consecutive steps; a prime."""


class Peers:
    """Inner products of what each CF keeps of this rank's gradient with the other ranks' gradients.

    The sketches of a step are (1 + CFs, WIDTH). The first row is the sketch of the gradient. The
    other rows are the sketches of what each CF keeps of it."""

    def __init__(self, cfs: int) -> None:
        self._signs: dict[ModelParameter, Tensor] = {}
        self._sketches = torch.zeros(1 + cfs, WIDTH, dtype=torch.float64)  # of the running step
        # For the next tally: ||g||^2, then <g, the other ranks' g>, then <c, the other ranks' g>.
        self._found = torch.zeros(2 + cfs, dtype=torch.float64)

    def add(self, parameter: ModelParameter, step: int, rows: Tensor, sections: Sections) -> None:
        """Add the sketches of a group of parameters.

        parameter: the group's first. rows: the group's sample of the gradient, and what each CF
        keeps of it, (1 + CFs, elements)."""
        numel = rows.shape[1] + SHIFTS
        signs = self._signs.get(parameter)
        if signs is None or signs.numel() != numel or signs.device != rows.device:
            draw = np.random.default_rng(crc32(f"{parameter.name}{parameter.shard}".encode()))
            drawn = torch.from_numpy(draw.integers(0, 2, numel, dtype=np.int8) * 2 - 1)
            signs = self._signs[parameter] = drawn.to(rows.device, non_blocking=True)
        shift = step * STRIDE % SHIFTS
        now = signs[shift : shift + rows.shape[1]]
        self._sketches = self._sketches.to(rows.device, non_blocking=True)
        self._sketches.add_(sketched(rows, now, shift, sections))

    def end_step(self, tally: Tally) -> Tensor:
        """Copy the gradient's sketch to the tally. Returns all sketches, for `receive`."""
        sketches, self._sketches = self._sketches, torch.zeros_like(self._sketches)
        tally.at("sketch").copy_(sketches[0])
        return sketches

    def receive(self, own: Tensor, total: Tensor) -> None:
        """Compute the products of a step. own: the result of the step's `end_step`,
        (1 + CFs, WIDTH). total: the sum of the ranks' sketches of the gradient, (WIDTH,)."""
        self._found = torch.cat([own[:1] @ own[0], own @ (total - own[0])])

    def begin_step(self, tally: Tally) -> None:
        """Move the products of the latest `receive` to the tally."""
        found = self._found.to(
            tally.vector.device, non_blocking=True
        )  # a loaded state may be on another
        if tally.drift:
            tally.at("peers_energy").add_(found[:1])
        tally.at("peers_total").add_(found[1:2])
        tally.at("peers").add_(found[2:])
        self._found = torch.zeros_like(found)
        self._sketches.zero_()

    def state_dict(self) -> dict[str, Tensor]:
        """The products for the next tally. Between two steps there is no other state."""
        return {"found": self._found.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._found = state["found"].clone()
        self._sketches = torch.zeros_like(self._sketches)
