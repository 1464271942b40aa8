"""DeCo-SGD: the delay and the CF are chosen together, so that the network hides behind computing.

    torchrun --standalone --nproc-per-node 2 examples/deco_sgd.py

Lu and others, "DeCo-SGD: Joint Optimization of Delay Staleness and Gradient Compression Ratio for
Distributed SGD" (2025, arXiv 2507.17346). Let a share d of the gradient be sent (CF 1 / d), and a
mean be t steps late. Of all pairs by which a step takes no longer than computing, take the one with
the least noise

    (1 - d) / (d (1 - d / 2)^t)

What is sent before the gradients of t more steps are computed takes a latency, and its bytes. The
link must also have sent one step's bytes when the next one's come.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor, Delayed, Plan, Policy, StepReport
from policies import DENSE, Context


def noise(cf: float, late: int) -> float:
    """What compression adds to the gradient's noise if means are so many steps late."""
    return (cf - 1) / (1 - 0.5 / cf) ** late


class DeCo(Policy):
    """DeCo-SGD's rule, by the link as it was measured when the run began, and by what steps take.

    interval: steps between two choices. step_size: between two CFs that may be chosen.
    """

    name = "deco-sgd"
    chooses_delay = True

    def __init__(self, interval: int = 50, step_size: float = 1.25) -> None:
        self.interval, self.step_size = interval, step_size

    def start(self, context: Context) -> None:
        self._context = context
        self._cfs = (DENSE, *context.ladder(self.step_size))
        self._chosen = self._cfs[-1], context.delays[-1]
        self._computing: list[float] = []
        self._reason = ""

    def candidates(self) -> Sequence[float]:
        return self._cfs[1:]

    def plan(self) -> Plan:
        return Plan(self._chosen[0], reason=self._reason, delay=self._chosen[1])

    def observe(self, report: StepReport) -> None:
        self._reason = ""
        computing = report.seconds - report.exchange_seconds
        if computing > 0:  # known
            self._computing.append(computing)
        if len(self._computing) == self.interval:
            seconds, self._computing = median(self._computing), []
            self._chosen = cf, delay = self.choice(seconds, report.hops)
            self._reason = (
                f"{1e3 * seconds:.0f} ms of computing hide CF {cf:.3g}, {delay} steps late"
            )

    def choice(self, computing: float, hops: int) -> tuple[float, int]:
        """CF and delay, if a step computes for so many seconds and an exchange takes so many
        messages that wait for one another."""
        known = self._context
        latency, per_byte = hops * known.latency(), known.link()[1]
        hidden = []
        for delay in known.delays:  # which hides all of its steps but one
            free = min(computing, (delay - 1) * computing - latency)
            fits = (cf for cf in self._cfs if known.wire_bytes(cf) * per_byte <= free)
            if cf := next(fits, 0.0):
                hidden.append((noise(cf, delay - 1), cf, delay))
        return min(hidden)[1:] if hidden else (self._cfs[-1], known.delays[-1])

    def state_dict(self) -> dict[str, Any]:
        return {"chosen": [*self._chosen], "computing": [*self._computing]}

    def load_state_dict(self, state: Any) -> None:
        self._chosen, self._computing = tuple(state["chosen"]), [*state["computing"]]


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    layers = [nn.Linear(100, 500), nn.ReLU(), nn.Linear(500, 500), nn.ReLU(), nn.Linear(500, 10)]
    model = DDP(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    policy, sync = DeCo(interval=20), Delayed((1, 2, 3, 4, 6, 8))
    compressor = AdaptiveCompressor(policy=policy, sync=sync, network="100mbit,30ms")
    compressor.attach(model)
    generator = torch.Generator().manual_seed(1 + rank)  # other inputs on every rank
    for _ in range(120):
        inputs = torch.randn(256, 100, generator=generator)
        loss = nn.functional.cross_entropy(model(inputs), inputs[:, :10].argmax(dim=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    compressor.detach()
    if rank == 0:
        print(f"DeCo-SGD: loss {loss.item():.2f}, {compressor.explain()}")
        print(compressor.summary())
    compressor.close()
    dist.destroy_process_group()
    time.sleep(0.5)  # torch may abort if a process exits while gloo's threads are still at work


if __name__ == "__main__":
    main()
