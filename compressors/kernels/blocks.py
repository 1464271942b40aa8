"""The common parts of the kernels for the host and for a device: numbers, blocks, working memory,
results.

A number computed from data is a `Scalar`, a truth value computed from data a `Flag`: on the host a
Python number or bool, on a device a 0-dim tensor, so that the host never waits for the device.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

log = logging.getLogger("adaptive")

Array = NDArray[Any]

Use = TypeVar("Use")

Numbers = Any
"""Native numbers, for arithmetic on whole numbers: a NumPy array on the host, else a tensor."""

Scalar = float | Tensor
"""A number computed from data: a float on the host, a 0-dim float64 tensor on a device."""

Flag = bool | Tensor
"""A truth value computed from data: a bool on the host, a 0-dim bool tensor on a device."""

force_device_path = os.environ.get("ADAPTIVE_DEVICE_PATH") == "1"
"""CPU tensors are treated like tensors on a device. Tests run the device path in this way."""

force_triton = False
"""Triton's kernels are also used for CPU tensors that are treated like tensors on a device. Tests
run the kernels in Triton's interpreter in this way, with the environment variable
TRITON_INTERPRET=1."""


class ThresholdSearch(NamedTuple):
    """A search for a threshold: (magnitudes, mean of all magnitudes, k) -> the threshold.

    by_counting: magnitudes are an array with the k + 1 largest among them. at_once: a tensor of
    the k + 1 largest, descending, whose values are not read."""

    by_counting: Callable[[Array, float, int], float]
    at_once: Callable[[Tensor, Tensor, int], Tensor]


CACHE_BLOCK = 1 << 17
"""Elements that selection reads at a time. With some scratch they fit the second-level cache."""

CODE_BLOCK = 1 << 19
"""Elements that quantizers work on at a time on the host. A block and its scratch stay in the
last-level cache (a quarter of this takes 1.3 to 1.8 times as long). Part of the wire format."""

LARGE = 1 << 22
"""The smallest number of bytes of an array for which NumPy asks for large pages."""

_local = threading.local()


class InvalidPayload(ValueError):  # noqa: N818
    """The received bytes have a size or indices that no compressor can have sent."""


class Selected(NamedTuple):
    """The result of a selection: the kept elements of a flat tensor x.

    indices: positions of the elements (int32, ascending). values: the elements. total: ||x||^2. On
    a device empty places come last, with index x.numel() and value 0.
    """

    indices: Tensor
    values: Tensor
    total: Scalar


class Coding(NamedTuple):
    """A coding of values, for kernels that decode values while they read them.

    kind: "floats": the values themselves (float32 or 16 bits); "levels": whole numbers times a
    scale; "natural": powers of two times an offset. bits: of a code. bucket: number of values that
    share a scale or offset.
    """

    kind: str
    bits: int = 0
    bucket: int = 1


class Encoded(NamedTuple):
    """The result of a kernel that encodes values x.

    parts: of the payload. decoded: the decoded values c; None if not asked for. norms: (programs,
    3), float64: ||x||^2, ||c||^2 and ||x - c||^2 of the values of each program.
    """

    parts: tuple[Tensor, ...]
    decoded: Tensor | None
    norms: Tensor


def is_host(device: torch.device) -> bool:
    """Whether tensors of this device take the host path: NumPy on the tensor's own memory."""
    return device.type == "cpu" and not force_device_path


def on_host(tensor: Tensor) -> bool:
    """Whether the tensor takes the host path and has a dtype that NumPy is fast at."""
    return is_host(tensor.device) and tensor.dtype in (torch.float32, torch.float64)


def takes_triton(tensor: Tensor) -> bool:
    """Whether Triton's kernels may work on the tensor: it is on a CUDA device, has a dtype that the
    kernels know, and Triton works. (Fake tensors have no memory that a kernel could read.)"""
    if type(tensor) is not Tensor or tensor.dtype not in (torch.float32, torch.uint8, torch.int32):
        return False
    return _has_triton() if tensor.is_cuda else force_triton and force_device_path


