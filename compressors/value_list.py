"""A compressor that sends all values of a tensor, coded by a value format."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from compressors.base import (
    Compressor,
    Payload,
    RowsPayload,
    Spec,
    check_out,
    joined,
    split_rows,
)
from compressors.kernels import kernels_for
from compressors.kernels.blocks import Flag
from compressors.wire.values import Layout, ValueFormat, decode_by_kernel


class ValueList(Compressor):
    """A value list sends every element of a tensor, coded by `form`. `compress` sets the tensor to
    the decoded payload; the tensor itself may be a part of the payload. Energies are unknown. The
    payload of an empty tensor has no parts."""

    def __init__(self, form: ValueFormat) -> None:
        self.name, self.form = form.name, form

    def compress(self, x: Tensor, spec: Spec, add: Tensor | None = None) -> Payload:
        if not x.numel():
            return Payload((), spec)
        parts, decoded = self.form.encode(x, spec.key)
        return Payload(self._sent(x, parts, decoded), spec)

    def compress_rows(self, x: Tensor, specs: Sequence[Spec], add: Tensor | None) -> Payload | None:
        if not x.numel():
            return Payload((), joined(specs))
        made = self.form.fused(x, None, specs[0].key, True, len(specs)) if self.form.fuses else None
        if made is None or made.decoded is None:
            return None
        layouts = (self._layout(specs[0]),) * len(specs)
        parts = self._sent(x, made.parts, made.decoded)
        return RowsPayload(parts, joined(specs), layouts=layouts)

    def _sent(self, x: Tensor, parts: tuple[Tensor, ...], decoded: Tensor) -> tuple[Tensor, ...]:
        if not self.form.lossless:
            x.copy_(decoded)
        return parts

    def add_to(self, out: Tensor, payload: Payload, scale: float = 1.0) -> None:
        check_out(out, payload)
        if payload.parts and not decode_by_kernel(self.form.coding, out, [payload], scale, True):
            decoded = self.form.decode(payload.parts, payload.numel, payload.dtype)
            out.add_(decoded, alpha=scale)

    def mean_of(
        self, out: Tensor, payloads: Sequence[Payload], scale: float, as_zeros: Flag = False
    ) -> None:
        coding = self.form.coding
        if out.numel() and not decode_by_kernel(coding, out, payloads, scale, False, as_zeros):
            super().mean_of(out, payloads, scale, as_zeros)

    def nbytes(self, spec: Spec) -> int:
        return sum(count * of.itemsize for count, of in self._layout(spec))

    def _layout(self, spec: Spec) -> Layout:
        return self.form.layout(spec.numel, spec.dtype) if spec.numel else ()

    def read(self, data: Tensor, spec: Spec) -> list[Payload]:
        return [Payload(parts, spec) for parts in split_rows(data, *self._layout(spec))]

    def read_rows(self, data: Tensor, specs: Sequence[Spec]) -> Payload | None:
        if not specs[0].numel:
            return Payload((), joined(specs))
        if not self.form.fuses or kernels_for(data).fused(data) is None:
            return None
        return RowsPayload.read(data, [self._layout(specs[0])] * len(specs), joined(specs))
