"""How values become fewer bits, and back: what quantizers and quantized sparsifiers share.

A `BlockFormat` works on one block that fits the cache at a time, so that adding the new gradient,
rounding, packing and summing squared norms read the tensor from memory once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from math import nan
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from compressors.base import Key
from compressors.norms import block_norm, lost, on_numpy, squared_norm, trusted
from compressors.rows import BLOCK
from compressors.scratch import fresh, scratch

Layout = tuple[tuple[int, torch.dtype], ...]
Parts = tuple[Tensor, ...]


class ValueFormat(ABC):
    """Values of a flat tensor as the parts of a payload. Stateless; any byte pattern decodes.

    At least one part holds floating-point numbers (values or scales), and has an element if there
    is a value: NaN in them decodes to NaN throughout, and 0 to 0 throughout.

    name: the registered name, or that of the compressor.
    lossless: decodes to exactly what was encoded.
    """

    name: str = ""
    lossless: bool = False

    @abstractmethod
    def layout(self, count: int, dtype: torch.dtype) -> Layout:
        """(elements, dtype) of each part for `count` values of a tensor of `dtype`."""

    @abstractmethod
    def encode(self, values: Tensor, key: Key) -> Parts:
        """The parts, contiguous, as `layout` says. `values` (flat) are left as they are."""

    @abstractmethod
    def decode(self, parts: Parts, count: int, dtype: torch.dtype) -> Tensor:
        """The values that `parts` stand for: bit by bit the same wherever it is called."""

    def nbytes(self, count: int, dtype: torch.dtype) -> int:
        """Bytes of all the parts together."""
        return sum(elements * part.itemsize for elements, part in self.layout(count, dtype))


class Block(NamedTuple):
    """A run of elements that is encoded at once.

    x: the elements, float32 or float64. start: position of the first. norm: ||x||^2, to seed
    random numbers with. key: of the tensor.
    """

    x: Tensor
    start: int
    norm: float
    key: Key


class Blocks:
    """The blocks of `x`, from first to last; the first time round, x += add in place.

    total: ||x||^2, known once they have been gone through.
    """

    def __init__(self, x: Tensor, add: Tensor | None, key: Key) -> None:
        self.x, self.key = x.detach(), key
        self._add = None if add is None else add.detach()
        self._norms: list[float] = []
        self.total = nan

    def __iter__(self) -> Iterator[Block]:
        known, add = len(self._norms) > 0, self._add
        for i, (start, stop) in enumerate(bounds(self.x)):
            x = self.x[start:stop]
            if add is not None:
                x.add_(add[start:stop])
            wide = x if x.dtype == widened(x.dtype) else x.to(widened(x.dtype))
            if not known:
                self._norms.append(_rough_norm(wide))
            yield Block(wide, start, self._norms[i], self.key)
        self._add = None
        if not known:
            total = sum(self._norms)
            self.total = trusted(total, self.x.numpy()) if on_numpy(self.x) else total


class BlockFormat(ValueFormat):
    """Encodes and decodes block by block; `layout` grows evenly with every BLOCK elements.

    shared: so many leading parts hold for the whole tensor; `survey` computes them.
    projection: what is lost is orthogonal to what is kept, so that error = total - energy.
    """

    shared: int = 0
    projection: bool = False

    def survey(self, blocks: Blocks, shared: Parts) -> None:
        """Go through `blocks` (at least one) and fill the `shared` parts. Only if there are any."""

    @abstractmethod
    def encode_block(self, block: Block, parts: Parts) -> tuple[float, float]:
        """Fill this block's share of `parts`. Returns the squared norms of what is kept and of what
        is lost (anything for the latter if `projection`)."""

    @abstractmethod
    def decode_block(self, parts: Parts, out: Tensor) -> None:
        """Fill `out` (float32 or float64), one block, from its share of the parts."""

    def encode(self, values: Tensor, key: Key) -> Parts:
        return encode_sum(self, values, None, key).parts

    def decode(self, parts: Parts, count: int, dtype: torch.dtype) -> Tensor:
        out = fresh(count, dtype, parts[0].device)
        for start, stop in bounds(out):
            self.decode_into(out[start:stop], parts, start)
        return out

    def decode_into(self, out: Tensor, parts: Parts, start: int) -> None:
        """Fill `out` (of any dtype) with the block that starts at `start`."""
        share = self.share(parts, start, out.numel(), out.dtype)
        if out.dtype == widened(out.dtype):
            self.decode_block(share, out)
        else:
            wide = scratch("wide", out.numel(), widened(out.dtype), out.device)
            self.decode_block(share, wide)
            out.copy_(wide)

    def share(self, parts: Parts, start: int, count: int, dtype: torch.dtype) -> Parts:
        """The slices of `parts` for the `count` elements from `start` on, a multiple of BLOCK."""
        before = self.layout(start, dtype)[self.shared :]
        here = self.layout(count, dtype)[self.shared :]
        own = (
            part[a : a + b]
            for part, (a, _), (b, _) in zip(parts[self.shared :], before, here, strict=True)
        )
        return (*parts[: self.shared], *own)


class Encoded(NamedTuple):
    """The parts, and the squared norms of what was encoded, is kept and is lost."""

    parts: Parts
    total: float
    energy: float
    error: float


def encode_sum(form: BlockFormat, x: Tensor, add: Tensor | None, key: Key) -> Encoded:
    """x += add in place (if given), then encode x."""
    layout = form.layout(x.numel(), x.dtype)
    parts = tuple(fresh(size, dtype, x.device) for size, dtype in layout)
    blocks = Blocks(x, add, key)
    energy = error = 0.0
    with np.errstate(all="ignore"):
        if form.shared and x.numel():
            form.survey(blocks, parts[: form.shared])
        for block in blocks:
            share = form.share(parts, block.start, block.x.numel(), x.dtype)
            kept, missed = form.encode_block(block, share)
            energy, error = energy + kept, error + missed
    if form.projection:
        error = lost(blocks.total, energy)
    return Encoded(parts, blocks.total, energy, error)


def bounds(x: Tensor) -> Iterator[tuple[int, int]]:
    """(start, stop) of each block of flat `x`. On a device other than the CPU the tensor is one
    block: there it is starting an operation that costs."""
    size = BLOCK if x.device.type == "cpu" else max(x.numel(), 1)
    return ((start, min(start + size, x.numel())) for start in range(0, x.numel(), size))


def widened(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def norm2(x: Tensor) -> float:
    """||x||^2 of a block, in single precision unless that overflows or underflows."""
    return trusted(block_norm(x.numpy()), x.numpy()) if on_numpy(x) else squared_norm(x)


def _rough_norm(x: Tensor) -> float:
    return block_norm(x.numpy()) if on_numpy(x) else squared_norm(x)
