"""The DDP communication hook, and what stays on the model once it is registered.

A hook can never be unregistered, so what it does is decided by its state, which can change.

No `from __future__ import annotations` here: DDP compares the annotations of a hook with the
classes themselves, and rejects strings.
"""

from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from adaptive.compressor import AdaptiveCompressor


class HookState(Protocol):
    """What `adaptive_hook` wants as its state: an `AdaptiveCompressor`, or what `attach` made."""

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]: ...


def adaptive_hook(state: HookState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Exchange one bucket compressed: `ddp_model.register_comm_hook(compressor, adaptive_hook)`.

    Returns a future of the mean gradient, shape (elements of the bucket,)."""
    return state.reduce(bucket)


class Attachment:
    """The hook's state on one model. Copies and pickles of the model leave the compressor
    behind."""

    def __init__(self, compressor: "AdaptiveCompressor | None" = None) -> None:
        self.compressor = compressor

    def reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        if self.compressor is None:
            raise RuntimeError("this copy of the model has no compressor: attach one")
        return self.compressor.reduce(bucket)

    def __reduce__(self) -> "tuple[type[Attachment], tuple[()]]":
        return Attachment, ()

    @staticmethod
    def of(model: DistributedDataParallel) -> "Attachment | None":
        """The model's, if it has one. RuntimeError if nothing can be attached to the model now."""
        found: Attachment | None = getattr(model, "_adaptive_attachment", None)
        before = found.compressor if found else None
        if before is not None and not before.detached:
            raise RuntimeError("model is attached already; detach() its compressor first")
        if found is None and model._comm_hooks:
            name = getattr(model._comm_hooks[0][0], "__name__", "?")
            raise RuntimeError(f"model has a communication hook already ({name}); DDP takes one")
        return found

    def register(self, model: DistributedDataParallel) -> None:
        """The model's from now on."""
        object.__setattr__(model, "_adaptive_attachment", self)  # past nn.Module's own
        model.register_comm_hook(self, adaptive_hook)