@cache
def _has_triton() -> bool:
    """Whether Triton is installed, and a trial kernel works: Triton compiles its kernels at first
    use, which needs a C compiler and a writable folder."""
    if os.environ.get("ADAPTIVE_TRITON") == "0" or find_spec("triton") is None:
        return False
    import triton

    # The version in the extra `gpu`. torch 2.6 comes with 3.2, which was never tested.
    major, minor = triton.__version__.split(".")[:2]
    return (int(major), int(minor)) >= (3, 3) and triton_works(torch.device("cuda"))


def triton_works(device: torch.device) -> bool:
    """Launch one of Triton's kernels; False, with a warning that says why, if that fails."""
    from compressors.kernels.triton import flags

    try:
        flags.fill_if(
            torch.ones((), dtype=torch.bool, device=device), torch.zeros(16, device=device), 1.0
        )
    except Exception as error:
        log.warning(
            "Triton cannot compile kernels here (%s: %s): torch's operations do the same, with "
            "more launches. It needs a C compiler (gcc) and a folder that can be written "
            "(TRITON_CACHE_DIR); ADAPTIVE_TRITON=0 leaves it out without this warning",
            type(error).__name__,
            " ".join(str(error).split())[:300],
        )
        return False
    return True


def energies(total: Scalar, kept: Scalar, lost: Scalar, like: Tensor) -> Tensor:
    """`Payload.energies` of these three squared norms, where `like` is."""
    numbers = (total, kept, lost)
    if is_host(like.device):
        here = [float(number) for number in numbers]
        return torch.tensor(here, dtype=torch.float64, device="cpu")
    full = partial(torch.full, (), dtype=torch.float64, device=like.device)
    return torch.stack([n if isinstance(n, Tensor) else full(n) for n in numbers])


def either(a: Flag, b: Flag) -> Flag:
    """Whether `a` or `b` is set. Without an operation on the device if the host knows one of them,
    or if both are the same tensor."""
    if a is False:
        return b
    return a if b is False or a is b else a | b


def fill_if(flag: Flag, x: Tensor, value: float) -> None:
    """Set all elements of `x` to `value`, in place, if `flag` is set."""
    if isinstance(flag, Tensor):
        if triton := triton_for_flags(x):
            triton.fill_if(flag, x, value)
        else:
            x.masked_fill_(flag, value)
    elif flag:
        x.fill_(value)


def zeros_if(flag: Flag, x: Tensor) -> Tensor:
    """`x`, or zeros if `flag` is set."""
    if isinstance(flag, Tensor):
        return x.masked_fill(flag, 0.0)
    return torch.zeros_like(x) if flag else x


def add_if(flag: Flag, x: Tensor, y: Tensor, alpha: float = 1.0) -> None:
    """x += alpha * y, in place, if `flag` is set. `y` must be finite."""
    if isinstance(flag, Tensor):
        if triton := triton_for_flags(x, y):
            triton.add_if(flag, x, y, alpha)
        else:
            x.addcmul_(y, flag.to(x.dtype), value=alpha)
    elif flag:
        x.add_(y, alpha=alpha)


def scale_if(flag: Flag, x: Tensor, factor: float) -> None:
    """x *= factor, in place, if `flag` is set."""
    if isinstance(flag, Tensor):
        if triton := triton_for_flags(x):
            triton.scale_if(flag, x, factor)
        else:
            x.mul_(torch.ones((), dtype=x.dtype, device=x.device).masked_fill_(flag, factor))
    elif flag:
        x.mul_(factor)


def triton_for_flags(*tensors: Tensor) -> ModuleType | None:
    """The module of Triton's kernels for flags, if it supports these tensors; else None."""
    for x in tensors:
        known = takes_triton(x) and x.dtype == torch.float32
        if not known or not x.is_contiguous() or not x.numel():
            return None
    from compressors.kernels.triton import (
        flags as triton_flags,  # here, as Triton need not be installed
    )

    return triton_flags


