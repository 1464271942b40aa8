"""Which layer gets which CF: the most kept energy for the same bytes.

The idea is L-GreCo's (Alimohammadi, Markov, Frantar, Alistarh, 2023), which solves it by dynamic
programming under an error budget.

Each layer has a few options, bytes against kept energy. On the upper concave hull of these points
every further byte keeps less than the one before, so it is best to spend the next bytes where they
keep most: greedy, and exact up to the last step that does not fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple


class Option(NamedTuple):
    """A layer at `cf`: payload bytes, and the energy of its gradient that is kept."""

    cf: float
    nbytes: float
    kept: float


class Allocation(NamedTuple):
    """The CF of every layer, their bytes and kept energy together."""

    cfs: dict[str, float]
    nbytes: float
    kept: float


def allocate(options: Mapping[str, Sequence[Option]], budget: float) -> Allocation:
    """The options, one a layer, that keep most for at most `budget` bytes; the cheapest of each
    layer if not even those fit. Each layer has at least one option; numbers are finite."""
    hulls = {name: hull(of_layer) for name, of_layer in options.items()}
    taken = {name: points[0] for name, points in hulls.items()}
    left = budget - sum(option.nbytes for option in taken.values())
    steps = [
        ((after.kept - before.kept) / (after.nbytes - before.nbytes), name, place)
        for name, points in hulls.items()
        for place, (before, after) in enumerate(pairwise(points))
    ]
    for _, name, place in sorted(steps, key=lambda step: (-step[0], step[1], step[2])):
        before, after = hulls[name][place : place + 2]
        if taken[name] is before and after.nbytes - before.nbytes <= left:
            left -= after.nbytes - before.nbytes
            taken[name] = after
    chosen = taken.values()
    return Allocation(
        {name: option.cf for name, option in taken.items()},
        sum(option.nbytes for option in chosen),
        sum(option.kept for option in chosen),
    )


def hull(options: Sequence[Option]) -> list[Option]:
    """The upper concave hull, from the cheapest option on: bytes and kept energy both grow."""
    points: list[Option] = []
    for option in sorted(options, key=lambda each: (each.nbytes, -each.kept, each.cf)):
        if points and option.kept <= points[-1].kept:
            continue
        while len(points) > 1 and not _bends_down(points[-2], points[-1], option):
            points.pop()
        points.append(option)
    return points


def _bends_down(a: Option, b: Option, c: Option) -> bool:
    """Going from a over b to c, a byte keeps no more after b than before."""
    return (b.kept - a.kept) * (c.nbytes - b.nbytes) >= (c.kept - b.kept) * (b.nbytes - a.nbytes)
