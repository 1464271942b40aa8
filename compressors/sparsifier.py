"""Sparsifiers: a few elements travel, as indices and values in a payload of fixed size.

A subclass says which elements are kept. The indices travel in the smaller of two formats
(`compressors.wire.indices`), the values in full or coded (`compressors.wire.values`). What coding
loses is part of the error, and so stays in the residual.
"""

from __future__ import annotations

from abc import abstractmethod
from copy import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from compressors.base import (
    Compressor,
    Key,
    Payload,
    check_cf,
    check_flat,
    check_out,
    combined_cf,
    kept,
    projection_error,
    split_bytes,
)
from compressors.kernels import (
    Selected,
    check_same_length,
    kernels_for,
    on_host,
    squared_norm,
    squared_norms,
)
from compressors.kernels.blocks import energies, is_host
from compressors.kernels.device import take_present
from compressors.wire.indices import check_ascending, choose_format
from compressors.wire.values import ValueFormat, make_values


@dataclass(frozen=True)
class SparsePayload(Payload):
    """A sparse payload holds a few elements, in a fixed number of slots.

    parts: indices (int32, ascending), then the coded values, `capacity` of them. On the wire the
        values come first, then the indices in the smallest of their formats.
    capacity: number of slots on the wire; there are at most as many indices, on a device exactly as
        many: there slots that hold nothing come last, with index `numel` and value 0.
    full: whether there are always as many indices as slots.
    exact: the values before coding, to compress them further; None after receiving.
    sent: the values after coding, if that loses something; None after receiving.
    """

    capacity: int = 0
    full: bool = False
    exact: Tensor | None = None
    sent: Tensor | None = None

    @property
    def nbytes(self) -> int:
        coded = sum(part.numel() * part.element_size() for part in self.parts[1:])
        return coded + choose_format(self.numel, self.capacity).nbytes(self.numel, self.capacity)

    def write(self, out: Tensor) -> None:
        index_format = choose_format(self.numel, self.capacity)
        split = max(0, out.numel() - index_format.nbytes(self.numel, self.capacity))
        Payload(self.parts[1:], self.numel, self.cf, self.key).write(out[:split])
        index_format.encode_into(out[split:], self.parts[0], self.numel, self.capacity, self.full)

    def with_parts(self, *parts: Tensor) -> SparsePayload:
        return replace(self, parts=parts, sent=None)


