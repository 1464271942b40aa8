"""The kernels in NumPy, on the memory of CPU tensors (float32 or float64), block by block.

The functions are those of `compressors.kernels.Kernels`. Where magnitudes are equal, the element
with the lower index is chosen, so every selection is a function of the values alone.

Exact selection costs little more than reading the tensor, where `torch.topk` on a whole gradient
costs some 60 copies of it. One pass over blocks that fit the cache does all that touches every
element: it adds the new gradient, sums the squared norm, and collects the elements at or above a
threshold that is guessed from a strided sample. The guess is meant to be a little too low; the k
largest elements are then found among the few collected.

The result never depends on the guess. If it was too high, fewer than k elements are collected, and
a lower guess is tried. If it was too low, it is raised on the way: once more than twice k elements
are held, all but the k largest of them are dropped, and from then on only what exceeds the smallest
of those can matter.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from math import inf

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compressors.kernels.blocks import CACHE_BLOCK, Array, Scalar, Selected, ThresholdSearch

_ROW = 2048  # elements summed in the array's own precision; their sums are carried on in double
_TINY = 1e-20  # squares of float32 below 1e-38 vanish: not to be trusted in a sum this small

_RANK_SAMPLE = 1 << 13  # elements, at most, from which the k-th largest is bracketed
_RANK_STRIDE = 17  # at least; a larger sample costs more than it saves
_PARTITION_BELOW = 1 << 11  # elements; under this a plain partition is as fast

_SAMPLE = 1 << 16  # elements looked at, at most, to guess a threshold
_STRIDE = 33  # at least; a larger sample costs more than it saves
_PLAIN_BELOW = 1 << 13  # elements; under this the guess costs more than it saves
_PLAIN_CF = 4  # keeping more than a quarter, collecting costs more than it saves

_GUESS_BINS_FROM = 1 << 14  # elements; under this a guess of the bins' threshold costs too much
_SHORT_BIN = 24  # elements; the maxima of bins so short are found faster column by column

_BITS_BLOCK = 1 << 17  # bits unpacked at a time, a byte each: they fit the cache

_local = threading.local()

Observer = Callable[[Array], object]
"""Is shown the magnitudes of all elements once, in order, block by block."""


# Norms -------------------------------------------------------------------------------------------


def squared_norm(x: Tensor) -> float:
    return array_norm(x.detach().numpy())


def block_norm(x: Tensor) -> float:
    """||x||^2 of one block: in single precision unless that overflows or vanishes."""
    block = x.numpy()
    return checked_norm(block_square(block), block)


def add_and_norm(memory: Tensor, tensor: Tensor) -> float:
    x, y = memory.detach().numpy(), tensor.detach().numpy()
    total = 0.0
    with np.errstate(all="ignore"):
        for start in range(0, x.size, CACHE_BLOCK):
            block = x[start : start + CACHE_BLOCK]
            block += y[start : start + CACHE_BLOCK]
            total += block_square(block)
    return checked_norm(total, x)


def array_norm(x: Array) -> float:
    """||x||^2 of a flat float32 or float64 array."""
    with np.errstate(all="ignore"):
        total = 0.0
        for start in range(0, x.size, CACHE_BLOCK):
            total += block_square(x[start : start + CACHE_BLOCK])
    return checked_norm(total, x)


def block_square(block: Array) -> float:
    """||block||^2; pass the sum over all blocks through `checked_norm`.

    Rows are too short for BLAS to split among threads, so the result depends on `block` alone."""
    rows = block.size // _ROW
    tail = block[rows * _ROW :]
    norm = float(np.dot(tail, tail))
    if rows:
        head = block[: rows * _ROW].reshape(rows, _ROW)
        norm += float(np.matmul(head[:, None, :], head[:, :, None]).sum(dtype=np.float64))
    return norm


def checked_norm(total: float, x: Array) -> float:
    """`total`, or ||x||^2 computed anew in double if float32 may have overflowed or vanished."""
    if x.dtype != np.float32 or _TINY < total < inf:
        return total
    starts = range(0, x.size, CACHE_BLOCK)
    blocks = (x[start : start + CACHE_BLOCK].astype(np.float64) for start in starts)
    return sum((block_square(block) for block in blocks), 0.0)


# Ranking -----------------------------------------------------------------------------------------


def largest(x: Tensor, k: int) -> Tensor:
    return torch.from_numpy(largest_positions(x.detach().numpy(), k).astype(np.int32))


def kth_largest(x: Tensor, k: int) -> float:
    return float(_partitioned(x.numpy(), k))


def largest_positions(x: Array, k: int) -> NDArray[np.intp]:
    """Ascending positions of the `k` elements of `x` that are largest in magnitude."""
    if k >= x.size:
        return np.arange(x.size)
    magnitude = np.abs(x)
    smallest = rank_value(magnitude, k)
    keep = np.flatnonzero(magnitude >= smallest)
    if keep.size == k:
        return keep
    if keep.size < k:  # NaN, which nothing compares to: counted as infinite
        return largest_positions(np.where(np.isnan(x), inf, x), k)
    above = magnitude.take(keep) > smallest
    ties = np.flatnonzero(~above)
    above[ties[: k - (keep.size - ties.size)]] = True
    return keep[above]


def rank_value(x: Array, k: int) -> float:
    """The `k`-th largest element of `x`, 1 <= k <= x.size, faster than by partitioning.

    1. Bracket it between two elements of a strided sample.
    2. Count the elements above the bracket, partition those inside it.
    3. If the sample misled, so that the k-th largest is not inside, partition all.
    """
    if x.size < _PARTITION_BELOW:
        return _partitioned(x, k)
    sample = x[:: max(x.size // _RANK_SAMPLE | 1, _RANK_STRIDE)]
    above, below = rank_bounds(sample.size, k / x.size)
    top = _partitioned(sample, above) if above >= 1 else inf
    bottom = _partitioned(sample, below) if below <= sample.size else -inf
    inside = x.take(np.flatnonzero((x >= bottom) & (x <= top)))
    rank = k - int(np.count_nonzero(x > top))
    if 1 <= rank <= inside.size:
        return _partitioned(inside, rank)
    return _partitioned(x, k)


def rank_bounds(sample: int, share: float) -> tuple[int, int]:
    """Ranks (low, high) in a sample of that many elements. They lie 4 standard deviations on either
    side of the element with `share` of the whole array at or above it, so either may be out of the
    sample."""
    wanted = sample * share
    margin = 4.0 * (wanted * (1.0 - share)) ** 0.5 + 4.0
    return int(wanted - margin), int(wanted + margin) + 1


def _partitioned(x: Array, rank: int) -> float:
    """The `rank`-th largest element of `x`, 1 <= rank <= x.size. NaN counts as the largest."""
    return np.partition(x, x.size - rank)[x.size - rank]


# Selection ---------------------------------------------------------------------------------------


class Candidates:
    """Candidates are the elements that may be among the k largest, in a list that is kept short.

    threshold: magnitude below which an element is of no interest. It only ever rises.
    compare: how a magnitude must compare to the threshold: numpy's >= or >.
    indices, values: runs of elements in the order of their indices; `count` in all.
    """

    def __init__(self, k: int, threshold: float) -> None:
        self.k = k
        self.threshold = threshold
        self.compare: np.ufunc = np.greater_equal
        self.count = 0
        self.indices: list[NDArray[np.int32]] = []
        self.values: list[Array] = []

    def extend(self, indices: NDArray[np.int32], values: Array) -> None:
        """Append a run; drop all but the k largest where too many are held."""
        self.indices.append(indices)
        self.values.append(values)
        self.count += indices.size
        if self.count > 2 * self.k + CACHE_BLOCK:
            self._prune()

    def all(self) -> tuple[NDArray[np.int32], Array]:
        """(indices, values) of all elements held, of which there must be at least one."""
        return np.concatenate(self.indices), np.concatenate(self.values)

    def largest(self) -> tuple[NDArray[np.int32], Array]:
        """(indices, values) of the k largest elements held, or of all if they are fewer."""
        indices, values = self.all()
        keep = largest_positions(values, self.k)
        return indices.take(keep), values.take(keep)

    def _prune(self) -> None:
        """Keep the k largest so far. Later elements must exceed the smallest of them, as an equal
        one has a higher index."""
        indices, values = self.largest()
        self.indices, self.values, self.count = [indices], [values], self.k
        self.threshold = np.abs(values).min()
        self.compare = np.greater


def select(x: Tensor, k: int, add: Tensor | None) -> Selected:
    with np.errstate(all="ignore"):
        return _select(x.numpy(), k, _array(add))


def select_above(x: Tensor, threshold: Scalar, k: int, add: Tensor | None) -> Selected:
    array = x.numpy()
    with np.errstate(all="ignore"):
        candidates, total = _collect(array, k, array.dtype.type(threshold), _array(add))
        if not candidates.count:
            return _select(array, min(k, 1), None)
        return _selected(candidates.largest(), checked_norm(total, array))


def select_by_count(x: Tensor, k: int, add: Tensor | None, search: ThresholdSearch) -> Selected:
    """The search counts among the k + 1 largest elements or somewhat more, which the one pass over
    the tensor has gathered: among those every count up to k is that of the whole tensor."""
    array, total = x.numpy(), _Sum()
    with np.errstate(all="ignore"):
        indices, values, norm = superset(array, k + 1, _array(add), total.add)
        magnitude = np.abs(values)
        threshold = search(magnitude, total.value / array.size, k)
        at = np.flatnonzero(magnitude >= array.dtype.type(threshold))
    if at.size > k or not at.size:
        at = largest_positions(values, k)
    return _selected((indices.take(at), values.take(at)), norm)


def superset(
    x: Array, k: int, add: Array | None, observe: Observer
) -> tuple[NDArray[np.int32], Array, float]:
    """(indices, values, ||x||^2): elements of `x` with the `k` largest among them.

    How many elements of `x` reach a threshold can be counted among them, unless `k` or more do.
    The results may be views of `x`."""
    if x.size >= _PLAIN_BELOW and _PLAIN_CF * k <= x.size:
        candidates, total = _gather(x, k, add, observe)
        if candidates is not None:
            return *candidates.all(), checked_norm(total, x)
    else:
        _, total = _collect(x, x.size, inf, add, observe)
    return np.arange(x.size, dtype=np.int32), x, checked_norm(total, x)


class _Sum:
    """This adds up all the blocks that it is shown, in double precision."""

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, block: Array) -> None:
        rows = block.size // _ROW
        head, tail = block[: rows * _ROW].reshape(rows, 1, _ROW), block[rows * _ROW :]
        ones = np.ones((_ROW, 1), block.dtype)  # a product with ones is the fastest sum
        self.value += float(tail.sum(dtype=np.float64))
        self.value += float(np.matmul(head, ones).sum(dtype=np.float64))


def _array(add: Tensor | None) -> Array | None:
    return None if add is None else add.numpy()


def _selected(found: tuple[NDArray[np.int32], Array], total: float) -> Selected:
    indices, values = found
    return Selected(torch.from_numpy(indices), torch.from_numpy(values), total)


def _select(x: Array, k: int, add: Array | None) -> Selected:
    if x.size < _PLAIN_BELOW or _PLAIN_CF * k > x.size:
        if add is not None:
            x += add
        return _select_plain(x, k)
    candidates, total = _gather(x, k, add)
    if candidates is None:
        return _select_plain(x, k)
    return _selected(candidates.largest(), checked_norm(total, x))


def _select_plain(x: Array, k: int) -> Selected:
    keep = largest_positions(x, k)
    return _selected((keep.astype(np.int32), x.take(keep)), array_norm(x))


def _gather(
    x: Array, k: int, add: Array | None, observe: Observer | None = None
) -> tuple[Candidates | None, float]:
    """Candidates with at least the `k` largest among them, and ||x||^2.

    None instead of candidates if fewer than k elements compare at all, because the others are NaN.
    """
    sample = _sample(x, add)
    rank = rank_bounds(sample.size, k / x.size)[1]
    candidates, total = _collect(x, k, _guess(sample, rank), add, observe)
    while candidates.count < k:
        if rank > sample.size:
            return None, total
        rank *= 4
        candidates, total = _collect(x, k, _guess(sample, rank), None)
    return candidates, total


def _sample(x: Array, add: Array | None) -> Array:
    """Magnitudes of evenly spread elements of x + add. The stride is odd, so that patterns of the
    usual even layer widths do not fall in step with it."""
    stride = max(x.size // _SAMPLE | 1, _STRIDE)
    sample = x[::stride]
    return np.abs(sample if add is None else sample + add[::stride])


def _guess(sample: Array, rank: int) -> float:
    """The magnitude of that rank in the sample, counted from the largest; 0 past its end."""
    return _partitioned(sample, rank) if rank <= sample.size else 0.0


def _collect(
    x: Array, k: int, threshold: float, add: Array | None, observe: Observer | None = None
) -> tuple[Candidates, float]:
    """One pass over `x`: the elements that reach the threshold, and ||x||^2."""
    candidates = Candidates(k, threshold)
    scratch, mask = _buffers(x.dtype)
    total = 0.0
    for start in range(0, x.size, CACHE_BLOCK):
        block = x[start : start + CACHE_BLOCK]
        if add is not None:
            np.add(block, add[start : start + CACHE_BLOCK], out=block)
        total += block_square(block)
        magnitude = np.abs(block, out=scratch[: block.size])
        if observe is not None:
            observe(magnitude)
        above = candidates.compare(magnitude, candidates.threshold, out=mask[: block.size])
        found = np.flatnonzero(above)
        if found.size:
            candidates.extend((found + start).astype(np.int32), block.take(found))
    return candidates, total


def _buffers(dtype: np.dtype) -> tuple[Array, NDArray[np.bool_]]:
    """This thread's working memory for one block: magnitudes and a mask."""
    buffers: dict[str, Array] = _local.__dict__
    if dtype.char not in buffers:
        buffers[dtype.char] = np.empty(CACHE_BLOCK, dtype)
        buffers["mask"] = np.empty(CACHE_BLOCK, np.bool_)
    return buffers[dtype.char], buffers["mask"]


