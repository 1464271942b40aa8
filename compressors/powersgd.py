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

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from math import floor, isqrt, nan, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compressors.base import (
    Key,
    Payload,
    check_cf,
    check_out,
    combined_cf,
    projection_error,
    split_bytes,
)
from compressors.kernels import squared_norms
from compressors.kernels.blocks import Flag, energies, fill_if, is_host
from compressors.rounds import (
    Report,
    Rounds,
    RoundsCompressor,
    check_bucket,
    not_finite,
    projection_energies,
    zeros_if,
)


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
    ) -> Rounds:
        check_bucket(tensors, cfs, keys)
        parts = [
            self._part(tensor, cf, key, i in skipped)
            for i, (tensor, cf, key) in enumerate(zip(tensors, cfs, keys, strict=True))
        ]
        totals = squared_norms([part.flat[:0] if part.skipped else part.flat for part in parts])
        like = tensors[0]
        first = like.new_empty(sum(part.plan.p_size + part.plan.rest for part in parts))
        second = like.new_empty(sum(part.plan.q_size for part in parts))
        for part, p, rest, _ in _views(parts, first, second):
            part.find_p(p, rest)
        fill_if(not_finite(totals), first, nan)  # products may hide it
        first = yield first

        bad = not_finite(first)
        fill_if(bad, first, 0.0)  # so that all that is computed from it is finite
        for part, p, _, q in _views(parts, first, second):
            part.find_q(p, q)
        report(_own(parts, totals, bad))
        second = yield second

        bad = bad | not_finite(second)
        for summed in (first, second):
            fill_if(bad, summed, nan)
            summed.div_(world_size)
        means = []
        for part, _, rest, q in _views(parts, first, second):
            if part.plan.rank:
                self._warm.keep(part.key.name, part.start, q.view_as(part.start), bad)
            means.append(part.payload(q, rest))
        return means

    def _alone(self, tensor: Tensor, cf: float, key: Key) -> Payload:
        """Starts from the Q of the last step, which stays as it is.

        If that Q has too few columns, one more step of iteration is done, as a random start would
        show far less than what PowerSGD keeps once it has run for a few steps."""
        part = self._part(tensor, cf, key, False)
        plan = part.plan
        if plan.rank:
            cold = self._warm.known(key.name, plan.cols) < plan.rank
            part.q, matrix = part.start, plan.matrix(part.flat)
            for step in range(1 + cold):
                start = orthonormal_rows(part.q) if step else part.q
                part.p = orthonormal_rows(start @ matrix.t())
                part.q = part.p @ matrix
        return _own([part], squared_norms([part.flat]), False)[0]

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
        parts = (p[: now.p_size], q[: now.q_size], rest)
        fewer, all_columns, beside = squared_norms([parts[1], q, rest]).unbind()
        energy = fewer + beside
        total, _, error = payload.scalars
        error = error + projection_error(all_columns + beside, energy)
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
        sizes = (plan.p_size, plan.q_size, plan.rest)
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

    def _part(self, tensor: Tensor, cf: float, key: Key, skipped: bool) -> Part:
        flat = tensor.detach()
        plan = layout(cf, flat.numel(), key.shape)
        empty = flat.new_empty(0)
        start = self._warm.start(key.name, plan.rank, plan.cols, flat) if plan.rank else empty
        return Part(key, cf, plan, flat, skipped, start, p=empty, q=empty)


class Layout(NamedTuple):
    """A layout says how a flat tensor is seen as a matrix of low rank.

    The first rows x cols elements are a matrix, approximated with `rank` columns of P and Q; the
    last `rest` elements travel as they are. If rank is 0, the whole tensor does."""

    rows: int
    cols: int
    rank: int
    rest: int

    @property
    def p_size(self) -> int:
        """Elements of P."""
        return self.rows * self.rank

    @property
    def q_size(self) -> int:
        """Elements of Q."""
        return self.cols * self.rank

    @property
    def floats(self) -> int:
        """Elements sent: P, Q and the rest."""
        return self.p_size + self.q_size + self.rest

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

    skipped: whether this rank contributes nothing. start: Q^T to begin with (rank x columns).
    p, q: P^T and this rank's own Q^T, once they are known.
    """

    key: Key
    cf: float
    plan: Layout
    flat: Tensor
    skipped: bool
    start: Tensor
    p: Tensor
    q: Tensor

    def find_p(self, p: Tensor, rest: Tensor) -> None:
        """Fill in what this rank adds to the first sum: p = Q^T M^T and the rest, both flat."""
        plan = self.plan
        if self.skipped:
            p.zero_()
            rest.zero_()
            return
        if plan.rank:
            torch.mm(self.start, plan.matrix(self.flat).t(), out=p.view(plan.rank, plan.rows))
        if plan.rest:
            rest.copy_(plan.tail(self.flat))

    def find_q(self, p: Tensor, q: Tensor) -> None:
        """Fill in what this rank adds to the second sum: q = P^T M, flat.

        p: the first sum of P^T, flat, not orthonormal yet."""
        plan, self.p, self.q = self.plan, p, q
        if plan.rank:
            self.p = orthonormal_rows(p.view(plan.rank, plan.rows))
        if self.skipped:
            q.zero_()
        elif plan.rank:
            torch.mm(self.p, plan.matrix(self.flat), out=q.view(plan.rank, plan.cols))

    def own_rest(self, bad: Flag) -> Tensor:
        """What travels uncompressed of this rank's own tensor; zeros if it is not to be kept."""
        rest = self.plan.tail(self.flat)
        return zeros_if(self.skipped or bad, rest) if self.plan.rest else rest

    def payload(self, q: Tensor, rest: Tensor, energies: Tensor | None = None) -> Payload:
        parts, flat = (self.p.view(-1), q, rest), self.flat
        return Payload(parts, flat.numel(), self.cf, self.key, energies, flat.dtype)


