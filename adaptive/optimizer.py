"""What the user's optimizer and gradient scaler say."""

from __future__ import annotations

from math import nan
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import Optimizer

if TYPE_CHECKING:
    from torch.amp import GradScaler


def learning_rate(optimizer: Optimizer | None) -> float:
    """Of the first parameter group; nan without an optimizer."""
    return float(optimizer.param_groups[0]["lr"]) if optimizer else nan


def loss_scale(scaler: GradScaler | None, device: torch.device) -> Tensor | None:
    """The loss scale as a tensor, never read on the host; None without an active scaler."""
    if scaler is None or not scaler.is_enabled():
        return None
    return scaler.scale(torch.ones((), device=device))


def describe(optimizer: Optimizer | None) -> str:
    """What must be alike on all ranks."""
    if optimizer is None:
        return "none"
    momenta = [group.get("momentum") for group in optimizer.param_groups]
    return f"{type(optimizer).__name__} with momentum {momenta}"
