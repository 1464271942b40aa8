"""All payloads of a bucket in one contiguous uint8 tensor, so that one collective carries them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from compressors import Compressor
from compressors.base import Key, Payload


def pack(
    compressor: Compressor, payloads: Sequence[Payload], cf: float, dtype: torch.dtype
) -> Tensor:
    """The payloads one after the other. RuntimeError if one has not its announced size."""
    sizes = [compressor.payload_nbytes(payload.numel, cf, dtype) for payload in payloads]
    wire = torch.empty(sum(sizes), dtype=torch.uint8, device=payloads[0].parts[0].device)
    for payload, size, room in zip(payloads, sizes, wire.split(sizes), strict=True):
        if payload.nbytes != size:
            raise RuntimeError(
                f"compressor {compressor.name!r} announced {size} bytes for {payload.numel} "
                f"elements at CF {cf:g} and made {payload.nbytes}"
            )
        payload.write(room)
    return wire


def unpack(
    compressor: Compressor,
    wire: Tensor,
    numels: Sequence[int],
    cf: float,
    dtype: torch.dtype,
    keys: Sequence[Key],
) -> list[Payload]:
    """The payloads that one rank packed. CorruptPayload if the bytes cannot be theirs."""
    sizes = [compressor.payload_nbytes(numel, cf, dtype) for numel in numels]
    return [
        compressor.read(data, numel, cf, dtype, key)
        for data, numel, key in zip(wire.split(sizes), numels, keys, strict=True)
    ]
