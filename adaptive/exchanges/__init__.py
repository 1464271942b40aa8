"""How the payloads of all ranks become the mean gradient: one file for each way.

`make_strategy` says which ways a compressor allows; `adaptive.exchanges.choice` chooses among them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from adaptive.bucket_step import BucketStep
from adaptive.exchanges.gathered import gathered
from adaptive.exchanges.in_rounds import in_rounds
from adaptive.exchanges.pipeline import Rounds
from adaptive.exchanges.sharded import sharded
from adaptive.exchanges.shared_indices import shared_indices
from adaptive.exchanges.summed import summed
from compressors import Compressor
from compressors.grace import GraceCompressor
from compressors.rounds import RoundsCompressor
from compressors.sparsifier import Sparsifier

EXCHANGES = (
    "auto",
    "all_reduce",
    "all_gather",
    "sharded",
    "shared_indices",
    "shared_indices_by_energy",
)


@dataclass(frozen=True)
class Strategy:
    """name: one of EXCHANGES. collectives: that it issues a bucket.

    sharded: units must not cross the borders of the ranks' shards. by_energy: the rank with the
        largest error-fed gradient chooses for all, not one after the other.
    """

    name: str
    start: Callable[[BucketStep], Rounds]
    collectives: int
    sharded: bool = False
    by_energy: bool = False


GATHERED = Strategy("all_gather", gathered, 1)
SUMMED = Strategy("all_reduce", summed, 1)
SHARDED = Strategy("sharded", sharded, 2, sharded=True)
SHARED_INDICES = Strategy("shared_indices", shared_indices, 2)
BY_ENERGY = Strategy("shared_indices_by_energy", shared_indices, 2, by_energy=True)


def strategies(base: Compressor) -> list[Strategy]:
    """The ways open to a compressor, the one that suits it on any network first."""
    if isinstance(base, RoundsCompressor):
        return [Strategy("all_reduce", partial(in_rounds, compressor=base), base.rounds_count)]
    if base.linear:
        return [SUMMED, GATHERED, SHARDED] if base.error_feedback else [SUMMED, GATHERED]
    if isinstance(base, GraceCompressor):  # a second compression would have a ctx of its own
        return [GATHERED]
    ways = [GATHERED, SHARDED]
    if isinstance(base, Sparsifier) and base.values.lossless:
        ways += [SHARED_INDICES, BY_ENERGY]
    return ways


def make_strategy(base: Compressor, exchange: str) -> Strategy:
    """The way called `exchange`; ValueError if the compressor does not allow it."""
    ways = strategies(base)
    for way in ways:
        if way.name == exchange:
            return way
    accepted = ", ".join(["auto", *(way.name for way in ways)])
    raise ValueError(f"exchange must be one of {accepted} for base {base.name!r}; got {exchange!r}")


def check_exchange(exchange: str, base: Compressor) -> str:
    """`exchange` if it is "auto" or a way that `base` allows; ValueError otherwise."""
    return exchange if exchange == "auto" else make_strategy(base, exchange).name
