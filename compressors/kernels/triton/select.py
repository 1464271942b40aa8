"""The norm and the selections of `reference.py` as Triton's kernels, which read the tensor once.

Exact top-k without sorting, and with one pass over the tensor. The bits of a magnitude, read as an
integer, have the order of magnitudes: they are its key, of 31 bits. From a sample of the tensor
comes a key that somewhat more than k elements reach. These elements are listed. A radix select
among them finds the key of the k-th largest in digits of 8, 8, 8 and 7 bits: each digit comes from
a histogram over the elements whose keys begin with the digits found so far (Alabi, Blanchard,
Gordon and Steinbach, "Fast k-Selection Algorithms for Graphics Processors", ACM JEA 17, 2012).
Triton counts a histogram of n bins by n / 32 population counts for each element. So there are few
bins, and only listed elements are counted. The kernels of `select`, one launch each:

    sample      a key that somewhat more than k elements will reach; clears the histograms
    gather      x += add, squared norms, lists of the elements that reach that key
    digit       (four times) on the lists: histogram of the next digit
    count       on the lists: how many elements are above the k-th largest, and how many equal it
    take        on the lists: writes them out, in the order of their indices

For a short tensor one program does all this in a single launch, and finds the key bit by bit.

Each program (a block of threads) has a chunk of the tensor, and writes its list to its own region,
so that programs need no order until the counts are known. A region can hold a part of the chunk.
If there are more elements (many equal ones, for instance), or if the sample was wrong and fewer
than k elements reach its key, the later kernels read the chunk instead: slower, with the same
result.

The host reads nothing. Floating-point numbers are added in an order that depends on sizes alone, so
that results are the same bit by bit in every run. Among equal magnitudes the lower index is chosen.
All NaN are equal, and larger than infinity.
"""

from __future__ import annotations

from math import ceil, sqrt
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from compressors.kernels.blocks import Scalar, Selected, ThresholdSearch
from compressors.kernels.triton.launching import cdiv, launch


class Sizes(NamedTuple):
    """The division of a tensor among programs. Tests use small sizes, so that a few elements cross
    many borders.

    block: elements that a program reads together. programs: their largest number. sample: elements
    of the sample. These are powers of two, the sample is at least 8. share: a program can list one
    in `share` elements of its chunk. warps: of a program. alone: the largest number of elements for
    a single program.
    """

    block: int = 2048
    programs: int = 1024
    share: int = 4
    warps: int = 8
    alone: int = 1 << 15
    sample: int = 1 << 14

    def chunk(self, numel: int) -> int:
        """The number of elements of each program except the last: whole blocks."""
        return cdiv(cdiv(numel, self.programs), self.block) * self.block

    def rank(self, k: int, numel: int) -> int:
        """The rank, in the sample, of the key from which on elements are listed: with a margin of
        six standard deviations, so that lists are almost never too short."""
        expected = self.sample * k / numel
        return min(ceil(expected + 6 * sqrt(expected)) + 16, self.sample)


SIZES = Sizes()

ALONE = 1 << 13
"""The number of elements that a single program reads together: 512 for each warp. The same for all
tensors, so that only one kernel has to be compiled."""

_BINS = tl.constexpr(256)  # of a histogram; half of them for the last digit
_DIGITS = tl.constexpr(4)
_PEAK = tl.constexpr(4 * 256)  # place of the largest key, after the histograms of all digits
_LEAST = tl.constexpr(4 * 256 + 1)  # place of the key from which on elements are listed
_LISTED = tl.constexpr(4 * 256 + 2)  # place of the number of elements that reach this key
_COUNTS = 2048  # numbers in memory for all these, a power of two
_NUMBERS = tl.constexpr(_COUNTS)
_NEIGHBOURS = tl.constexpr(8)  # consecutive elements in the sample
_INFINITY = tl.constexpr(0x7F800000)  # key of infinity


# Python's side -----------------------------------------------------------------------------------


def squared_norm(x: Tensor, sizes: Sizes = SIZES) -> Scalar:
    return _norm(x, None, sizes)


def add_and_norm(memory: Tensor, tensor: Tensor, sizes: Sizes = SIZES) -> Scalar:
    return _norm(memory, tensor, sizes)


def largest(x: Tensor, k: int, sizes: Sizes = SIZES) -> Tensor:
    return select(x, k, None, sizes).indices


