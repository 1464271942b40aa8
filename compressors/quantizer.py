"""Quantizers: every element is sent, in fewer bits."""

from __future__ import annotations

from collections.abc import Mapping
from math import nan

import torch
from torch import Tensor

from compressors.base import Compressor, Key, Payload, check_cf
from compressors.formats import BlockFormat, bounds, encode_sum, widened
from compressors.norms import check_same_length
from compressors.scratch import scratch
from compressors.sparse import check_flat, check_out
from compressors.wire import split


class Quantizer(Compressor):
    """Compresses a whole tensor by one of a few value formats, chosen by the CF.

    forms: the format of each CF that can be done. The CF is fp32 bits / bits per element, scales
    not counted; `payload_nbytes` counts them. Any other CF means the nearest of these (the smaller
    of two equally near), and that is the CF of the payload. Half-precision tensors are computed in
    float32 and sent in the same bits.

    Not multilevel: fewer bits of what is in few bits already is a second error on top of the first
    one, and no cheaper than compressing the tensor itself.
    """

    multilevel = False

    def __init__(self, forms: Mapping[float, BlockFormat]) -> None:
        self.forms = dict(sorted(forms.items()))

    def form(self, cf: float) -> BlockFormat:
        """The value format used at `cf`."""
        return self.forms[self._nearest(cf)]

    def compress(self, tensor: Tensor, cf: float, key: Key) -> Payload:
        return self._compress(tensor, None, cf, key)

    def compress_sum(self, memory: Tensor, tensor: Tensor, cf: float, key: Key) -> Payload:
        check_same_length(memory, tensor)
        return self._compress(memory, tensor, cf, key)

    def add_to(self, out: Tensor, payload: Payload, scale: float = 1.0) -> None:
        check_out(out, payload)
        self._add(out.detach(), payload, scale)

    def subtract_from(self, tensor: Tensor, payload: Payload) -> None:
        self._add(tensor.detach(), payload, -1.0)

    def payload_nbytes(self, numel: int, cf: float, dtype: torch.dtype = torch.float32) -> int:
        return self.form(cf).nbytes(numel, dtype)

    def read(self, data: Tensor, numel: int, cf: float, dtype: torch.dtype, key: Key) -> Payload:
        cf = self._nearest(cf)
        parts = split(data, *self.forms[cf].layout(numel, dtype))
        return Payload(parts, numel, cf, nan, nan, key, dtype=dtype)

    def supported(self, cf: float, numel: int) -> float:
        return self._nearest(cf)

    def floats(self, numel: int, cf: float) -> float:
        """In fp32 numbers of as many bits."""
        return numel / self._nearest(cf)

    def _nearest(self, cf: float) -> float:
        cf = check_cf(cf)
        return min(self.forms, key=lambda can: (abs(can - cf), can))

    def _compress(self, tensor: Tensor, add: Tensor | None, cf: float, key: Key) -> Payload:
        check_flat(tensor)
        cf = self._nearest(cf)
        parts, total, energy, error = encode_sum(self.forms[cf], tensor, add, key)
        return Payload(parts, tensor.numel(), cf, energy, error, key, total, tensor.dtype)

    def _add(self, out: Tensor, payload: Payload, scale: float) -> None:
        form, dtype = self.form(payload.cf), payload.dtype
        for start, stop in bounds(out):
            block = out[start:stop]
            if dtype == widened(dtype):
                kept = scratch("kept", block.numel(), dtype, block.device)
            else:
                kept = torch.empty(block.numel(), dtype=dtype, device=block.device)
            form.decode_into(kept, payload.parts, start)
            block.add_(kept, alpha=scale)
