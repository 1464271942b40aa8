"""Parameters that are exchanged as one flat tensor, where DDP's buckets are not used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adaptive.model.parameters import ModelParameter, is_dense, storage_of
from compressors.kernels.blocks import CACHE_BLOCK, block_size, is_host, reused

CHUNK = 25 * 2**20
"""Bytes of parameters in a chunk at most, unless a parameter is larger: as DDP's buckets."""

DEVICE_CHUNK = 256 * 2**20
"""The same on a device, where the number of launches counts more than what a cache holds."""


BLOCK = 2 * CACHE_BLOCK
"""Elements of a block on a host."""


FEW = 8
"""Views of a block that cost less as so many operations than as a copy of them all."""


class Destination(NamedTuple):
    """Where a mean goes in the place of a flat tensor: `times` the mean is added to `out`."""

    out: Tensor
    times: float


class Block(NamedTuple):
    """Elements [start, stop) of a chunk. values: views of the parameters' own memory, flat."""

    start: int
    stop: int
    values: list[Tensor]

    def joined(self, out: Tensor) -> Tensor:
        """The values, in `out`."""
        return _join(self.values, out)

    def subtract(self, start: Tensor, out: Tensor) -> None:
        """out = start - values. Of a few large values none is copied first."""
        if len(self.values) > FEW or self.values[0].dtype != out.dtype:
            torch.sub(start, self.joined(out), out=out)
            return
        sizes = [*map(len, self.values)]
        for a, b, c in zip(start.split(sizes), self.values, out.split(sizes), strict=True):
            torch.sub(a, b, out=c)


@dataclass(eq=False)
class Chunk:
    """Parameters one behind the other, of one precision and device.

    A parameter's elements are in the order of its memory; where that has gaps, row by row.
    scratch: flat tensors that are written again in each step, by their use; on a device there are
    none, since its allocator keeps them."""

    parameters: Sequence[ModelParameter]
    scratch: dict[str, Tensor] = field(default_factory=dict)
    _places: list[Any] = field(default_factory=list)  # of the parameters' memory
    _values: list[Tensor] = field(default_factory=list)  # flat views of parameters
    _gaps: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # parameters, and copies
    _blocks: list[Block] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sizes = [p.numel for p in self.parameters]
        self.numel = sum(self.sizes)
        self._tensors = [p.tensor for p in self.parameters]
        sharded = any(hasattr(p, "to_local") for p in self._tensors)
        self._place: Callable[[Tensor], Any] = storage_of if sharded else Tensor.data_ptr

    @property
    def narrow(self) -> bool:
        """The parameters have fewer bits than what is kept of them."""
        return self.parameters[0].tensor.dtype != self.parameters[0].dtype

    def buffer(self, use: str) -> Tensor:
        """A flat tensor for this use, with any values."""
        first = self.parameters[0]
        scratch = reused(self.scratch, first.tensor.device)
        found = scratch.get(use)
        if found is None:
            found = torch.empty(self.numel, dtype=first.dtype, device=first.tensor.device)
            scratch[use] = found
        return found

    def here(self, use: str) -> Tensor:
        """The parameters' values (a copy), flat, in the buffer for this use."""
        return _join(self._read(), self.buffer(use))

    @torch.no_grad()
    def go_to(self, values: Tensor) -> None:
        """The parameters become `values` (flat)."""
        torch._foreach_copy_(self._read(), self.split(values))
        for p, copy in self._gaps:
            p.copy_(copy.view(p.shape))

    def blocks(self) -> Sequence[Block]:
        """The chunk in pieces that fit a host's cache; on a device in one."""
        values = self._read()
        if not self._blocks:
            device = self.parameters[0].tensor.device
            self._blocks = list(_blocks(values, block_size(self.numel, device, BLOCK)))
        return self._blocks

    def split(self, flat: Tensor) -> list[Tensor]:
        """By parameter: views."""
        return list(flat.split(self.sizes))

    def within(self, flat: Tensor, start: int) -> Iterator[tuple[ModelParameter, Tensor]]:
        """Parameters whose elements are in `flat`, which begins at `start`, and views of these."""
        at = 0
        for parameter, size in zip(self.parameters, self.sizes, strict=True):
            if start <= at < start + len(flat) and size:
                yield parameter, flat[at - start : at - start + size]
            at += size

    @torch.no_grad()
    def _read(self) -> list[Tensor]:
        """Flat views of all parameters; a script may have given some of them other memory."""
        places = [*map(self._place, self._tensors)]
        if places != self._places:
            self._places, self._gaps, self._blocks = places, [], []
            self._values = [self._flat(p.local.detach()) for p in self.parameters]
        for p, copy in self._gaps:
            copy.view(p.shape).copy_(p)
        return self._values

    def _flat(self, p: Tensor) -> Tensor:
        if is_dense(p):
            return p.as_strided((p.numel(),), (1,), p.storage_offset())
        copy = p.new_empty(p.numel())
        self._gaps.append((p, copy))
        return copy


def _join(values: list[Tensor], out: Tensor) -> Tensor:
    if not values or values[0].dtype == out.dtype:  # which all have
        return torch.cat(values, out=out)
    torch._foreach_copy_(list(out.split([len(each) for each in values])), values)
    return out


def _blocks(values: Sequence[Tensor], size: int) -> Iterator[Block]:
    """Of `size` elements each, but for the last."""
    start = stop = 0
    within: list[Tensor] = []
    for each in values:
        at = 0
        while at < len(each):
            taken = min(len(each) - at, size - (stop - start))
            within.append(each[at : at + taken])
            at, stop = at + taken, stop + taken
            if stop - start == size:
                yield Block(start, stop, within)
                start, within = stop, []
    if within:
        yield Block(start, stop, within)


def joined_nbytes(device: torch.device) -> int:
    """Of DDP's buckets so many bytes at least are exchanged as one; 0: each by itself."""
    return 0 if is_host(device) else DEVICE_CHUNK


def chunked(parameters: Iterable[ModelParameter]) -> list[Chunk]:
    """Parameters in the model's order as chunks."""
    return [Chunk(each) for each in chunks(parameters)]


def chunks(parameters: Iterable[ModelParameter]) -> Iterator[list[ModelParameter]]:
    """Parameters in the model's order, those of each chunk together, without empty ones."""
    some = (p for p in parameters if p.numel)
    for (_, device), alike in groupby(some, key=lambda p: (p.tensor.dtype, p.tensor.device)):
        most = CHUNK if is_host(device) else DEVICE_CHUNK
        chunk: list[ModelParameter] = []
        nbytes = 0
        for p in alike:
            own = p.numel * p.dtype.itemsize
            if chunk and nbytes + own > most:
                yield chunk
                chunk, nbytes = [], 0
            chunk.append(p)
            nbytes += own
        yield chunk
