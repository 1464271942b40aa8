"""Typed views of received bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from compressors.base import CorruptPayload


def split(data: Tensor, *parts: tuple[int, torch.dtype]) -> tuple[Tensor, ...]:
    """Cut flat uint8 `data` into tensors of (elements, dtype) each, one after the other.

    A part is a view of `data` where its alignment allows, else a copy.
    Raises CorruptPayload unless `data` is exactly as long as the parts together.
    """
    wanted = sum(count * dtype.itemsize for count, dtype in parts)
    if data.dtype != torch.uint8 or data.dim() != 1 or data.numel() != wanted:
        raise CorruptPayload(
            f"payload must be {wanted} bytes (flat uint8), "
            f"got {data.dtype} of shape {tuple(data.shape)}"
        )
    tensors, start = [], 0
    for count, dtype in parts:
        raw = data[start : start + count * dtype.itemsize]
        tensors.append(_typed(raw, dtype))
        start += raw.numel()
    return tuple(tensors)


def _typed(raw: Tensor, dtype: torch.dtype) -> Tensor:
    size = dtype.itemsize
    if raw.stride(0) != 1 or raw.storage_offset() % size or raw.data_ptr() % size:
        raw = torch.empty(raw.shape, dtype=torch.uint8, device=raw.device).copy_(raw)
    return raw.view(dtype)
