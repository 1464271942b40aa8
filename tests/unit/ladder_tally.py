"""The tally of a step that the shadow ladder and signal gain add to."""

from __future__ import annotations

import torch

from adaptive.statistics.samples import WIDTH
from adaptive.statistics.vector import Asked, Tally


def make_tally(ladder: int, device: str | torch.device = "cpu") -> Tally:
    """A tally of zeros for a ladder of so many CFs."""
    asked = Asked(ladder=tuple(map(float, range(2, 2 + ladder))), sketch=WIDTH)
    return Tally(asked, torch.device(device))
