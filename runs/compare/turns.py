"""Who trains when: the order that shares a busy machine's noise out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from runs.compare.contender import Contender
from runs.compare.options import Comparison


@dataclass(frozen=True)
class Turn:
    """A contender's run of a seed is to be brought to `until` steps."""

    number: int
    contender: Contender
    seed: int
    until: int


def count_turns(comparison: Comparison) -> int:
    """How many turns there are."""
    steps = (comparison.steps_of(contender) for contender in comparison.contenders)
    return len(comparison.seeds) * sum(ceil(count / comparison.slice) for count in steps)


def turns(comparison: Comparison) -> Iterator[Turn]:
    """Seed after seed; within a seed a slice of each contender, then the next slice.

    Who begins goes round, since the machine may be slower or faster at the start of a round.
    """
    everyone = comparison.contenders
    longest = max(map(comparison.steps_of, everyone))
    number = 0
    for seed_number, seed in enumerate(comparison.seeds):
        for i in range(ceil(longest / comparison.slice)):
            first = (seed_number + i) % len(everyone)
            for contender in (*everyone[first:], *everyone[:first]):
                steps = comparison.steps_of(contender)
                if i * comparison.slice < steps:
                    number += 1
                    until = min(steps, (i + 1) * comparison.slice)
                    yield Turn(number, contender, seed, until)