class Sparsifier(Compressor):
    """A sparsifier keeps at most k = max(1, floor(numel / cf)) elements and sends k slots.

    values: how the kept values travel: "fp32" (as they are), "bf16", "fp16", "int8", "int4", "qsgd"
        or a `ValueFormat`.
    """

    exact_count = False
    """Whether exactly k elements are always kept, so that another count is a corrupt payload."""

    comparable = True
    """Whether elements are chosen by magnitude alone, so that tensors can be joined and compressed
    together."""

    def __init__(self, values: str | ValueFormat = "fp32") -> None:
        self._set_values(make_values(values))

    def coded(self, values: str | ValueFormat) -> Sparsifier:
        """A sparsifier that keeps the same elements, but writes their values as `values`."""
        other = copy(self)
        other._set_values(make_values(values))
        return other

    def _set_values(self, values: ValueFormat) -> None:
        self.values = values
        own = type(self).name
        self.name = own if values.lossless else f"{own}+{values.name}"

    def momentum_lag(self, cf: float) -> float:
        """The larger the CF, the longer elements wait in the residual, and the less of the lag
        should be kept (measured: docs/defaults.md)."""
        return min(1.0, 1.2 / cf ** (1 / 3))

    @abstractmethod
    def select(self, tensor: Tensor, k: int, add: Tensor | None, key: Key) -> Selected:
        """tensor += add in place, then the elements of `tensor` to keep.

        k: at most so many; 1 <= k <= numel, or k = 0 if numel is 0.
        add: if not None, it has the dtype, length and device of `tensor`."""

    def compress(self, tensor: Tensor, cf: float, key: Key) -> Payload:
        return self._compress(tensor, None, cf, key)

    def compress_sum(self, memory: Tensor, tensor: Tensor, cf: float, key: Key) -> Payload:
        check_same_length(memory, tensor)
        if tensor.dtype == memory.dtype and tensor.device == memory.device:
            return self._compress(memory, tensor, cf, key)
        memory.detach().add_(tensor)
        return self._compress(memory, None, cf, key)

    def recompress(self, payload: Payload, factor: float) -> Payload:
        """Keeps the largest of the elements in `payload`, whatever rule chose those."""
        assert isinstance(payload, SparsePayload)
        cf = combined_cf(payload.cf, factor)
        capacity = kept(payload.numel, cf)
        values = self._decoded(payload) if payload.exact is None else payload.exact
        positions = kernels_for(values).largest(values, min(capacity, values.numel()))
        chosen = Selected(
            take(payload.parts[0], positions), take(values, positions), payload.scalars[0]
        )
        return self._payload(chosen, payload.numel, cf, payload.key)

    def add_to(self, out: Tensor, payload: Payload, scale: float = 1.0) -> None:
        check_out(out, payload)
        if payload.energies is not None and is_host(out.device):  # else `read` has checked them
            check_ascending(payload.parts[0], payload.numel)
        self._add(out, payload, scale)

    def subtract_from(self, tensor: Tensor, payload: Payload) -> None:
        self._add(tensor, payload, -1.0)

    def _add(self, out: Tensor, payload: Payload, scale: float) -> None:
        indices, values = payload.parts[0], self._decoded(payload)
        if not is_host(out.device) and not self.exact_count:
            indices = indices.clamp(max=payload.numel - 1)
        add_at(out, indices, values, scale)

    def payload_nbytes(self, numel: int, cf: float, dtype: torch.dtype = torch.float32) -> int:
        k = kept(numel, cf)
        coded = sum(count * part.itemsize for count, part in self.values.layout(k, dtype))
        return coded + choose_format(numel, k).nbytes(numel, k)

    def read(self, data: Tensor, numel: int, cf: float, dtype: torch.dtype, key: Key) -> Payload:
        k = kept(numel, cf)
        index_format = choose_format(numel, k)
        layout = (*self.values.layout(k, dtype), (index_format.nbytes(numel, k), torch.uint8))
        *coded, raw = split_bytes(data, *layout)
        indices, corrupt = index_format.decode(raw, numel, k, self.exact_count)
        parts = (indices, *coded)
        return SparsePayload(
            parts, numel, cf, key, dtype=dtype, corrupt=corrupt, capacity=k, full=self.exact_count
        )

    def indices(self, payload: Payload) -> Tensor | None:
        """On a device the last ones are `numel` if fewer elements are kept than there are slots."""
        indices = payload.parts[0]
        return None if indices.numel() == payload.numel else indices.long()

    def floats(self, numel: int, cf: float) -> float:
        return float(kept(numel, cf))

    def index_nbytes(self, numel: int, cf: float) -> int:
        """Bytes of the packed indices alone."""
        k = kept(numel, cf)
        return choose_format(numel, k).nbytes(numel, k)

    def pack_indices(self, payload: Payload) -> Tensor:
        """The indices alone, packed (uint8, `index_nbytes` elements)."""
        k = kept(payload.numel, payload.cf)
        return choose_format(payload.numel, k).encode(
            payload.parts[0], payload.numel, k, self.exact_count
        )

    def at(self, tensor: Tensor, packed: Tensor, cf: float, key: Key) -> Payload:
        """The payload of flat `tensor` at the indices that another rank chose and packed."""
        check_flat(tensor)
        numel, k = tensor.numel(), kept(tensor.numel(), cf)
        indices, corrupt = choose_format(numel, k).decode(packed, numel, k, self.exact_count)
        values = (take if is_host(tensor.device) else take_present)(tensor.detach(), indices)
        payload = self._payload(Selected(indices, values, squared_norm(tensor)), numel, cf, key)
        return replace(payload, corrupt=corrupt)

    def _compress(self, tensor: Tensor, add: Tensor | None, cf: float, key: Key) -> Payload:
        check_flat(tensor)
        cf, numel = check_cf(cf), tensor.numel()
        add = None if add is None else add.detach()
        chosen = self.select(tensor.detach(), kept(numel, cf), add, key)
        if is_host(tensor.device) and not on_host(tensor):  # selected as on a device
            count = int((chosen.indices < numel).sum())
            chosen = Selected(chosen.indices[:count], chosen.values[:count], chosen.total)
        return self._payload(chosen, numel, cf, key)

    def _payload(self, chosen: Selected, numel: int, cf: float, key: Key) -> Payload:
        indices, values, total = chosen
        capacity, count = kept(numel, cf), indices.numel()
        coded, decoded = self.values.encode_and_decode(_padded(values, capacity), key)
        sent = None if self.values.lossless else decoded[:count]
        own = [values] if sent is None else [values, sent, values - sent]
        norms = squared_norms(own)
        inner, *rest = norms.tolist() if is_host(norms.device) else norms.unbind()
        energy, coding_error = rest or (inner, 0.0)
        error = coding_error + (projection_error(total, inner) if count < numel else 0.0)
        return SparsePayload(
            (indices, *coded),
            numel,
            cf,
            key,
            energies(total, energy, error, indices),
            values.dtype,
            capacity=capacity,
            full=self.exact_count,
            exact=values,
            sent=sent,
        )

    def _decoded(self, payload: Payload) -> Tensor:
        """The values as receivers decode them, one for each index."""
        assert isinstance(payload, SparsePayload)
        if payload.sent is not None:
            return payload.sent
        indices = payload.parts[0]
        values = self.values.decode(payload.parts[1:], payload.capacity, payload.dtype)
        if is_host(values.device) or self.exact_count:
            return values[: indices.numel()]
        return values.masked_fill(indices >= payload.numel, 0)


def _padded(values: Tensor, capacity: int) -> Tensor:
    """`values`, with zeros up to `capacity`."""
    if values.numel() == capacity:
        return values
    padded = values.new_zeros(capacity)
    padded[: values.numel()] = values
    return padded


def add_at(out: Tensor, indices: Tensor, values: Tensor, scale: float) -> None:
    """out[indices] += scale * values, in place, for indices that differ from each other."""
    out.detach().index_add_(0, indices, values.to(out.dtype), alpha=scale)


def take(tensor: Tensor, indices: Tensor) -> Tensor:
    """tensor[indices], a new tensor."""
    return torch.index_select(tensor.detach(), 0, indices)
