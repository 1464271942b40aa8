"""Low-rank adapters (LoRA) for a model's linear layers: Hu and others 2021, section 4.1.

A linear layer W is frozen, and a product of two thin matrices is trained beside it:

    h = W x + (alpha / r) B A x,    A: (r, inputs),  B: (outputs, r)

A starts normal and B at zero, so that the model starts as it was. The paper sets alpha to the
first r that is tried and then leaves it; here alpha = 2 r, so that the factor is 2 at every rank.
"""

from __future__ import annotations

import math
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SCALE = 2.0
"""alpha / r."""


class LowRankLinear(nn.Module):
    """A frozen linear layer with an adapter; inputs (..., inputs) become (..., outputs).

    a, b: the paper's A and B, the only parameters that have gradients. A's standard deviation,
    of which the paper says nothing, is 1/sqrt(inputs): the elements of A x are then as large as
    those of x.
    """

    def __init__(self, linear: nn.Linear, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        drawn = torch.randn(rank, linear.in_features, generator=generator)
        self.a = nn.Parameter(drawn / math.sqrt(linear.in_features))
        self.b = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        frozen: Tensor = self.linear(x)
        return frozen + SCALE * F.linear(F.linear(x, self.a), self.b)


def add_adapters(model: nn.Module, rank: int, seed: int) -> None:
    """Freeze a model, in place, and give every linear layer of its `blocks` an adapter.

    The adapters are drawn from `seed`; the global random numbers are untouched. The state that
    `model.state_dict()` returns holds the frozen parameters, too. ValueError if the model has no
    such layers, or if the rank is below 1 or above the smallest dimension of one of them, which is
    the highest rank that a change of its weights can have.
    """
    blocks = getattr(model, "blocks", nn.ModuleList())
    found = [(name, m) for name, m in blocks.named_modules() if isinstance(m, nn.Linear)]
    if not found:
        raise ValueError("needs a model that has blocks with linear layers, as gpt and gpt-10m")
    most = min(min(linear.weight.shape) for _, linear in found)
    if not 1 <= rank <= most:
        raise ValueError(f"must be from 1 to {most}, the smallest dimension of a linear layer")
    model.requires_grad_(False)
    # Not the seed itself, from which the task draws the weights.
    generator = torch.Generator().manual_seed(crc32(f"adapters {seed}".encode()))
    for name, linear in found:
        above, _, own = name.rpartition(".")
        setattr(blocks.get_submodule(above), own, LowRankLinear(linear, rank, generator))
