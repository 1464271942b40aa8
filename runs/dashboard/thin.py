"""Fewer points that tell the same story: what one row of a screen can show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Switch:
    """A move from one CF to another, or a judgement (both the same).

    others: how many more there were close by, that are not shown one by one.
    """

    step: int
    cf_before: float
    cf: float
    reason: str
    others: int = 0

    @property
    def moves(self) -> bool:
        return self.cf != self.cf_before


def changes(steps: Floats, cfs: Floats, switches: Sequence[Switch]) -> tuple[Floats, Floats]:
    """Steps at which the CF changes, and to what; the first is where the run begins.

    steps, cfs: some of the steps, with the CF sent. TensorBoard keeps a random thousand of them,
    so short stretches, perhaps also the first, are known from the switches only.
    """
    known = dict(zip(steps.tolist(), cfs.tolist(), strict=True))
    known |= {s.step - 1.0: s.cf_before for s in switches[:1] if s.step <= steps[0]}
    known |= {float(switch.step): switch.cf for switch in switches if switch.moves}
    at = np.array(sorted(known))
    to = np.array([known[step] for step in at])
    new = np.ones(len(at), dtype=bool)
    new[1:] = to[1:] != to[:-1]
    return at[new], to[new]


def longest(at: Floats, to: Floats, end: float, bins: int) -> tuple[Floats, Floats]:
    """The same pieces if there are no more than `bins`; else equally long ones, each with the CF
    that was in use for most of it. `end`: where the last piece ends."""
    if len(at) <= bins:
        return at, to
    edges = np.linspace(at[0], end, bins + 1)
    cuts = np.union1d(edges, at)
    lengths = np.diff(cuts)
    cf = to[np.searchsorted(at, cuts[:-1], side="right") - 1]
    which = np.clip(np.searchsorted(edges, cuts[:-1], side="right") - 1, 0, bins - 1)
    values, index = np.unique(cf, return_inverse=True)
    spent = np.zeros((bins, len(values)))
    np.add.at(spent, (which, index), lengths)
    most = values[spent.argmax(axis=1)]
    new = np.ones(bins, dtype=bool)
    new[1:] = most[1:] != most[:-1]
    return edges[:-1][new], most[new]


def marks(switches: Sequence[Switch], first: float, end: float, bins: int) -> list[Switch]:
    """The switches if there are no more than `bins`; else one for each of `bins` equal parts of
    [first, end] that has any (a move, if there was one), which counts the others."""
    if len(switches) <= bins:
        return list(switches)
    width = max(end - first, 1) / bins
    groups: dict[int, list[Switch]] = {}
    for switch in switches:
        groups.setdefault(int((switch.step - first) / width), []).append(switch)
    kept = []
    for group in groups.values():
        shown = next((switch for switch in group if switch.moves), group[0])
        others = sum(switch.others + 1 for switch in group) - 1
        kept.append(Switch(shown.step, shown.cf_before, shown.cf, shown.reason, others))
    return kept


def evenly(count: int, most: int) -> NDArray[np.intp]:
    """Indices of at most `most` of `count` points, the first and the last among them."""
    if count <= most:
        return np.arange(count)
    return np.unique(np.linspace(0, count - 1, most).round().astype(np.intp))


def held(at: Floats, values: Floats, steps: Floats) -> Floats:
    """The last value at or before each of `steps`; nan before the first."""
    index = np.searchsorted(at, steps, side="right") - 1
    return np.where(index >= 0, values[np.maximum(index, 0)], np.nan)


def held_within(at: Floats, values: Floats, steps: Floats, since: Floats) -> Floats:
    """The same, but nan where the last value is from before `since`, one for each step."""
    return np.where(held(at, at, steps) >= since, held(at, values, steps), np.nan)
