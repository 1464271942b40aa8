"""All payloads of a bucket in one contiguous uint8 tensor, so that one collective carries them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from adaptive.bucket import Unit
from compressors.base import Payload
from compressors.kernels import fresh


def payload_sizes(units: Sequence[Unit], dtype: torch.dtype) -> list[int]:
    """Bytes of each unit's payload: the same on every rank."""
    return [unit.compressor.payload_nbytes(unit.numel, unit.cf, dtype) for unit in units]


def pack(units: Sequence[Unit], payloads: Sequence[Payload], dtype: torch.dtype) -> Tensor:
    """The payloads one after the other. RuntimeError if one has not its announced size."""
    sizes = payload_sizes(units, dtype)
    device = payloads[0].parts[0].device if payloads else torch.device("cpu")
    wire = fresh(sum(sizes), torch.uint8, device)
    for unit, payload, size, room in zip(units, payloads, sizes, wire.split(sizes), strict=True):
        if payload.nbytes != size:
            raise RuntimeError(
                f"compressor {unit.compressor.name!r} announced {size} bytes for {unit.numel} "
                f"elements at CF {unit.cf:g} and made {payload.nbytes}"
            )
        payload.write(room)
    return wire


def unpack(units: Sequence[Unit], wire: Tensor, dtype: torch.dtype) -> list[Payload]:
    """The payloads that one rank packed. CorruptPayload if the bytes cannot be theirs."""
    rooms = wire.split(payload_sizes(units, dtype))
    return [
        unit.compressor.read(data, unit.numel, unit.cf, dtype, unit.key)
        for unit, data in zip(units, rooms, strict=True)
    ]
