"""The argument `exchange`: how payloads become the mean, as the script wants it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from adaptive.exchange.choice import (
    AT_SAME_CF,
    ParameterServer,
    check_exchange,
    in_one_collective,
)
from adaptive.exchange.strategies import Strategy
from adaptive.exchange.two_level import NodeExchange, TwoLevel, find_nodes
from adaptive.model.replicas import Replica
from adaptive.network.collectives import Exchange
from adaptive.network.link import EmulatedLink
from compressors import Compressor


@dataclass(frozen=True)
class ExchangeOptions:
    """A checked value of `exchange`.

    way: the name of a strategy, "auto", or a user's strategy. server: how means are sent back in
    the sharded exchange. levels: the two levels that the script asks for. may_have_levels: "auto"
    uses two levels if there are several nodes. one_collective: a bucket's exchange may take one
    collective only.
    """

    way: str | Strategy
    server: ParameterServer = AT_SAME_CF
    levels: TwoLevel | None = None
    may_have_levels: bool = field(default=True, repr=False)
    one_collective: bool = field(default=False, repr=False)

    @classmethod
    def of(cls, given: Any, base: Compressor) -> ExchangeOptions:
        """The options for the argument `exchange`. ValueError or TypeError for a value that does
        not go with the base."""
        levels = given if isinstance(given, TwoLevel) else None
        between = given.between if isinstance(given, TwoLevel) else given
        server = between if isinstance(between, ParameterServer) else AT_SAME_CF
        return cls(check_exchange(between, base), server, levels)

    def beside(
        self, sync: str, among_all: bool, one_collective: bool, base: Compressor
    ) -> ExchangeOptions:
        """These options with the restrictions of a way to synchronise. sync: its name in errors.
        among_all: all ranks exchange with each other. one_collective: a bucket's exchange may take
        one collective only.

        ValueError if options and restrictions do not go together."""
        if not among_all and self.way != "auto":
            raise ValueError(
                f"exchange must be 'auto' with {sync}, whose ranks exchange with neighbours only; "
                f"got {self.way!r}"
            )
        # Two levels need collectives of all ranks, and backward waits between the levels.
        may_have_levels = among_all and not one_collective
        if self.levels is not None and not may_have_levels:
            raise ValueError(f"exchange must have one level with {sync}, got {self.levels!r}")
        way = in_one_collective(self.way, base) if one_collective else self.way
        return replace(
            self, way=way, may_have_levels=may_have_levels, one_collective=one_collective
        )

    def check_used(self, base: str, compresses: bool, changing: str, not_by_gains: str) -> None:
        """ValueError for a setting that would have no effect.

        base: the base's name. compresses: whether the base compresses. changing: the value of
        `sync` if its number of local steps changes, else "". not_by_gains: the policy's name if it
        does not decide by gains, or chooses a CF for each layer; else ""."""
        if not compresses and self.server != AT_SAME_CF:
            raise ValueError(
                f"exchange={self.server!r}: needs a base that compresses, got base={base!r}"
            )
        by_policy = self.server.down_cf == "auto"
        if by_policy and changing:
            raise ValueError(
                f"exchange={self.server!r}: needs a number of local steps that is fixed, got "
                f"sync={changing}"
            )
        if by_policy and not_by_gains:
            raise ValueError(
                f"exchange={self.server!r}: needs a policy that decides by gains, as 'goodput' and "
                f"'gravac' do, and chooses one CF for all layers (with down_cf=None means have the "
                f"CF of gradients); got policy {not_by_gains!r}"
            )

    def open(self, replica: Replica, link: EmulatedLink | None) -> Exchange:
        """The collectives of a model, in one or two levels (a collective)."""
        levels = self.levels
        if levels is None and self.way == "auto" and self.may_have_levels:
            levels = TwoLevel()
        nodes = None
        if replica.everyone is replica.group:  # a sharded model has two levels already
            nodes = find_nodes(levels, self.levels is not None, replica.group)
        if nodes is None:
            return Exchange(replica.group, link, replica.everyone)
        return NodeExchange(nodes, replica.everyone, link)
