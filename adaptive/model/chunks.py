"""Chunks: parameters that are exchanged as one flat tensor, without DDP's buckets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adaptive.model.parameters import ModelParameter, is_dense, storage_of
from compressors.kernels.blocks import CACHE_BLOCK, block_size, is_host, reused

CHUNK = 25 * 2**20
"""The largest number of bytes of a chunk's parameters on a host, unless a single parameter is
larger. DDP's buckets have the same size."""

DEVICE_CHUNK = 256 * 2**20
"""The largest number of bytes on a device, where the number of launches counts more than the
cache."""

BLOCK = 2 * CACHE_BLOCK
"""Elements of a `Block` on a host."""

FEW_VIEWS = 8
"""The largest number of views of a block that are subtracted one by one, without a copy."""


class Destination(NamedTuple):
    """Where a mean is added: `out` += `times` * mean."""

    out: Tensor
    times: float


class Block(NamedTuple):
    """Elements [start, stop) of a chunk. values: flat views of the parameters, which hold these
    elements."""

    start: int
    stop: int
    values: list[Tensor]

    def joined(self, out: Tensor) -> Tensor:
        """Copy the values to `out`, one after the other. Returns `out`."""
        return _join(self.values, out)

    def subtract(self, start: Tensor, out: Tensor) -> None:
        """out = start - values. A few views are subtracted one by one, without a copy of them."""
        if len(self.values) > FEW_VIEWS or self.values[0].dtype != out.dtype:
            torch.sub(start, self.joined(out), out=out)
            return
        sizes = [*map(len, self.values)]
        for a, b, c in zip(start.split(sizes), self.values, out.split(sizes), strict=True):
            torch.sub(a, b, out=c)


@dataclass(eq=False)
class Chunk:
    """A chunk: parameters of one dtype and device, one after the other as a flat tensor.

    The elements of a parameter have the order of its memory; if that memory has gaps, the order of
    rows.
    scratch: flat tensors that each step overwrites, by their use. On a device there are none,
    because a device's allocator keeps freed memory."""

    parameters: Sequence[ModelParameter]
    scratch: dict[str, Tensor] = field(default_factory=dict)
    _places: list[Any] = field(default_factory=list)  # identify the parameters' memory
    _values: list[Tensor] = field(default_factory=list)  # flat views of the parameters
    _gaps: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # (with gaps, flat copy)
    _blocks: list[Block] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sizes = [p.numel for p in self.parameters]
        self.numel = sum(self.sizes)
        self._tensors = [p.tensor for p in self.parameters]
        sharded = any(hasattr(p, "to_local") for p in self._tensors)
        self._place: Callable[[Tensor], Any] = storage_of if sharded else Tensor.data_ptr

    @property
    def narrow(self) -> bool:
        """Whether the parameters have fewer bits than the state that is kept for them."""
        return self.parameters[0].tensor.dtype != self.parameters[0].dtype

    def buffer(self, use: str) -> Tensor:
        """A flat tensor for this use (numel,), with any values."""
        first = self.parameters[0]
        scratch = reused(self.scratch, first.tensor.device)
        found = scratch.get(use)
        if found is None:
            found = torch.empty(self.numel, dtype=first.dtype, device=first.tensor.device)
            scratch[use] = found
        return found

    def here(self, use: str) -> Tensor:
        """A copy of the parameters' values (numel,), in the buffer for this use."""
        return _join(self._read(), self.buffer(use))

    @torch.no_grad()
    def go_to(self, values: Tensor) -> None:
        """Set the parameters to `values` (numel,)."""
        torch._foreach_copy_(self._read(), self.split(values))
        for p, copy in self._gaps:
            p.copy_(copy.view(p.shape))

    def blocks(self) -> Sequence[Block]:
        """The chunk, cut into blocks that fit a host's cache; on a device one block."""
        values = self._read()
        if not self._blocks:
            device = self.parameters[0].tensor.device
            self._blocks = list(_blocks(values, block_size(self.numel, device, BLOCK)))
        return self._blocks

    def split(self, flat: Tensor) -> list[Tensor]:
        """The elements of each parameter in `flat` (numel,), as views."""
        return list(flat.split(self.sizes))

    def pieces(self, flat: Tensor) -> Iterator[tuple[ModelParameter, Tensor]]:
        """Each parameter, with a view of its elements in `flat` (numel,)."""
        return zip(self.parameters, self.split(flat), strict=True)

    def by_name(self, flat: Tensor) -> dict[str, Tensor]:
        """A copy of each parameter's elements in `flat` (numel,), by the parameter's name."""
        return {p.name: piece.clone() for p, piece in self.pieces(flat)}

    def fill(self, flat: Tensor, by_name: Mapping[str, Tensor]) -> Tensor:
        """Fill `flat` (numel,) with the elements that `by_name` has for each parameter. Returns
        `flat`."""
        for p, piece in self.pieces(flat):
            piece.copy_(by_name[p.name])
        return flat

    def take_residuals(self, out: Tensor) -> Tensor:
        """Move the residuals to `out` (numel,): zero where a residual is empty. Returns `out`."""
        for p, piece in self.pieces(out.zero_()):
            if p.unsent is not None:
                piece.copy_(p.unsent)
            p.has_residual = False
        return out

    def within(self, flat: Tensor, start: int) -> Iterator[tuple[ModelParameter, Tensor]]:
        """The parameters that begin inside `flat`, each with a view of its elements. flat: the
        chunk's elements from `start` on."""
        at = 0
        for parameter, size in zip(self.parameters, self.sizes, strict=True):
            if start <= at < start + len(flat) and size:
                yield parameter, flat[at - start : at - start + size]
            at += size

    @torch.no_grad()
    def _read(self) -> list[Tensor]:
        """Flat views of all parameters, made again if a script has given some parameters other
        memory. A parameter whose memory has gaps is copied."""
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
    if not values or values[0].dtype == out.dtype:  # all values have one dtype
        return torch.cat(values, out=out)
    torch._foreach_copy_(list(out.split([len(each) for each in values])), values)
    return out


def _blocks(values: Sequence[Tensor], size: int) -> Iterator[Block]:
    """Cut the values into blocks of `size` elements; the last block may have fewer."""
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
    """The number of bytes from which joined DDP buckets are exchanged as one tensor; 0: each bucket
    is exchanged separately."""
    return 0 if is_host(device) else DEVICE_CHUNK


def chunked(parameters: Iterable[ModelParameter]) -> list[Chunk]:
    """The chunks of these parameters."""
    return [Chunk(each) for each in chunks(parameters)]


def chunks(parameters: Iterable[ModelParameter]) -> Iterator[list[ModelParameter]]:
    """The parameters of each chunk, in the model's order, without empty parameters."""
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
