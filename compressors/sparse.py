"""Kept elements in and out of a flat tensor, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from compressors.base import CorruptPayload, Payload

MAX_NUMEL = 2**31 - 1


def check_flat(tensor: Tensor) -> None:
    """ValueError unless `tensor` is flat and its positions fit 32 bits."""
    if tensor.dim() != 1 or tensor.numel() > MAX_NUMEL:
        raise ValueError(
            f"tensor must be flat with at most {MAX_NUMEL} elements, got {tuple(tensor.shape)}"
        )


def check_out(out: Tensor, payload: Payload) -> None:
    """CorruptPayload unless `out` has the shape of the tensor that was compressed."""
    if out.dim() != 1 or out.numel() != payload.numel:
        raise CorruptPayload(
            f"payload of {payload.numel} elements cannot be added to shape {tuple(out.shape)}"
        )


def check_ascending(indices: Tensor, numel: int) -> None:
    """CorruptPayload unless `indices` ascend strictly from >= 0 to < `numel`.

    Ascending indices are within bounds if the first and the last one are. On a device other than
    the CPU this waits for the device."""
    if indices.numel() == 0:
        return
    first, last = int(indices[0]), int(indices[-1])
    if first < 0 or last >= numel or not bool((indices[1:] > indices[:-1]).all()):
        raise CorruptPayload(f"indices must ascend within [0, {numel}), got {first} ... {last}")


def add_at(out: Tensor, indices: Tensor, values: Tensor, scale: float) -> None:
    """out[indices] += scale * values, in place, for indices that differ from each other."""
    out.detach().index_add_(0, indices, values.to(out.dtype), alpha=scale)


def take(tensor: Tensor, indices: Tensor) -> Tensor:
    """tensor[indices], a new tensor."""
    return torch.index_select(tensor.detach(), 0, indices)
