"""Random-k sparsification with indices that every rank derives from a shared seed.

Wangni et al., "Gradient Sparsification for Communication-Efficient Distributed Optimization"
(NeurIPS 2018), with uniform probabilities; Stich et al., "Sparsified SGD with Memory" (NeurIPS
2018) for the error-fed variant. The indices are the same on all ranks, so only values travel and
they can be summed by an all-reduce.
"""

from __future__ import annotations

from hashlib import blake2b
from math import gcd

import torch
from torch import Tensor

from compressors import base
from compressors.base import Compressor, Key, Payload, kept
from compressors.kernels import add_and_norm, kernels_at, squared_norm
from compressors.kernels.blocks import Scalar, energies
from compressors.wire.values import ValueFormat, make_values


class RandomK(Compressor):
    """Random-k keeps k = max(1, floor(numel / cf)) elements, each equally likely over the steps.

    The payload holds the coded values alone.

    seed: the same on all ranks.
    unbiased: scale the values by numel / k, so that E[C(a)] = a; then the error is not fed back.
        Otherwise C is a projection, to be used with error feedback.
    values: how the values travel: "fp32" (as they are), "bf16", "fp16", "int8", "int4", "qsgd" or a
        `ValueFormat`. Coded values cannot be summed, so their payloads are gathered.
    """

    name = "randomk"

    def __init__(
        self, seed: int = 0, unbiased: bool = False, values: str | ValueFormat = "fp32"
    ) -> None:
        self.seed = seed
        self.unbiased = unbiased
        self.error_feedback = not unbiased
        self.values = make_values(values)
        self.linear = self.values.lossless

    def compress(self, tensor: Tensor, cf: float, key: Key) -> Payload:
        return self._compress(tensor, squared_norm(tensor), cf, key)

    def compress_sum(self, memory: Tensor, tensor: Tensor, cf: float, key: Key) -> Payload:
        return self._compress(memory, add_and_norm(memory, tensor), cf, key)

    def recompress(self, payload: Payload, factor: float) -> Payload:
        cf, numel = base.combined_cf(payload.cf, factor), payload.numel
        values = self._decoded(payload) if payload.exact is None else payload.exact
        scale = self._scale(numel, values.numel())
        values = values[: kept(numel, cf)]
        return self._payload(values, scale, payload.scalars[0], numel, cf, payload.key)

    def add_to(self, out: Tensor, payload: Payload, scale: float = 1.0) -> None:
        base.check_out(out, payload)
        values = self._decoded(payload).to(out.dtype)
        out.detach().index_add_(0, self._indices(payload), values, alpha=scale)

    def payload_nbytes(self, numel: int, cf: float, dtype: torch.dtype = torch.float32) -> int:
        return self.values.nbytes(kept(numel, cf), dtype)

    def read(self, data: Tensor, numel: int, cf: float, dtype: torch.dtype, key: Key) -> Payload:
        parts = base.split_bytes(data, *self.values.layout(kept(numel, cf), dtype))
        return Payload(parts, numel, cf, key, dtype=dtype)

    def indices(self, payload: Payload) -> Tensor | None:
        whole = kept(payload.numel, payload.cf) == payload.numel
        return None if whole else self._indices(payload).long()

    def floats(self, numel: int, cf: float) -> float:
        return float(kept(numel, cf))

    def _compress(self, tensor: Tensor, total: Scalar, cf: float, key: Key) -> Payload:
        base.check_flat(tensor)
        cf, numel = base.check_cf(cf), tensor.numel()
        indices = seeded_indices(self.seed, key, numel, kept(numel, cf), tensor.device)
        values = tensor.detach().index_select(0, indices)
        return self._payload(values, 1.0, total, numel, cf, key)

    def _payload(
        self, values: Tensor, scaled: float, total: Scalar, numel: int, cf: float, key: Key
    ) -> Payload:
        """The payload of the kept elements of a.

        values: those elements, times `scaled`. total: ||a||^2."""
        k = values.numel()
        scale = self._scale(numel, k)
        inner = squared_norm(values) / scaled**2  # ||a||^2 over the kept elements
        if scale != scaled:
            values = values * (scale / scaled)
        energy = scale**2 * inner
        error = base.projection_error(total + energy, 2 * scale * inner) if k < numel else 0.0
        parts, sent = self.values.encode(values, key)
        if not self.values.lossless:
            # ||a - q||^2 = ||a - c||^2 + 2 <a - c, c - q> + ||c - q||^2, where a = c / scale
            rounded = values - sent
            across = (values.double() * rounded.double()).sum() * (1 / scale - 1)
            error = base.projection_error(error + 2 * across + squared_norm(rounded), 0.0)
            energy = squared_norm(sent)
        of = energies(total, energy, error, values)
        return Payload(parts, numel, cf, key, of, values.dtype, exact=values)

    def _decoded(self, payload: Payload) -> Tensor:
        k = kept(payload.numel, payload.cf)
        return self.values.decode(payload.parts, k, payload.dtype)

    def _scale(self, numel: int, k: int) -> float:
        return numel / k if self.unbiased and k else 1.0

    def _indices(self, payload: Payload) -> Tensor:
        k, device = kept(payload.numel, payload.cf), payload.parts[0].device
        return seeded_indices(self.seed, payload.key, payload.numel, k, device)


def seeded_indices(seed: int, key: Key, numel: int, k: int, device: torch.device) -> Tensor:
    """The first `k` of a permutation of range(numel) that depends on (seed, key, numel) alone.

    index[i] = (stride * i + start) mod numel, with a stride coprime to numel: all differ, those for
    a smaller k come first, and each is equally likely. No product reaches 2**62.
    """
    if k == 0:
        return torch.empty(0, dtype=torch.int32, device=device)
    digest = blake2b(repr((seed, key.name, key.step, numel)).encode(), digest_size=16).digest()
    start = int.from_bytes(digest[:8], "little") % numel
    stride = int.from_bytes(digest[8:], "little") % numel
    while gcd(stride, numel) != 1:
        stride = (stride + 1) % numel
    return kernels_at(device).progression(k, start, stride, numel, device)
