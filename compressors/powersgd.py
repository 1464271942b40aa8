"""PowerSGD: low-rank approximation by one step of subspace iteration, warm-started.

Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization" (NeurIPS 2019), Algorithm 1. A gradient M (n x m) on each rank, Q (m x r) shared:

    P = orthonormal(sum(M Q));  Q = mean(M^T P);  every rank decodes P Q^T.

P Q^T is the exact mean of the projections P P^T M of each rank's own M. A rank's residual is M less
its own projection (the paper's Algorithm 2). With M less the mean, as in PyTorch's hook, the same
would be decoded, but differences between ranks would never be subtracted, and would accumulate.

P and Q are stored transposed (r x n, r x m): products then run at the speed of memory at any rank
(else 6 to 20 times slower for ranks 2 to 4, measured), and a lower rank is a prefix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from hashlib import blake2b
from math import floor, isqrt, nan, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compressors import base
from compressors.base import Payload, Spec, check_cf, check_seed
from compressors.kernels import kernels_for, squared_norms
from compressors.kernels.blocks import Flag, energies, fill_if, zeros_if
from compressors.rounds import (
    Report,
    Rounds,
    RoundsCompressor,
    not_finite,
    projection_energies,
)


class Layout(NamedTuple):
    """The layout of a flat tensor as a matrix of low rank.

    The first rows x cols elements are a matrix, approximated with `rank` columns of P and Q. The
    last `rest` elements are sent uncompressed; if rank is 0, the whole tensor."""

    rows: int
    cols: int
    rank: int
    rest: int

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Elements of P, of Q, and uncompressed elements."""
        return self.rows * self.rank, self.cols * self.rank, self.rest

    @property
    def cf(self) -> float:
        """The actual compression factor."""
        return max(1.0, (self.rows * self.cols + self.rest) / max(1, sum(self.sizes)))

    def matrix(self, flat: Tensor) -> Tensor:
        """The matrix, as a view of `flat`."""
        return flat[: self.rows * self.cols].view(self.rows, self.cols)

    def tail(self, flat: Tensor) -> Tensor:
        """The uncompressed elements, as a view of `flat`."""
        return flat[self.rows * self.cols :]


@lru_cache(maxsize=1 << 14)
def layout(cf: float, numel: int, shape: tuple[int, ...] = (), rank: int | None = None) -> Layout:
    """The layout of a tensor of `numel` elements, with a parameter's `shape`, at `cf`.

    The matrix is n = shape[0] by m = all the other dimensions (Vogels and others 2019, section 3),
    nearly square if `shape` is () (not known). rank: None: max(1, floor(n m / (cf (n + m)))). A
    tensor at CF 1, or one that would not become smaller, is sent uncompressed."""
    cf = check_cf(cf)
    if shape and prod(shape) != numel:
        raise ValueError(f"key.shape must have the tensor's {numel} elements, got {shape}")
    rows = shape[0] if shape else isqrt(numel)
    cols = numel // max(rows, 1)
    size, sides = rows * cols, rows + cols
    if rank is None:
        rank = floor(size / (cf * max(sides, 1)) * (1 + 1e-12))  # 1e-12: as in `kept`
    rank = min(max(rank, 1), rows, cols)
    if cf == 1 or sides * rank >= size:
        return Layout(0, 0, 0, numel)
    return Layout(rows, cols, rank, numel - size)


class _Part(NamedTuple):
    """One tensor of a bucket. start: the Q^T from which the iteration starts (rank x columns)."""

    spec: Spec
    plan: Layout
    start: Tensor
    matrix: Tensor
    rest: Tensor

    def payload(
        self, p: Tensor, q: Tensor, rest: Tensor, energies: Tensor | None = None
    ) -> Payload:
        return Payload((p.view(-1), q.reshape(-1), rest), self.spec, energies)


