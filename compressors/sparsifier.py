"""Sparsifiers send a few elements of a tensor, as indices and values in a payload of fixed size.

A subclass selects the elements. Indices are sent in the smaller of two formats
(`compressors.wire.indices`), values in full precision or coded (`compressors.wire.values`). The
compression error includes the coding error of values, so error feedback keeps both.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from compressors import base
from compressors.base import Compressor, Key, Payload, Spec
from compressors.kernels import kernels_for, squared_norm, squared_norms
from compressors.kernels.blocks import (
    Coding,
    Flag,
    Selected,
    either,
    energies,
)
from compressors.wire.indices import choose_format
from compressors.wire.values import ValueFormat, make_values


@dataclass(frozen=True)
class SparsePayload(Payload):
    """A sparse payload holds a few elements in a fixed number of slots (`capacity`).

    parts: indices (int32, ascending), then `capacity` coded values. (On the wire values come
        first.) On the host an empty slot has no index. On a device there are `capacity` indices,
        and empty slots come last, with index `numel` and value 0.
    full: no slot is empty, by the rule of the sparsifier.
    exact: the values before coding, from which `smaller` selects. decoded: the values as receivers
        decode them; None if coding is lossless. Both are None in a received payload.
    """

    full: bool = False
    exact: Tensor | None = None
    decoded: Tensor | None = None

    @property
    def capacity(self) -> int:
        """Number of slots on the wire."""
        return self.spec.num_kept

    @property
    def nbytes(self) -> int:
        coded = sum(part.numel() * part.element_size() for part in self.parts[1:])
        return coded + choose_format(self.numel, self.capacity).nbytes(self.numel, self.capacity)

    def write(self, out: Tensor) -> None:
        index_format = choose_format(self.numel, self.capacity)
        if index_format.write(self.parts[0], self.numel, self.capacity, out, self.parts[1:]):
            return
        split = max(0, out.numel() - index_format.nbytes(self.numel, self.capacity))
        Payload(self.parts[1:], self.spec).write(out[:split])
        index_format.encode(self.parts[0], self.numel, self.capacity, self.full, out[split:])

    def with_parts(self, *parts: Tensor) -> SparsePayload:
        return replace(self, parts=parts, decoded=None)


_NOTHING = Spec(())


@dataclass(frozen=True)
class SparseRows(SparsePayload):
    """The sparse payload of consecutive tensors (rows) of equal length, each compressed separately.
    It exists on a device only, and has no empty slots.

    parts: (rows, elements); an index counts from the start of its row. row: the spec of the first
    row."""

    row: Spec = _NOTHING

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.parts[0])

    @property
    def capacity(self) -> int:
        return self.rows * self.row.num_kept

    @property
    def nbytes(self) -> int:
        coded = sum(part.numel() * part.element_size() for part in self.parts[1:])
        numel, k = self.row.numel, self.row.num_kept
        return coded + self.rows * choose_format(numel, k).nbytes(numel, k)

    @property
    def marks(self) -> list[Tensor]:
        floats = [part for part in self.parts if part.is_floating_point()]
        return [part[:, 0].clone() for part in floats]

    def positions(self) -> Tensor:
        starts = torch.arange(0, self.numel, self.row.numel, device=self.parts[0].device)
        return (self.parts[0] + starts[:, None]).view(-1).int()

    def write(self, out: Tensor) -> None:
        numel, k = self.row.numel, self.row.num_kept
        choose_format(numel, k).write(
            self.parts[0].view(-1), numel, k, out, self.parts[1:], self.rows
        )


class Sparsifier(Compressor):
    """Of a segment of n elements, a sparsifier keeps at most max(1, floor(n / cf)). A payload has
    so many slots for each of its segments (k in all).

    values: the format of the values: "fp32" (not coded), "bf16", "fp16", "int8", "int4", "qsgd" or
        a `ValueFormat`.

    exact_count: exactly k elements are always kept. A payload with another number is invalid.
    comparable: elements are selected by magnitude alone, so that a concatenation of tensors can be
        compressed as one tensor.
    """

    exact_count = False
    comparable = True
    selects = True
    # With more delay in the residual, at a larger CF, less momentum is best (measured:
    # docs/research/defaults.md).
    momentum_factor = 1.2

    def __init__(self, values: str | ValueFormat = "fp32") -> None:
        self.values = make_values(values)
        own = type(self).name
        self.name = own if self.values.lossless else f"{own}+{self.values.name}"

    def coded(self, values: str | ValueFormat) -> Sparsifier:
        """A sparsifier that selects the same elements, and sends their values as `values`."""
        other = copy(self)
        Sparsifier.__init__(other, values)
        return other

    @abstractmethod
    def select(self, tensor: Tensor, k: int, add: Tensor | None, key: Key) -> Selected:
        """tensor += add in place, then select at most k elements of flat `tensor`.

        k: 1 <= k <= numel, or k = 0 if numel is 0.
        add: None, or a tensor with the dtype, length and device of `tensor`."""

    def select_segments(self, tensor: Tensor, spec: Spec, add: Tensor | None) -> Selected:
        """tensor += add in place, then select at most `spec.counts[i]` elements of segment i, which
        has `spec.segments[i]` elements. Indices count from the start of `tensor`, and ascend.

        A sparsifier may leave this method out: with granularity "layer" each tensor is then handed
        to `select`. A class that defines `select` anew must define this method anew, too."""
        raise NotImplementedError

    @property
    def by_segments(self) -> bool:
        """Whether `select_segments` selects what `select` would: one class defines both."""
        defines = next(vars(kind) for kind in type(self).__mro__ if "select" in vars(kind))
        return "select_segments" in defines

    def compress(self, x: Tensor, spec: Spec, add: Tensor | None = None) -> Payload:
        base.check_flat(x, spec, add)
        base.check_cf(spec.cf)
        if x.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"x must be float32 or float64, got {x.dtype}")
        add = None if add is None else add.detach()
        if len(spec.segments) > 1 and self.by_segments:
            by, chosen = "select_segments", self.select_segments(x.detach(), spec, add)
        else:
            by, chosen = "select", self.select(x.detach(), spec.num_kept, add, spec.key)
        self._check_chosen(by, chosen, spec)
        return self._payload(chosen, spec)

    def _check_chosen(self, by: str, chosen: Selected, spec: Spec) -> None:
        """ValueError or TypeError, naming the class, if its method `by` has returned what no
        payload can be made of. No value is read."""
        select = f"{type(self).__name__}.{by} must return"
        if not isinstance(chosen, Selected):
            raise TypeError(f"{select} a Selected, got {type(chosen).__name__}")
        indices, values, _ = chosen
        kinds = [(each.dim(), each.numel(), each.dtype) for each in (indices, values)]
        k, most = spec.num_kept, "exactly" if self.exact_count else "at most"
        count = k if self.exact_count else min(indices.numel(), k)
        if kinds != [(1, count, torch.int32), (1, count, spec.dtype)]:
            got = ", ".join(f"{tuple(x.shape)} of {x.dtype}" for x in (indices, values))
            raise ValueError(
                f"{select} {most} {k} indices of torch.int32, flat, and as many values of "
                f"{spec.dtype}, got {got}"
            )

    def smaller(self, payload: Payload, factor: float) -> Payload:
        """A payload of the largest elements of `payload`, by whatever rule those were selected."""
        assert isinstance(payload, SparsePayload)
        if isinstance(payload, SparseRows):
            return self._smaller_rows(payload, factor)
        spec = payload.spec.at(base.combined_cf(payload.cf, factor))
        values = self._decoded(payload) if payload.exact is None else payload.exact
        if len(spec.segments) > 1 and self.by_segments:
            return self._payload(self._smaller_segments(payload, values, spec), spec)
        positions = kernels_for(values).largest(values, min(spec.num_kept, values.numel()))
        indices, values = (x.index_select(0, positions) for x in (payload.parts[0], values))
        return self._payload(Selected(indices, values, payload.scalars[0]), spec)

    def _smaller_segments(self, payload: SparsePayload, values: Tensor, spec: Spec) -> Selected:
        """The largest of the payload's values in each segment."""
        kernels, total = kernels_for(values), payload.scalars[0]
        if payload.full:
            before = payload.spec.counts
            counts = tuple(map(min, spec.counts, before))
            found = kernels.select_segments(values, before, counts, None)
            indices = payload.parts[0].index_select(0, found.indices)
            return Selected(indices, found.values, total)
        # How many elements each segment has sent depends on the data. Empty slots come last.
        whole = values.new_zeros(payload.numel + 1)
        whole.index_copy_(0, payload.parts[0].long(), values)
        found = kernels.select_segments(whole[:-1], spec.segments, spec.counts, None)
        return found._replace(total=total)

    def add_to(self, out: Tensor, payload: Payload, scale: float = 1.0) -> None:
        base.check_out(out, payload)
        fused = self._fused(out, [payload])
        if fused is not None:
            indices = payload.parts[0]
            rows = payload.rows if isinstance(payload, SparseRows) else 1
            coded = self._coded(fused, [payload], indices.numel() // rows)
            fused.add_sparse(out.detach(), indices, coded, scale, rows)
            return
        indices, values = payload.parts[0], self._decoded(payload)
        if not self.exact_count:  # the index `numel` of an empty slot is outside of `out`
            indices = kernels_for(out).in_bounds(indices, payload.numel)
        out.detach().index_add_(0, indices, values.to(out.dtype), alpha=scale)

    def nbytes(self, spec: Spec) -> int:
        return self.values.size(spec.num_kept, spec.dtype) + self.index_nbytes(spec)

    def read(self, data: Tensor, spec: Spec) -> list[Payload]:
        nbytes, layout = self.index_nbytes(spec), self.values.layout(spec.num_kept, spec.dtype)
        *columns, packed = base.columns_of(data, (*layout, (nbytes, torch.uint8)))
        rows = zip(*map(torch.unbind, columns), strict=True)
        return [
            self._sparse((indices, *coded), spec, invalid=invalid)
            for coded, (indices, invalid) in zip(rows, self._unpacked(packed, spec), strict=True)
        ]

    def compress_rows(self, x: Tensor, specs: Sequence[Spec], add: Tensor | None) -> Payload | None:
        spec, row = base.joined(specs), specs[0]
        base.check_flat(x, spec, add)
        if len(spec.segments) > len(specs):
            return None
        chosen = self.select_rows(x.detach(), len(specs), row.num_kept, add, spec.key)
        return chosen and self._rows_payload(chosen, spec, row)

    def select_rows(
        self, tensor: Tensor, rows: int, k: int, add: Tensor | None, key: Key
    ) -> Selected | None:
        """`select` of exactly k elements in each of `rows` consecutive tensors of equal length: as
        `Kernels.select_rows`. None if this sparsifier cannot; then `add` was not added."""
        return None

    def _rows_payload(self, chosen: Selected, spec: Spec, row: Spec) -> SparseRows:
        indices, values, total = chosen
        rows = spec.numel // row.numel
        spec = spec.at(row.cf)
        fused = self.values.fused(values, None, spec.key, True, rows)
        assert fused is not None  # `select_rows` returns None where no kernel encodes values
        coded, decoded, norms = fused
        kernels = kernels_for(values).fused(values)
        of = kernels.sum_energies(total, norms, values.numel() < spec.numel)
        decoded = None if self.values.lossless else decoded
        parts = tuple(part.view(rows, -1) for part in (indices, *coded))
        return SparseRows(
            parts, spec, of, indices=indices, full=True, exact=values, decoded=decoded, row=row
        )

    def _smaller_rows(self, payload: SparseRows, factor: float) -> Payload:
        assert payload.exact is not None
        spec = payload.spec.at(base.combined_cf(payload.cf, factor))
        row, rows = payload.row.at(spec.cf), payload.rows
        count = payload.row.num_kept
        chosen = kernels_for(payload.exact).select_rows(
            payload.exact, rows, min(row.num_kept, count), None
        )
        if chosen is None:  # `payload` has one element a row already
            return replace(payload, spec=spec, row=row)
        starts = torch.arange(0, rows * count, count, device=chosen.indices.device)
        at = (chosen.indices.view(rows, -1) + starts[:, None]).view(-1)
        indices = payload.parts[0].view(-1).index_select(0, at)
        return self._rows_payload(Selected(indices, chosen.values, payload.scalars[0]), spec, row)

    def read_rows(self, data: Tensor, specs: Sequence[Spec]) -> Payload | None:
        spec, row = base.joined(specs), specs[0]
        fused = kernels_for(data).fused(data)
        alike = len(spec.segments) == len(specs) and self.exact_count and self.values.fuses
        if fused is None or not alike:
            return None
        nbytes, layout = self.index_nbytes(row), self.values.layout(row.num_kept, row.dtype)
        data = data[:, : self.nbytes(row)]
        *coded, packed = base.columns_of(data, (*layout, (nbytes, torch.uint8)))
        decoded = self._unpacked(packed, row)
        indices = fused.as_rows([each for each, _ in decoded])
        return SparseRows((indices, *coded), spec, invalid=decoded[0][1], full=True, row=row)

    def mean_of(
        self, out: Tensor, payloads: Sequence[Payload], scale: float, as_zeros: Flag = False
    ) -> None:
        if not self._add_fused(out, payloads, scale, as_zeros, onto=False):
            super().mean_of(out, payloads, scale, as_zeros)

    def add_all(
        self, out: Tensor, payloads: Sequence[Payload], scale: float, as_zeros: Flag = False
    ) -> None:
        if not self._add_fused(out, payloads, scale, as_zeros, onto=True):
            super().add_all(out, payloads, scale, as_zeros)

    def _add_fused(
        self, out: Tensor, payloads: Sequence[Payload], scale: float, as_zeros: Flag, onto: bool
    ) -> bool:
        """Add all payloads by one kernel: to `out`, or if not `onto` to zeros, which replace `out`.
        Returns False, and does nothing, if there is no such kernel."""
        for payload in payloads:
            base.check_out(out, payload)
        fused = self._fused(out, payloads)
        if as_zeros is True or fused is None:
            return False
        side_by_side = isinstance(payloads[0], SparseRows)  # then it is the only payload
        if side_by_side:
            (indices,) = (payload.parts[0] for payload in payloads)
        else:
            indices = fused.as_rows([payload.parts[0] for payload in payloads])
        coded = self._coded(fused, payloads, indices.shape[1])
        fused.add_sparse_rows(out.detach(), indices, coded, scale, as_zeros, onto, side_by_side)
        return True

    def floats(self, spec: Spec) -> float:
        return float(spec.num_kept)

    def index_nbytes(self, spec: Spec) -> int:
        """Bytes of the packed indices of a payload, without values."""
        return choose_format(spec.numel, spec.num_kept).nbytes(spec.numel, spec.num_kept)

    def pack_indices(self, payload: Payload) -> Tensor:
        """The packed indices of a payload, without values (uint8, `index_nbytes` elements)."""
        numel, k = payload.numel, payload.spec.num_kept
        return choose_format(numel, k).encode(payload.parts[0], numel, k, self.exact_count)

    def uncoded(self) -> Sparsifier:
        """A sparsifier that selects the same elements, and sends any number of values in full
        precision."""
        other = self.coded("fp32")
        other.exact_count = False
        return other

    def at_union(self, x: Tensor, packed: Tensor, spec: Spec) -> Payload:
        """The payload of flat `x` at the union of the ranks' indices.

        packed: (ranks, bytes): each rank's indices at CF `spec.cf` x ranks, from `pack_indices`. An
        index that several ranks have sent takes one slot of the union, so slots may stay empty."""
        base.check_flat(x, spec)
        flat, numel, lists = x.detach(), x.numel(), []
        invalid: Flag = False
        for indices, unknown in self._unpacked(packed, spec.at(spec.cf * len(packed))):
            invalid = either(invalid, unknown)
            lists.append(indices)
        kernels = kernels_for(flat)
        indices = kernels.union(torch.cat(lists), spec.num_kept, numel)
        values = kernels.take_present(flat, indices)
        chosen = Selected(indices, values, squared_norm(flat))
        return replace(self._payload(chosen, spec), invalid=invalid)

    def _unpacked(self, packed: Tensor, spec: Spec) -> list[tuple[Tensor, Flag]]:
        """(indices, whether they are invalid) of each rank. packed: (ranks, bytes)."""
        form = choose_format(spec.numel, spec.num_kept)
        return form.decode(packed, spec.numel, spec.num_kept, self.exact_count)

    def _sparse(self, parts: tuple[Tensor, ...], spec: Spec, **known: Any) -> SparsePayload:
        return SparsePayload(parts, spec, indices=parts[0], full=self.exact_count, **known)

    def _payload(self, chosen: Selected, spec: Spec) -> Payload:
        indices, values, total = chosen
        count, missing = values.numel(), max(0, spec.num_kept - values.numel())
        slots = torch.cat([values, values.new_zeros(missing)]) if missing else values
        # A number on the host, and in `smaller` of a received payload (nan): no kernel encodes.
        number = not isinstance(total, Tensor)
        fused = None if number else self.values.fused(slots.detach(), None, spec.key)
        coded, decoded = self.values.encode(slots, spec.key) if fused is None else fused[:2]
        decoded = None if self.values.lossless or decoded is None else decoded[:count]
        if fused is not None:
            sums = kernels_for(values).fused(values)
            of = sums.sum_energies(total, fused.norms, count < spec.numel)
        else:
            tensors = [values] if decoded is None else [values, decoded, values - decoded]
            norms = squared_norms(tensors)
            inner, *rest = kernels_for(norms).numbers(norms)
            energy, coding_error = rest or (inner, 0.0)
            left_out = base.projection_error(total, inner) if count < spec.numel else 0.0
            of = energies(total, energy, coding_error + left_out, indices)
        return self._sparse((indices, *coded), spec, energies=of, exact=values, decoded=decoded)

    def _fused(self, out: Tensor, payloads: Sequence[Payload]) -> Any:
        """The kernels that decode these payloads into `out`; None if there are no such kernels, or
        if the payloads differ in number of indices, or are not of the dtype of `out`."""
        alike = all(
            payload.dtype == out.dtype
            and payload.parts[0].numel() == payloads[0].parts[0].numel() > 0
            for payload in payloads
        )
        indices = [payload.parts[0] for payload in payloads]
        return kernels_for(out).fused(out, *indices) if payloads and alike else None

    def _coded(self, fused: Any, payloads: Sequence[Payload], count: int) -> Any:
        """The payloads' values in the form that kernels read: `count` values of each payload (or
        row). They are the `decoded` values, in full precision, if known; else coded values."""
        known = self.values.coding
        if isinstance(payloads[0], SparseRows):
            of = payloads[0]
            if of.decoded is not None:
                return fused.coded_rows((of.decoded,), count, Coding("floats"), of.rows)
            return fused.Coded(of.parts[1], of.parts[-1], count, known)
        decoded = [each.decoded for each in payloads if isinstance(each, SparsePayload)]
        if known is None or any(values is not None for values in decoded):
            values = [(self._decoded(payload),) for payload in payloads]
            return fused.coded(values, count, Coding("floats"))
        parts = [payload.parts[1:] for payload in payloads]
        return fused.coded(parts, payloads[0].spec.num_kept, known)

    def _decoded(self, payload: Payload) -> Tensor:
        """The values as receivers decode them, one for each index."""
        assert isinstance(payload, SparsePayload)
        if payload.decoded is not None:
            return payload.decoded
        indices = payload.parts[0]
        values = self.values.decode(payload.parts[1:], payload.capacity, payload.dtype)
        if self.exact_count:
            return values[: indices.numel()]
        return kernels_for(values).without_empty(values, indices, payload.numel)


class TopK(Sparsifier):
    """Of a segment of n elements, top-k keeps exactly the max(1, floor(n / cf)) of largest
    magnitude.

    This is the compressor of Aji and Heafield, "Sparse Communication for Distributed Gradient
    Descent" (EMNLP 2017), with exact selection, and of GraVAC. It is a contraction, as error
    feedback needs: ||a - C(a)||^2 <= (1 - k/n) ||a||^2 (Stich et al., "Sparsified SGD with Memory",
    2018).

    Among equal magnitudes a CPU keeps the lower index; another device may keep any of them.
    """

    name = "topk"
    exact_count = True

    def select(self, tensor: Tensor, k: int, add: Tensor | None, key: Key) -> Selected:
        return kernels_for(tensor).select(tensor, k, add)

    def select_rows(
        self, tensor: Tensor, rows: int, k: int, add: Tensor | None, key: Key
    ) -> Selected | None:
        if not self.values.fuses:
            return None
        return kernels_for(tensor).select_rows(tensor, rows, k, add)

    def select_segments(self, tensor: Tensor, spec: Spec, add: Tensor | None) -> Selected:
        return kernels_for(tensor).select_segments(tensor, spec.segments, spec.counts, add)
