"""A checksum behind each payload on the wire (`AdaptiveCompressor(checksum=True)`).

Bytes that were changed on their way decode into plausible garbage, by most compressors without an
error, and perhaps on one rank only. On the CPU it is CRC-32. On other devices it is a sum of the
bytes with odd weights by position, modulo 2^32: torch operations only, and it too finds any single
byte that was changed, while more may cancel out, once in 2^32 times.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from compressors.base import CorruptPayload

NBYTES = 4
"""Bytes of a checksum."""

_MODULUS = 2**32
_MULTIPLIER = 2654435761
"""Of the positions: their products, made odd, are the weights on a device (Knuth's hash)."""


def checksum(payload: Tensor) -> Tensor:
    """Of a contiguous, flat uint8 tensor: NBYTES bytes, where that is."""
    if payload.device.type == "cpu":
        crc = zlib.crc32(payload.numpy().data)
        return torch.tensor(list(crc.to_bytes(NBYTES, "little")), dtype=torch.uint8)
    return _weighted_sum(payload)


def _weighted_sum(payload: Tensor) -> Tensor:
    """The same without a look at the data on the host."""
    places = torch.arange(1, payload.numel() + 1, device=payload.device)
    weights = (places * _MULTIPLIER % _MODULUS) | 1
    total = ((payload.to(torch.int64) + 1) * weights).sum() % _MODULUS
    shifts = torch.arange(0, 8 * NBYTES, 8, device=payload.device)
    return ((total >> shifts) & 0xFF).to(torch.uint8)


def signed(payload: Tensor) -> Tensor:
    """The payload (flat uint8) with its checksum behind it."""
    return torch.cat((payload, checksum(payload)))


def check(rows: Tensor, what: str, source: int | None = None) -> Tensor:
    """The payloads without their checksums. rows: uint8, (ranks, bytes), signed. source: of a
    single row, the rank that it came from.

    CorruptPayload if one has not its checksum; it names `what` and the ranks they came from. One
    host synchronisation on a device, where decoding has several."""
    payloads = rows[:, :-NBYTES]
    own = torch.stack([checksum(payload) for payload in payloads])
    same = (own == rows[:, -NBYTES:]).all(dim=1).tolist()
    wrong = [rank if source is None else source for rank, fits in enumerate(same) if not fits]
    if wrong:
        ranks = ", ".join(map(str, wrong))
        raise CorruptPayload(
            f"{what}: the payload from rank {ranks} has not its checksum: its bytes were changed "
            f"on the way"
        )
    return payloads
