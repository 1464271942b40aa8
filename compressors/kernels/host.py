"""The kernels in NumPy, on the memory of CPU tensors (float32 or float64), block by block.

Among equal magnitudes the element with the lower index is chosen, so every selection is a function
of the values alone.

Exact selection costs little more than reading the tensor; `torch.topk` costs about 60 copies of it.
One pass over blocks that fit the cache adds the new gradient, sums the squared norm, and collects
the elements that reach a threshold, guessed from a strided sample. The k largest are found among
these few elements. The result never depends on the guess: if fewer than k elements reach the
threshold, a lower one is tried; if more than twice k do, it is raised during the pass.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from math import inf, prod
from typing import Any

import numpy as np
import torch
from numpy.random import SFC64
from numpy.typing import NDArray
from torch import Tensor

from compressors.kernels.blocks import (
    CACHE_BLOCK,
    CODE_BLOCK,
    Array,
    Flag,
    InvalidPayload,
    Numbers,
    Scalar,
    Selected,
    ThresholdSearch,
)
from compressors.kernels.reference import Found, Kernels, by_householder
from compressors.kernels.segments import segments_of

_ROW = 2048  # elements summed in the array's own precision; sums of rows are added in double
_TINY = 1e-20  # a float32 sum of squares below this is inexact: squares below 1e-38 vanish

# Measured: a larger sample, or a guess for fewer elements, costs more than it saves.
_RANK_SAMPLE, _RANK_STRIDE = 1 << 13, 17  # elements, at most, that bracket the k-th largest
_PARTITION_BELOW = 1 << 11  # elements; under this a plain partition is as fast
_SAMPLE, _STRIDE = 1 << 15, 65  # elements looked at, at most, to guess a threshold
_PLAIN_BELOW, _PLAIN_CF = 1 << 13, 4  # for fewer elements, or more of them kept, nothing is guessed
_GUESS_BINS_FROM = 1 << 14  # elements, for bins
_SHORT_BIN = 24  # elements; up to this length the maxima are found faster column by column
_BITS_BLOCK = 1 << 17  # bits unpacked at a time, a byte each: they fit the cache
_ODD = np.uint16(40503)  # 2**16 over the golden ratio
_USES = 4  # number of elements that use the same random word
_WIDE = 8  # up to this number, rows are made orthonormal in double precision

_local = threading.local()


# Norms -------------------------------------------------------------------------------------------


def _norm(x: Array, add: Array | None) -> float:
    total = 0.0
    with np.errstate(all="ignore"):
        for start in range(0, x.size, CACHE_BLOCK):
            block = x[start : start + CACHE_BLOCK]
            if add is not None:
                block += add[start : start + CACHE_BLOCK]
            total += block_square(block)
    return checked_norm(total, x)


def block_square(block: Array) -> float:
    """||block||^2. The sum over all blocks must be checked by `checked_norm`.

    Rows are too short for BLAS to split among threads, so the result depends on `block` alone."""
    rows = block.size // _ROW
    tail = block[rows * _ROW :]
    norm = float(np.dot(tail, tail))
    if rows:
        head = block[: rows * _ROW].reshape(rows, _ROW)
        norm += float(np.matmul(head[:, None, :], head[:, :, None]).sum(dtype=np.float64))
    return norm


def checked_norm(total: float, x: Array) -> float:
    """`total`, or ||x||^2 computed again in double if float32 may have overflowed or vanished."""
    if x.dtype != np.float32 or _TINY < total < inf:
        return total
    starts = range(0, x.size, CACHE_BLOCK)
    blocks = (x[start : start + CACHE_BLOCK].astype(np.float64) for start in starts)
    return sum((block_square(block) for block in blocks), 0.0)


# Ranking -----------------------------------------------------------------------------------------


def largest_positions(x: Array, k: int) -> NDArray[np.intp]:
    """Ascending positions of the `k` elements of `x` that are largest in magnitude."""
    if k >= x.size:
        return np.arange(x.size)
    magnitude = np.abs(x)
    smallest = _rank_value(magnitude, k)
    keep = np.flatnonzero(magnitude >= smallest)
    if keep.size == k:
        return keep
    if keep.size < k:  # NaN compares to nothing: count it as infinite
        return largest_positions(np.where(np.isnan(x), inf, x), k)
    above = magnitude.take(keep) > smallest
    ties = np.flatnonzero(~above)
    above[ties[: k - (keep.size - ties.size)]] = True
    return keep[above]


def _rank_value(x: Array, k: int) -> float:
    """The `k`-th largest element of `x`, 1 <= k <= x.size, faster than by partitioning `x`: two
    elements of a strided sample bracket it, and the elements inside are partitioned (all elements
    if the bracket is wrong)."""
    if x.size < _PARTITION_BELOW:
        return _partitioned(x, k)
    sample = x[:: max(x.size // _RANK_SAMPLE | 1, _RANK_STRIDE)]
    above, below = _rank_bounds(sample.size, k / x.size)
    top = _partitioned(sample, above) if above >= 1 else inf
    bottom = _partitioned(sample, below) if below <= sample.size else -inf
    inside = x.take(np.flatnonzero((x >= bottom) & (x <= top)))
    rank = k - int(np.count_nonzero(x > top))
    if 1 <= rank <= inside.size:
        return _partitioned(inside, rank)
    return _partitioned(x, k)


def _rank_bounds(sample: int, share: float) -> tuple[int, int]:
    """Two ranks in a sample of `sample` elements, 4 standard deviations above and below the element
    that a `share` of the whole array reaches. Either rank may be outside the sample."""
    wanted = sample * share
    margin = 4.0 * (wanted * (1.0 - share)) ** 0.5 + 4.0
    return int(wanted - margin), int(wanted + margin) + 1


def _partitioned(x: Array, rank: int) -> float:
    """The `rank`-th largest element of `x`, 1 <= rank <= x.size. NaN counts as the largest."""
    return np.partition(x, x.size - rank)[x.size - rank]


# Selection ---------------------------------------------------------------------------------------


class Candidates:
    """The elements that may be among the k largest, in a list that is kept short.

    threshold: smaller magnitudes are not collected. It only rises.
    compare: comparison of a magnitude with the threshold: numpy's >= or >.
    indices, values: runs of elements in the order of their indices; `count` in all.
    total, magnitudes: the sums of squares and of magnitudes of all elements so far.
    """

    def __init__(self, k: int, threshold: float) -> None:
        self.k = k
        self.threshold = threshold
        self.compare: np.ufunc = np.greater_equal
        self.count = 0
        self.indices: list[NDArray[np.int32]] = []
        self.values: list[Array] = []
        self.total = self.magnitudes = 0.0

    def extend(self, indices: NDArray[np.int32], values: Array) -> None:
        """Append a run; if the list is too long, keep only the k largest so far. Later elements
        must then exceed the smallest of them, because an equal one has a higher index."""
        self.indices.append(indices)
        self.values.append(values)
        self.count += indices.size
        if self.count > 2 * self.k + CACHE_BLOCK:
            indices, values = self.largest()
            self.indices, self.values, self.count = [indices], [values], self.k
            self.threshold = np.abs(values).min()
            self.compare = np.greater

    def all(self) -> tuple[NDArray[np.int32], Array]:
        """(indices, values) of all collected elements, of at least one run."""
        return np.concatenate(self.indices), np.concatenate(self.values)

    def largest(self) -> tuple[NDArray[np.int32], Array]:
        """(indices, values) of the k largest collected elements, or of all if there are fewer."""
        indices, values = self.all()
        keep = largest_positions(values, self.k)
        return indices.take(keep), values.take(keep)

    def selected(self) -> Selected:
        return _selected(*self.largest(), self.total)


def _gather(x: Array, k: int, add: Array | None, sum_magnitudes: bool = False) -> Candidates:
    """Candidates that include the `k` largest. All elements are candidates in a short tensor, for a
    large share k / numel, and if fewer than `k` elements are not NaN."""
    if x.size >= _PLAIN_BELOW and _PLAIN_CF * k <= x.size:
        sample = _sample(x, add)
        rank = _rank_bounds(sample.size, k / x.size)[1]
        candidates = _collect(x, k, _guess(sample, rank), add, sum_magnitudes)
        while candidates.count < k and rank <= sample.size:
            rank *= 4
            candidates = _collect(x, k, _guess(sample, rank), None, sum_magnitudes)
        if candidates.count >= k:
            return candidates
        add = None
    candidates = Candidates(k, 0.0)
    candidates.total = _norm(x, add)
    if sum_magnitudes:
        blocks = (x[start : start + CACHE_BLOCK] for start in range(0, x.size, CACHE_BLOCK))
        candidates.magnitudes = sum(_block_sum(np.abs(block)) for block in blocks)
    candidates.indices, candidates.values = [np.arange(x.size, dtype=np.int32)], [x]
    return candidates


def _sample(x: Array, add: Array | None) -> Array:
    """Magnitudes of evenly spread elements of x + add. The stride is odd, because usual layer
    widths are even: an even stride would sample the same columns again and again."""
    stride = max(x.size // _SAMPLE | 1, _STRIDE)
    sample = x[::stride]
    return np.abs(sample if add is None else sample + add[::stride])


def _guess(sample: Array, rank: int) -> float:
    """The magnitude of that rank in the sample, counted from the largest; 0 past its end."""
    return float(_partitioned(sample, rank)) if rank <= sample.size else 0.0


def _guess_in_bins(x: Array, bin_size: int, k: int, add: Array | None) -> float:
    """A magnitude that somewhat more than `k` of the elements chosen by `select_bins` should reach;
    0 if unknown."""
    bins = x.size // bin_size
    if x.size < _GUESS_BINS_FROM or bins == 0:
        return 0.0
    some = slice(None, None, max(_STRIDE, x.size // _SAMPLE | 1))
    rows = latest = x[: bins * bin_size].reshape(bins, bin_size)[some]
    if add is not None:
        latest = add[: bins * bin_size].reshape(bins, bin_size)[some]
        rows = rows + latest
    magnitude = np.abs(rows)
    sent = magnitude[np.abs(rows + latest) >= magnitude.max(axis=1, keepdims=True)]
    return _guess(sent, _rank_bounds(rows.size, k / x.size)[1])


def _collect(
    x: Array,
    k: int,
    threshold: float,
    add: Array | None,
    sum_magnitudes: bool = False,
    bins: tuple[int, Array] | None = None,
) -> Candidates:
    """One pass over `x`: collects the elements that reach the threshold, and the sums.

    bins: (bin size, latest): collect only elements that `select_bins` chooses."""
    candidates = Candidates(k, threshold)
    size, latest = bins or (1, x)
    if bins and not threshold:
        candidates.compare = np.greater  # no zeros
    step = CACHE_BLOCK // size * size
    magnitudes, mask = _spare("magnitudes", step, x.dtype), _spare("mask", step, np.bool_)
    for start in range(0, x.size, step):
        block = x[start : start + step]
        if add is not None:
            np.add(block, add[start : start + step], out=block)
        candidates.total += block_square(block)
        magnitude = np.abs(block, out=magnitudes[: block.size])
        if sum_magnitudes:
            candidates.magnitudes += _block_sum(magnitude)
        above = candidates.compare(magnitude, candidates.threshold, out=mask[: block.size])
        peaks = _peaks(magnitude, size) if bins else magnitude
        if bins and not candidates.threshold:  # nearly all elements must be compared
            coming = np.add(block, latest[start : start + step], out=magnitude)
            above &= np.abs(coming, out=coming) >= np.repeat(peaks, size)[: block.size]
        found = above.nonzero()[0]
        if bins and candidates.threshold:
            coming = np.abs(block.take(found) + latest[start : start + step].take(found))
            found = found[coming >= peaks.take(found // size)]
        if found.size:
            candidates.extend((found + start).astype(np.int32), block.take(found))
    candidates.total = checked_norm(candidates.total, x)
    return candidates


def _block_sum(block: Array) -> float:
    """The sum of a block. Sums of rows are added in double precision."""
    rows = block.size // _ROW
    head, tail = block[: rows * _ROW].reshape(rows, 1, _ROW), block[rows * _ROW :]
    ones = np.ones((_ROW, 1), block.dtype)  # a product with ones is the fastest sum
    whole = np.matmul(head, ones).sum(dtype=np.float64)
    return float(tail.sum(dtype=np.float64)) + float(whole)


def _array(add: Tensor | None) -> Array | None:
    return None if add is None else add.numpy()


def _selected(indices: NDArray[np.int32], values: Array, total: float) -> Selected:
    return Selected(torch.from_numpy(indices), torch.from_numpy(values), total)


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


# The contract ------------------------------------------------------------------------------------


class Host(Kernels):
    """The kernels for CPU tensors: norms of any dtype, selections of float32 or float64."""

    may_read = True
    xp = np

    def numbers(self, x: Tensor) -> tuple[Scalar, ...]:
        return tuple(x.tolist())

    def flag(self, x: Tensor) -> Flag:
        return bool(x)

    def look(self, at: Callable[[], Found], otherwise: Found) -> Found:
        return at()

    def scalar(self, number: Any) -> Scalar:
        return float(number)

    def native(self, x: Tensor) -> Numbers:
        return x.numpy()

    def wide(self, numbers: Numbers) -> Numbers:
        return numbers.astype(np.int32)

    def ranks(self, numbers: Numbers, below: int) -> Numbers:
        return np.arange(numbers.size, dtype=np.int32 if below <= 1 << 31 else np.int64)

    def fold(self, digits: Numbers, base: int, runs: int, out: Numbers) -> None:
        count, length = digits.shape[-1], out.shape[-1]
        if digits.dtype != np.uint8 or count < runs * length:
            filled = _spare_rows("digits", digits, runs * length)
            filled[..., :count] = digits  # upper bits are dropped
            filled[..., count:] = 0
            digits = filled
        np.copyto(out, digits[..., (runs - 1) * length :])
        for i in reversed(range(runs - 1)):
            out *= base
            out += digits[..., i * length : (i + 1) * length]

    def unfold(self, folded: Numbers, base: int, runs: int, use: str) -> Numbers:
        if runs == 1:
            return folded
        length = folded.shape[-1]
        digits = _spare_rows(use, folded, runs * length)
        for i in range(runs):
            digit = digits[..., i * length : (i + 1) * length]
            np.floor_divide(folded, base**i, out=digit)
            if base == 3:
                digit -= digit // 3 * 3  # much faster than a remainder
            elif i < runs - 1:
                digit &= base - 1
        return digits

    def received(
        self, indices: Numbers, numel: int, exact: bool, invalid: Flag
    ) -> tuple[Tensor, Flag]:
        if invalid:
            raise InvalidPayload(f"payload must hold indices that ascend within [0, {numel})")
        if not exact:
            indices = indices[: np.searchsorted(indices, numel)]
        return torch.from_numpy(indices.astype(np.int32, copy=False)), False

    def sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float64

    def fill_random16(self, out: Tensor, digest: bytes) -> None:
        """Drawing is slow, so four elements use the same random word, at distances of a quarter of
        the length of `out`: the word itself, and its products with powers of an odd number, which
        permute the words."""
        each = -(-out.numel() // _USES)
        drawn = np.asarray(_random_bits(digest).random_raw(-(-each // 4)))
        words, array = drawn.view(np.uint16)[:each], out.numpy()
        for at in range(0, array.size, each or 1):
            piece = array[at : at + each]
            np.copyto(piece, words[: piece.size])
            np.multiply(words, _ODD, out=words)

    def orthonormal_rows(self, rows: Tensor) -> Tensor:
        """Double precision would cost too much for many rows."""
        if len(rows) <= _WIDE:
            return super().orthonormal_rows(rows)
        return by_householder(rows, rows.dtype)

    def squared_norm(self, x: Tensor) -> Scalar:
        return _norm(x.numpy(), None) if _is_fast(x) else super().squared_norm(x)

    def add_and_norm(self, memory: Tensor, tensor: Tensor) -> Scalar:
        fast = _is_fast(memory) and tensor.dtype == memory.dtype and tensor.device == memory.device
        if not fast:
            return super().add_and_norm(memory, tensor)
        return _norm(memory.numpy(), tensor.numpy())

    def sum_pieces(self, x: Tensor, counts: Array) -> Tensor:
        if len(counts) == 1:
            return x.sum().double().view(1)
        return torch.from_numpy(np.add.reduceat(x.numpy(), _starts(counts))).double()

    def max_pieces(self, x: Tensor, counts: Array) -> Tensor:
        if len(counts) == 1:
            return super().max_pieces(x, counts)
        return torch.from_numpy(np.maximum.reduceat(x.numpy(), _starts(counts))).double()

    def spread(self, numbers: Tensor, counts: Array) -> Tensor:
        if len(counts) == 1:
            return numbers
        return torch.from_numpy(np.repeat(numbers.numpy(), counts))

    def not_negative(self, x: Tensor) -> Tensor:
        positive = _spare("positive", x.numel(), np.bool_)
        return torch.from_numpy(np.greater_equal(x.numpy(), 0, out=positive))

    def largest(self, x: Tensor, k: int) -> Tensor:
        return torch.from_numpy(largest_positions(x.numpy(), k).astype(np.int32))

    def kth_largest(self, x: Tensor, k: int) -> Scalar:
        return float(_partitioned(x.numpy(), k))

    def select(self, x: Tensor, k: int, add: Tensor | None) -> Selected:
        with np.errstate(all="ignore"):
            return _gather(x.numpy(), k, _array(add)).selected()

    def select_segments(
        self, x: Tensor, lengths: tuple[int, ...], counts: tuple[int, ...], add: Tensor | None
    ) -> Selected:
        segments, total = segments_of(lengths, counts), 0.0
        array, latest = x.numpy(), _array(add)
        indices = np.empty(int(segments.counts.sum()), np.int32)
        with np.errstate(all="ignore"):
            for start, stop, k, first in segments.long:
                piece = None if latest is None else latest[start:stop]
                found = _gather(array[start:stop], k, piece)
                np.add(found.largest()[0], start, out=indices[first : first + k])
                total += found.total
            if short := segments.short:
                values = array.take(short.at)
                if latest is not None:
                    values += latest.take(short.at)
                    array[short.at] = values
                total += checked_norm(block_square(values), values)
                indices[short.out] = short.select(np.abs(values))
        return _selected(indices, array.take(indices), total)

    def select_above(self, x: Tensor, threshold: Scalar, k: int, add: Tensor | None) -> Selected:
        array = x.numpy()
        with np.errstate(all="ignore"):
            candidates = _collect(array, k, array.dtype.type(threshold), _array(add))
            if not candidates.count:
                candidates = _gather(array, min(k, 1), None)
            return candidates.selected()

    def select_by_count(
        self, x: Tensor, k: int, add: Tensor | None, search: ThresholdSearch
    ) -> Selected:
        array = x.numpy()
        with np.errstate(all="ignore"):
            candidates = _gather(array, k + 1, _array(add), sum_magnitudes=True)
            indices, values = candidates.all()
            magnitude = np.abs(values)
            threshold = search.by_counting(magnitude, candidates.magnitudes / array.size, k)
            at = np.flatnonzero(magnitude >= array.dtype.type(threshold))
        if at.size > k or not at.size:
            at = largest_positions(values, k)
        return _selected(indices.take(at), values.take(at), candidates.total)

    def select_bins(self, x: Tensor, bin_size: int, k: int, add: Tensor | None) -> Selected:
        """A few bins give a magnitude that somewhat more than k of the chosen elements will reach,
        so that not all are collected. If this guess is wrong, a second pass collects all."""
        array, latest = x.numpy(), _array(add)
        with np.errstate(all="ignore"):
            guess = _guess_in_bins(array, bin_size, k, latest)
            bins = bin_size, array if latest is None else latest
            candidates = _collect(array, k, guess, latest, False, bins)
            if guess and candidates.count < k:
                candidates = _collect(array, k, 0.0, None, False, bins)
            if not candidates.count:
                candidates = _gather(array, min(k, 1), None)
            return candidates.selected()

    def heaviest(self, estimates: Callable[[int, int], Tensor], k: int, numel: int) -> Tensor:
        held = Candidates(k, 0.0)
        for start in range(0, numel, CACHE_BLOCK):
            block = estimates(start, min(start + CACHE_BLOCK, numel)).numpy()
            at = np.flatnonzero(held.compare(block, held.threshold))
            held.extend((at + start).astype(np.int32), block.take(at))
        indices, values = map(torch.from_numpy, held.largest())
        return indices[values.argsort(descending=True, stable=True)]

    def take_present(self, x: Tensor, indices: Tensor) -> Tensor:
        return x.index_select(0, indices)

    def in_bounds(self, indices: Tensor, numel: int) -> Tensor:
        return indices

    def without_empty(self, values: Tensor, indices: Tensor, numel: int) -> Tensor:
        return values[: indices.numel()]

    def filled(self, indices: Tensor, numel: int) -> Tensor | None:
        return None

    def union(self, indices: Tensor, least: int, numel: int) -> Tensor:
        return indices.sort().values.unique_consecutive()

    def progression(
        self, k: int, start: int, stride: int, numel: int, device: torch.device
    ) -> Tensor:
        indices = np.empty(k, np.uint32)  # by additions, because products and remainders are slow
        done = min(k, 1024)
        indices[:done] = (np.arange(done) * stride + start) % numel
        while done < k:  # the next ones are the ones so far, plus stride * done
            more = indices[done : 2 * done]
            np.add(indices[: more.size], np.uint32(stride * done % numel), out=more)
            np.minimum(more, more - np.uint32(numel), out=more)  # negative ones wrap to large ones
            done += more.size
        return torch.from_numpy(indices.view(np.int32))

    def slots(self, positions: Tensor, factor: int, offset: int, columns: int) -> Tensor:
        """NumPy multiplies three times as fast."""
        array = positions.numpy().view(np.uint64) * np.uint64(factor % 2**64)
        array += np.uint64(offset % 2**64)
        array >>= np.uint64(32)
        array *= np.uint64(2 * columns)
        array >>= np.uint64(32)
        return torch.from_numpy(array.view(np.int64))

    def set_bits(self, positions: Tensor, present: Tensor | None, out: Tensor) -> None:
        at, packed = positions.numpy(), out.numpy()
        nbits = 8 * packed.size
        flags = np.empty(min(_BITS_BLOCK, nbits), np.bool_)
        starts = range(0, nbits, _BITS_BLOCK)
        # With starts of another dtype, numpy would convert all positions.
        cuts = [*np.searchsorted(at, np.array(starts, at.dtype)), at.size]
        for start, low, high in zip(starts, cuts, cuts[1:], strict=False):
            block = flags[: nbits - start]
            block[:] = False
            block[at[low:high].astype(np.int64) - start] = True  # int32 subscripts are slower
            packed[start // 8 : (start + _BITS_BLOCK) // 8] = np.packbits(block, bitorder="little")

    def find_bits(self, data: Tensor, count: int) -> Tensor:
        packed = data.numpy()
        dtype = np.int32 if 8 * packed.size < 1 << 31 else np.int64
        positions = np.full(count, 8 * packed.size, dtype)
        left = positions
        for start in range(0, packed.size, _BITS_BLOCK // 8):
            block = np.unpackbits(packed[start : start + _BITS_BLOCK // 8], bitorder="little")
            found = block.view(np.bool_).nonzero()[0][: left.size]
            np.add(found, 8 * start, out=left[: found.size], casting="same_kind")
            left = left[found.size :]
        return torch.from_numpy(positions)

    def pack_bits(self, bits: Tensor) -> Tensor:
        return torch.from_numpy(np.packbits(bits.numpy(), bitorder="little"))

    def unpack_bits(self, packed: Tensor, out: Tensor) -> None:
        bits = np.unpackbits(packed.numpy(), count=out.numel(), bitorder="little")
        out.copy_(torch.from_numpy(bits))


def _random_bits(digest: bytes) -> SFC64:
    """This thread's generator, set to the state `digest`. (A new one takes as long as drawing.)"""
    if not hasattr(_local, "bits"):
        _local.bits = SFC64(0)
    bits: SFC64 = _local.bits
    words = np.append(np.frombuffer(digest, np.uint64), np.uint64(1))  # the last one is a counter
    bits.state = {
        "bit_generator": "SFC64", "state": {"state": words}, "has_uint32": 0, "uinteger": 0,
    }  # fmt: skip
    return bits


def _spare(use: str, size: int, dtype: Any) -> Array:
    """Working memory, which the next call of the same thread with the same `use` and dtype returns
    again: `scratch` without an operation of torch."""
    arrays: dict[tuple[str, Any], Array] = _local.__dict__.setdefault("arrays", {})
    array = arrays.get((use, dtype))
    if array is None or array.size < size:
        array = arrays[use, dtype] = np.empty(max(size, CODE_BLOCK + 64), dtype)
    return array[:size]


def _spare_rows(use: str, like: Array, size: int) -> Array:
    """(..., size) uint8 of working memory, with the leading dimensions of `like`."""
    shape = (*like.shape[:-1], size)
    return _spare(use, prod(shape), np.uint8).reshape(shape)


def _starts(counts: Array) -> Array:
    return counts.cumsum() - counts


def _is_fast(x: Tensor) -> bool:
    return x.dtype in (torch.float32, torch.float64)
