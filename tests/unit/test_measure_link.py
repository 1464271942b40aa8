"""How the cost of a link is measured before training: with a modelled network under it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from adaptive.exchange.choice import measure_latency, measure_link
from adaptive.exchange.two_level import NodeExchange, Nodes


class Network:
    """Two ranks whose all-reduces take a modelled time, which is at once over."""

    world_size = ranks = 2
    copies = 1

    def __init__(self, seconds: Callable[[int, int], float]) -> None:
        self.now, self.sent = 0.0, 0
        self._seconds = seconds
        self._times: dict[int, int] = {}

    def clock(self) -> float:
        return self.now

    def all_reduce(self, tensor: Tensor) -> Network:
        times = self._times[tensor.numel()] = self._times.get(tensor.numel(), 0) + 1
        self.now += self._seconds(tensor.nbytes, times)
        self.sent += tensor.nbytes
        return self

    def sum_later(self, tensor: Tensor) -> Any:
        tensor.mul_(self.ranks)
        self.wait = lambda: tensor  # type: ignore[method-assign]
        return self

    def wait(self) -> Any: ...

    def take_traffic(self) -> None: ...


def measured(seconds: Callable[[int, int], float]) -> tuple[float, float, Network]:
    """(seconds of a message, bits a second, the network)."""
    network = Network(seconds)
    exchange: Any = network
    cost = measure_link(exchange, network.clock, torch.device("cpu"))
    return cost.alpha, 8 * cost.beta, network


@pytest.mark.parametrize("rate", [1e6, 10e6, 100e6, 1e9])
@pytest.mark.parametrize("latency", [1e-4, 0.004])
def test_a_link_without_much_latency_has_its_rate(rate: float, latency: float) -> None:
    alpha, found, network = measured(lambda nbytes, _: 2 * latency + 8 * nbytes / rate)
    assert alpha == pytest.approx(latency, rel=0.2)
    assert found == pytest.approx(rate, rel=0.02)
    assert network.sent < 8e6


@pytest.mark.parametrize("rate", [1e6, 10e6, 100e6, 1e9])
@pytest.mark.parametrize("latency", [0.02, 0.1])
def test_latency_and_the_start_of_windows_are_no_bytes(rate: float, latency: float) -> None:
    """As on a kernel's link of 100 Mbit/s and 100 ms: an empty all-reduce takes two messages, one
    with some bytes two more, and the first ones of a size take long, until windows are open."""

    def seconds(nbytes: int, times: int) -> float:
        handshake = 2 * latency if nbytes > 4 else 0.0
        closed = latency * 8 / times if nbytes > 1e6 else 0.0
        return 2 * latency + handshake + closed + 8 * nbytes / rate

    alpha, found, network = measured(seconds)
    assert alpha == pytest.approx(latency, rel=0.01)
    assert rate / 8 < found < 1.1 * rate
    assert network.now < 40


def test_every_rank_of_a_node_times_a_message() -> None:
    """A rank that sent nothing would count no time, and the mean over ranks would be too short."""
    dist.init_process_group("fake", rank=3, world_size=4, store=FakeStore())
    try:
        world: Any = dist.group.WORLD
        inside: Any = dist.new_group([2, 3])
        between: Any = dist.new_group([1, 3])
        exchange = NodeExchange(Nodes(inside, between), world)
        with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as sent:
            # A clock that counts messages: no time passes unless this rank sends one.
            latency = measure_latency(exchange, lambda: sent.call_count, torch.device("cpu"))
        assert latency > 0
    finally:
        dist.destroy_process_group()
