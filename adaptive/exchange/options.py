"""How payloads become the mean, as a script asks for it: the values of the argument `exchange`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from adaptive.exchange.choice import (
    SAME,
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
    """An `exchange`, checked.

    way: the name of a strategy, "auto", or a strategy of the user's. server: how means travel back
    in the sharded exchange. levels: that the script has asked for. may_have_levels: "auto" takes
    two levels where there are several nodes. one_collective: a bucket's exchange may take no more.
    """

    way: str | Strategy
    server: ParameterServer = SAME
    levels: TwoLevel | None = None
    may_have_levels: bool = field(default=True, repr=False)
    one_collective: bool = field(default=False, repr=False)

    @classmethod
    def of(cls, asked: Any, base: Compressor) -> ExchangeOptions:
        """ValueError or TypeError for an `exchange` that does not go with the base."""
        levels = asked if isinstance(asked, TwoLevel) else None
        between = asked.between if isinstance(asked, TwoLevel) else asked
        server = between if isinstance(between, ParameterServer) else SAME
        return cls(check_exchange(between, base), server, levels)

    def beside(
        self, told: str, among_all: bool, one_collective: bool, base: Compressor
    ) -> ExchangeOptions:
        """The same beside a way to synchronise, which errors name as `told`. among_all: all ranks
        exchange with all. one_collective: a bucket's exchange may take no more than one.

        ValueError where they do not go together."""
        if not among_all and self.way != "auto":
            raise ValueError(
                f"exchange must be 'auto' with {told}, whose ranks exchange with neighbours only; "
                f"got {self.way!r}"
            )
        # Backward waits between two levels, whose collectives are of all ranks.
        may_have_levels = among_all and not one_collective
        if self.levels is not None and not may_have_levels:
            raise ValueError(f"exchange must have one level with {told}, got {self.levels!r}")
        way = in_one_collective(self.way, base) if one_collective else self.way
        return replace(
            self, way=way, may_have_levels=may_have_levels, one_collective=one_collective
        )

    def check_used(self, base: str, compresses: bool, changing: str, not_by_gains: str) -> None:
        """ValueError for a setting that nothing would look at.

        compresses: the base of this name does. changing: the way to synchronise, if its number of
        local steps changes. not_by_gains: the policy's name, if it does not go by gains, or gives
        layers CFs of their own; else ""."""
        if not compresses and self.server != SAME:
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
                f"exchange={self.server!r}: needs a policy that goes by gains, as 'goodput' and "
                f"'gravac' do, and gives all layers one CF (with down_cf=None means have the CF of "
                f"gradients); got policy {not_by_gains!r}"
            )

    def open(self, replica: Replica, link: EmulatedLink | None) -> Exchange:
        """The collectives of a model, at the levels that there are (a collective)."""
        levels = self.levels
        if levels is None and self.way == "auto" and self.may_have_levels:
            levels = TwoLevel()
        nodes = None
        if replica.everyone is replica.group:  # a sharded model has levels of its own
            nodes = find_nodes(levels, self.levels is not None, replica.group)
        if nodes is None:
            return Exchange(replica.group, link, replica.everyone)
        return NodeExchange(nodes, replica.everyone, link)
