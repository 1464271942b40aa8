"""The DDP communication hook.

No `from __future__ import annotations` here: DDP compares the annotations of a hook with the
classes themselves, and rejects strings.
"""

from typing import Protocol

import torch
import torch.distributed as dist


class HookState(Protocol):
    """What `adaptive_hook` wants as its state: an `AdaptiveCompressor`, or what `attach` made."""

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]: ...


def adaptive_hook(state: HookState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Exchange one bucket compressed: `ddp_model.register_comm_hook(compressor, adaptive_hook)`.

    Returns a future of the mean gradient, shape (elements of the bucket,)."""
    return state.reduce(bucket)
