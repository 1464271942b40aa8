"""The norm and the selections of `device.py` as Triton's kernels, which read the tensor twice.

Exact top-k without sorting. The bits of a magnitude, read as an integer, are ordered as magnitudes
are: they are its key, of 31 bits. A radix select finds the key of the k-th largest element in three
digits of 11, 10 and 10 bits: a histogram of a digit, over the elements whose key begins as that
one's does, tells what its digit is (Alabi, Blanchard, Gordon and Steinbach, "Fast k-Selection
Algorithms for Graphics Processors", ACM JEA 17, 2012). The kernels of `select`, a launch each:

    accumulate  x += add, squared norms, histogram of the first digit: exponent and 3 bits
    gather      lists the elements whose first digit is at least the k-th largest's, and makes the
                histogram of the second digit
    refine      on the lists: histogram of the third digit
    count       on the lists: how many elements are above the k-th largest, and how many equal it
    take        on the lists: writes them out, in the order of their indices

Of a short tensor, as a bucket's sample is, one program does all this in a single launch.

Each program (a block of threads) has a chunk of the tensor, and writes what it lists to a region of
its own, so that lists need no order among programs until the counts give it. A region holds a part
of the chunk. If the elements do not fit it, as where many are equal, the later kernels read the
chunk instead: slower, with the same result.

Nothing is read by the host. Floating-point numbers are added in an order that depends on sizes
alone, so that results repeat to the bit. Among equal magnitudes the lower index is chosen, and all
NaN are equal, larger than infinity.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from compressors.kernels.blocks import Scalar, Selected, ThresholdSearch
from compressors.kernels.triton.launching import cdiv, launch, power_of_2


class Sizes(NamedTuple):
    """How a tensor is divided. Tests use small sizes, so that a few elements cross many borders.

    block: elements that a program looks at together. programs: at most so many; both are powers of
    two. share: a program can list one in so many elements of its chunk. warps: a program. alone: up
    to so many elements one program sees all at once, and selects among them by itself.
    """

    block: int = 2048
    programs: int = 1024
    share: int = 4
    warps: int = 8
    alone: int = 1 << 15

    def chunk(self, numel: int) -> int:
        """Elements of each program but the last: whole blocks."""
        return cdiv(cdiv(numel, self.programs), self.block) * self.block


SIZES = Sizes()

_BINS = tl.constexpr(2048)  # of a histogram; half of them for the digits after the first
_DIGITS = tl.constexpr(3)
_PEAK = tl.constexpr(3 * 2048)  # where the largest key is, after the histograms of all digits
_INFINITY = tl.constexpr(0x7F800000)  # its key


# Python's side -----------------------------------------------------------------------------------


def squared_norm(x: Tensor, sizes: Sizes = SIZES) -> Scalar:
    return _accumulated(x, None, None, sizes).sum()


def add_and_norm(memory: Tensor, tensor: Tensor, sizes: Sizes = SIZES) -> Scalar:
    return _accumulated(memory, tensor, None, sizes).sum()


def largest(x: Tensor, k: int, sizes: Sizes = SIZES) -> Tensor:
    return select(x, k, None, sizes).indices


def select(x: Tensor, k: int, add: Tensor | None, sizes: Sizes = SIZES) -> Selected:
    return _selected(x, None, k, add, sizes)


def select_above(
    x: Tensor, threshold: Scalar, k: int, add: Tensor | None, sizes: Sizes = SIZES
) -> Selected:
    if not isinstance(threshold, Tensor):
        threshold = torch.full((), threshold, dtype=torch.float32, device=x.device)
    return _selected(x, threshold, k, add, sizes)


def select_by_count(
    x: Tensor, k: int, add: Tensor | None, search: ThresholdSearch, sizes: Sizes = SIZES
) -> Selected:
    found = _selected(x, None, min(k + 1, x.numel()), add, sizes)
    most = found.values.abs().sort(descending=True).values
    threshold = search.at_once(most, x.abs().mean(dtype=torch.float64), k)
    chosen = select_above(found.values, threshold, k, None, sizes)
    # The last one is of slots that hold nothing.
    indices = torch.nn.functional.pad(found.indices, (0, 1), value=x.numel())
    return Selected(indices.index_select(0, chosen.indices), chosen.values, found.total)


def _accumulated(x: Tensor, add: Tensor | None, counts: Tensor | None, sizes: Sizes) -> Tensor:
    """x += add; the squared norm of each program's chunk (float64); adds the histogram of the first
    digits to `counts`."""
    numel, chunk = x.numel(), sizes.chunk(x.numel())
    programs = cdiv(numel, chunk)
    squares = x.new_empty(programs, dtype=torch.float64)
    options: dict[str, Any] = {"block": sizes.block, "num_warps": sizes.warps}
    launch(_accumulate, (programs,), x, x, add, squares, counts, numel, chunk, **options)
    return squares


def _selected(
    x: Tensor, threshold: Tensor | None, k: int, add: Tensor | None, sizes: Sizes
) -> Selected:
    """The `k` largest; of those only the ones that reach `threshold`, if that is not None."""
    numel, chunk = x.numel(), sizes.chunk(x.numel())
    if numel <= sizes.alone:
        return _selected_alone(x, threshold, k, add)
    programs, capacity = cdiv(numel, chunk), cdiv(chunk, sizes.share)
    counts = torch.zeros(_PEAK.value + 1, dtype=torch.int32, device=x.device)
    squares = _accumulated(x, add, counts, sizes)
    listed = counts.new_empty(programs)
    positions, values = counts.new_empty(programs * capacity), x.new_empty(programs * capacity)
    above, equal = counts.new_empty(programs), counts.new_empty(programs)
    found = Selected(counts.new_empty(k), x.new_empty(k), squares.new_empty(()))
    lists = x, positions, values, listed, counts, k, numel, chunk, capacity
    options: dict[str, Any] = {"block": sizes.block, "num_warps": sizes.warps}
    grid, outputs = (programs,), (above, equal, squares, *found)
    launch(_gather, grid, x, *lists, **options)
    launch(_refine, grid, x, *lists, **options)
    launch(_count, grid, x, *lists, threshold, above, equal, **options)
    launch(_take, grid, x, *lists, threshold, *outputs, programs=sizes.programs, **options)
    return found


def _selected_alone(x: Tensor, threshold: Tensor | None, k: int, add: Tensor | None) -> Selected:
    block = max(1024, power_of_2(x.numel()))
    total = x.new_empty((), dtype=torch.float64)
    found = Selected(x.new_empty(k, dtype=torch.int32), x.new_empty(k), total)
    options = {"block": block, "num_warps": block // 1024}
    launch(_select_alone, (1,), x, x, add, threshold, *found, k, x.numel(), **options)
    return found


# Kernels -----------------------------------------------------------------------------------------
#
# Offsets are of 64 bits up to the start of a block: beyond the last element they may exceed 2**31.


@triton.jit
def _accumulate(x, add, squares, counts, numel, chunk, block: tl.constexpr):
    program = tl.program_id(0)
    begin, end = _bounds(program, numel, chunk)
    lanes = tl.arange(0, block)
    total = tl.full((), 0.0, tl.float64)
    histogram = tl.zeros((_BINS,), tl.int32)
    for start in range(begin, end, block):
        inside = lanes < end - start
        value = tl.load(x + start + lanes, mask=inside, other=0.0)
        if add is not None:
            value += tl.load(add + start + lanes, mask=inside, other=0.0)
            tl.store(x + start + lanes, value, mask=inside)
        wide = value.to(tl.float64)
        total += tl.sum(wide * wide)
        if counts is not None:
            histogram += tl.histogram(_bin(_key(value), 0, 0), _BINS)
    tl.store(squares + program, total)
    if counts is not None:
        tl.atomic_add(counts + tl.arange(0, _BINS), histogram, sem="relaxed")


@triton.jit(do_not_specialize=["k"])
def _gather(
    x, positions, values, listed, counts, k, numel, chunk, capacity, block: tl.constexpr
):  # fmt: skip
    program = tl.program_id(0)
    begin, end = _bounds(program, numel, chunk)
    region = program.to(tl.int64) * capacity
    digit, _ = _kth_largest(counts, k, 1)
    lanes = tl.arange(0, block)
    count = tl.full((), 0, tl.int32)
    histogram = tl.zeros((_BINS,), tl.int32)
    for start in range(begin, end, block):
        inside = lanes < end - start
        value = tl.load(x + start + lanes, mask=inside, other=0.0)
        key = _key(value)
        keep = inside & (key >> 20 >= digit)
        slot = count + tl.cumsum(keep.to(tl.int32)) - 1
        fits = keep & (slot < capacity)
        tl.store(positions + region + slot, (start + lanes).to(tl.int32), mask=fits)
        tl.store(values + region + slot, value, mask=fits)
        count += tl.sum(keep.to(tl.int32))
        histogram += tl.histogram(_bin(key, digit, 1), _BINS)
    tl.store(listed + program, count)
    tl.atomic_add(counts + _BINS + tl.arange(0, _BINS), histogram, sem="relaxed")


@triton.jit(do_not_specialize=["k"])
def _refine(
    x, positions, values, listed, counts, k, numel, chunk, capacity,
    block: tl.constexpr,
):  # fmt: skip
    source, _, _, length = _list(x, positions, values, listed, numel, chunk, capacity)
    digits, _ = _kth_largest(counts, k, 2)
    lanes = tl.arange(0, block)
    peak = tl.full((), 0, tl.int32)
    histogram = tl.zeros((_BINS,), tl.int32)
    for start in range(0, length, block):
        key = _key(tl.load(source + start + lanes, mask=lanes < length - start, other=0.0))
        histogram += tl.histogram(_bin(key, digits, 2), _BINS)
        peak = tl.maximum(peak, tl.max(key))
    tl.atomic_add(counts + 2 * _BINS + tl.arange(0, _BINS), histogram, sem="relaxed")
    tl.atomic_max(counts + _PEAK, peak, sem="relaxed")


@triton.jit(do_not_specialize=["k"])
def _count(
    x, positions, values, listed, counts, k, numel, chunk, capacity,
    threshold, above, equal, block: tl.constexpr,
):  # fmt: skip
    source, _, _, length = _list(x, positions, values, listed, numel, chunk, capacity)
    smallest, _ = _smallest(counts, k, threshold)
    lanes = tl.arange(0, block)
    larger, same = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    for start in range(0, length, block):
        inside = lanes < length - start
        key = _key(tl.load(source + start + lanes, mask=inside, other=0.0))
        larger += tl.sum((inside & (key > smallest)).to(tl.int32))
        same += tl.sum((inside & (key == smallest)).to(tl.int32))
    tl.store(above + tl.program_id(0), larger)
    tl.store(equal + tl.program_id(0), same)


@triton.jit(do_not_specialize=["k"])
def _take(
    x, positions, values, listed, counts, k, numel, chunk, capacity,
    threshold, above, equal, squares, indices, taken, total,
    programs: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    source, begin, whole, length = _list(x, positions, values, listed, numel, chunk, capacity)
    region = program.to(tl.int64) * capacity
    smallest, wanted = _smallest(counts, k, threshold)
    each = tl.arange(0, programs)
    larger = tl.load(above + each, mask=each < tl.num_programs(0), other=0)
    same = tl.load(equal + each, mask=each < tl.num_programs(0), other=0)
    ties = tl.sum(tl.where(each < program, same, 0))  # before this program
    used = tl.sum(tl.where(each < program, larger, 0)) + tl.minimum(ties, wanted)
    lanes = tl.arange(0, block)
    for start in range(0, length, block):
        inside = lanes < length - start
        value = tl.load(source + start + lanes, mask=inside, other=0.0)
        at = (begin + start + lanes).to(tl.int32)
        if whole:
            at = tl.load(positions + region + start + lanes, mask=inside, other=0)
        key = _key(value)
        tie = (inside & (key == smallest)).to(tl.int32)
        take = inside & (key > smallest) | (tie > 0) & (ties + tl.cumsum(tie) <= wanted)
        slot = used + tl.cumsum(take.to(tl.int32)) - 1
        tl.store(indices + slot, at, mask=take)
        tl.store(taken + slot, value, mask=take)
        ties += tl.sum(tie)
        used += tl.sum(take.to(tl.int32))
    if threshold is not None:
        full = tl.sum(larger) + tl.minimum(tl.sum(same), wanted)
        for first in range(program.to(tl.int64) * block, k - full, tl.num_programs(0) * block):
            empty = lanes < k - full - first
            tl.store(indices + full + first + lanes, lanes * 0 + numel, mask=empty)
            tl.store(taken + full + first + lanes, lanes * 0.0, mask=empty)
    if program == 0:
        tl.store(total, tl.sum(tl.load(squares + each, mask=each < tl.num_programs(0), other=0.0)))


@triton.jit(do_not_specialize=["k", "numel"])
def _select_alone(x, add, threshold, indices, taken, total, k, numel, block: tl.constexpr):
    lanes = tl.arange(0, block)
    inside = lanes < numel
    value = tl.load(x + lanes, mask=inside, other=0.0)
    if add is not None:
        value += tl.load(add + lanes, mask=inside, other=0.0)
        tl.store(x + lanes, value, mask=inside)
    key = _key(value)
    smallest, wanted = tl.full((), 0, tl.int32), k
    for digit in tl.static_range(_DIGITS):
        found, wanted = _descend(tl.histogram(_bin(key, smallest, digit), _BINS), wanted)
        smallest = (smallest << 10) + found
    if threshold is not None:
        smallest, wanted = _reached(smallest, wanted, threshold, tl.max(key))
    tie = (inside & (key == smallest)).to(tl.int32)
    take = inside & (key > smallest) | (tie > 0) & (tl.cumsum(tie) <= wanted)
    slot = tl.cumsum(take.to(tl.int32)) - 1
    tl.store(indices + slot, lanes, mask=take)
    tl.store(taken + slot, value, mask=take)
    if threshold is not None:
        full = tl.sum(take.to(tl.int32))
        tl.store(indices + full + lanes, lanes * 0 + numel, mask=lanes < k - full)
        tl.store(taken + full + lanes, lanes * 0.0, mask=lanes < k - full)
    wide = value.to(tl.float64)
    tl.store(total, tl.sum(wide * wide))


# What the kernels share --------------------------------------------------------------------------


@triton.jit
def _bounds(program, numel, chunk):
    """Where the program's chunk begins and ends."""
    begin = program.to(tl.int64) * chunk
    return begin, tl.minimum(begin + chunk, numel)


