"""The few operations that NumPy arrays and tensors spell differently.

Where hundreds of small tensors are coded one by one, NumPy takes a fifth of torch's time, most of
which goes into each call. So the same code runs on arrays that share a CPU tensor's memory, and on
the tensors themselves on other devices. All are flat; types go by the names that both know.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

Numbers = Any  # a NumPy array or a tensor


def native(tensor: Tensor) -> Numbers:
    """The array of a CPU tensor, a tensor of another device as it is."""
    return tensor.detach().numpy() if tensor.device.type == "cpu" else tensor.detach()


def as_tensor(x: Numbers) -> Tensor:
    return torch.from_numpy(x) if isinstance(x, np.ndarray) else x


def zeros(count: int, dtype: str, like: Numbers) -> Numbers:
    if isinstance(like, np.ndarray):
        return np.zeros(count, dtype)
    return torch.zeros(count, dtype=getattr(torch, dtype), device=like.device)


def count_up(count: int, dtype: str, like: Numbers) -> Numbers:
    """0, 1, ... count - 1."""
    if isinstance(like, np.ndarray):
        return np.arange(count, dtype=dtype)
    return torch.arange(count, dtype=getattr(torch, dtype), device=like.device)


def cast(x: Numbers, dtype: str) -> Numbers:
    """The same numbers in another type; what does not fit loses its upper bits."""
    return x.astype(dtype) if isinstance(x, np.ndarray) else x.to(getattr(torch, dtype))


def view(x: Numbers, dtype: str) -> Numbers:
    """The same bytes as another type."""
    return x.view(dtype) if isinstance(x, np.ndarray) else x.view(getattr(torch, dtype))


def join(parts: list[Numbers]) -> Numbers:
    """One after the other; at least one part."""
    return np.concatenate(parts) if isinstance(parts[0], np.ndarray) else torch.cat(parts)
