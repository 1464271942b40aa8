"""Exact top-k in each segment of a tensor, without sorting: a radix select as in `select.py`, with
histograms for each segment. The number of launches does not grow with the number of segments.

Each program has a tile: neighbouring elements of one segment. No element is listed, because a list
for each segment would be as long as the tensor; so each kernel reads the tensor once:

    first       x += add, squared norms, histogram of the first digit
    digit       (three times) histogram of the next digit
    count       how many elements of a tile are above the segment's k-th largest, how many equal it
    take        writes the selected elements out, in the order of their indices
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from compressors.kernels.blocks import Selected
from compressors.kernels.segments import places, segments_of
from compressors.kernels.triton.launching import launch
from compressors.kernels.triton.select import _BINS, _DIGITS, _added, _key, _kth_largest, _place

TILE = 2048
"""Elements of a program."""

_WARPS = 8


@lru_cache(maxsize=256)
def _tiles(
    lengths: tuple[int, ...], counts: tuple[int, ...], tile: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """(tiles, k). tiles: (4, tiles), int32: the number of each tile's segment, its first element,
    its length, and the number of its segment's first tile. k: of each segment, int32."""
    segments = segments_of(lengths, counts)
    each = -(-segments.lengths // tile)  # tiles of each segment
    of, place = np.repeat(np.arange(len(each)), each), places(each)
    left = segments.lengths[of] - place * tile
    first = (each.cumsum() - each)[of]
    rows = of, segments.starts[of] + place * tile, np.minimum(left, tile), first
    tiles = torch.from_numpy(np.stack(rows).astype(np.int32))
    k = torch.from_numpy(segments.counts.astype(np.int32))
    return tiles.to(device, non_blocking=True), k.to(device, non_blocking=True)


def select_segments(
    x: Tensor,
    lengths: tuple[int, ...],
    counts: tuple[int, ...],
    add: Tensor | None,
    tile: int = TILE,
) -> Selected:
    """As `Kernels.select_segments`."""
    tiles, k = _tiles(lengths, counts, tile, x.device)
    grid, most = (tiles.shape[1],), sum(counts)
    found = k.new_zeros(len(lengths) * _DIGITS.value * _BINS.value)  # histograms
    squares = x.new_empty(grid, dtype=torch.float64)
    above, equal, wanted = k.new_empty(3, *grid).unbind()
    options: dict[str, Any] = {"block": tile, "num_warps": _WARPS}
    launch(_first, grid, x, x, add, *tiles[:3], found, squares, **options)
    for digit in range(1, _DIGITS.value):
        launch(_digit, grid, x, x, *tiles[:3], k, found, digit, **options)
    launch(_count, grid, x, x, *tiles[:3], k, found, above, equal, wanted, **options)
    # Of the elements that equal the k-th largest of a segment, the first ones are taken.
    before = equal.cumsum(0, dtype=torch.int32).sub_(equal)
    ties = before - before.index_select(0, tiles[3])
    taken = torch.minimum(wanted.sub(ties).clamp_(min=0), equal).add_(above)
    used = taken.cumsum(0, dtype=torch.int32).sub_(taken)
    indices, values = k.new_empty(most), x.new_empty(most)
    launch(_take, grid, x, x, *tiles[:3], k, found, ties, used, indices, values, **options)
    return Selected(indices, values, squares.sum())


@triton.jit
def _first(x, add, of, begins, lengths, found, squares, block: tl.constexpr):
    program = tl.program_id(0)
    begin, length = tl.load(begins + program).to(tl.int64), tl.load(lengths + program)
    lanes, bins = tl.arange(0, block), tl.arange(0, _BINS)
    inside = lanes < length
    value = _added(x, add, begin, lanes, inside)
    wide = value.to(tl.float64)
    tl.store(squares + program, tl.sum(wide * wide))
    shift, _ = _place(0)
    # A search ends in bin 0 if it ends in no other bin, whatever the count of bin 0. So lanes
    # beyond the tile, and in `_digit` other keys, may be counted there.
    histogram = tl.histogram(tl.where(inside, _key(value) >> shift, 0), _BINS)
    start = tl.load(of + program).to(tl.int64) * _DIGITS * _BINS
    tl.atomic_add(found + start + bins, histogram, mask=histogram > 0, sem="relaxed")


@triton.jit(do_not_specialize=["digit"])
def _digit(x, of, begins, lengths, k, found, digit, block: tl.constexpr):
    key, inside, _, start, wanted = _tile(x, of, begins, lengths, k, block)
    first, _ = _kth_largest(found + start, wanted, digit)
    bins = tl.arange(0, _BINS)
    shift, bits = _place(digit)
    here = inside & (key >> (shift + bits) == first)
    histogram = tl.histogram(tl.where(here, key >> shift & ((1 << bits) - 1), 0), _BINS)
    at = found + start + digit * _BINS + bins
    tl.atomic_add(at, histogram, mask=histogram > 0, sem="relaxed")


@triton.jit
def _count(x, of, begins, lengths, k, found, above, equal, wanted, block: tl.constexpr):
    program = tl.program_id(0)
    key, inside, _, start, count = _tile(x, of, begins, lengths, k, block)
    smallest, rank = _kth_largest(found + start, count, _DIGITS)
    tl.store(above + program, tl.sum((inside & (key > smallest)).to(tl.int32)))
    tl.store(equal + program, tl.sum((inside & (key == smallest)).to(tl.int32)))
    tl.store(wanted + program, rank)


@triton.jit(do_not_specialize=["x", "indices", "values"])
def _take(
    x, of, begins, lengths, k, found, ties, used, indices, values, block: tl.constexpr
):  # fmt: skip
    program = tl.program_id(0)
    lanes = tl.arange(0, block)
    key, inside, value, start, count = _tile(x, of, begins, lengths, k, block)
    smallest, rank = _kth_largest(found + start, count, _DIGITS)
    tie = (inside & (key == smallest)).to(tl.int32)
    earlier = tl.load(ties + program)
    take = inside & (key > smallest) | (tie > 0) & (earlier + tl.cumsum(tie) <= rank)
    slot = tl.load(used + program) + tl.cumsum(take.to(tl.int32)) - 1
    tl.store(indices + slot, tl.load(begins + program) + lanes, mask=take)
    tl.store(values + slot, value, mask=take)


@triton.jit
def _tile(x, of, begins, lengths, k, block: tl.constexpr):
    """(keys, which lanes are inside, values, start of the segment's histograms, its k)."""
    program = tl.program_id(0)
    segment, begin = tl.load(of + program), tl.load(begins + program).to(tl.int64)
    lanes = tl.arange(0, block)
    inside = lanes < tl.load(lengths + program)
    value = tl.load(x + begin + lanes, mask=inside, other=0.0)
    start = segment.to(tl.int64) * _DIGITS * _BINS
    return _key(value), inside, value, start, tl.load(k + segment)
