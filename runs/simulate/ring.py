"""The sum over ranks, added up in the order in which a ring all-reduce adds."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

SEGMENT = 1 << 20
"""Bytes of gloo's largest segment."""


def ring_sum(tensors: Sequence[Tensor]) -> None:
    """Sum tensors of one shape, a rank's each, into all of them.

    Floating-point addition is not associative. A ring all-reduce (Patarasu and Yuan 2009) gives
    each rank a chunk to finish, whose sum starts at the neighbour and comes round to it; the
    chunks are cut as gloo cuts them, so that a simulated run is a real one to the bit.
    """
    flat = [tensor.view(-1) for tensor in tensors]
    ranks = len(flat)
    size = _chunk(flat[0].numel(), flat[0].element_size(), ranks)
    for last in range(ranks):
        parts = [each[last * size : (last + 1) * size] for each in flat]
        total = parts[last - 1].clone()
        for hop in range(2, ranks + 1):
            total.add_(parts[last - hop])
        for part in parts:
            part.copy_(total)


def _chunk(numel: int, itemsize: int, ranks: int) -> int:
    """Elements in a rank's chunk (the last ones may be short or empty): a whole number of
    segments, at least two, all of one size."""
    nbytes = numel * itemsize
    largest = itemsize * max(1, SEGMENT // itemsize)
    segments = _up(max(-(-nbytes // largest), 2 * ranks), ranks)
    segment = _up(-(-nbytes // segments), itemsize)
    return segments // ranks * segment // itemsize


def _up(count: int, unit: int) -> int:
    """`count` rounded up to a multiple of `unit`."""
    return -(-count // unit) * unit
