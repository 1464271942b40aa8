"""How much memory a piece of work asks for."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class _Watch(TorchDispatchMode):
    """Notes the largest memory block that a torch operation has made anew."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        known = {t.untyped_storage().data_ptr() for t in _tensors((args, tuple(kwargs.values())))}
        result = func(*args, **kwargs)
        for tensor in _tensors(result):
            if tensor.untyped_storage().data_ptr() not in known:
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        return result


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
        for each in value:
            yield from _tensors(each)


def largest_allocation(step: Callable[[], object]) -> int:
    """Bytes of the largest block that torch makes in a step, or of all that NumPy holds at its
    peak, whichever is more."""
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    with _Watch() as watch:
        step()
    peak = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    return max(peak, watch.largest)