def check_same_length(memory: Tensor, tensor: Tensor) -> None:
    """Raise ValueError unless both tensors are flat and equally long."""
    if memory.dim() != 1 or memory.shape != tensor.shape:
        raise ValueError(
            f"memory and tensor must be flat and equally long, got shapes "
            f"{tuple(memory.shape)} and {tuple(tensor.shape)}"
        )


def widened(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in: float64 for float64, float32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def scratch(use: str, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Working memory of `count` elements. On the host the next call of the same thread with the
    same `use` (a name) and dtype returns the same memory."""
    if not is_host(device):
        return torch.empty(count, dtype=dtype, device=device)
    buffers: dict[tuple[str, torch.dtype], Tensor] = _local.__dict__.setdefault("buffers", {})
    buffer = buffers.get((use, dtype))
    if buffer is None or buffer.numel() < count:
        # Somewhat more than a block, because packing fills it up.
        numel = max(count, CODE_BLOCK + 64)
        buffer = buffers[use, dtype] = torch.empty(numel, dtype=dtype, device=device)
    return buffer[:count]


def scratch_like(use: str, tensor: Tensor) -> Tensor:
    """Working memory like flat `tensor`."""
    return scratch(use, tensor.numel(), tensor.dtype, tensor.device)


def uninitialized(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A new tensor of `count` elements with arbitrary contents. NumPy asks Linux for large pages:
    the first write of 50 MB then takes 8 ms, and 24 ms after `torch.empty`."""
    if not is_host(device) or count * dtype.itemsize < LARGE:
        return torch.empty(count, dtype=dtype, device=device)
    return torch.from_numpy(np.empty(count * dtype.itemsize, np.uint8)).view(dtype)


def reused(buffers: dict[Use, Tensor], device: torch.device) -> dict[Use, Tensor]:
    """`buffers`, working memory by use that the next step reuses. On a device an empty dictionary,
    because its allocator keeps freed memory."""
    return buffers if is_host(device) else {}


CELL = 1024
"""Number of neighbouring elements whose share of noise in a second moment is estimated together
(adaptive/memory/moments.py)."""


def block_size(numel: int, device: torch.device, size: int = CODE_BLOCK) -> int:
    """The number of elements of a block: `size`; on a device all."""
    return size if is_host(device) else max(numel, 1)


def block_bounds(x: Tensor, size: int = CODE_BLOCK) -> Iterator[tuple[int, int]]:
    """(start, stop) of each block of `size` elements of flat `x`; on a device one block."""
    size = block_size(x.numel(), x.device, size)
    return ((start, min(start + size, x.numel())) for start in range(0, x.numel(), size))


def fill_up(x: Tensor, size: int) -> Tensor:
    """`x` with zeros after its last column, up to `size` columns (elements, if it is flat)."""
    missing = size - x.shape[-1]
    return torch.constant_pad_nd(x, (0, missing)) if missing else x


def rows(x: Tensor, width: int) -> list[Tensor]:
    """Flat `x` as a matrix of `width` columns, then a matrix of one row for the rest. Empty ones
    are left out."""
    whole = x.numel() // width * width
    if whole == x.numel():
        return [x.view(-1, width)] if whole else []
    rest = x[whole:].view(1, -1)
    return [x[:whole].view(-1, width), rest] if whole else [rest]


def numbers_of_rows(numbers: Tensor, x: Tensor, width: int) -> list[Tensor]:
    """For each matrix of `rows(x, width)` a matrix with the numbers of its rows. numbers: the same
    count for each row of `x` (not empty), flat."""
    whole = x.numel() // width
    if whole * width == x.numel():
        return [numbers.view(whole, -1)]
    table = numbers.view(whole + 1, -1)
    return [table[:whole], table[whole:]] if whole else [table]
