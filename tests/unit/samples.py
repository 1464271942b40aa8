"""Tensors that every compressor has to cope with, and what a test asks of its payloads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from compressors import Compressor, RoundsCompressor
from compressors.base import Key, Payload, Spec


def normal(numel: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(numel, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def ordinary(dtype: torch.dtype, numel: int = 10_000) -> dict[str, torch.Tensor]:
    """Flat tensors of about `numel` elements, by what is special about them."""
    tiny = torch.finfo(dtype).smallest_normal
    huge = 1e30 if dtype == torch.float32 else 1e140
    return {
        "empty": torch.empty(0, dtype=dtype),
        "one": torch.tensor([-2.5], dtype=dtype),
        "zero": torch.zeros(numel, dtype=dtype),
        "constant": torch.full((numel,), -0.25, dtype=dtype),
        "denormal": normal(numel, dtype) * tiny / 1000,
        "huge": normal(numel, dtype) * huge,
        "normal": normal(numel + 1, dtype),
        "mixed": torch.cat([normal(numel // 2, dtype), normal(numel * 2 // 5, dtype) * 1e-6]),
    }


def compressed(
    compressor: Compressor,
    x: torch.Tensor,
    cf: float,
    key: Key = Key("w"),  # noqa: B008
    add: torch.Tensor | None = None,
) -> Payload:
    """The payload of `x` (+ `add`), as one segment."""
    return compressor.compress(x, Spec.of(x, cf, key), add)


def decompressed(compressor: Compressor, payload: Payload) -> torch.Tensor:
    """The dense tensor that the payload stands for."""
    out = torch.zeros(payload.numel, dtype=payload.dtype, device=payload.parts[0].device)
    compressor.add_to(out, payload)
    return out


def specs(tensors: Sequence[torch.Tensor], cfs: Sequence[float], keys: Sequence[Key]) -> list[Spec]:
    return [Spec.of(*each) for each in zip(tensors, cfs, keys, strict=True)]


def wire(compressor: Compressor, payload: Payload, dtype: torch.dtype, offset: int = 0) -> Payload:
    """What a receiver makes of the payload; `offset` puts its bytes out of alignment. A payload of
    a compressor that works in rounds does not travel."""
    if isinstance(compressor, RoundsCompressor):
        return payload
    data = torch.empty(payload.nbytes + offset, dtype=torch.uint8)[offset:]
    payload.write(data)
    spec = Spec((payload.numel,), payload.cf, dtype, payload.key)
    return compressor.read(data[None], spec)[0]


def norm2(tensor: torch.Tensor) -> float:
    """Squared norm, in double; inf where that overflows."""
    wide = tensor.double().numpy()
    with np.errstate(over="ignore"):
        return float((wide * wide).sum())
