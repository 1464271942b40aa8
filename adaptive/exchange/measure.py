"""Measures what a message costs on the network between the ranks."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import torch

from adaptive.exchange.collectives import Exchange, reduce_wire_bytes
from adaptive.exchange.link import LinkCost

PROBE_NUMEL, LARGEST_NUMEL = 1 << 16, 1 << 18
"""Elements of the larger all-reduce, and of one on a link so fast that the first is over in SHORT.
"""

SHORT = 0.01
"""Seconds. What waits in a link's buffers is sent at once, and would make a link look faster."""

PROBES = 5


def measure_link(exchange: Exchange, clock: Callable[[], float], device: torch.device) -> LinkCost:
    """Time a few small and larger all-reduces. A collective; the result is alike on all ranks.

    The shortest times count: those of the network, not of a busy machine. A dense step that is
    modelled by them is rather too short than too long."""

    def seconds(numel: int) -> float:
        payload = torch.zeros(numel, device=device)
        times = []
        for _ in range(PROBES):
            began = clock()
            exchange.all_reduce(payload).wait()
            payload[0].item()  # until here only the stream of a device waits
            times.append(clock() - began)
        return min(times)

    seconds(1)  # the first one sets connections up

    def agreed(numel: int) -> tuple[float, float]:
        measured = torch.tensor([seconds(1), seconds(numel)], dtype=torch.float64, device=device)
        small, large = (exchange.sum_later(measured).wait() / exchange.ranks).tolist()
        return small, large

    numel = PROBE_NUMEL
    small, large = agreed(numel)
    if large < SHORT:
        numel = LARGEST_NUMEL
        small, large = agreed(numel)
    exchange.take_traffic()  # not part of any step
    world_size = exchange.world_size
    nbytes = reduce_wire_bytes(4 * numel, world_size)
    alpha = max(0.0, small / max(1, 2 * (world_size - 1)))
    return LinkCost(alpha, nbytes / (large - small) if large > small else inf)