@triton.jit
def _list(x, positions, values, listed, numel, chunk, capacity):
    """What the program has listed: where its values are, where its chunk begins, whether it is
    the list (or else the whole chunk, because not all did fit), and how long that is."""
    program = tl.program_id(0)
    begin, end = _bounds(program, numel, chunk)
    length = tl.load(listed + program)
    whole = length <= capacity
    if whole:
        source = values + program.to(tl.int64) * capacity
    else:
        source = x + begin
        length = (end - begin).to(tl.int32)
    return source, begin, whole, length


@triton.jit
def _key(value):
    """The bits of the magnitude; of all NaN the same, next to infinity's."""
    return tl.minimum(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, _INFINITY + 1)


@triton.jit
def _bin(key, first, digit: tl.constexpr):
    """This digit (0 to 2) of keys that begin with the digits `first`. Bin 0 is where a search ends
    if it ends in no other, whatever its count; so other keys may be counted there."""
    if digit == 0:
        return key >> 20
    here = key >> (30 - 10 * digit) == first
    return tl.where(here, key >> (20 - 10 * digit) & 1023, 0)


@triton.jit
def _descend(count, rank):
    """The bin in which the element of this rank lies, counted from the largest and from 1; and its
    rank in that bin. count: of the elements in each bin."""
    above = tl.sum(count) - tl.cumsum(count)  # in all later bins
    found = tl.sum((above >= rank).to(tl.int32))
    return found, rank - tl.max(tl.where(above < rank, above, 0))


