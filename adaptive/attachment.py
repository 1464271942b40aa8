"""What is attached to a DDP model. A hook can never be unregistered, so its state changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from adaptive.hook import adaptive_hook

if TYPE_CHECKING:
    from adaptive.compressor import AdaptiveCompressor


class Attachment:
    """The hook's state on one model. Copies and pickles of the model leave the compressor
    behind."""

    def __init__(self, compressor: AdaptiveCompressor | None = None) -> None:
        self.compressor = compressor

    def reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        if self.compressor is None:
            raise RuntimeError("this copy of the model has no compressor: attach one")
        return self.compressor.reduce(bucket)

    def __reduce__(self) -> tuple[type[Attachment], tuple[()]]:
        return Attachment, ()

    @staticmethod
    def of(model: DistributedDataParallel) -> Attachment | None:
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
