"""A real DDP model on a single rank, in the process of the test."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn


@contextmanager
def one_rank() -> Iterator[None]:
    """A process group of gloo with a single rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Given(nn.Module):
    """Parameters of these shapes, all of ones, whose gradients are what the forward is handed."""

    def __init__(self, shapes: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self.all = nn.ParameterList(nn.Parameter(torch.ones(list(shape))) for shape in shapes)

    def forward(self, gradients: Sequence[Tensor]) -> Tensor:
        pairs = zip(self.all, gradients, strict=True)
        return torch.stack([(p * gradient).sum() for p, gradient in pairs]).sum()
