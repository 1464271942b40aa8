"""PowerSGD: low-rank approximation by one step of subspace iteration, warm-started.

Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization" (NeurIPS 2019), Algorithm 1. A gradient M (n x m) on each rank, Q (m x r) shared:

    P = orthonormal(sum(M Q));  Q = mean(M^T P);  every rank decodes P Q^T.

P Q^T is the exact mean of the projections P P^T M of each rank's own M. So there are two choices
of residual: against a rank's own projection (the paper's Algorithm 2; `report` is given that
projection), or against the mean (PyTorch's hook; the rounds return that mean). The sums of either
over the ranks are the same, and so is everything that is ever decoded. But with the second choice
the differences between the ranks are never subtracted: they pile up, and the share of a that is
kept falls for ever.

P and Q are stored transposed (r x n, r x m): products then run at the speed of memory at any rank
(else 6 to 20 times slower for ranks 2 to 4, measured), and a lower rank is a prefix.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from math import floor, isfinite, isqrt, nan, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compressors.base import (
    Key,
    Payload,
    check_cf,
    check_flat,
    check_out,
    combined_cf,
    projection_error,
    split_bytes,
)
from compressors.kernels import Scalar, squared_norm
from compressors.kernels.blocks import energies
from compressors.rounds import Report, Rounds, RoundsCompressor, check_bucket, finite_or_nan


class PowerSGD(RoundsCompressor):
    """PowerSGD sends P and Q of rank floor(n m / (cf (n + m))) in two all-reduces for a bucket.

    The first all-reduce carries the P of all tensors and what travels uncompressed (see `layout`),
    the second one all Q. Each parameter's Q of the last step is where the next step starts.

    seed: the same on all ranks; of the random columns that Q begins with.

    parts: P^T (r x n, orthonormal rows), Q^T (r x m), uncompressed elements; all flat.
    """

    name = "powersgd"
    keeps_zeros = False

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self._warm = WarmStart(seed)

    def rounds(
        self,
        tensors: Sequence[Tensor],
        cfs: Sequence[float],
        keys: Sequence[Key],
        world_size: int,
        report: Report,
        *,
        skipped: Collection[int] = (),
        totals: Sequence[float] | None = None,
    ) -> Rounds:
        check_bucket(tensors, cfs, keys, totals)
        parts = [
            self._part(tensor, cf, key, i in skipped, totals[i] if totals else None)
            for i, (tensor, cf, key) in enumerate(zip(tensors, cfs, keys, strict=True))
        ]
        first = allocate_p(parts)
        for part in parts:
            part.find_p()
        if not all(isfinite(part.total) for part in parts):
            first.fill_(nan)  # products may hide it
        first = yield first

        finite = finite_or_nan(first)
        assign_p(parts, first)
        second = allocate_q(parts)
        for part in parts:
            part.p = orthonormal_rows(part.p) if finite and part.plan.rank else part.p
            part.find_q()
        report([part.own(cf) for part, cf in zip(parts, cfs, strict=True)])
        second = yield second

        finite = finite_or_nan(second) and finite
        if not finite:
            first.fill_(nan)
        first.div_(world_size)  # the rest; P was replaced
        assign_q(parts, second.div_(world_size))
        for part in parts:
            if finite and part.plan.rank:
                self._warm.keep(part.key.name, part.start, part.q)
        return [part.mean(cf) for part, cf in zip(parts, cfs, strict=True)]

    def compress(self, tensor: Tensor, cf: float, key: Key) -> Payload:
        """Run the rounds in a world of one rank, from the Q of the last step, which stays as it is.

        If that Q has too few columns, one more step of iteration is done, as a random start would
        show far less than what PowerSGD keeps once it has run for a few steps."""
        check_flat(tensor)
        half = tensor.dtype not in (torch.float32, torch.float64)
        part = self._part(tensor.float() if half else tensor, cf, key, False, None)
        plan = part.plan
        if plan.rank:
            cold = self._warm.known(key.name, plan.cols) < plan.rank
            part.q, matrix = part.start, plan.matrix(part.flat)
            for step in range(1 + cold):
                start = orthonormal_rows(part.q) if step else part.q
                part.p = orthonormal_rows(start @ matrix.t())
                part.q = part.p @ matrix
        payload = part.own(check_cf(cf))
        sent = tuple(p.to(tensor.dtype) for p in payload.parts)
        return replace(payload, parts=sent, dtype=tensor.dtype)

    def recompress(self, payload: Payload, factor: float) -> Payload:
        """P and Q truncated to their first columns: what the same rounds would have given at that
        rank. A tensor that went uncompressed, but would not at the larger CF, is compressed here.
        """
        cf = combined_cf(payload.cf, factor)
        then = layout(payload.cf, payload.numel, payload.key.shape)
        now = layout(cf, payload.numel, payload.key.shape)
        p, q, rest = payload.parts
        if now.rank == then.rank:
            return replace(payload, cf=cf)
        if not then.rank:
            return self.compress(rest, cf, payload.key)
        parts = (p[: now.rank * now.rows], q[: now.rank * now.cols], rest)
        energy = kept_energy(*parts[1:])
        total, _, error = payload.scalars
        error += projection_error(kept_energy(q, rest), energy)
        return replace(payload, parts=parts, cf=cf, energies=energies(total, energy, error, q))

    def add_to(self, out: Tensor, payload: Payload, scale: float = 1.0) -> None:
        check_out(out, payload)
        out = out.detach()
        plan = layout(payload.cf, payload.numel, payload.key.shape)
        p, q, rest = unpacked(payload, plan, out.dtype)
        if plan.rank:
            plan.matrix(out).addmm_(p.t(), q, alpha=scale)
        if plan.rest:
            plan.tail(out).add_(rest, alpha=scale)

    def write_to(self, out: Tensor, payload: Payload) -> None:
        check_out(out, payload)
        out = out.detach()
        plan = layout(payload.cf, payload.numel, payload.key.shape)
        if plan.rank > 1:  # adding to zeros is faster then
            super().write_to(out, payload)
            return
        p, q, rest = unpacked(payload, plan, out.dtype)
        if plan.rank:
            torch.mul(p.t(), q, out=plan.matrix(out))
        if plan.rest:
            plan.tail(out).copy_(rest)

    def subtract_from(self, tensor: Tensor, payload: Payload) -> None:
        self.add_to(tensor, payload, -1.0)

    def read(self, data: Tensor, numel: int, cf: float, dtype: torch.dtype, key: Key) -> Payload:
        plan = layout(cf, numel, key.shape)
        sizes = (plan.rank * plan.rows, plan.rank * plan.cols, plan.rest)
        parts = split_bytes(data, *((size, dtype) for size in sizes))
        return Payload(parts, numel, cf, key, dtype=dtype)

    def rank(self, cf: float, shape: tuple[int, ...]) -> int:
        """The rank for a parameter of this shape at `cf`; 0 if it travels uncompressed."""
        return layout(cf, prod(shape), shape).rank

    def payload_nbytes(self, numel: int, cf: float, dtype: torch.dtype = torch.float32) -> int:
        """Of a tensor of unknown shape, which is seen as nearly square."""
        return layout(cf, numel).floats * dtype.itemsize

    def payload_nbytes_for(
        self, shape: tuple[int, ...], cf: float, dtype: torch.dtype = torch.float32
    ) -> int:
        return layout(cf, prod(shape), shape).floats * dtype.itemsize

    def floats(self, numel: int, cf: float) -> float:
        return float(layout(cf, numel).floats)

    def floats_for(self, shape: tuple[int, ...], cf: float) -> float:
        return float(layout(cf, prod(shape), shape).floats)

    def supported(self, cf: float, numel: int) -> float:
        return layout(cf, numel).cf

    def supported_for(self, cf: float, shape: tuple[int, ...]) -> float:
        return layout(cf, prod(shape), shape).cf

    def state_dict(self) -> dict[str, Any]:
        """q: the transposed mean Q (rank x columns) by parameter name."""
        return {"q": self._warm.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not isinstance(state.get("q"), Mapping):
            raise ValueError(f"state must have matrices by name under 'q', got {sorted(state)}")
        self._warm.load_state_dict(state["q"])

    def _part(
        self, tensor: Tensor, cf: float, key: Key, skipped: bool, total: float | None
    ) -> Part:
        flat = tensor.detach()
        plan = layout(cf, flat.numel(), key.shape)
        if total is None or skipped:
            total = 0.0 if skipped else squared_norm(flat)
        empty = flat.new_empty(0)
        start = self._warm.start(key.name, plan.rank, plan.cols, flat) if plan.rank else empty
        return Part(key, plan, flat, skipped, total, start, p=empty, q=empty, rest=empty)


class Layout(NamedTuple):
    """A layout says how a flat tensor is seen as a matrix of low rank.

    The first rows x cols elements are a matrix, approximated with `rank` columns of P and Q; the
    last `rest` elements travel as they are. If rank is 0, the whole tensor does."""

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
    """A part is one tensor of a bucket, on its way through the rounds.

    skipped: whether this rank contributes nothing. total: ||a||^2. start: Q^T to begin with.
    p, q, rest: P^T, Q^T and the uncompressed elements, as views of what is all-reduced.
    """

    key: Key
    plan: Layout
    flat: Tensor
    skipped: bool
    total: float
    start: Tensor
    p: Tensor
    q: Tensor
    rest: Tensor

    def find_p(self) -> None:
        """p = Q^T M^T, and the rest; zeros if this rank contributes nothing."""
        if self.skipped:
            self.p.zero_()
            self.rest.zero_()
        else:
            if self.plan.rank:
                torch.mm(self.start, self.plan.matrix(self.flat).t(), out=self.p)
            self.rest.copy_(self.plan.tail(self.flat))

    def find_q(self) -> None:
        """q = P^T M."""
        if self.skipped:
            self.q.zero_()
        elif self.plan.rank:
            torch.mm(self.p, self.plan.matrix(self.flat), out=self.q)

    def own(self, cf: float) -> Payload:
        """The payload of what is kept of this rank's own tensor: P P^T M, and the rest."""
        rest = torch.zeros_like(self.rest) if self.skipped else self.plan.tail(self.flat)
        energy = kept_energy(self.q.reshape(-1), rest) if self.plan.rank else self.total
        error = projection_error(self.total, energy)
        parts = (self.p.view(-1), self.q.clone().view(-1), rest)
        numel, dtype = self.flat.numel(), self.flat.dtype
        of = energies(self.total, energy, error, self.flat)
        return Payload(parts, numel, cf, self.key, of, dtype)

    def mean(self, cf: float) -> Payload:
        """The payload that every rank decodes, once q and the rest are means over the ranks."""
        parts = (self.p.view(-1), self.q.view(-1), self.rest)
        return Payload(parts, self.flat.numel(), cf, self.key, dtype=self.flat.dtype)


