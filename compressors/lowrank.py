"""Flat gradients seen as matrices of low rank: how large, and what of them travels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import floor, isqrt, nan, prod
from typing import NamedTuple

import torch
from torch import Tensor

from compressors.base import Key, Payload, check_cf
from compressors.norms import lost, squared_norm


class Layout(NamedTuple):
    """The first rows x cols elements are a matrix, approximated with `rank` columns of P and Q;
    the last `rest` elements travel as they are. rank 0: all of it does."""

    rows: int
    cols: int
    rank: int
    rest: int

    @property
    def floats(self) -> int:
        """Elements sent: P, Q and the rest."""
        return (self.rows + self.cols) * self.rank + self.rest

    @property
    def cf(self) -> float:
        """The compression factor that this really is."""
        return (self.rows * self.cols + self.rest) / self.floats if self.floats else 1.0

    def matrix(self, flat: Tensor) -> Tensor:
        """The matrix, as a view of `flat`."""
        return (flat[: self.rows * self.cols] if self.rest else flat).view(self.rows, self.cols)

    def tail(self, flat: Tensor) -> Tensor:
        """What travels as it is, as a view of `flat`."""
        return flat[self.rows * self.cols :]


@lru_cache(maxsize=1 << 14)
def layout(cf: float, numel: int, shape: tuple[int, ...] = ()) -> Layout:
    """How a tensor of `numel` elements and a parameter's `shape` is sent at `cf`.

    The matrix is n = shape[0] by m = all the other dimensions (Vogels and others 2019, section 3).
    If `shape` is () (not known), it is the largest nearly square one; the elements left over, fewer
    than sqrt(numel), travel as they are.

    rank = max(1, floor(n m / (cf (n + m)))), at most min(n, m). CF 1, vectors, and matrices whose
    P and Q would be no smaller than they are themselves, travel uncompressed."""
    cf = check_cf(cf)
    if shape and prod(shape) != numel:
        raise ValueError(f"key.shape must have the tensor's {numel} elements, got {shape}")
    rows = shape[0] if shape else isqrt(numel)
    cols = numel // max(rows, 1)
    size, sides = rows * cols, rows + cols
    rank = floor(size / (cf * max(sides, 1)) * (1 + 1e-12))  # 1e-12: as in `kept`
    rank = min(max(rank, 1), rows, cols)
    if cf == 1 or sides * rank >= size:
        return Layout(0, 0, 0, numel)
    return Layout(rows, cols, rank, numel - size)


@dataclass
class Part:
    """One tensor of a bucket. p, q: P^T and Q^T, as far as they have got. total: ||a||^2."""

    key: Key
    plan: Layout
    flat: Tensor
    held: bool
    total: float
    start: Tensor
    p: Tensor
    q: Tensor
    rest: Tensor

    def find_p(self) -> None:
        """p = Q^T M^T, and the rest; nothing if this rank holds back."""
        if self.held:
            self.p.zero_()
            self.rest.zero_()
        else:
            if self.plan.rank:
                torch.mm(self.start, self.plan.matrix(self.flat).t(), out=self.p)
            self.rest.copy_(self.plan.tail(self.flat))

    def find_q(self) -> None:
        """q = P^T M."""
        if self.held:
            self.q.zero_()
        elif self.plan.rank:
            torch.mm(self.p, self.plan.matrix(self.flat), out=self.q)

    def own(self, cf: float) -> Payload:
        """What is kept of this rank's own tensor: P P^T M, and the rest."""
        rest = torch.zeros_like(self.rest) if self.held else self.plan.tail(self.flat)
        energy = kept_energy(self.q.reshape(-1), rest) if self.plan.rank else self.total
        error = lost(self.total, energy)
        parts = (self.p.view(-1), self.q.clone().view(-1), rest)
        numel, dtype = self.flat.numel(), self.flat.dtype
        return Payload(parts, numel, cf, energy, error, self.key, self.total, dtype)

    def mean(self, cf: float) -> Payload:
        """What every rank decodes, once q and the rest are means."""
        parts = (self.p.view(-1), self.q.view(-1), self.rest)
        return Payload(parts, self.flat.numel(), cf, nan, nan, self.key, dtype=self.flat.dtype)


def opened(payload: Payload, plan: Layout, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """P^T and Q^T as matrices, and the rest."""
    p, q, rest = payload.parts
    if rest.dtype != dtype:
        p, q, rest = p.to(dtype), q.to(dtype), rest.to(dtype)
    return p.view(plan.rank, plan.rows), q.view(plan.rank, plan.cols), rest


def kept_energy(q: Tensor, rest: Tensor) -> float:
    """||P Q^T||^2 + ||rest||^2 for orthonormal P."""
    return squared_norm(q) + (squared_norm(rest) if rest.numel() else 0.0)


def share_p(parts: Sequence[Part]) -> Tensor:
    """One flat tensor for every part's P and uncompressed elements."""
    size = sum(part.plan.rank * part.plan.rows + part.plan.rest for part in parts)
    shared = parts[0].flat.new_empty(size)
    cut_p(parts, shared)
    return shared


def cut_p(parts: Sequence[Part], shared: Tensor) -> None:
    sizes = [size for p in parts for size in (p.plan.rank * p.plan.rows, p.plan.rest)]
    views = iter(shared.split(sizes))
    for part in parts:
        part.p = next(views).view(part.plan.rank, part.plan.rows)
        part.rest = next(views)


def share_q(parts: Sequence[Part]) -> Tensor:
    """One flat tensor for every part's Q."""
    shared = parts[0].flat.new_empty(sum(part.plan.rank * part.plan.cols for part in parts))
    cut_q(parts, shared)
    return shared


def cut_q(parts: Sequence[Part], shared: Tensor) -> None:
    views = shared.split([part.plan.rank * part.plan.cols for part in parts])
    for part, view in zip(parts, views, strict=True):
        part.q = view.view(part.plan.rank, part.plan.cols)
