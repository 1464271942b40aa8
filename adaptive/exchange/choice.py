"""Which exchange a bucket takes: what a compressor allows, and what is fastest on the network."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from adaptive.exchange.collectives import Exchange
from adaptive.exchange.link import LinkCost
from adaptive.exchange.strategies import (
    Outgoing,
    Rounds,
    gathered,
    in_rounds,
    sharded,
    summed,
    voted_indices,
)
from adaptive.state import SavedPart
from compressors import Compressor
from compressors.rounds import RoundsCompressor
from compressors.sparsifier import Sparsifier
from policies.state import read, require

WORTH = 0.9
"""Compressing twice keeps less of the gradient, so it must save at least a tenth of the time."""


@dataclass(frozen=True)
class Strategy:
    """A strategy is one way in which payloads become the mean.

    start: begins the exchange of one bucket. collectives: that it issues a bucket. takes_sums: it
    compresses error-fed gradients itself. sharded: units must not cross the borders of the ranks'
    shards. votes: payloads hold the values at any number of indices, in full.
    """

    name: str
    start: Callable[[Exchange, Outgoing], Rounds]
    collectives: int
    takes_sums: bool = False
    sharded: bool = False
    votes: bool = False


GATHERED = Strategy("all_gather", gathered, 1)
SUMMED = Strategy("all_reduce", summed, 1)
SHARDED = Strategy("sharded", sharded, 2, sharded=True)

GOSSIP = "gossip"
"""No way to the mean: parameters go to neighbours only (adaptive/gossip.py)."""

EXCHANGES = (
    "auto",
    "all_reduce",
    "all_gather",
    "sharded",
    "voted_indices",
    GOSSIP,
)


def strategies(base: Compressor) -> list[Strategy]:
    """The strategies that a compressor allows, the one that suits it on any network first."""
    if isinstance(base, RoundsCompressor):
        start = partial(in_rounds, compressor=base)
        return [Strategy("all_reduce", start, base.rounds_count, takes_sums=True)]
    if base.linear:
        return [SUMMED, GATHERED, SHARDED] if base.error_feedback else [SUMMED, GATHERED]
    if isinstance(base, Sparsifier):
        start = partial(voted_indices, values=base.values)
        voted = Strategy("voted_indices", start, 3, takes_sums=True, votes=True)
        return [GATHERED, SHARDED, voted]
    return [GATHERED, SHARDED]


def check_exchange(exchange: str, base: Compressor) -> str:
    """`exchange` if it is "auto" or one that `base` allows; ValueError otherwise."""
    accepted = ["auto", *(strategy.name for strategy in strategies(base))]
    if not isinstance(base, RoundsCompressor):
        accepted.append(GOSSIP)
    if exchange not in accepted:
        told = f"exchange must be one of {', '.join(accepted)} for base {base.shown!r}"
        raise ValueError(f"{told}; got {exchange!r}")
    return exchange


def in_one_collective(exchange: str, base: Compressor) -> str:
    """`exchange`, or for "auto" the first that `base` allows, where that is of a single collective:
    before a second one is begun, backward waits for the first. ValueError for others."""
    allowed = strategies(base)
    wanted = next((each for each in allowed if each.name == exchange), allowed[0])
    if wanted.collectives == 1:
        return wanted.name
    single = [each.name for each in allowed if each.collectives == 1]
    if not single:
        raise ValueError(
            f"base must be sent in one collective with a delay, got {base.name!r}, which takes "
            f"{wanted.collectives}"
        )
    raise ValueError(
        f"exchange must be of one collective with a delay, {' or '.join(single)}, since backward "
        f"waits for the others; got {exchange!r}"
    )


class ExchangeChoice:
    """The strategy for each payload size: a fixed one, or with "auto" the fastest on `link`.

    With few ranks or small payloads an all-gather wins, with many ranks the sharded exchange; for
    a sparsifier voted indices, which send fewer bytes than that and get more through.

    down_cf: of the sharded exchange's second compression; None: that of the first. server: the
    error memory of that, if it has one of its own. messages: that a rank sends in a step, to
    neighbours; None where the payloads of all become the mean."""

    def __init__(
        self,
        base: Compressor,
        exchange: str,
        world_size: int,
        down_cf: float | None = None,
        server_memory: bool = False,
    ) -> None:
        allowed = strategies(base)
        self._fixed = next((each for each in allowed if each.name == exchange), None)
        self.messages: float | None = None
        if exchange == GOSSIP:
            self._fixed = GATHERED
        self.down_cf = down_cf
        self.server: dict[str, Tensor] | None = {} if server_memory else None
        if down_cf is not None or server_memory:
            start = partial(sharded, down_cf=down_cf, server=self.server)
            self._fixed = replace(SHARDED, start=start)
        self._many = next((each for each in allowed if each.votes), SHARDED)
        if self._fixed is None and (allowed[0] is not GATHERED or SHARDED not in allowed):
            self._fixed = allowed[0]
        self._world_size = world_size
        self.link = LinkCost()

    def parts(self, device: torch.device, resharded: bool) -> dict[str, SavedPart]:
        """What is saved: the cost of the link, and the server's memory, which is on `device`.
        resharded: a state that is loaded is of another number of ranks, and of another link."""
        check_link = partial(self._check_link, resharded=resharded)
        load_server = partial(self._load_server, device=device)
        return {
            "link": SavedPart(self._save_link, check_link, self._load_link, object),
            "server": SavedPart(self._save_server, self._check_server, load_server),
        }

    def _save_link(self) -> list[float]:
        return list(vars(self.link).values())

    def _check_link(self, link: Any, resharded: bool) -> None:
        if resharded:
            require(link is None, "'link' must be None in a resharded state")
        else:
            _, beta = read({"link": link}, "link", tuple[float, object])
            require(isinstance(beta, float) and beta > 0, "'link' must be two numbers")

    def _load_link(self, link: Any) -> None:
        if link is not None:
            self.link = LinkCost(*link)

    def _save_server(self) -> dict[str, Tensor]:
        return {name: kept.clone() for name, kept in (self.server or {}).items()}

    def _check_server(self, server: Mapping[str, Any]) -> None:
        for name, kept in server.items():
            fits = isinstance(kept, Tensor) and kept.is_floating_point() and kept.dim() == 1
            fits = fits and bool(kept.isfinite().all())
            require(fits, f"server: {name!r} is damaged, {kept!r:.80}")

    def _load_server(self, server: Mapping[str, Tensor], device: torch.device) -> None:
        if self.server is not None:
            self.server.clear()
            self.server.update({name: kept.to(device) for name, kept in server.items()})

    @property
    def measures(self) -> bool:
        """The choice depends on the link, which is to be measured."""
        return self._fixed is None and self._world_size > 2

    def pick(self, nbytes: float, compressor: Compressor) -> Strategy:
        """For payloads of `nbytes` a bucket, which `compressor` makes: the base, or a quantizer
        below it."""
        many = self._many if isinstance(compressor, Sparsifier) else SHARDED
        if not self.measures:
            fixed = self._fixed or GATHERED
            return many if fixed.votes else fixed
        n, link = self._world_size, self.link
        if not isfinite(link.beta):  # an injected clock tells nothing: count the bytes
            link = LinkCost(0.0, 1.0)
        return many if link.sharded(nbytes, n) < WORTH * link.gathered(nbytes, n) else GATHERED