def _views(
    parts: Sequence[Part], first: Tensor, second: Tensor
) -> Iterator[tuple[Part, Tensor, Tensor, Tensor]]:
    """Each part with its P and uncompressed elements, which are views of the first sum, and its Q,
    which is one of the second. All are flat."""
    views = first.split([size for part in parts for size in (part.plan.p_size, part.plan.rest)])
    qs = second.split([part.plan.q_size for part in parts])
    return zip(parts, views[::2], views[1::2], qs, strict=True)


def _own(parts: Sequence[Part], totals: Tensor, bad: Flag) -> list[Payload]:
    """The payloads of what is kept of this rank's own tensors: P P^T M, and the rest.

    totals: ||a||^2 of each. bad: some rank's tensors are not finite, so nothing is kept."""
    qs = [part.q.reshape(-1) for part in parts]
    rests = [part.own_rest(bad) for part in parts]
    beside = [r if part.plan.rank else r[:0] for part, r in zip(parts, rests, strict=True)]
    kept = squared_norms([*qs, *beside]).view(2, -1).sum(0)
    of = projection_energies(totals, kept, [not part.plan.rank for part in parts], bad)
    qs = [q.clone() if bad is False else zeros_if(bad, q) for q in qs]
    return [part.payload(*each) for part, *each in zip(parts, qs, rests, of, strict=True)]


def unpacked(payload: Payload, plan: Layout, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """P^T and Q^T as matrices, and the rest."""
    p, q, rest = payload.parts
    if rest.dtype != dtype:
        p, q, rest = p.to(dtype), q.to(dtype), rest.to(dtype)
    return p.view(plan.rank, plan.rows), q.view(plan.rank, plan.cols), rest


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
            new = torch.stack(fresh).to(like.device, like.dtype, non_blocking=True)
            rows = torch.cat([orthonormal_rows(rows), new])
        return orthonormal_rows(rows)

    def keep(self, name: str, start: Tensor, rows: Tensor, bad: Flag) -> None:
        """Start from `rows` the next time. If they are `bad`, nothing changes, except that on a
        device those rows of `start` are kept that were not known before.

        Rows of zeros (of a zero gradient) tell nothing: instead of them, those of `start` are kept,
        from which they were computed."""
        if bad is True:
            return
        rank, known = len(rows), self.known(name, rows.shape[1])
        new = torch.where((rows == 0).all(1, keepdim=True), start, rows)
        old = self._rows[name].to(new) if known else start[:0]
        if known < rank:
            old = torch.cat([old, start[known:]])
        if known > rank:
            new = torch.cat([new, old[rank:]])
        self._rows[name] = torch.where(bad, old, new) if isinstance(bad, Tensor) else new

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


_WIDE = 8  # rows up to which the host works in double; beyond, that would cost too much


def orthonormal_rows(rows: Tensor) -> Tensor:
    """Orthonormal rows (r, n) whose first j span what the first j of `rows` span, for every j.

    PowerSGD (Vogels and others 2019, Algorithm 1) orthogonalises with Gram-Schmidt, which divides
    by zero for a zero gradient and loses orthogonality for nearly dependent columns. Householder
    reflections do neither.

    rows: (r, n) with r <= n. A row that is zero, or depends on the ones before it, becomes some
    unit vector orthogonal to the others (always the same for the same `rows`), so the result
    always is a basis of r dimensions. NaN only if `rows` is not finite.

    Vectors are rows, not columns, because that is how they lie in memory."""
    wide = rows.double() if len(rows) <= _WIDE or not is_host(rows.device) else rows
    if wide.dtype == rows.dtype and rows.numel():  # then squares could overflow or vanish
        largest = wide.abs().amax(1, keepdim=True)
        wide = wide / torch.where(largest > 0, largest, 1.0)
    columns = torch.linalg.qr(wide.t()).Q
    return columns.t().to(rows.dtype, memory_format=torch.contiguous_format)
