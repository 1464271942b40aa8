"""torch's Muon: which optimizers are, and how large their steps are.

Muon replaces each matrix's momentum by the nearest matrix with orthogonal rows or columns. So the
elements of its updates are as large as the shape of the matrix makes them, and those of AdamW are
near 0.2 (Liu and others 2025, section 2.2). Compression compares elements of both with each other.
So an update of Muon is told in the learning rate that AdamW would need for steps of that size.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import torch
from torch import Tensor
from torch.optim import Optimizer

from adaptive.memory.handover import Group, steps_as

ADAMW_SIZE = 0.2
"""Root mean square of AdamW's updates, by which Muon's "match_rms_adamw" is scaled."""


def is_muon(optimizer: Optimizer | None) -> bool:
    """Whether this is torch's own Muon (torch 2.9 and later), or inherits its `step`."""
    kind = getattr(torch.optim, "Muon", None)
    return kind is not None and steps_as(optimizer, kind)


def rate_scale(group: Group, shape: Sequence[int]) -> float:
    """The learning rate of an AdamW with steps of the same size, as a multiple of Muon's. 1 with
    adjust_lr_fn="match_rms_adamw"."""
    rows, columns = shape
    adjusted = {
        "match_rms_adamw": ADAMW_SIZE * sqrt(max(rows, columns)),
        "original": sqrt(max(1, rows / columns)),
    }
    ratio = adjusted.get(group.get("adjust_lr_fn") or "original", 1.0)
    return ratio / adjusted["match_rms_adamw"]


def normalized(grad: Tensor) -> Tensor:
    """A sample of a gradient (flat) as large as an update."""
    size = grad.square().mean().sqrt_()
    return grad * (ADAMW_SIZE / size.clamp_(min=torch.finfo(grad.dtype).tiny))