def unpacked(payload: Payload, plan: Layout, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """P^T and Q^T as matrices, and the rest."""
    p, q, rest = payload.parts
    if rest.dtype != dtype:
        p, q, rest = p.to(dtype), q.to(dtype), rest.to(dtype)
    return p.view(plan.rank, plan.rows), q.view(plan.rank, plan.cols), rest


def kept_energy(q: Tensor, rest: Tensor) -> Scalar:
    """||P Q^T||^2 + ||rest||^2 for orthonormal P."""
    return squared_norm(q) + (squared_norm(rest) if rest.numel() else 0.0)


def allocate_p(parts: Sequence[Part]) -> Tensor:
    """One flat tensor for the P and the uncompressed elements of all parts, which become views."""
    size = sum(part.plan.rank * part.plan.rows + part.plan.rest for part in parts)
    shared = parts[0].flat.new_empty(size)
    assign_p(parts, shared)
    return shared


def assign_p(parts: Sequence[Part], shared: Tensor) -> None:
    """Make every part's P and uncompressed elements views of `shared`."""
    sizes = [size for p in parts for size in (p.plan.rank * p.plan.rows, p.plan.rest)]
    views = iter(shared.split(sizes))
    for part in parts:
        part.p = next(views).view(part.plan.rank, part.plan.rows)
        part.rest = next(views)


def allocate_q(parts: Sequence[Part]) -> Tensor:
    """One flat tensor for the Q of all parts, which become views of it."""
    shared = parts[0].flat.new_empty(sum(part.plan.rank * part.plan.cols for part in parts))
    assign_q(parts, shared)
    return shared


def assign_q(parts: Sequence[Part], shared: Tensor) -> None:
    """Make every part's Q a view of `shared`."""
    views = shared.split([part.plan.rank * part.plan.cols for part in parts])
    for part, view in zip(parts, views, strict=True):
        part.q = view.view(part.plan.rank, part.plan.cols)


class WarmStart:
    """This is the memory of PowerSGD: it holds Q^T (rank x columns) of the last step by parameter.

    Where the next step starts from ("warm start", Vogels and others 2019, section 4.2). It comes
    out of a sum over the ranks, so it is the same on all ranks. A lower rank uses the first rows,
    and the others are kept for later; beyond the highest rank so far, random rows are added.

    seed: of the random rows; the same on all ranks.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._rows: dict[str, Tensor] = {}

    def known(self, name: str, cols: int) -> int:
        """How many rows of this length are kept."""
        rows = self._rows.get(name)
        return 0 if rows is None or rows.shape[1] != cols else len(rows)

    def start(self, name: str, rank: int, cols: int, like: Tensor) -> Tensor:
        """`rank` orthonormal rows, of the dtype and on the device of `like`."""
        known = min(self.known(name, cols), rank)
        rows = self._rows[name][:known].to(like) if known else like.new_empty(0, cols)
        if known < rank:
            fresh = [self._random(name, row, cols) for row in range(known, rank)]
            rows = torch.cat([orthonormal_rows(rows), torch.stack(fresh).to(like)])
        return orthonormal_rows(rows)

    def keep(self, name: str, start: Tensor, rows: Tensor) -> None:
        """Start from `rows` the next time.

        Rows of zeros (of a zero gradient) tell nothing: instead of them, those of `start` are kept,
        from which they were computed."""
        new = torch.where((rows == 0).all(1, keepdim=True), start, rows)
        if self.known(name, new.shape[1]) > len(new):
            new = torch.cat([new, self._rows[name][len(new) :].to(new)])
        self._rows[name] = new

    def state_dict(self) -> dict[str, Tensor]:
        return {name: rows.clone() for name, rows in self._rows.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError, and change nothing, unless all are finite matrices."""
        for name, rows in state.items():
            whole = isinstance(rows, Tensor) and rows.dim() == 2 and rows.is_floating_point()
            if not whole or not bool(rows.isfinite().all()):
                raise ValueError(f"state of {name!r} must be a finite matrix (rank x columns)")
        self._rows = {name: rows.clone() for name, rows in state.items()}

    def _random(self, name: str, row: int, cols: int) -> Tensor:
        """A random row: a function of (seed, name, row, cols) alone."""
        digest = blake2b(repr((self.seed, name, row)).encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        return torch.randn(cols, generator=generator, dtype=torch.float64)


_WIDE = 8  # rows up to which the work is done in double; beyond, that would cost too much


def orthonormal_rows(rows: Tensor) -> Tensor:
    """Orthonormal rows (r, n) whose first j span what the first j of `rows` span, for every j.

    PowerSGD (Vogels and others 2019, Algorithm 1) orthogonalises with Gram-Schmidt, which divides
    by zero for a zero gradient and loses orthogonality for nearly dependent columns. Householder
    reflections do neither.

    rows: (r, n) with r <= n. A row that is zero, or depends on the ones before it, becomes some
    unit vector orthogonal to the others (always the same for the same `rows`), so the result
    always is a basis of r dimensions. NaN only if `rows` is not finite.

    Vectors are rows, not columns, because that is how they lie in memory."""
    wide = rows.double() if len(rows) <= _WIDE else rows
    if wide.dtype == rows.dtype and rows.numel():  # then squares could overflow or vanish
        largest = wide.abs().amax(1, keepdim=True)
        wide = wide / torch.where(largest > 0, largest, 1.0)
    columns = torch.linalg.qr(wide.t()).Q
    return columns.t().to(rows.dtype).contiguous()
