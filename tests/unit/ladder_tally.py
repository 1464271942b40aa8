"""The numbers of a step that the shadow ladder and signal gain add to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Numbers:
    """These are named float64 tensors, as in the tally of a step."""

    def __init__(self, ladder: int, device: torch.device) -> None:
        counts = {"signal_total": 1, "peers_total": 1}
        names = ("shadow_total", "shadow_error", "signal", "peers", *counts)
        self._at = {
            name: torch.zeros(counts.get(name, ladder), dtype=torch.float64, device=device)
            for name in names
        }

    def at(self, name: str) -> Tensor:
        return self._at[name]


def make_tally(ladder: int, device: str | torch.device = "cpu") -> Any:
    """A tally of zeros for a ladder of so many CFs."""
    return _Numbers(ladder, torch.device(device))
