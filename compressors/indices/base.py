"""The contract of the ways in which the indices of kept elements travel."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from compressors.base import CorruptPayload
from compressors.either import Numbers, native


class IndexFormat(ABC):
    """At most `capacity` of the positions in range(numel), in a number of bytes that depends on
    (numel, capacity) alone. How many there are is told by the bytes themselves.

    Needs 0 <= capacity <= numel < 2**31.

    name: used in messages and benchmarks.
    """

    name: str

    @abstractmethod
    def nbytes(self, numel: int, capacity: int) -> int:
        """Bytes that `encode` makes: a pure function, alike on all ranks."""

    @abstractmethod
    def encode(self, indices: Tensor, numel: int, capacity: int) -> Tensor:
        """`indices` (int32, flat, strictly ascending within [0, numel), not checked) as flat uint8.

        ValueError if there are more than `capacity`."""

    @abstractmethod
    def decode(self, data: Tensor, numel: int, capacity: int) -> Tensor:
        """The indices (int32, flat, ascending) whose bytes are `data` (uint8, flat).

        CorruptPayload unless `data` is what `encode` makes of indices that ascend strictly
        within [0, numel). On a device other than the CPU this waits for the device."""


def check_count(indices: Tensor, capacity: int) -> None:
    """ValueError if there are more `indices` than fit."""
    if indices.numel() > capacity:
        raise ValueError(f"indices must be at most {capacity}, got {indices.numel()}")


def received(data: Tensor, nbytes: int) -> Numbers:
    """`data`; CorruptPayload unless it is `nbytes` long (flat uint8)."""
    if data.dtype != torch.uint8 or data.dim() != 1 or data.numel() != nbytes:
        raise CorruptPayload(
            f"indices must be {nbytes} bytes (flat uint8), "
            f"got {data.dtype} of shape {tuple(data.shape)}"
        )
    return native(data)


def check_received(count: int, capacity: int) -> None:
    """CorruptPayload if more indices were received than could have been sent."""
    if count > capacity:
        raise CorruptPayload(f"payload must hold at most {capacity} indices, got {count}")


def check_ascending(indices: Numbers, numel: int) -> None:
    """CorruptPayload unless `indices` ascend strictly within [0, numel)."""
    if not len(indices):
        return
    first, last = int(indices[0]), int(indices[-1])
    if first < 0 or last >= numel or not bool((indices[1:] > indices[:-1]).all()):
        raise CorruptPayload(f"indices must ascend within [0, {numel}), got {first} ... {last}")


def check_zero(unused: Numbers) -> None:
    """CorruptPayload unless what no index needs is zero."""
    if bool(unused.any()):
        raise CorruptPayload("payload must be zero where it holds nothing")
