"""torch's Muon: how to recognise it, and the size of its steps.

Muon replaces each matrix's momentum by the nearest matrix with orthogonal rows or columns. So the
size of its updates' elements depends on the shape of the matrix. Elements of AdamW's updates are
near 0.2 (Liu and others 2025, section 2.2). Compression compares elements of both with each other.
So updates of Muon are divided by the learning rate that AdamW would need for steps of that size.

The update of a rank has that size however much noise is in the momentum. Noise differs between
ranks, so the mean of the ranks' updates is smaller than Muon's update by the mean gradient. With q
the signal's share of a gradient's energy and k the share of the noise that stays in the momentum,
r = q / (q + k (1 - q)) is the correlation of two ranks' momenta. The norm of the mean of N updates
is then sqrt((1 + (N - 1) r) / N) times the norm of one update.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import torch
from torch import Tensor
from torch.optim import Optimizer

from adaptive.memory.handover import Group, steps_as
from adaptive.model.parameters import local

TINY = 1e-30
"""Added to energies, so that none is zero."""

ADAMW_SIZE = 0.2
"""Root mean square of AdamW's updates: the factor in Muon's "match_rms_adamw"."""


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


def enlargements(optimizer: Optimizer, steps: int, ranks: int) -> dict[Tensor, Tensor]:
    """The factors of this rank's updates that make the ranks' mean as large as Muon's update by the
    mean gradient: for each parameter, 0-dim, in [1, sqrt(N)]. To be called after a step.

    steps: number of gradients in the momenta."""
    found: dict[Tensor, Tensor] = {}
    for group in optimizer.param_groups:
        stepped = [p for p in group["params"] if p.grad is not None and optimizer.state.get(p)]
        if not stepped:
            continue
        momenta = [local(optimizer.state[p]["momentum_buffer"]) for p in stepped]
        of_gradients = _energies([local(p.grad) for p in stepped])  # (parameters,)
        beta: float = group["momentum"]
        of_noise = (1 - beta) / (1 + beta)  # the share of the noise that stays in the momentum
        bias = max(1 - beta**steps, 1 - beta)
        part = _energies(momenta).div_(bias**2).div_(of_gradients.clamp_(min=TINY))
        # If both energies overflow, or without momentum, all counts as signal.
        signal = part.sub_(of_noise).div_(1 - of_noise).clamp_(0.0, 1.0).nan_to_num_(1.0)
        if group["nesterov"]:  # the noise in (1 - beta) gradient + beta momentum
            of_noise = (1 - beta) ** 2 * ((1 + beta) ** 2 + beta**4 / (1 - beta**2))
        correlation = signal / (signal + (1 - signal).mul_(of_noise)).clamp_(min=TINY)
        scales = correlation.mul_(ranks - 1).add_(1).reciprocal_().mul_(ranks).sqrt_()
        found |= zip(stepped, scales.unbind(), strict=True)
    return found


def _energies(tensors: Sequence[Tensor]) -> Tensor:
    """Squared norms, in float32."""
    narrow = [t.float() if t.dtype == torch.float64 else t for t in map(Tensor.detach, tensors)]
    norms = torch._foreach_norm(narrow, 2, dtype=torch.float32)
    return torch.stack(norms).square_()


def normalized(grad: Tensor) -> Tensor:
    """A gradient (flat), scaled to the size of an update."""
    size = grad.square().mean().sqrt_()
    return grad * (ADAMW_SIZE / size.clamp_(min=torch.finfo(grad.dtype).tiny))
