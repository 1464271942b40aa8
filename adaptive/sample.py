"""A fixed strided sample of each gradient, on which the gain before error feedback is measured.

A second full selection on g would cost as much as the compression itself. Small tensors are taken
whole; of large ones enough is taken that a candidate keeps some elements.
"""

from __future__ import annotations

from torch import Tensor

WHOLE = 4096
"""Elements up to which a tensor is its own sample."""

SHARE = 256
"""Of what exceeds WHOLE, one element in this many."""


def sample_stride(numel: int) -> int:
    """Distance between sampled elements of a tensor of `numel` elements."""
    wanted = min(numel, WHOLE + numel // SHARE)
    return max(1, numel // max(1, wanted))


def strided_sample(grad: Tensor) -> Tensor:
    """Every `sample_stride`-th element of `grad` (flat), contiguous; `grad` itself if small."""
    stride = sample_stride(grad.numel())
    return grad if stride == 1 else grad[::stride].contiguous()