class PowerSGD(RoundsCompressor):
    """PowerSGD sends P and Q of rank floor(n m / (cf (n + m))), or of the given one, in two
    all-reduces for a bucket.

    The first all-reduce sums the P of all tensors and the uncompressed elements (see `layout`), the
    second one all Q. Each step starts from the parameter's Q of the last step ("warm start", Vogels
    and others 2019, section 4.2). A lower rank uses the first columns of this Q; a rank above the
    highest one so far adds random columns.

    rank: of every matrix, at any CF above 1; None: by the CF.
    seed: of the random columns; the same on all ranks.

    parts: P^T (r x n, orthonormal rows), Q^T (r x m), uncompressed elements; all flat.
    """

    name = "powersgd"
    keeps_zeros = False

    def __init__(self, rank: int | None = None, seed: int = 0) -> None:
        if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int) or rank < 1):
            raise ValueError(f"rank={rank!r}: must be an integer >= 1, or None")
        self.rank = rank
        self.seed = check_seed(seed)
        self._last: dict[str, Tensor] = {}  # Q^T of the last step by parameter

    def rounds(
        self,
        tensors: Sequence[Tensor],
        specs: Sequence[Spec],
        world_size: int,
        report: Report,
    ) -> Rounds:
        parts = [self._part(*each) for each in zip(tensors, specs, strict=True)]
        totals = squared_norms(tensors)
        ps = [part.start @ part.matrix.t() for part in parts]
        mixed = zip(ps, parts, strict=True)
        first = torch.cat([each for p, part in mixed for each in (p.view(-1), part.rest)])
        fill_if(not_finite(totals), first, nan)  # products may hide nonfinite elements
        first = yield first

        bad = not_finite(first)
        fill_if(bad, first, 0.0)  # so that all following results are finite
        sizes = [part.plan.sizes for part in parts]
        sums = first.split([size for p, _, rest in sizes for size in (p, rest)])
        ps = [orthonormal_rows(s.view_as(p)) for s, p in zip(sums[::2], ps, strict=True)]
        qs = [p @ part.matrix for p, part in zip(ps, parts, strict=True)]
        second = torch.cat([q.view(-1) for q in qs])
        report(_own(parts, ps, qs, totals, bad))
        second = yield second

        bad = bad | not_finite(second)
        for summed in (first, second):
            fill_if(bad, summed, nan)
            summed.div_(world_size)
        means = second.split([q for _, q, _ in sizes])
        for part, q in zip(parts, means, strict=True):
            if part.plan.rank:
                self._keep(part.spec.key.name, part.start, q.view_as(part.start), bad)
        decoded = zip(parts, ps, means, sums[1::2], strict=True)
        return [part.payload(p, q, rest) for part, p, q, rest in decoded]

    def compress(self, x: Tensor, spec: Spec, add: Tensor | None = None) -> Payload:
        """If the last step's Q has too few columns, makes one more iteration: from a random start,
        one iteration keeps far less energy than PowerSGD does after a few steps."""
        base.check_flat(x, spec, add)
        x = x.detach()
        if add is not None:
            x.add_(add.detach())
        part = self._part(x, spec)
        p = orthonormal_rows(part.start @ part.matrix.t())
        q = p @ part.matrix
        if self._known(spec.key.name, part.plan.cols) < part.plan.rank:
            p = orthonormal_rows(orthonormal_rows(q) @ part.matrix.t())
            q = p @ part.matrix
        return _own([part], [p], [q], squared_norms([x]), False)[0]

    def smaller(self, payload: Payload, factor: float) -> Payload:
        """P and Q truncated to their first columns, the result of the rounds at the lower rank."""
        spec = payload.spec.at(base.combined_cf(payload.cf, factor))
        then, now = self._layout(payload.spec), self._layout(spec)
        p, q, rest = payload.parts
        if now.rank == then.rank:
            return replace(payload, spec=spec)
        if not then.rank:
            return self.compress(rest, spec)
        p_size, q_size, _ = now.sizes
        parts = (p[:p_size], q[:q_size], rest)
        fewer, all_columns, beside = squared_norms([parts[1], q, rest]).unbind()
        energy = fewer + beside
        total, _, error = payload.scalars
        error = error + base.projection_error(all_columns + beside, energy)
        return replace(payload, parts=parts, spec=spec, energies=energies(total, energy, error, q))

    def add_to(self, out: Tensor, payload: Payload, scale: float = 1.0) -> None:
        base.check_out(out, payload)
        out, plan = out.detach(), self._layout(payload.spec)
        p, q, rest = (part.to(out.dtype) for part in payload.parts)
        p, q = p.view(plan.rank, plan.rows), q.view(plan.rank, plan.cols)
        plan.matrix(out).addmm_(p.t(), q, alpha=scale)
        plan.tail(out).add_(rest, alpha=scale)

    def mean_of(
        self, out: Tensor, payloads: Sequence[Payload], scale: float, as_zeros: Flag = False
    ) -> None:
        plan = self._layout(payloads[0].spec)
        if len(payloads) > 1 or scale != 1 or plan.rank != 1 or plan.rest:
            super().mean_of(out, payloads, scale, as_zeros)
            return
        base.check_out(out, payloads[0])  # one pass over the memory instead of two
        p, q, _ = (part.to(out.dtype) for part in payloads[0].as_zeros(as_zeros).parts)
        torch.mul(p[:, None], q, out=plan.matrix(out.detach()))

    def floats(self, spec: Spec) -> float:
        return float(sum(self._layout(spec).sizes))

    def nearest(self, spec: Spec) -> float:
        return self._layout(spec).cf

    def state_dict(self) -> dict[str, Any]:
        """q: the transposed mean Q (rank x columns) by parameter name."""
        return {"q": {name: rows.clone() for name, rows in self._last.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        last = state.get("q")
        if not isinstance(last, Mapping):
            raise ValueError(f"state must have matrices by name under 'q', got {sorted(state)}")
        for name, rows in last.items():
            whole = isinstance(rows, Tensor) and rows.dim() == 2 and rows.is_floating_point()
            if not whole or not bool(rows.isfinite().all()):
                raise ValueError(f"state of {name!r} must be a finite matrix (rank x columns)")
        self._last = {name: rows.clone() for name, rows in last.items()}

    def _layout(self, spec: Spec) -> Layout:
        """The layout of a tensor with this spec."""
        return layout(spec.cf, spec.numel, spec.key.shape, self.rank)

    def _part(self, tensor: Tensor, spec: Spec) -> _Part:
        flat, plan = tensor.detach(), self._layout(spec)
        start = self._start(spec.key.name, plan.rank, plan.cols, flat)
        return _Part(spec, plan, start, plan.matrix(flat), plan.tail(flat))

    def _known(self, name: str, cols: int) -> int:
        """The number of rows of Q^T, of this length, that the last step has left."""
        rows = self._last.get(name)
        return 0 if rows is None or rows.shape[1] != cols else len(rows)

    def _start(self, name: str, rank: int, cols: int, like: Tensor) -> Tensor:
        """`rank` orthonormal rows, of the dtype and on the device of `like`.

        A random row is a function of (seed, name, row, cols) alone."""
        known = min(self._known(name, cols), rank)
        rows = self._last[name][:known].to(like) if known else like.new_empty(0, cols)
        random = []
        for row in range(known, rank):
            digest = blake2b(repr((self.seed, name, row)).encode(), digest_size=8).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
            drawn = torch.randn(cols, generator=generator, dtype=torch.float64, device="cpu")
            random.append(drawn)
        if random:
            new = torch.stack(random).to(like.device, like.dtype, non_blocking=True)
            rows = torch.cat([orthonormal_rows(rows), new])
        return orthonormal_rows(rows)

    def _keep(self, name: str, start: Tensor, rows: Tensor, bad: Flag) -> None:
        """Keep `rows` as the start of the next step. Zero rows (of a zero gradient) are replaced by
        those of `start`. If `bad`, nothing changes, except that on a device the new rows of `start`
        are kept."""
        if bad is True:
            return
        rank, known = len(rows), self._known(name, rows.shape[1])
        new = torch.where((rows == 0).all(1, keepdim=True), start, rows)
        old = self._last[name].to(new) if known else start[:0]
        if known < rank:
            old = torch.cat([old, start[known:]])
        if known > rank:
            new = torch.cat([new, old[rank:]])
        if not isinstance(bad, Tensor):
            self._last[name] = new
        elif known == rank and old is self._last[name]:
            # In place: new memory would free the old one to the CUDA stream of an earlier callback,
            # while this callback's stream has not yet read it.
            torch.where(bad, old, new, out=old)
        else:
            self._last[name] = torch.where(bad, old, new)


def _own(
    parts: Sequence[_Part], ps: Sequence[Tensor], qs: Sequence[Tensor], totals: Tensor, bad: Flag
) -> list[Payload]:
    """The payloads of this rank's own projections P P^T M, with the uncompressed elements.

    totals: ||a||^2 of each tensor. bad: some rank's tensors are not finite, so payloads are 0."""
    rests = [zeros_if(bad, part.rest) for part in parts]
    beside = [r if part.plan.rank else r[:0] for part, r in zip(parts, rests, strict=True)]
    kept = squared_norms([*(q.view(-1) for q in qs), *beside]).view(2, -1).sum(0)
    of = projection_energies(totals, kept, [not part.plan.rank for part in parts], bad)
    qs = [zeros_if(bad, q) for q in qs]
    return [part.payload(*each) for part, *each in zip(parts, ps, qs, rests, of, strict=True)]


def orthonormal_rows(rows: Tensor) -> Tensor:
    """Orthonormal rows (r, n) whose first j span what the first j of `rows` span, for every j.

    By Householder reflections: the paper's Gram-Schmidt divides by zero for a zero gradient and
    loses orthogonality for nearly dependent columns.

    rows: (r, n) with r <= n. A row that is zero, or depends on the ones before it, becomes some
    unit vector orthogonal to the others. NaN only if `rows` is not finite."""
    return kernels_for(rows).orthonormal_rows(rows) if rows.numel() else rows
