"""Random-k sparsification with indices that every rank derives from a shared seed.

Wangni et al., "Gradient Sparsification for Communication-Efficient Distributed Optimization"
(NeurIPS 2018), with uniform probabilities; Stich et al., "Sparsified SGD with Memory" (NeurIPS
2018) for the error-fed variant. The indices are the same on all ranks, so only values are sent, and
an all-reduce can sum them.
"""

from __future__ import annotations

from hashlib import blake2b
from math import gcd

import torch
from torch import Tensor

from compressors import base
from compressors.base import Compressor, Key, Payload, Spec
from compressors.kernels import add_and_norm, kernels_at, squared_norm
from compressors.kernels.blocks import Scalar, energies


class RandomK(Compressor):
    """Random-k keeps k = max(1, floor(numel / cf)) elements, each equally likely over the steps.

    The payload holds the values alone.

    seed: the same on all ranks.
    unbiased: scale the values by numel / k, so that E[C(a)] = a; then the error is not fed back.
        Otherwise C is a projection, to be used with error feedback.
    """

    name = "randomk"
    sums = True
    selects = True

    def __init__(self, seed: int = 0, unbiased: bool = False) -> None:
        self.seed = base.check_seed(seed)
        self.unbiased = unbiased
        self.feeds_back = not unbiased

    def compress(self, x: Tensor, spec: Spec, add: Tensor | None = None) -> Payload:
        base.check_flat(x, spec, add)
        base.check_cf(spec.cf)
        x = x.detach()
        total = squared_norm(x) if add is None else add_and_norm(x, add.detach())
        indices = self._indices(spec, x.device)
        values = x.index_select(0, indices)
        return self._payload(indices, values, 1.0, total, spec)

    def smaller(self, payload: Payload, factor: float) -> Payload:
        spec = payload.spec.at(base.combined_cf(payload.cf, factor))
        (values,) = payload.parts
        scale, indices = self._scale(spec.numel, values.numel()), payload.indices
        assert indices is not None
        few = slice(spec.num_kept)
        return self._payload(indices[few], values[few], scale, payload.scalars[0], spec)

    def add_to(self, out: Tensor, payload: Payload, scale: float = 1.0) -> None:
        base.check_out(out, payload)
        assert payload.indices is not None
        values = payload.parts[0].to(out.dtype)
        out.detach().index_add_(0, payload.indices, values, alpha=scale)

    def nbytes(self, spec: Spec) -> int:
        return spec.num_kept * spec.dtype.itemsize

    def read(self, data: Tensor, spec: Spec) -> list[Payload]:
        rows = base.split_rows(data, (spec.num_kept, spec.dtype))
        indices = self._indices(spec, data.device)
        return [Payload(parts, spec, indices=indices) for parts in rows]

    def floats(self, spec: Spec) -> float:
        return float(spec.num_kept)

    def _payload(
        self, indices: Tensor, values: Tensor, scaled: float, total: Scalar, spec: Spec
    ) -> Payload:
        """The payload of the kept elements of a.

        values: these elements, times `scaled`. total: ||a||^2."""
        k, numel = values.numel(), spec.numel
        scale = self._scale(numel, k)
        inner = squared_norm(values) / scaled**2  # ||a||^2 over the kept elements
        if scale != scaled:
            values = values * (scale / scaled)
        energy = scale**2 * inner
        error = base.projection_error(total + energy, 2 * scale * inner) if k < numel else 0.0
        of = energies(total, energy, error, values)
        return Payload((values,), spec, of, indices=indices)

    def _scale(self, numel: int, k: int) -> float:
        return numel / k if self.unbiased and k else 1.0

    def _indices(self, spec: Spec, device: torch.device) -> Tensor:
        return seeded_indices(self.seed, spec.key, spec.numel, spec.num_kept, device)


def seeded_indices(seed: int, key: Key, numel: int, k: int, device: torch.device) -> Tensor:
    """The first `k` of a permutation of range(numel) that depends on (seed, key, numel) alone.

    index[i] = (stride * i + start) mod numel, with a stride coprime to numel: no index occurs
    twice, a smaller k has the first of these indices, and each index is equally likely. No product
    reaches 2**62.
    """
    if k == 0:
        return torch.empty(0, dtype=torch.int32, device=device)
    digest = blake2b(repr((seed, key.name, key.step, numel)).encode(), digest_size=16).digest()
    start = int.from_bytes(digest[:8], "little") % numel
    stride = int.from_bytes(digest[8:], "little") % numel
    while gcd(stride, numel) != 1:
        stride = (stride + 1) % numel
    return kernels_at(device).progression(k, start, stride, numel, device)
