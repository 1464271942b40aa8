"""A policy of your own: the smallest CF whose exchange fits a share of the step time.

    torchrun --standalone --nproc-per-node 2 examples/budget_policy.py --network 20mbit

The idea is Kimad's (Xin and others, 2023): compress as much as the bandwidth of late asks for. A
policy decides on agreed statistics only, so every rank takes the same decision in the same step.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from math import isfinite
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import AdaptiveCompressor, Plan, Policy, StepReport
from policies import DENSE, Context

HYSTERESIS = 1.5
"""A smaller CF must fit the budget by this factor, or noise in the step time would move it back."""


class Budget(Policy):
    """Sends the smallest CF, dense included, at which waiting for the network takes at most `share`
    of a step; the largest CF if none does.

    share: in (0, 1]. window: steps between two decisions, >= 1. ValueError otherwise.
    """

    name = "budget"

    def __init__(self, share: float = 0.2, window: int = 10) -> None:
        if not 0 < share <= 1:
            raise ValueError(f"share must be in (0, 1], got {share!r}")
        if window < 1:
            raise ValueError(f"window must be >= 1, got {window!r}")
        self.share, self.window = share, window

    def start(self, context: Context) -> None:
        """Once, before the first step."""
        self._cfs = (DENSE, *context.ladder(step_size=2.0))
        self._bytes = context.wire_bytes  # of a step, by CF
        self._cf, self._reason = DENSE, ""
        self._begin_window()

    def _begin_window(self) -> None:
        self._steps, self._seconds, self._waited = 0, 0.0, 0.0

    def candidates(self) -> tuple[float, ...]:
        return self._cfs[1:]

    def plan(self) -> Plan:
        """Before each step. The reason is of the step in which the CF changes."""
        return Plan(self._cf, reason=self._reason)

    def observe(self, report: StepReport) -> None:
        """After each step. A step's time is known one step later, so it may be of another CF."""
        self._reason = ""
        timed = isfinite(report.seconds) and isfinite(report.wait_seconds)
        if not timed or report.timed_cf != self._cf:
            return
        self._steps += 1
        self._seconds += report.seconds
        self._waited += min(report.wait_seconds, report.seconds)
        if self._steps < self.window:
            return
        chosen = next(filter(self._fits, self._cfs), self._cfs[-1])
        if chosen != self._cf:
            self._reason = (
                f"the network takes {self._share(self._cf):.0%} of a step at CF {self._cf:g}, and "
                f"would take {self._share(chosen):.0%} at CF {chosen:g}; share={self.share:g}"
            )
        self._cf = chosen
        self._begin_window()

    def _share(self, cf: float) -> float:
        """The part of a step at `cf` that goes to the network: bytes take time in proportion."""
        waited = self._waited * self._bytes(cf) / self._bytes(self._cf)
        return waited / (self._seconds - self._waited + waited) if waited else 0.0

    def _fits(self, cf: float) -> bool:
        limit = self.share / HYSTERESIS if cf < self._cf else self.share
        return self._share(cf) <= limit

    def rescale(self) -> None:
        """The number of ranks has changed: times of before do not count."""
        self._begin_window()

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, f"_{name}") for name in ("cf", "steps", "seconds", "waited")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.get("cf") not in self._cfs:
            raise ValueError(f"state: cf must be one of {self._cfs}, got {state.get('cf')!r}")
        self._cf, self._steps = float(state["cf"]), int(state["steps"])
        self._seconds, self._waited = float(state["seconds"]), float(state["waited"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--share", type=float, default=0.2)
    parser.add_argument("--network", help="emulate a slow link, e.g. 20mbit")
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    compressor = AdaptiveCompressor(policy=Budget(arguments.share), network=arguments.network)
    compressor.attach(model, optimizer=optimizer)

    teacher = torch.randn(64, 8)  # the same on all ranks, by the seed above
    generator = torch.Generator().manual_seed(1 + rank)  # other inputs on every rank
    for step in range(arguments.steps):
        inputs = torch.randn(256, 64, generator=generator)
        loss = nn.functional.mse_loss(model(inputs), inputs @ teacher)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 20 == 19:
            print(f"step {step + 1}: loss {loss.item():.3f}, CF {compressor.cf:g}", flush=True)
    if rank == 0:
        print(compressor.summary())
    compressor.close()
    dist.destroy_process_group()
    time.sleep(0.5)  # torch may abort if a process exits while gloo's threads are still at work


if __name__ == "__main__":
    main()