# Selection in bins -------------------------------------------------------------------------------


def select_bins(x: Tensor, bin_size: int, k: int, add: Tensor | None) -> Selected:
    """The rule usually lets far more than k elements through. So that not all of them are gathered
    first, a few bins tell a magnitude that somewhat more than k elements will reach. If they
    mislead, a second pass gathers all: the result never depends on the guess."""
    array, latest = x.numpy(), _array(add)
    with np.errstate(all="ignore"):
        guess = _guess_in_bins(array, bin_size, k, latest)
        candidates, total = _collect_bins(array, bin_size, k, guess, latest, latest)
        if guess and candidates.count < k:
            candidates, total = _collect_bins(array, bin_size, k, 0.0, latest, None)
        if not candidates.count:
            return _select(array, min(k, 1), None)
        return _selected(candidates.largest(), checked_norm(total, array))


def _guess_in_bins(x: Array, bin_size: int, k: int, add: Array | None) -> float:
    """A magnitude that somewhat more than `k` of the elements let through should reach, or 0 if
    that cannot be told."""
    bins = x.size // bin_size
    if x.size < _GUESS_BINS_FROM or bins == 0:
        return 0.0
    some = slice(None, None, max(_STRIDE, x.size // _SAMPLE | 1))
    rows = x[: bins * bin_size].reshape(bins, bin_size)[some]
    latest = rows
    if add is not None:
        latest = add[: bins * bin_size].reshape(bins, bin_size)[some]
        rows = rows + latest
    magnitude = np.abs(rows)
    sent = magnitude[np.abs(rows + latest) >= magnitude.max(axis=1, keepdims=True)]
    rank = rank_bounds(rows.size, k / x.size)[1]
    return float(_partitioned(sent, rank)) if rank <= sent.size else 0.0


def _collect_bins(
    x: Array, bin_size: int, k: int, threshold: float, latest: Array | None, add: Array | None
) -> tuple[Candidates, float]:
    """One pass: the elements that the rule lets through and that reach `threshold`, and ||x||^2."""
    candidates = Candidates(k, x.dtype.type(threshold))
    if not threshold:
        candidates.compare = np.greater  # no zeros
    step = CACHE_BLOCK // bin_size * bin_size
    scratch, mask = np.empty(step, x.dtype), np.empty(step, np.bool_)
    total = 0.0
    for start in range(0, x.size, step):
        block = x[start : start + step]
        now = block if latest is None else latest[start : start + step]
        if add is not None:
            np.add(block, now, out=block)
        total += block_square(block)
        magnitude = np.abs(block, out=scratch[: block.size])
        above = candidates.compare(magnitude, candidates.threshold, out=mask[: block.size])
        peaks = _peaks(magnitude, bin_size)
        if candidates.threshold:  # few elements are left to look at
            found = np.flatnonzero(above)
            predicted = np.abs(block.take(found) + now.take(found))
            found = found[predicted >= peaks.take(found // bin_size)]
        else:
            predicted = np.abs(np.add(block, now, out=magnitude), out=magnitude)
            sent = np.greater_equal(predicted, np.repeat(peaks, bin_size)[: block.size])
            found = np.flatnonzero(np.logical_and(sent, above, out=above))
        if found.size:
            candidates.extend((found + start).astype(np.int32), block.take(found))
    return candidates, total


def _peaks(magnitude: Array, bin_size: int) -> Array:
    """The maximum of each bin; the last bin may be shorter."""
    whole = magnitude.size // bin_size
    if bin_size > _SHORT_BIN or not whole:
        return np.maximum.reduceat(magnitude, np.arange(0, magnitude.size, bin_size))
    rows = magnitude[: whole * bin_size].reshape(whole, bin_size)
    peaks = rows[:, 0].copy()
    for column in range(1, bin_size):
        np.maximum(peaks, rows[:, column], out=peaks)
    rest = magnitude[whole * bin_size :]
    return np.append(peaks, rest.max()) if rest.size else peaks


# Single bits -------------------------------------------------------------------------------------


def set_bits(positions: Tensor, present: Tensor | None, out: Tensor) -> None:
    at, packed = positions.numpy(), out.numpy()
    nbits = 8 * packed.size
    flags = np.empty(min(_BITS_BLOCK, nbits), np.bool_)
    starts = range(0, nbits, _BITS_BLOCK)
    # Starts of another dtype than the positions would have all of those converted.
    cuts = [*np.searchsorted(at, np.array(starts, at.dtype)), at.size]
    for start, low, high in zip(starts, cuts, cuts[1:], strict=False):
        block = flags[: nbits - start]
        block[:] = False
        block[at[low:high].astype(np.int64) - start] = True  # int32 subscripts are slower
        packed[start // 8 : (start + _BITS_BLOCK) // 8] = np.packbits(block, bitorder="little")


def find_bits(data: Tensor, count: int) -> Tensor:
    packed = data.numpy()
    dtype = np.int32 if 8 * packed.size <= 1 << 31 else np.int64
    parts = [np.empty(0, dtype)]
    for start in range(0, packed.size, _BITS_BLOCK // 8):
        block = np.unpackbits(packed[start : start + _BITS_BLOCK // 8], bitorder="little")
        parts.append((np.flatnonzero(block.view(np.bool_)) + 8 * start).astype(dtype))
    return torch.from_numpy(np.concatenate(parts)[:count])
