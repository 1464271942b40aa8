"""Which layer gets which CF: the most worth for the same bytes.

The idea is L-GreCo's (Alimohammadi, Markov, Frantar, Alistarh, 2023), which solves it by dynamic
programming under an error budget.

Each layer has a few options, bytes against worth. On the upper concave hull of these points every
further byte adds less than the one before, so it is best to spend the next bytes where they add
most: greedy, and exact up to the last step that does not fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple


class Option(NamedTuple):
    """A layer at `cf`: payload bytes, and what that is worth; may be negative."""

    cf: float
    nbytes: float
    worth: float


class Allocation(NamedTuple):
    """The CF of every layer, and the sums of their bytes and worth."""

    cfs: dict[str, float]
    nbytes: float
    worth: float


def allocate(options: Mapping[str, Sequence[Option]], budget: float) -> Allocation:
    """The options, one a layer, that are worth most for at most `budget` bytes; the cheapest of
    each layer if not even those fit. Each layer has at least one option; numbers are finite."""
    hulls = {name: hull(of_layer) for name, of_layer in options.items()}
    taken = {name: points[0] for name, points in hulls.items()}
    left = budget - sum(option.nbytes for option in taken.values())
    steps = [
        ((after.worth - before.worth) / (after.nbytes - before.nbytes), name, place)
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
        sum(option.worth for option in chosen),
    )


def hull(options: Sequence[Option]) -> list[Option]:
    """The upper concave hull, from the cheapest option on: bytes and worth both grow."""
    points: list[Option] = []
    for option in sorted(options, key=lambda each: (each.nbytes, -each.worth, each.cf)):
        if points and option.worth <= points[-1].worth:
            continue
        while len(points) > 1 and not _bends_down(points[-2], points[-1], option):
            points.pop()
        points.append(option)
    return points


def _bends_down(a: Option, b: Option, c: Option) -> bool:
    """Going from a over b to c, a byte adds no more after b than before."""
    before, after = b.worth - a.worth, c.worth - b.worth
    return before * (c.nbytes - b.nbytes) >= after * (b.nbytes - a.nbytes)
