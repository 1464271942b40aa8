"""Top-k sparsification: the k elements that are largest in magnitude.

Aji and Heafield, "Sparse Communication for Distributed Gradient Descent" (EMNLP 2017), with exact
selection; GraVAC's compressor. The error is fed back, so C(a) is a contraction:
||a - C(a)||^2 <= (1 - k/n) ||a||^2 (Stich et al., "Sparsified SGD with Memory", 2018).
"""

from __future__ import annotations

from dataclasses import replace
from math import nan

import torch
from torch import Tensor

from compressors.base import Compressor, Key, Payload, check_cf, further, kept
from compressors.norms import check_same_length, lost, on_numpy, squared_norm
from compressors.selection import select
from compressors.sparse import add_at, check_ascending, check_flat, check_out, take
from compressors.wire import split


class TopK(Compressor):
    """Keeps k = max(1, floor(numel / cf)) elements.

    parts: indices (int32, k elements, ascending), values (the tensor's dtype, k elements).
    On a CPU the lower index wins among equal magnitudes; on another device any may.
    """

    name = "topk"

    def compress(self, tensor: Tensor, cf: float, key: Key) -> Payload:
        return self._compress(tensor, None, cf, key)

    def compress_sum(self, memory: Tensor, tensor: Tensor, cf: float, key: Key) -> Payload:
        check_same_length(memory, tensor)
        if tensor.dtype == memory.dtype and tensor.device == memory.device:
            return self._compress(memory, tensor, cf, key)
        memory.detach().add_(tensor)
        return self._compress(memory, None, cf, key)

    def recompress(self, payload: Payload, factor: float) -> Payload:
        cf = further(payload.cf, factor)
        indices, values = payload.parts
        positions, values, _ = _largest(values, kept(payload.numel, cf), None)
        energy = squared_norm(values)
        error = payload.error + lost(payload.energy, energy)
        parts = (take(indices, positions), values)
        return replace(payload, parts=parts, cf=cf, energy=energy, error=error)

    def add_to(self, out: Tensor, payload: Payload, scale: float = 1.0) -> None:
        check_out(out, payload)
        indices, values = payload.parts
        check_ascending(indices, payload.numel)
        add_at(out, indices, values, scale)

    def subtract_from(self, tensor: Tensor, payload: Payload) -> None:
        indices, values = payload.parts
        add_at(tensor, indices, values, -1.0)

    def payload_nbytes(self, numel: int, cf: float, dtype: torch.dtype = torch.float32) -> int:
        return kept(numel, cf) * (torch.int32.itemsize + dtype.itemsize)

    def read(self, data: Tensor, numel: int, cf: float, dtype: torch.dtype, key: Key) -> Payload:
        k = kept(numel, cf)
        parts = split(data, (k, torch.int32), (k, dtype))
        return Payload(parts, numel, cf, nan, nan, key, dtype=dtype)

    def indices(self, payload: Payload) -> Tensor | None:
        indices = payload.parts[0]
        return None if indices.numel() == payload.numel else indices.long()

    def floats(self, numel: int, cf: float) -> float:
        return float(kept(numel, cf))

    def _compress(self, tensor: Tensor, add: Tensor | None, cf: float, key: Key) -> Payload:
        check_flat(tensor)
        cf = check_cf(cf)
        numel = tensor.numel()
        indices, values, total = _largest(tensor.detach(), kept(numel, cf), add)
        energy = squared_norm(values)
        error = lost(total, energy) if values.numel() < numel else 0.0
        return Payload((indices, values), numel, cf, energy, error, key, total, values.dtype)


def _largest(tensor: Tensor, k: int, add: Tensor | None) -> tuple[Tensor, Tensor, float]:
    """tensor += add; then the `k` largest magnitudes: int32 indices, values, ||tensor||^2."""
    if on_numpy(tensor):
        found = select(tensor.numpy(), k, None if add is None else add.detach().numpy())
        return torch.from_numpy(found.indices), torch.from_numpy(found.values), found.total
    if add is not None:
        tensor.add_(add)
    indices = tensor.abs().topk(k, sorted=False).indices.sort().values.to(torch.int32)
    return indices, take(tensor, indices), squared_norm(tensor)
