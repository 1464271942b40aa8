"""Top-k in each segment of a tensor: how all segments are selected from at once.

The host selects from each long segment by itself, as from a tensor. It sorts all short segments at
once, by keys of 64 bits. A key begins with the number of the segment, and ends with the place of
the element in the segment. Between them is the magnitude, so that larger magnitudes come first.
Without kernels for segments a device sorts all segments: first by magnitude, then by segment.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from compressors.kernels.blocks import Array

_PLACE_BITS, _MAGNITUDE_BITS = 11, 31
_SHORT = 1 << _PLACE_BITS
"""Elements of the longest segment that the host sorts. (Sorting takes 30 ns an element, and to
select from a segment by itself takes 30 us at least.)"""
_MOST = 1 << (64 - _MAGNITUDE_BITS - _PLACE_BITS)
"""The largest number of segments that are sorted at once."""


@dataclass(frozen=True, eq=False)
class Segments:
    """Segments in a tensor, and the number of elements that are selected from each.

    lengths, counts: of each segment (int64). long: the numbers of the segments that the host
    selects from one by one."""

    lengths: NDArray[np.int64]
    counts: NDArray[np.int64]

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """The position of each segment's first element in the tensor."""
        return self.lengths.cumsum() - self.lengths

    @cached_property
    def firsts(self) -> NDArray[np.int64]:
        """The place of each segment's first selected element among all selected elements."""
        return self.counts.cumsum() - self.counts

    @cached_property
    def long(self) -> list[tuple[int, int, int, int]]:
        """(start, stop, count, first) of each long segment."""
        long = np.setdiff1d(np.arange(len(self.lengths)), self._short)
        stops = self.starts + self.lengths
        each = (self.starts, stops, self.counts, self.firsts)
        return [*zip(*(numbers[long].tolist() for numbers in each), strict=True)]

    @cached_property
    def short(self) -> ShortSegments | None:
        """The short segments; None if there is none."""
        if not len(self._short):
            return None
        return ShortSegments(self, self._short)

    @cached_property
    def _short(self) -> NDArray[np.int64]:
        return np.flatnonzero(self.lengths <= _SHORT)[:_MOST]


@lru_cache(maxsize=256)
def segments_of(lengths: tuple[int, ...], counts: tuple[int, ...]) -> Segments:
    return Segments(np.array(lengths, np.int64), np.array(counts, np.int64))


class ShortSegments:
    """The short segments of a tensor.

    at: positions of their elements in the tensor. out: places of their selected elements among
    those of all segments."""

    def __init__(self, of: Segments, short: NDArray[np.int64]) -> None:
        lengths, counts = of.lengths[short], of.counts[short]
        starts, rank = of.starts[short], places(counts)
        self.at, self._keys = _elements(tuple(starts.tolist()), tuple(lengths.tolist()))
        self.out = np.repeat(of.firsts[short], counts) + rank
        before = lengths.cumsum() - lengths
        self._ranks = np.repeat(before, counts) + rank  # of the selected, once all are sorted
        self._starts = np.repeat(starts, counts)

    def select(self, magnitude: Array) -> NDArray[np.int64]:
        """Ascending positions, in the tensor, of the largest elements of each segment. magnitude:
        of the elements `at`."""
        if magnitude.dtype == np.float32:
            # The bits of nonnegative numbers, read as integers, have the order of the numbers.
            smaller = np.uint32(2**_MAGNITUDE_BITS - 1) - magnitude.view(np.uint32)
            keys = smaller.astype(np.uint64)
            keys <<= np.uint64(_PLACE_BITS)
            keys |= self._keys
            keys.sort()  # `argsort` takes seven times as long
            places_of = keys.take(self._ranks) & np.uint64(_SHORT - 1)
            found = self._starts + places_of.astype(np.int64)
        else:
            segment = self._keys >> np.uint64(_MAGNITUDE_BITS + _PLACE_BITS)
            found = self.at.take(np.lexsort((-magnitude, segment)).take(self._ranks))
        found.sort()
        return found


@lru_cache(maxsize=64)
def _elements(
    starts: tuple[int, ...], lengths: tuple[int, ...]
) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    """For each element of some segments its position in the tensor, and its key without magnitude.
    They are the same for all numbers of selected elements."""
    sizes = np.array(lengths, np.int64)
    place = places(sizes)
    keys = np.repeat(np.arange(len(sizes), dtype=np.uint64), sizes)
    keys <<= np.uint64(_MAGNITUDE_BITS + _PLACE_BITS)
    keys |= place.astype(np.uint64)
    return np.repeat(np.array(starts, np.int64), sizes) + place, keys


def places(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """0, 1, ... in each of consecutive runs with these lengths."""
    starts = lengths.cumsum() - lengths
    return np.arange(int(lengths.sum())) - np.repeat(starts, lengths)


def positions_by_sorting(magnitude: Tensor, of: Tensor, ranks: Tensor) -> Tensor:
    """Ascending positions (int32) of the selected elements, on any device. of: the number of each
    element's segment. ranks: places of the selected elements once all are sorted."""
    order = magnitude.sort(descending=True, stable=True).indices
    by_segment = of.index_select(0, order).sort(stable=True).indices
    return order.index_select(0, by_segment.index_select(0, ranks)).sort().values.int()
