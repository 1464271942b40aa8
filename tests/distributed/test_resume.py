"""Stopping and going on, detaching and attaching again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import (
    Accordion,
    AdaptiveCompressor,
    Goodput,
    GraVAC,
    MemoryTimeline,
    Network,
    ParameterServer,
    Policy,
)
from tests.distributed.processes import run_ranks
from tests.distributed.setting import Clock, flat_parameters, loss_of, same, small_net

STEPS, STOP = 50, 23

POLICIES = {
    "gravac": lambda: GraVAC(epsilon=0.3, omega=0.2, window=6, dense_window=3),
    "error_fed": lambda: GraVAC(epsilon=0.4, omega=0.2, window=4, gain="error_fed"),
    "accordion": lambda: Accordion(interval=5, eta=0.2),
    "goodput": lambda: Goodput(goal="time", opening=3, cooldown=3),
}


class Run:
    """A training run that can be stopped into a state and started from one."""

    def __init__(
        self,
        policy: Policy,
        base: str,
        exchange: str | ParameterServer,
        static_graph: bool = False,
        **options: Any,
    ) -> None:
        net = small_net(torch.float32)
        self.model = DDP(net, bucket_cap_mb=0.002, static_graph=static_graph)
        settings: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.001}
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.AdamW(self.model.parameters(), **settings)
            if options.get("memory") == "updates"
            else torch.optim.SGD(self.model.parameters(), momentum=0.9, **settings)
        )
        self.clock = Clock()
        self.timeline = MemoryTimeline()
        self.compressor = AdaptiveCompressor(
            base,
            (2, 100),
            policy=policy,
            exchange=exchange,
            network=Network(clock=self.clock),
            timeline=self.timeline,
            **options,
        ).attach(self.model, optimizer=self.optimizer)

    def train(self, rank: int, start: int, stop: int) -> None:
        for step in range(start, stop):
            # Step times that differ from rank to rank and depend on what was sent.
            self.clock.now = self.clock.now + 0.01 * (1 + rank) + 0.05 / self.compressor.cf
            self.optimizer.zero_grad()
            loss_of(self.model, step, rank).backward()
            self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "compressor": self.compressor.state_dict(),
            "clock": self.clock.now,
        }

    def load(self, rank: int, state: dict[str, Any]) -> None:
        for _ in range(2 if self.model.static_graph else 1):  # let DDP order its buckets
            loss_of(self.model, 0, rank).backward()
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.compressor.load_state_dict(state["compressor"])
        self.clock.now = state["clock"]


def _run(policy: str, base: str, exchange: str = "auto", static_graph: bool = False) -> Run:
    return Run(POLICIES[policy](), base, exchange, static_graph)


def _straight_and_resumed(
    rank: int,
    policy: str,
    base: str,
    exchange: str,
    path: str,
    stop: int = STOP,
    static_graph: bool = False,
) -> dict[str, Any]:
    straight = _run(policy, base, exchange, static_graph)
    straight.train(rank, 0, STEPS)
    stopped = _run(policy, base, exchange, static_graph)
    stopped.train(rank, 0, stop)
    torch.save(stopped.state(), f"{path}/{rank}")
    resumed = _run(policy, base, exchange, static_graph)
    resumed.load(rank, torch.load(f"{path}/{rank}", weights_only=True))
    resumed.train(rank, stop, STEPS)
    return {
        "parameters": [flat_parameters(r.model) for r in (straight, resumed)],
        "states": [r.compressor.state_dict() for r in (straight, resumed)],
        "switches": straight.compressor.summary().switches,
    }


@pytest.mark.parametrize(
    ("policy", "base", "exchange"),
    [
        ("gravac", "topk", "auto"),
        ("error_fed", "randomk", "auto"),
        ("error_fed", "dgc+qsgd", "sharded"),
        ("accordion", "powersgd", "auto"),
        ("goodput", "topk", "auto"),
        ("goodput", "dgc+int8", "auto"),
    ],
)
def test_resuming_equals_never_having_stopped(
    policy: str, base: str, exchange: str, tmp_path: Any
) -> None:
    for result in run_ranks(2, _straight_and_resumed, policy, base, exchange, str(tmp_path)):
        assert result["switches"] > 0
        assert torch.equal(*result["parameters"])
        assert same(*result["states"])


@pytest.mark.parametrize(("stop", "static_graph"), [(1, False), (1, True), (2, True)])
def test_stopped_while_ddp_orders_its_buckets(stop: int, static_graph: bool, tmp_path: Any) -> None:
    options = "goodput", "topk", "auto", str(tmp_path), stop, static_graph
    for result in run_ranks(2, _straight_and_resumed, *options):
        assert torch.equal(*result["parameters"])


def _misfit(rank: int, what: str) -> str:
    run = _run("gravac", "topk")
    run.train(rank, 0, 3)
    state = run.compressor.state_dict()
    if what == "world_size":
        state["world_size"] = 7
    if what == "memory":
        state["memory"]["stranger"] = {}
    with pytest.raises(ValueError, match="state:") as caught:
        run.compressor.load_state_dict(state)
    return str(caught.value)


@pytest.mark.parametrize("what", ["world_size", "memory"])
def test_a_state_that_does_not_fit_is_refused(what: str) -> None:
    wanted = {
        "world_size": "world_size is 7, expected 2",
        "memory": "memory has unknown keys: stranger",
    }
    for message in run_ranks(2, _misfit, what):
        assert wanted[what] in message


def _detached(rank: int) -> dict[str, Any]:
    run = _run("gravac", "topk")
    run.train(rank, 0, 20)
    had = run.compressor.state_dict()["memory"]
    run.compressor.detach()
    run.train(rank, 20, 30)
    dense = run.compressor.cf
    velocity = run.optimizer.state[next(run.model.parameters())]["momentum_buffer"].clone()
    other = AdaptiveCompressor("randomk", (4, 4), policy="fixed")
    other.attach(run.model, optimizer=run.optimizer)
    run.train(rank, 30, 33)
    other_cf = other.cf
    return {
        "had": len(had),
        "dense": dense,
        "other": other_cf,
        "velocity": velocity,
        "parameters": flat_parameters(run.model),
        "steps": run.compressor.summary().steps,
    }


def test_detach_is_dense_and_another_can_be_attached() -> None:
    results = run_ranks(2, _detached)
    for result in results:
        assert result["had"] > 0
        assert result["dense"] == 1
        assert result["other"] == 4
        assert result["steps"] == 30  # its own 20, and the 10 after detach
        assert bool(result["parameters"].isfinite().all())
        assert torch.equal(result["parameters"], results[0]["parameters"])
        assert torch.equal(result["velocity"], results[0]["velocity"])
