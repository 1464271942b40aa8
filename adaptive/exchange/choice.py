"""Which exchange to use for a payload: the one that a cost model says is fastest.

alpha-beta model (ring algorithms, N ranks, payload B bytes): an all-gather takes (N-1)(alpha +
B/beta), the sharded exchange 2(N-1)(alpha + B/(N beta)). With few ranks or small payloads the first
wins, with many ranks the second, whose bytes do not grow with N.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, isfinite
from statistics import median

import torch

from adaptive.exchange.collectives import Exchange
from adaptive.exchange.strategies import GATHERED, SHARDED, Strategy, make_strategy, strategies
from compressors import Compressor

PROBE_BYTES = 1 << 18
PROBES = 5

WORTH = 0.9
"""Compressing twice keeps less of the gradient, so it must save at least a tenth of the time."""


@dataclass(frozen=True)
class LinkCost:
    """What a message costs on the network, by the alpha-beta model.

    alpha: seconds a message. beta: bytes a second that a rank sends. Agreed by all ranks.
    """

    alpha: float = 0.0
    beta: float = inf

    def gathered(self, nbytes: float, n: int) -> float:
        """Seconds to all-gather `nbytes` a rank among `n` ranks."""
        return (n - 1) * (self.alpha + nbytes / self.beta)

    def sharded(self, nbytes: float, n: int) -> float:
        """Seconds of an all-to-all and an all-gather of 1/n of `nbytes` each."""
        return 2 * (n - 1) * (self.alpha + nbytes / n / self.beta)


def measure_link(exchange: Exchange, clock: Callable[[], float], device: torch.device) -> LinkCost:
    """Time a few small and larger all-gathers. A collective; the result is alike on all ranks."""

    def seconds(nbytes: int) -> float:
        payload = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        times = []
        for _ in range(PROBES):
            began = clock()
            exchange.all_gather(payload).wait()
            times.append(clock() - began)
        return median(times)

    seconds(8)  # the first one sets connections up
    measured = torch.tensor([seconds(8), seconds(PROBE_BYTES)], dtype=torch.float64, device=device)
    small, large = (exchange.sum_later(measured).wait() / exchange.world_size).tolist()
    exchange.take_traffic()  # not part of any step
    hops = max(1, exchange.world_size - 1)
    slope = (large - small) / (hops * PROBE_BYTES)
    return LinkCost(max(0.0, small / hops), 1 / slope if slope > 0 else inf)


class ExchangeChoice:
    """The exchange for each payload size: a fixed one, or with "auto" the fastest.

    ValueError if the compressor does not allow `exchange`.
    """

    def __init__(self, base: Compressor, exchange: str, world_size: int) -> None:
        self._strategies = strategies(base)
        self._fixed = None if exchange == "auto" else make_strategy(base, exchange)
        self._world_size = world_size
        self.link = LinkCost()

    @property
    def measures(self) -> bool:
        """The choice depends on the link, which is to be measured."""
        if self._fixed is not None or self._world_size <= 2:
            return False
        return self._strategies[0] is GATHERED and SHARDED in self._strategies

    @property
    def by_energy(self) -> bool:
        """The ranks' energies must be known."""
        return self._fixed is not None and self._fixed.by_energy

    def pick(self, nbytes: float) -> Strategy:
        """For payloads of `nbytes` a bucket."""
        if not self.measures:
            return self._fixed or self._strategies[0]
        n, link = self._world_size, self.link
        if not isfinite(link.beta):  # an injected clock tells nothing: count the bytes
            link = LinkCost(0.0, 1.0)
        return SHARDED if link.sharded(nbytes, n) < WORTH * link.gathered(nbytes, n) else GATHERED
