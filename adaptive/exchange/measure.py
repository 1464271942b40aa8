"""Measures what a message costs on the network between the ranks."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from statistics import median

import torch

from adaptive.exchange.collectives import Exchange
from adaptive.exchange.link import LinkCost

PROBE_BYTES = 1 << 18
PROBES = 5


def measure_link(exchange: Exchange, clock: Callable[[], float], device: torch.device) -> LinkCost:
    """Time a few small and larger all-gathers. A collective; the result is alike on all ranks."""

    def seconds(nbytes: int) -> float:
        payload = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        times = []
        for _ in range(PROBES):
            began = clock()
            exchange.all_gather(payload).wait()
            if device.type == "cuda":  # until here only its stream waits
                torch.cuda.synchronize(device)
            times.append(clock() - began)
        return median(times)

    seconds(8)  # the first one sets connections up
    measured = torch.tensor([seconds(8), seconds(PROBE_BYTES)], dtype=torch.float64, device=device)
    small, large = (exchange.sum_later(measured).wait() / exchange.ranks).tolist()
    exchange.take_traffic()  # not part of any step
    hops = max(1, exchange.world_size - 1)
    slope = (large - small) / (hops * PROBE_BYTES)
    return LinkCost(max(0.0, small / hops), 1 / slope if slope > 0 else inf)
