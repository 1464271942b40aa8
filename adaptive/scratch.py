"""Buffers that are used again in every step."""

from __future__ import annotations

import torch
from torch import Tensor


class Scratch:
    """Named buffers, each as large as the largest that was asked for under its name."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[object, torch.dtype, torch.device], Tensor] = {}

    def take(self, name: object, numel: int, like: Tensor) -> Tensor:
        """A flat buffer of `numel` elements with the dtype and device of `like`; contents are
        whatever was left there."""
        key = (name, like.dtype, like.device)
        held = self._buffers.get(key)
        if held is None or held.numel() < numel:
            held = self._buffers[key] = torch.empty(numel, dtype=like.dtype, device=like.device)
        return held[:numel]
