"""No compression: the dense gradient, as DDP itself would send it."""

from __future__ import annotations

from math import nan

import torch
from torch import Tensor

from compressors.base import Compressor, Key, Payload
from compressors.norms import add_and_norm, squared_norm
from compressors.sparse import check_out
from compressors.wire import split


class NoCompression(Compressor):
    """The tensor itself at every CF; its payloads are at CF 1.

    The payload is the tensor, not a copy: write it to the wire before the tensor changes, so
    before `subtract_from` as well.
    """

    name = "none"
    linear = True

    def compress(self, tensor: Tensor, cf: float, key: Key) -> Payload:
        return self._payload(tensor, squared_norm(tensor), key)

    def compress_sum(self, memory: Tensor, tensor: Tensor, cf: float, key: Key) -> Payload:
        return self._payload(memory, add_and_norm(memory, tensor), key)

    def recompress(self, payload: Payload, factor: float) -> Payload:
        return payload

    def add_to(self, out: Tensor, payload: Payload, scale: float = 1.0) -> None:
        check_out(out, payload)
        out.detach().add_(payload.parts[0], alpha=scale)

    def subtract_from(self, tensor: Tensor, payload: Payload) -> None:
        tensor.detach().sub_(payload.parts[0])

    def payload_nbytes(self, numel: int, cf: float, dtype: torch.dtype = torch.float32) -> int:
        return numel * dtype.itemsize

    def read(self, data: Tensor, numel: int, cf: float, dtype: torch.dtype, key: Key) -> Payload:
        return Payload(split(data, (numel, dtype)), numel, 1.0, nan, nan, key, dtype=dtype)

    def supported(self, cf: float, numel: int) -> float:
        return 1.0

    def floats(self, numel: int, cf: float) -> float:
        return float(numel)

    def _payload(self, tensor: Tensor, energy: float, key: Key) -> Payload:
        parts = (tensor.detach(),)
        return Payload(parts, tensor.numel(), 1.0, energy, 0.0, key, energy, tensor.dtype)
