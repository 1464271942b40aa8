"""Running the device path without a device: on CPU tensors, on meta tensors, and counting.

Triton's kernels are run by its interpreter, as conftest.py sees to; on a machine with a GPU by the
GPU, which can work on its own tensors only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from compressors.kernels import blocks

_NO_LAUNCH = {
    "alias", "as_strided", "detach", "diagonal", "expand", "narrow", "permute", "select", "slice",
    "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unfold", "unsqueeze",
    "view", "empty", "empty_like", "new_empty", "_unsafe_view", "_reshape_alias", "lift_fresh",
}  # fmt: skip


class Operations(TorchDispatchMode):
    """This counts the operations that are started, each of which is a launch on a device: views
    and mere allocations aside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name not in _NO_LAUNCH:
            self.names[name] += 1
        return func(*args, **(kwargs or {}))


def count_operations(call: Callable[[], object]) -> int:
    """How many operations `call` starts."""
    with Operations() as operations:
        call()
    return operations.names.total()


@contextmanager
def device_path() -> Iterator[None]:
    """Here CPU tensors take the device path, and no tensor takes Triton's kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "force_device_path", True)
        patch.setattr(blocks, "_has_triton", lambda: False)
        yield


@contextmanager
def triton_path() -> Iterator[None]:
    """Here CPU tensors take the device path, and all tensors Triton's kernels where there are any
    for them."""
    with device_path(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "force_triton", True)
        patch.setattr(blocks, "_has_triton", lambda: True)
        yield


class Launches:
    """This stands in for Triton's kernels, and notes each launch without running it."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **kwargs: self.grids.append(grid)


def meta(numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A flat tensor without values: whatever reads one raises."""
    return torch.empty(numel, dtype=dtype, device="meta")
