"""PowerSGD: low-rank approximation by one step of subspace iteration, warm-started.

Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization" (NeurIPS 2019), Algorithm 1. A gradient M (n x m) on each rank, Q (m x r) shared:

    P = orthonormal(sum(M Q));  Q = mean(M^T P);  every rank decodes P Q^T.

P Q^T is the exact mean of the projections P P^T M of each rank's own M. So there are two choices
of residual: against a rank's own projection (the paper's Algorithm 2; what `report` is given), or
against the mean (PyTorch's hook; what comes back at the end). Their sums over the ranks are the
same, and so is all that is ever decoded. But with the second nothing ever takes the differences
between the ranks off: they pile up, and the share of a that is kept falls for ever.

P and Q are held transposed (r x n, r x m): products then run at the speed of memory at any rank
(else 6 to 20 times slower for ranks 2 to 4, measured), and a lower rank is a prefix.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import isfinite, nan, prod
from typing import Any

import torch
from torch import Tensor

from compressors.base import Key, Payload, check_cf, further
from compressors.lowrank import (
    Part,
    cut_p,
    cut_q,
    kept_energy,
    layout,
    opened,
    share_p,
    share_q,
)
from compressors.norms import lost, squared_norm
from compressors.orthogonal import orthonormal_rows
from compressors.rounds import Report, Rounds, RoundsCompressor, check_bucket, finite_or_nan
from compressors.sparse import check_flat, check_out
from compressors.warmstart import WarmStart
from compressors.wire import split


class PowerSGD(RoundsCompressor):
    """Sends P and Q of rank floor(n m / (cf (n + m))): two all-reduces a bucket, one for all P
    (and what travels uncompressed: see `compressors.lowrank.layout`), one for all Q.

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
        held: Collection[int] = (),
        totals: Sequence[float] | None = None,
    ) -> Rounds:
        check_bucket(tensors, cfs, keys, totals)
        parts = [
            self._part(tensor, cf, key, i in held, totals[i] if totals else None)
            for i, (tensor, cf, key) in enumerate(zip(tensors, cfs, keys, strict=True))
        ]
        first = share_p(parts)
        for part in parts:
            part.find_p()
        if not all(isfinite(part.total) for part in parts):
            first.fill_(nan)  # products may hide it
        first = yield first

        finite = finite_or_nan(first)
        cut_p(parts, first)
        second = share_q(parts)
        for part in parts:
            part.p = orthonormal_rows(part.p) if finite and part.plan.rank else part.p
            part.find_q()
        report([part.own(cf) for part, cf in zip(parts, cfs, strict=True)])
        second = yield second

        finite = finite_or_nan(second) and finite
        if not finite:
            first.fill_(nan)
        first.div_(world_size)  # the rest; P was replaced
        cut_q(parts, second.div_(world_size))
        for part in parts:
            if finite and part.plan.rank:
                self._warm.keep(part.key.name, part.start, part.q)
        return [part.mean(cf) for part, cf in zip(parts, cfs, strict=True)]

    def compress(self, tensor: Tensor, cf: float, key: Key) -> Payload:
        """In a world of one. Starts from the warm Q and leaves it as it is. If columns are missing,
        all get one more step of iteration, as a random start would show far less than what PowerSGD
        keeps once it has run for a few steps."""
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
        """Truncated to the first columns: what the same rounds would have given at that rank.
        A tensor that went uncompressed but would not at the larger CF is compressed here."""
        cf = further(payload.cf, factor)
        then = layout(payload.cf, payload.numel, payload.key.shape)
        now = layout(cf, payload.numel, payload.key.shape)
        p, q, rest = payload.parts
        if now.rank == then.rank:
            return replace(payload, cf=cf)
        if not then.rank:
            return self.compress(rest, cf, payload.key)
        parts = (p[: now.rank * now.rows], q[: now.rank * now.cols], rest)
        energy = kept_energy(*parts[1:])
        error = payload.error + lost(kept_energy(q, rest), energy)
        return replace(payload, parts=parts, cf=cf, energy=energy, error=error)

    def add_to(self, out: Tensor, payload: Payload, scale: float = 1.0) -> None:
        check_out(out, payload)
        out = out.detach()
        plan = layout(payload.cf, payload.numel, payload.key.shape)
        p, q, rest = opened(payload, plan, out.dtype)
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
        p, q, rest = opened(payload, plan, out.dtype)
        if plan.rank:
            torch.mul(p.t(), q, out=plan.matrix(out))
        if plan.rest:
            plan.tail(out).copy_(rest)

    def subtract_from(self, tensor: Tensor, payload: Payload) -> None:
        self.add_to(tensor, payload, -1.0)

    def read(self, data: Tensor, numel: int, cf: float, dtype: torch.dtype, key: Key) -> Payload:
        plan = layout(cf, numel, key.shape)
        sizes = (plan.rank * plan.rows, plan.rank * plan.cols, plan.rest)
        parts = split(data, *((size, dtype) for size in sizes))
        return Payload(parts, numel, cf, nan, nan, key, dtype=dtype)

    def rank(self, cf: float, shape: tuple[int, ...]) -> int:
        """The rank for a parameter of this shape at `cf`; 0 if it travels uncompressed."""
        return layout(cf, prod(shape), shape).rank

    def payload_nbytes(self, numel: int, cf: float, dtype: torch.dtype = torch.float32) -> int:
        """For a tensor of unknown shape, seen as nearly square."""
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

    def _part(self, tensor: Tensor, cf: float, key: Key, held: bool, total: float | None) -> Part:
        flat = tensor.detach()
        plan = layout(cf, flat.numel(), key.shape)
        if total is None or held:
            total = 0.0 if held else squared_norm(flat)
        empty = flat.new_empty(0)
        start = self._warm.start(key.name, plan.rank, plan.cols, flat) if plan.rank else empty
        return Part(key, plan, flat, held, total, start, p=empty, q=empty, rest=empty)
