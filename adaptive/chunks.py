"""Parameters that are exchanged as one flat tensor, where DDP's buckets are not used."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from adaptive.parameters import ModelParameter
from compressors.kernels.blocks import is_host

CHUNK = 25 * 2**20
"""Bytes of parameters in a chunk at most, unless a parameter is larger: as DDP's buckets."""


@dataclass(eq=False)
class Chunk:
    """Parameters one behind the other, of one precision and device.

    scratch: flat tensors that are written again in each step, by their use; on a device there are
    none, since its allocator keeps them."""

    parameters: Sequence[ModelParameter]
    scratch: dict[str, Tensor] = field(default_factory=dict)

    @property
    def numel(self) -> int:
        return sum(p.local.numel() for p in self.parameters)

    def room(self, use: str) -> Tensor:
        """A flat tensor for this use, with any values."""
        found = self.scratch.get(use)
        if found is None:
            first = self.parameters[0]
            found = torch.empty(self.numel, dtype=first.dtype, device=first.tensor.device)
            if is_host(found.device):
                self.scratch[use] = found
        return found

    def here(self, use: str) -> Tensor:
        """The parameters' values (a copy), flat, in the room for this use."""
        values = [p.local.detach().reshape(-1) for p in self.parameters]
        room = self.room(use)
        if all(each.dtype == room.dtype for each in values):
            return torch.cat(values, out=room)
        torch._foreach_copy_(self.split(room), values)
        return room

    @torch.no_grad()
    def go_to(self, values: Tensor) -> None:
        """The parameters become `values` (flat)."""
        locals_ = [p.local for p in self.parameters]
        views = [v.view(p.shape) for v, p in zip(self.split(values), locals_, strict=True)]
        torch._foreach_copy_(locals_, views)

    def split(self, flat: Tensor) -> list[Tensor]:
        """By parameter: views."""
        return list(flat.split([p.local.numel() for p in self.parameters]))


def chunks(parameters: Iterable[ModelParameter]) -> Iterator[list[ModelParameter]]:
    """Parameters in the model's order, those of each chunk together."""
    for _, alike in groupby(parameters, key=lambda p: (p.dtype, p.tensor.device)):
        chunk: list[ModelParameter] = []
        nbytes = 0
        for p in alike:
            own = p.local.numel() * p.dtype.itemsize
            if chunk and nbytes + own > CHUNK:
                yield chunk
                chunk, nbytes = [], 0
            chunk.append(p)
            nbytes += own
        yield chunk
