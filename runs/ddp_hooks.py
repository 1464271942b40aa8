"""PyTorch's own communication hooks, to compare with: what they send, and how they are registered.

No `from __future__ import annotations` here: DDP compares the annotations of a hook with the
classes themselves.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

RANK, START = 4, 2
"""Of PowerSGD, and dense steps before it compresses (it needs 2; by default it sends 1,000)."""

ONE_BUCKET = 10_000
"""MB: with several buckets PowerSGD's hook aborts on gloo, since it sends from callbacks."""


class OtherHook:
    """A hook of PyTorch's on a model. name: one of runs.settings.DDP_HOOKS; None: DDP as it is."""

    def __init__(self, name: str | None) -> None:
        self._name = name
        self._state: PowerSGDState | None = None
        if name == "powersgd":
            self._state = PowerSGDState(
                None, matrix_approximation_rank=RANK, start_powerSGD_iter=START
            )

    @property
    def bucket_cap_mb(self) -> float | None:
        """For the model's constructor."""
        return None if self._state is None else ONE_BUCKET

    def register(self, model: DistributedDataParallel) -> None:
        if self._name == "bf16":
            model.register_comm_hook(None, _bf16)
        elif self._state is not None:
            model.register_comm_hook(self._state, powerSGD_hook)

    def payload(self, dense: int) -> tuple[int, int]:
        """Elements and bytes handed to collectives in place of so many elements in all."""
        if self._state is not None:
            _, before, after = self._state.compression_stats()
            dense = round(dense - before + after)
        return dense, dense * (2 if self._name == "bf16" else 4)


def _bf16(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """PyTorch's, under another name: DDP lets it have that one with NCCL alone."""
    return bf16_compress_hook(state, bucket)
