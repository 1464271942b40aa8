"""The tally of a step that the shadow ladder and signal gain add to."""

from __future__ import annotations

import torch

from adaptive.statistics.signal import WIDTH
from adaptive.statistics.vector import Tally


def make_tally(ladder: int, device: str | torch.device = "cpu") -> Tally:
    """A tally of zeros for a ladder of so many CFs."""
    cfs = tuple(map(float, range(2, 2 + ladder)))
    return Tally(ladder=cfs, sketch=WIDTH, device=torch.device(device))
