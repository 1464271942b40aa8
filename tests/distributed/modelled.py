"""A network and a machine that are modelled: step times that owe nothing to the machine's noise."""

from __future__ import annotations

from collections.abc import Callable
from threading import Semaphore, Thread

import torch
from torch import nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor, Compressor, LinkSpec, MemoryTimeline, Network, Policy
from adaptive.network.link import EmulatedLink
from tests.distributed.setting import Clock, loss_of

COMPUTE = 0.005
"""Seconds of forward, backward and optimizer in every step."""


class ModelledLink(EmulatedLink):
    """Moves a clock on by what a transfer would take, once the last hook call of the backward that
    began it is over.

    One bucket at a time: a second one's hook call would see the first one's transfer go on.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__(LinkSpec(1.0))
        self.seconds_a_byte = 0.0
        self.others = 0.0  # seconds until the other ranks are ready, too
        self.hook_over = Semaphore(0)
        self._clock = clock

    def hold(
        self, wait: Callable[[], torch.Tensor], wire_bytes: float, device: torch.device
    ) -> Future[torch.Tensor]:
        held: Future[torch.Tensor] = Future()

        def carry() -> None:
            value = wait()
            self.hook_over.acquire()
            self._clock.now += self.others + self.seconds_a_byte * wire_bytes
            held.set_result(value)

        Thread(target=carry, daemon=True).start()
        return held


class ModelledRun:
    """Trains a net in one bucket; every step takes COMPUTE and what the link takes.

    cfs: what was sent in each step so far. dense_bytes: of a dense step, a rank's.
    """

    def __init__(
        self,
        rank: int,
        policy: Policy,
        base: str | Compressor = "topk+fp32",
        cf_range: tuple[float, float] = (4, 100),
    ) -> None:
        self.rank, self.policy = rank, policy
        self.clock = Clock()
        self.timeline = MemoryTimeline()
        torch.manual_seed(0)
        # So large that the bytes of the statistics, which no link holds back, hardly count.
        net = nn.Sequential(nn.Linear(12, 600), nn.Tanh(), nn.Linear(600, 20), nn.Linear(20, 3))
        self.model = DDP(net)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02)
        self.compressor = AdaptiveCompressor(
            base,
            cf_range,
            policy=policy,
            exchange="all_gather",
            network=Network(clock=self.clock),
            timeline=self.timeline,
        ).attach(self.model)
        self.cfs: list[float] = []
        session = self.compressor._session
        assert session is not None
        self.dense_bytes = session._sizes.wire_bytes(1.0)
        self.link = session.exchange._link = ModelledLink(self.clock)
        end = session.end_backward

        def end_backward(last: Future[torch.Tensor]) -> Future[torch.Tensor]:
            done = end(last)
            self.link.hook_over.release()
            return done

        session.end_backward = end_backward  # type: ignore[method-assign]

    def step(self) -> float:
        """One step; the CF that it sent."""
        self.optimizer.zero_grad()
        loss = loss_of(self.model, len(self.cfs), self.rank)
        self.clock.now += COMPUTE
        loss.backward()
        self.optimizer.step()
        self.cfs.append(self.compressor.cf)
        return self.cfs[-1]

    def network(self, dense_seconds: float) -> None:
        """From here on a dense exchange takes so long."""
        self.link.seconds_a_byte = dense_seconds / self.dense_bytes