@triton.jit
def _kth_largest(counts, k, digits: tl.constexpr):
    """The first so many digits of the k-th largest key, from their histograms; and its rank among
    the keys that begin with them, counted from 1."""
    bins = tl.arange(0, _BINS)
    key = tl.full((), 0, tl.int32)
    rank = k
    for digit in tl.static_range(digits):
        found, rank = _descend(tl.load(counts + digit * _BINS + bins), rank)
        key = (key << 10) + found
    return key, rank


@triton.jit
def _smallest(counts, k, threshold):
    """The smallest key that is taken, and how many elements that have it are."""
    smallest, wanted = _kth_largest(counts, k, _DIGITS)
    if threshold is not None:
        smallest, wanted = _reached(smallest, wanted, threshold, tl.load(counts + _PEAK))
    return smallest, wanted


@triton.jit
def _reached(smallest, wanted, threshold, peak):
    """`_smallest` among the elements that reach the threshold; peak: the largest key."""
    least = tl.load(threshold).to(tl.float32).to(tl.int32, bitcast=True)
    least = tl.where((least > 0) & (least <= _INFINITY), least, 0)  # nothing is below NaN
    wanted = tl.where(least > peak, 1, tl.where(least > smallest, 0, wanted))
    smallest = tl.where(least > peak, peak, tl.where(least > smallest, least - 1, smallest))
    return smallest, wanted
