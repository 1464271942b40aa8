"""Golden runs of a model that FSDP2 shards: two replicas of two shards, four processes.

    python -m tests.distributed.golden_fsdp            makes golden_fsdp.json anew
    python -m tests.distributed.golden_fsdp --print    prints what it would hold

What tests/integration/golden.py is for replicas of DDP, with its ways to pin arithmetic.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim import SGD, AdamW, Optimizer

from adaptive import (
    Accordion,
    AdaptiveCompressor,
    Goodput,
    GraVAC,
    LinkSpec,
    MemoryTimeline,
    Network,
    Policy,
    Schedule,
)
from runs.modelled_clock import ModelledClock
from tests.distributed.processes import run_ranks
from tests.integration.golden import batch, command, digest, written_down

FILE = Path(__file__).with_name("golden_fsdp.json")
RANKS, STEPS = 4, 24
LOOKS = (1, 8, 16, 24)
"""The steps after which shards are looked at."""


def _sgd(parameters: Iterable[Tensor]) -> Optimizer:
    return SGD(parameters, lr=0.02, weight_decay=0.001)


def _momentum(parameters: Iterable[Tensor]) -> Optimizer:
    return SGD(parameters, lr=0.02, momentum=0.9, weight_decay=0.001)


def _adamw(parameters: Iterable[Tensor]) -> Optimizer:
    return AdamW(parameters, lr=0.003)


@dataclass(frozen=True)
class Run:
    """One golden run. unused: some steps leave a module, or a parameter, out. saved: everything is
    made anew after step 12, and takes up what was saved. scaled: with a loss scale."""

    optimizer: Callable[[Iterable[Tensor]], Optimizer]
    policy: Callable[[], Policy]
    base: str = "topk"
    precision: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    unused: bool = False
    saved: bool = False
    scaled: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


def _goodput() -> Policy:
    return Goodput(goal="time", opening=3, cooldown=3)


def _schedule() -> Policy:
    return Schedule({0: 1.0, 3: 8.0, 10: 40.0, 15: 1.0, 17: 16.0})


RUNS = {
    "goodput, residual": Run(_sgd, _goodput),
    "a module left out": Run(_momentum, _schedule, unused=True),
    "updates": Run(_adamw, _goodput, unused=True),
    "half precision": Run(
        _adamw,
        _schedule,
        precision=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        unused=True,
    ),
    "sharded exchange": Run(_momentum, _schedule, "topk+bf16", options={"exchange": "sharded"}),
    "gravac by layer": Run(
        _sgd,
        lambda: GraVAC(window=4, dense_window=3, cooldown=4, epsilon=0.3),
        "dgc",
        options={"granularity": "layer", "memory": "residual"},
    ),
    "powersgd": Run(_adamw, lambda: Accordion(interval=4, eta=0.2), "powersgd"),
    "saved, momentum": Run(_momentum, _schedule, saved=True, unused=True),
    "saved, updates": Run(_adamw, _goodput, saved=True),
    "a loss scale": Run(_momentum, _schedule, "int8", scaled=True),
}


class _Net(nn.Module):
    """Shards of unequal size, some of them empty, and a module (the gate) and a parameter (the
    shift) that only some steps use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate, self.last = nn.Linear(12, 9), nn.Linear(9, 1), nn.Linear(9, 3)
        self.shift = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, which: int) -> Tensor:
        hidden = self.first(x).relu()
        y = self.last(hidden)
        if which >= 1:
            y = y * self.gate(hidden)
        return y + self.shift if which >= 2 else y


class _Training:
    """Model, optimizer and compressor of one rank."""

    def __init__(self, run: Run, timeline: MemoryTimeline) -> None:
        torch.manual_seed(17)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
        self.model: Any = _Net()
        for module in (self.model.first, self.model.gate, self.model.last, self.model):
            fully_shard(module, mesh=mesh["shard"], mp_policy=run.precision)
        self.optimizer = run.optimizer(self.model.parameters())
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=run.scaled)
        self.compressor = AdaptiveCompressor(
            run.base,
            (4, 64),
            policy=run.policy(),
            network=Network(clock=ModelledClock(0.01, LinkSpec(3e5, 0.001))),
            timeline=timeline,
            **run.options,
        ).attach_fsdp(
            self.model,
            mesh,
            optimizer=self.optimizer,
            scaler=self.scaler if run.scaled else None,
        )

    def shards(self) -> list[Tensor]:
        """Of this rank."""
        return [p.to_local() for p in self.model.parameters()]

    def step(self, step: int, rank: int, which: int) -> None:
        x, y = batch(step, rank)
        loss = (self.model(x, which) - y).float().square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def take_up(self, before: _Training) -> None:
        """Go on from where another one is."""
        with torch.no_grad():
            for here, there in zip(self.shards(), before.shards(), strict=True):
                here.copy_(there)
        state = before.compressor.state_dict("rank")
        self.optimizer.load_state_dict(deepcopy(before.optimizer.state_dict()))
        self.compressor.load_state_dict(deepcopy(state))


def _train(run: Run, rank: int) -> dict[str, Any]:
    """One rank of a run; what is to be written down of it."""
    timeline = MemoryTimeline()
    training, looks = _Training(run, timeline), []
    for step in range(STEPS):
        if run.saved and step == STEPS // 2:
            before, training = training, _Training(run, timeline)
            training.take_up(before)
        training.step(step, rank, (2, 0, 2, 1)[step % 4] if run.unused else 2)
        if step + 1 in LOOKS:
            looks.append(digest(training.shards()))
    training.compressor.close()
    return written_down(looks, timeline)


def _train_each(rank: int) -> dict[str, dict[str, Any]]:
    logging.getLogger("adaptive").setLevel(logging.ERROR)  # what policies conclude
    return {name: _train(run, rank) for name, run in RUNS.items()}


def train_all() -> dict[str, Any]:
    """Every run, by all ranks. RuntimeError if replicas differ."""
    ranks = run_ranks(RANKS, _train_each, limit=150)
    found = {}
    for name in RUNS:
        looks = [of_rank[name]["parameters"] for of_rank in ranks]
        if looks[0] != looks[2] or looks[1] != looks[3]:  # rank 2 * replica + shard
            raise RuntimeError(f"{name}: the replicas' parameters are not alike")
        found[name] = {
            **ranks[0][name],
            "parameters": list(map(list, zip(looks[0], looks[1], strict=True))),
        }
    return found


if __name__ == "__main__":
    command("tests.distributed.golden_fsdp", FILE, train_all)