def select(x: Tensor, k: int, add: Tensor | None, sizes: Sizes = SIZES) -> Selected:
    return _selected(x, None, k, add, sizes)


def select_rows(x: Tensor, rows: int, k: int, add: Tensor | None, sizes: Sizes = SIZES) -> Selected:
    """`select` in each of `rows` consecutive tensors of equal length in x. Positions count from the
    start of their tensor; total: of all."""
    found = _selected(x, None, k, add, sizes, rows)
    assert isinstance(found.total, Tensor)
    return found._replace(total=found.total.sum())


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
    # The last one is for empty slots.
    indices = torch.nn.functional.pad(found.indices, (0, 1), value=x.numel())
    return Selected(indices.index_select(0, chosen.indices), chosen.values, found.total)


def _norm(x: Tensor, add: Tensor | None, sizes: Sizes) -> Tensor:
    """x += add; its squared norm."""
    numel, chunk = x.numel(), sizes.chunk(x.numel())
    programs = cdiv(numel, chunk)
    squares = x.new_empty(programs, dtype=torch.float64)
    options: dict[str, Any] = {"block": sizes.block, "num_warps": sizes.warps}
    launch(_accumulate, (programs,), x, x, add, squares, numel, chunk, **options)
    return squares.sum()


def _selected(
    x: Tensor, threshold: Tensor | None, k: int, add: Tensor | None, sizes: Sizes, rows: int = 1
) -> Selected:
    """The `k` largest elements, or those of them that reach `threshold`, if it is not None. rows:
    number of consecutive tensors of equal length in x, with `k` elements each."""
    numel = x.numel() // rows
    chunk = sizes.chunk(numel)
    if numel <= sizes.alone:
        return _selected_alone(x, threshold, k, add, rows)
    programs, capacity = cdiv(numel, chunk), cdiv(chunk, sizes.share)
    counts = x.new_empty(rows * _COUNTS, dtype=torch.int32)
    listed, above, equal = counts.new_empty(3, rows * programs).unbind()
    size = rows * programs * capacity
    positions, values = counts.new_empty(size), x.new_empty(size)
    squares = x.new_empty(rows * programs, dtype=torch.float64)
    total = squares.new_empty((rows,) if rows > 1 else ())
    found = Selected(counts.new_empty(rows * k), x.new_empty(rows * k), total)
    lists = x, positions, values, listed, counts, k, numel, chunk, capacity
    options: dict[str, Any] = {"block": sizes.block, "num_warps": sizes.warps}
    grid, outputs = (programs, rows), (above, equal, squares, *found)
    whole = {"sample": sizes.sample, "cleared": _COUNTS, "num_warps": max(1, sizes.sample // 512)}
    launch(_sample, (1, rows), x, x, add, counts, sizes.rank(k, numel), numel, **whole)
    launch(_gather, grid, x, *lists, add, squares, **options)
    for digit in range(_DIGITS.value):
        launch(_digit, grid, x, *lists, digit, **options)
    launch(_count, grid, x, *lists, threshold, above, equal, **options)
    launch(_take, grid, x, *lists, threshold, *outputs, programs=sizes.programs, **options)
    return found


def _selected_alone(
    x: Tensor, threshold: Tensor | None, k: int, add: Tensor | None, rows: int
) -> Selected:
    total = x.new_empty((rows,) if rows > 1 else (), dtype=torch.float64)
    found = Selected(x.new_empty(rows * k, dtype=torch.int32), x.new_empty(rows * k), total)
    options = {"block": ALONE, "num_warps": ALONE // 512}
    numel = x.numel() // rows
    launch(_select_alone, (1, rows), x, x, add, threshold, *found, k, numel, **options)
    return found


# Kernels -----------------------------------------------------------------------------------------
#
# Selection in consecutive tensors of equal length takes as many launches as in one tensor. The
# second number of a program is the number of its tensor.
#
# Offsets up to the start of a block have 64 bits: beyond the last element they may exceed 2**31.
#
# Kernels that list elements must not be told that their memory is aligned: they would read four
# elements in a thread, but write single ones, and for that exchange all between threads.


@triton.jit
def _accumulate(x, add, squares, numel, chunk, block: tl.constexpr):
    program = tl.program_id(0)
    begin, length = _bounds(program, numel, chunk)
    lanes = tl.arange(0, block)
    total = tl.zeros((block,), tl.float64)
    for start in range(0, length, block):
        value = _added(x, add, begin + start, lanes, lanes < length - start)
        wide = value.to(tl.float64)
        total += wide * wide
    tl.store(squares + program, tl.sum(total))


@triton.jit(do_not_specialize=["rank", "numel"])
def _sample(x, add, counts, rank, numel, sample: tl.constexpr, cleared: tl.constexpr):
    """Write the key of the element of this rank in a sample of x + add, rounded down."""
    own = tl.program_id(1).to(tl.int64) * numel
    x += own
    if add is not None:
        add += own
    counts += tl.program_id(1) * cleared
    lanes = tl.arange(0, sample)
    group = (lanes // _NEIGHBOURS).to(tl.int64)
    step = tl.maximum(numel // (sample // _NEIGHBOURS), 1)
    # Groups have unequal distances: else they could all be in the same columns of a matrix.
    moved = group * 40503 % tl.maximum(step // _NEIGHBOURS, 1) * _NEIGHBOURS
    at = group * step + moved + lanes % _NEIGHBOURS
    inside = at < numel
    value = tl.load(x + at, mask=inside, other=0.0)
    if add is not None:
        value += tl.load(add + at, mask=inside, other=0.0)
    key = tl.where(inside, _key(value), -1)
    least = tl.full((), 0, tl.int32)
    for i in range(19):  # the remaining bits would change the key by less than 1 in 2,000
        larger = least + (1 << (30 - i))
        least = tl.where(tl.sum((key >= larger).to(tl.int32)) >= rank, larger, least)
    slots = tl.arange(0, cleared)
    tl.store(counts + slots, tl.where(slots == _LEAST, least, 0))


@triton.jit(do_not_specialize=["k", "numel", "x", "add"])
def _gather(
    x, positions, values, listed, counts, k, numel, chunk, capacity, add, squares,
    block: tl.constexpr,
):  # fmt: skip
    own = tl.program_id(1).to(tl.int64) * numel
    x += own
    if add is not None:
        add += own
    positions, values, listed, counts = _own_lists(positions, values, listed, counts, capacity)
    squares += tl.program_id(1) * tl.num_programs(0)
    program = tl.program_id(0)
    begin, length = _bounds(program, numel, chunk)
    region = program.to(tl.int64) * capacity
    least = tl.load(counts + _LEAST)
    lanes = tl.arange(0, block)
    count = tl.full((), 0, tl.int32)
    total = tl.zeros((block,), tl.float64)
    for start in range(0, length, block):
        inside = lanes < length - start
        value = _added(x, add, begin + start, lanes, inside)
        wide = value.to(tl.float64)
        total += wide * wide
        keep = inside & (_key(value) >= least)
        slot = count + tl.cumsum(keep.to(tl.int32)) - 1
        fits = keep & (slot < capacity)
        at = (begin + start).to(tl.int32) + lanes
        tl.store(positions + region + slot, at, mask=fits)
        tl.store(values + region + slot, value, mask=fits)
        count += tl.sum(keep.to(tl.int32))
    tl.store(squares + program, tl.sum(total))
    tl.store(listed + program, count)
    tl.atomic_add(counts + _LISTED, count, sem="relaxed")


@triton.jit(do_not_specialize=["k", "numel", "digit"])
def _digit(
    x, positions, values, listed, counts, k, numel, chunk, capacity, digit,
    block: tl.constexpr,
):  # fmt: skip
    x += tl.program_id(1).to(tl.int64) * numel
    positions, values, listed, counts = _own_lists(positions, values, listed, counts, capacity)
    source, _, _, length = _list(x, positions, values, listed, counts, k, numel, chunk, capacity)
    first, _ = _kth_largest(counts, k, digit)
    bins, lanes = tl.arange(0, _BINS), tl.arange(0, block)
    shift, bits = _place(digit)
    peak = tl.full((), 0, tl.int32)
    histogram = tl.zeros((_BINS,), tl.int32)
    for start in range(0, length, block):
        key = _key(tl.load(source + start + lanes, mask=lanes < length - start, other=0.0))
        # A search ends in bin 0 if it ends in no other bin, whatever the count of bin 0. So other
        # keys, and lanes beyond the list, may be counted there.
        here = key >> (shift + bits) == first
        histogram += tl.histogram(tl.where(here, key >> shift & ((1 << bits) - 1), 0), _BINS)
        peak = tl.maximum(peak, tl.max(key))
    tl.atomic_add(counts + digit * _BINS + bins, histogram, mask=histogram > 0, sem="relaxed")
    tl.atomic_max(counts + _PEAK, peak, sem="relaxed")


@triton.jit(do_not_specialize=["k", "numel"])
def _count(
    x, positions, values, listed, counts, k, numel, chunk, capacity,
    threshold, above, equal, block: tl.constexpr,
):  # fmt: skip
    x += tl.program_id(1).to(tl.int64) * numel
    positions, values, listed, counts = _own_lists(positions, values, listed, counts, capacity)
    source, _, _, length = _list(x, positions, values, listed, counts, k, numel, chunk, capacity)
    smallest, _ = _smallest(counts, k, threshold)
    lanes = tl.arange(0, block)
    larger, same = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    for start in range(0, length, block):
        inside = lanes < length - start
        key = _key(tl.load(source + start + lanes, mask=inside, other=0.0))
        larger += tl.sum((inside & (key > smallest)).to(tl.int32))
        same += tl.sum((inside & (key == smallest)).to(tl.int32))
    at = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    tl.store(above + at, larger)
    tl.store(equal + at, same)


@triton.jit(do_not_specialize=["k", "numel", "x", "positions", "values"])
def _take(
    x, positions, values, listed, counts, k, numel, chunk, capacity,
    threshold, above, equal, squares, indices, taken, total,
    programs: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    x += tl.program_id(1).to(tl.int64) * numel
    positions, values, listed, counts = _own_lists(positions, values, listed, counts, capacity)
    row, first = tl.program_id(1).to(tl.int64), tl.program_id(1) * tl.num_programs(0)
    above += first
    equal += first
    squares += first
    indices += row * k
    taken += row * k
    total += row
    program = tl.program_id(0)
    source, begin, whole, length = _list(
        x, positions, values, listed, counts, k, numel, chunk, capacity
    )
    region = program.to(tl.int64) * capacity
    smallest, wanted = _smallest(counts, k, threshold)
    each = tl.arange(0, programs)
    larger = tl.load(above + each, mask=each < tl.num_programs(0), other=0)
    same = tl.load(equal + each, mask=each < tl.num_programs(0), other=0)
    ties = tl.sum(tl.where(each < program, same, 0))  # in programs before this one
    used = tl.sum(tl.where(each < program, larger, 0)) + tl.minimum(ties, wanted)
    lanes = tl.arange(0, block)
    for start in range(0, length, block):
        inside = lanes < length - start
        value = tl.load(source + start + lanes, mask=inside, other=0.0)
        at = (begin + start).to(tl.int32) + lanes
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


@triton.jit(do_not_specialize=["k", "numel", "x", "add"])
def _select_alone(x, add, threshold, indices, taken, total, k, numel, block: tl.constexpr):
    own = tl.program_id(1).to(tl.int64) * numel
    x += own
    if add is not None:
        add += own
    row = tl.program_id(1).to(tl.int64)
    indices += row * k
    taken += row * k
    total += row
    lanes = tl.arange(0, block)
    norm = tl.zeros((block,), tl.float64)
    peak = tl.full((), 0, tl.int32)
    for start in range(0, numel, block):
        value = _added(x, add, start, lanes, lanes < numel - start)
        peak = tl.maximum(peak, tl.max(_key(value)))
        wide = value.to(tl.float64)
        norm += wide * wide
    tl.store(total, tl.sum(norm))
    tl.debug_barrier()  # so that all threads of the program see the sum
    smallest, wanted = _kth_of(x, numel, k, block)
    if threshold is not None:
        smallest, wanted = _reached(smallest, wanted, threshold, peak)
    ties, used = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    for start in range(0, numel, block):
        inside = lanes < numel - start
        value = tl.load(x + start + lanes, mask=inside, other=0.0)
        key = _key(value)
        tie = (inside & (key == smallest)).to(tl.int32)
        take = inside & (key > smallest) | (tie > 0) & (ties + tl.cumsum(tie) <= wanted)
        slot = used + tl.cumsum(take.to(tl.int32)) - 1
        tl.store(indices + slot, start + lanes, mask=take)
        tl.store(taken + slot, value, mask=take)
        ties += tl.sum(tie)
        used += tl.sum(take.to(tl.int32))
    if threshold is not None:
        for first in range(used, k, block):
            tl.store(indices + first + lanes, lanes * 0 + numel, mask=lanes < k - first)
            tl.store(taken + first + lanes, lanes * 0.0, mask=lanes < k - first)


# Functions of several kernels --------------------------------------------------------------------


@triton.jit
def _own_lists(positions, values, listed, counts, capacity):
    """Pointers to the lists and the numbers of the program's tensor."""
    row, programs = tl.program_id(1).to(tl.int64), tl.num_programs(0)
    start = row * programs * capacity
    return positions + start, values + start, listed + row * programs, counts + row * _NUMBERS


@triton.jit
def _bounds(program, numel, chunk):
    """(start, length) of the program's chunk."""
    begin = program.to(tl.int64) * chunk
    return begin, tl.minimum(numel - begin, chunk).to(tl.int32)


@triton.jit
def _added(x, add, start, lanes, inside):
    """x += add for the elements `lanes` from `start` on; the sum, and 0 where not `inside`."""
    value = tl.load(x + start + lanes, mask=inside, other=0.0)
    if add is not None:
        value += tl.load(add + start + lanes, mask=inside, other=0.0)
        tl.store(x + start + lanes, value, mask=inside)
    return value


@triton.jit
def _list(x, positions, values, listed, counts, k, numel, chunk, capacity):
    """The elements that the program reads: pointer to the values, start of the program's chunk,
    whether they are the list (False: the whole chunk, because the list is incomplete), length."""
    program = tl.program_id(0)
    begin, all_of_chunk = _bounds(program, numel, chunk)
    length = tl.load(listed + program)
    whole = (length <= capacity) & (tl.load(counts + _LISTED) >= k)
    if whole:
        source = values + program.to(tl.int64) * capacity
    else:
        source = x + begin
        length = all_of_chunk
    return source, begin, whole, length


@triton.jit
def _key(value):
    """The bits of the magnitude; the same for all NaN, next to those of infinity."""
    return tl.minimum(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, _INFINITY + 1)


@triton.jit
def _place(digit):
    """(lowest bit, number of bits) of this digit (0 to 3) of a key. Keys have 31 bits, so the last
    digit has 7."""
    shift = tl.maximum(23 - 8 * digit, 0)
    return shift, 31 - 8 * digit - shift


@triton.jit
def _descend(count, rank):
    """(bin of the element of this rank, its rank in this bin). Ranks count from the largest, from 1
    on. count: number of elements in each bin."""
    above = tl.sum(count) - tl.cumsum(count)  # in all later bins
    found = tl.sum((above >= rank).to(tl.int32))
    return found, rank - tl.max(tl.where(above < rank, above, 0))


@triton.jit
def _kth_largest(counts, k, digits):
    """(the first `digits` digits of the k-th largest key, from their histograms; the rank of this
    key among the keys that begin with these digits, from 1 on)."""
    bins = tl.arange(0, _BINS)
    key = tl.full((), 0, tl.int32)
    rank = k
    for digit in range(digits):
        found, rank = _descend(tl.load(counts + digit * _BINS + bins), rank)
        _, bits = _place(digit)
        key = (key << bits) + found
    return key, rank


@triton.jit
def _kth_of(x, length, k, block: tl.constexpr):
    """(key of the k-th largest of `length` elements from x on, found bit by bit; its rank among the
    elements with this key, from 1 on). Run by one program."""
    lanes = tl.arange(0, block)
    smallest, above = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    for i in range(31):
        larger = smallest + (1 << (30 - i))
        reach = tl.zeros((block,), tl.int32)
        for start in range(0, length, block):
            inside = lanes < length - start
            key = _key(tl.load(x + start + lanes, mask=inside, other=0.0))
            reach += (inside & (key >= larger)).to(tl.int32)
        count = tl.sum(reach)
        smallest = tl.where(count >= k, larger, smallest)
        above = tl.where(count >= k, above, count)
    return smallest, k - above


@triton.jit
def _smallest(counts, k, threshold):
    """(smallest key that is taken, number of elements with this key that are taken)."""
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
