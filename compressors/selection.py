"""Exact top-k by magnitude on a CPU, in little more time than it takes to read the tensor.

`torch.topk` on a whole gradient costs some 60 copies of it. Here one pass over blocks that fit
the cache does all that touches every element: adds the new gradient to the memory, sums the squared
norm, and collects what is at or above a threshold guessed from a strided sample. The guess is meant
to be a little too low; the k largest are then found among the few collected.

The result never depends on the guess. Too high a threshold shows as fewer than k collected, and a
lower one is tried. Too low a one is raised on the way: when more than twice k are held, all but the
k largest of them are dropped, and from then on only what exceeds the smallest of those can matter.
Equal magnitudes go to the lower index, so the selection is a function of the values alone.

The same pass serves the sparsifiers that keep what reaches a threshold of their own making.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from compressors.collected import Collected as _Collected
from compressors.norms import BLOCK, Array, array_norm, block_norm, trusted
from compressors.ranking import largest, rank_bounds, rank_value

_SAMPLE = 1 << 16  # elements looked at, at most, to guess the threshold
_STRIDE = 33  # at least; a larger sample costs more than it saves
_PLAIN_BELOW = 1 << 13  # elements; under this the guess costs more than it saves
_PLAIN_CF = 4  # keeping more than a quarter, collecting costs more than it saves

_local = threading.local()

Observer = Callable[[Array], object]  # is shown the magnitudes, block by block


class Selection(NamedTuple):
    """indices: int32, ascending. values: those elements. total: ||x||^2 over all elements."""

    indices: NDArray[np.int32]
    values: Array
    total: float


def select(x: Array, k: int, add: Array | None = None) -> Selection:
    """The `k` elements of flat `x` (float32 or float64) that are largest in magnitude.

    add: if given, x += add in place first. Needs 1 <= k <= x.size < 2**31, or k = 0 of nothing.
    """
    with np.errstate(all="ignore"):
        if x.size >= _PLAIN_BELOW and _PLAIN_CF * k <= x.size:
            return _select_blocks(x, k, add)
        if add is not None:
            x += add
        return _select_plain(x, k)


def select_above(x: Array, threshold: float, k: int, add: Array | None = None) -> Selection:
    """The elements of flat `x` whose magnitude reaches `threshold` (rounded to the type of x); if
    they are more than `k`, the `k` largest of them; if there are none, the largest of all.

    Arguments otherwise as in `select`."""
    with np.errstate(all="ignore"):
        collected, total = _collect(x, k, x.dtype.type(threshold), add)
        if not collected.count:
            return select(x, min(k, 1))
        return Selection(*collected.largest(), trusted(total, x))


def select_superset(x: Array, k: int, add: Array | None, observe: Observer) -> Selection:
    """Elements of flat `x` with the `k` largest among them, so that how many of `x` are at or above
    a threshold can be counted among them, unless they are `k` or more. May be views of `x`.

    observe: is shown the magnitudes of all elements once, in order and in blocks.
    Arguments otherwise as in `select`."""
    with np.errstate(all="ignore"):
        if x.size >= _PLAIN_BELOW and _PLAIN_CF * k <= x.size:
            collected, total = _gather(x, k, add, observe)
            if collected is not None:
                return Selection(*collected.held(), trusted(total, x))
        else:
            _, total = _collect(x, x.size, inf, add, observe)
        return Selection(np.arange(x.size, dtype=np.int32), x, trusted(total, x))


def _select_plain(x: Array, k: int) -> Selection:
    keep = largest(x, k)
    return Selection(keep.astype(np.int32), x.take(keep), array_norm(x))


def _select_blocks(x: Array, k: int, add: Array | None) -> Selection:
    collected, total = _gather(x, k, add)
    if collected is None:
        return _select_plain(x, k)
    return Selection(*collected.largest(), trusted(total, x))


def _gather(
    x: Array, k: int, add: Array | None, observe: Observer | None = None
) -> tuple[_Collected | None, float]:
    """At least the `k` largest, and ||x||^2; None if fewer than k are >= 0: the others are NaN."""
    sample = _sample(x, add)
    rank = rank_bounds(sample.size, k / x.size)[1]
    collected, total = _collect(x, k, _threshold(sample, rank), add, observe)
    while collected.count < k:
        if rank > sample.size:
            return None, total
        rank *= 4
        collected, total = _collect(x, k, _threshold(sample, rank), None)
    return collected, total


def _sample(x: Array, add: Array | None) -> Array:
    """Magnitudes of evenly spread elements. The stride is odd, so that patterns of the usual even
    layer widths do not fall in step with it."""
    stride = max(x.size // _SAMPLE | 1, _STRIDE)
    sample = x[::stride]
    return np.abs(sample if add is None else sample + add[::stride])


def _threshold(sample: Array, rank: int) -> float:
    """Magnitude of that rank, counted from the largest; 0 past the end."""
    return rank_value(sample, rank) if rank <= sample.size else 0.0


def _collect(
    x: Array, k: int, threshold: float, add: Array | None, observe: Observer | None = None
) -> tuple[_Collected, float]:
    """One pass over `x`: the elements worth keeping, and ||x||^2."""
    collected = _Collected(k, threshold)
    scratch, mask = _buffers(x.dtype)
    total = 0.0
    for start in range(0, x.size, BLOCK):
        block = x[start : start + BLOCK]
        if add is not None:
            np.add(block, add[start : start + BLOCK], out=block)
        total += block_norm(block)
        magnitude = np.abs(block, out=scratch[: block.size])
        if observe is not None:
            observe(magnitude)
        above = collected.wanted(magnitude, collected.threshold, out=mask[: block.size])
        found = np.flatnonzero(above)
        if found.size:
            collected.extend((found + start).astype(np.int32), block.take(found))
    return collected, total


def _buffers(dtype: np.dtype) -> tuple[Array, NDArray[np.bool_]]:
    """This thread's scratch space for one block: magnitudes and a mask."""
    buffers: dict[str, Array] = _local.__dict__
    if dtype.char not in buffers:
        buffers[dtype.char] = np.empty(BLOCK, dtype)
        buffers["mask"] = np.empty(BLOCK, np.bool_)
    return buffers[dtype.char], buffers["mask"]
