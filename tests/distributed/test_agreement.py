"""Ranks that differ as much as they can still take the same decisions in the same steps."""

from __future__ import annotations

import logging
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from adaptive import (
    Accordion,
    AdaptiveCompressor,
    Event,
    Fixed,
    Goodput,
    GraVAC,
    MemoryTimeline,
    Network,
    RandomK,
    Timeline,
)
from adaptive.network import agreement
from adaptive.timeline.records import StepRecord
from compressors import TopK
from compressors.base import Spec
from tests.distributed.processes import run_ranks
from tests.distributed.setting import Clock, Scripted, batch, flat_parameters, loss_of, small_net


class _EveryRank(Timeline):
    """Sees nothing on ranks other than 0, which is part of what is tested."""

    def __init__(self) -> None:
        self.seen = 0

    def step(self, record: StepRecord) -> None:
        self.seen += 1

    def event(self, event: Event) -> None:
        self.seen += 1


def _disagreeable(rank: int, policy: Any, slow_rank: int, steps: int) -> dict[str, Any]:
    timeline = _EveryRank()
    model = DDP(small_net(torch.float32), bucket_cap_mb=0.002)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [steps // 2], gamma=0.1)
    compressor = AdaptiveCompressor(
        "topk", (2, 100), policy=policy, timeline=timeline, network="20mbit,100us"
    ).attach(model, optimizer=optimizer)
    plans, reports = [], []
    observe = policy.observe

    def record(report: Any) -> None:
        reports.append(repr(report))
        observe(report)

    policy.observe = record
    for step in range(steps):
        if rank == slow_rank or (step + rank) % 7 == 0:
            time.sleep(0.004)
        optimizer.zero_grad()
        x, y = batch(step, rank, torch.float32)
        ((model(x * 3**rank) - y * (rank + 1)) ** 2).mean().backward()
        plans.append(compressor.cf)
        optimizer.step()
        schedule.step()
    return {
        "plans": plans,
        "reports": reports,
        "parameters": flat_parameters(model),
        "seen": timeline.seen,
    }


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.long), 4])
@pytest.mark.parametrize(
    "policy",
    [
        GraVAC(epsilon=0.3, omega=0.2, window=8, dense_window=4),
        pytest.param(
            GraVAC(epsilon=0.5, omega=0.2, window=5, gain="error_fed", scaling="geometric"),
            marks=pytest.mark.long,
        ),
        Accordion(interval=7, eta=0.3),
    ],
    ids=["gradient", "error_fed", "accordion"],
)
def test_plans_reports_and_parameters_are_identical(policy: Any, world_size: int) -> None:
    results = run_ranks(world_size, _disagreeable, policy, world_size - 1, 60)
    assert len(set(results[0]["plans"])) > 1, "a policy that never moved proves nothing"
    for other in results[1:]:
        assert other["plans"] == results[0]["plans"]
        assert other["reports"] == results[0]["reports"]
        assert torch.equal(other["parameters"], results[0]["parameters"])
    assert [bool(result["seen"]) for result in results] == [True] + [False] * (world_size - 1)


class _RankDependent(TopK):
    """Announces a payload that depends on the rank: a hang, if nobody looked."""

    name = "rank-dependent"

    def nbytes(self, spec: Spec) -> int:
        return super().nbytes(spec.at(spec.cf * (1 + dist.get_rank())))


class _Untrue(TopK):
    """Announces more bytes than it makes."""

    name = "untrue"

    def nbytes(self, spec: Spec) -> int:
        return super().nbytes(spec) + 1


def _error_of(rank: int, how: str) -> str:
    model = DDP(small_net())
    try:
        if how == "sizes":
            AdaptiveCompressor(_RankDependent(), (2, 10)).attach(model)
        elif how == "untrue sizes":
            AdaptiveCompressor(_Untrue(), (2, 10), policy=Fixed(cf=10)).attach(model)
            loss_of(model, 0, rank).backward()
        elif how == "seed":
            AdaptiveCompressor(RandomK(seed=rank)).attach(model)
        elif how == "optimizer":
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            AdaptiveCompressor().attach(model, optimizer=optimizer if rank == 1 else None)
        elif how == "start":
            steps = Goodput(step_size=(2.0, 1.0001)[rank])  # the second makes too many candidates
            AdaptiveCompressor("topk", (10, 100), policy=steps).attach(model)
        elif how == "optimizer type":
            wrong: Any = "sgd" if rank == 1 else None
            AdaptiveCompressor().attach(model, optimizer=wrong)
        elif how == "zeros":
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            signs = AdaptiveCompressor("signsgd", (32, 32), granularity="bucket")
            signs.attach(model, optimizer=optimizer)
        elif how == "settings":
            AdaptiveCompressor("topk", (10, 100 + rank)).attach(model)
        elif how == "network":
            AdaptiveCompressor(network=(None, "10mbit")[rank]).attach(model)
        elif how == "clock":
            AdaptiveCompressor(network=Network(clock=Clock()) if rank else None).attach(model)
        elif how == "policy by name":
            AdaptiveCompressor(policy=(None, "goodput")[rank]).attach(model)
        elif how == "twice":
            AdaptiveCompressor().attach(model)
            AdaptiveCompressor().attach(model)
        elif how == "not ddp":
            AdaptiveCompressor().attach(small_net())  # type: ignore[arg-type]
        elif how == "other hook":
            if rank == 1:
                model.register_comm_hook(None, _other_hook)
            AdaptiveCompressor().attach(model)
        elif how == "unbound":
            AdaptiveCompressor().state_dict()
    except (RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _other_hook(state, bucket):  # type: ignore[no-untyped-def]
    raise AssertionError("never called")


@pytest.mark.parametrize(
    ("how", "wanted"),
    [
        (
            "sizes",
            (
                "ValueError: base: _RankDependent.nbytes must be the payload's bytes",
                "RuntimeError: rank 1 failed to set up: ValueError: base: _RankDependent.nbytes",
            ),
        ),
        ("untrue sizes", "ValueError: base: _Untrue.nbytes must be the payload's bytes"),
        ("seed", "RuntimeError: AdaptiveCompressor was set up differently on rank 1"),
        ("optimizer", "RuntimeError: AdaptiveCompressor was set up differently on rank 1"),
        (
            "start",
            (
                "ValueError: step_size=1.0001",
                "RuntimeError: rank 1 failed to set up: ValueError: step_size=1.0001",
            ),
        ),
        (
            "optimizer type",
            (
                "TypeError: optimizer must be a torch.optim.Optimizer, several of them, or None",
                "RuntimeError: rank 1 failed to set up: TypeError: optimizer must be",
            ),
        ),
        ("zeros", "ValueError: granularity must be 'layer' for base 'signsgd' with momentum"),
        ("settings", "RuntimeError: AdaptiveCompressor was set up differently on rank 1"),
        ("network", "RuntimeError: AdaptiveCompressor was set up differently on rank 1"),
        ("clock", "RuntimeError: AdaptiveCompressor was set up differently on rank 1"),
        ("policy by name", "RuntimeError: AdaptiveCompressor was set up differently on rank 1"),
        ("twice", "RuntimeError: model: the gradient of parameter"),
        ("not ddp", "TypeError: model must be a DistributedDataParallel module, got Sequential"),
        (
            "other hook",
            (
                "RuntimeError: model has a communication hook already (_other_hook)",
                "RuntimeError: rank 1 failed to set up: RuntimeError: model has a communication",
            ),
        ),
        (
            "unbound",
            "RuntimeError: the compressor knows no model: attach(model) first",
        ),
    ],
)
def test_errors_reach_every_rank_before_training(how: str, wanted: str | tuple) -> None:
    for message in run_ranks(2, _error_of, how):
        assert message.startswith(wanted)


def _alone(rank: int) -> dict[str, Any]:
    model = DDP(small_net())
    timeline = MemoryTimeline()
    compressor = AdaptiveCompressor(policy=Scripted([10.0]), timeline=timeline).attach(model)
    for step in range(3):
        x, y = batch(step, rank)
        ((model(x) - y) ** 2).mean().backward()
    compressor.flush()
    return {"summary": compressor.summary(), "factors": [s.wire_factor for s in timeline.steps]}


def test_a_world_of_one_works_and_sends_nothing() -> None:
    (result,) = run_ranks(1, _alone)
    assert result["summary"].bytes_sent == 0
    assert result["summary"].wire_factor == 1
    assert result["factors"] == [1, 1, 1]


class Said(logging.Handler):
    """What the library says, line by line."""

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _on_one_rank_alone(rank: int, what: str, over: str) -> str:
    """What rank 0 is told if it alone attaches, or asks for a gathered state. over: a file by which
    it says that it has been."""
    agreement.PATIENCE, agreement.SAY = timedelta(seconds=1), 0.2
    said = Said(logging.WARNING)
    logging.getLogger("adaptive").addHandler(said)
    model = DDP(small_net(torch.float32))
    compressor = AdaptiveCompressor(policy=Fixed(10))
    if what == "state":
        compressor.attach(model)
    told = ""
    if rank == 0:
        try:
            if what == "state":
                compressor.state_dict(checkpoint="gathered")
            else:
                compressor.attach(model)
        except RuntimeError as error:
            told = f"{said.lines[-1]}\n{error}"
        Path(over).touch()
    while not Path(over).exists():  # as a rank that does something else
        time.sleep(0.05)
    return told


@pytest.mark.parametrize(
    ("what", "wanted"),
    [
        ("attach", "attach() must be called on every rank"),
        (
            "state",
            "a gathered state_dict() must be asked for on every rank, not on rank 0 alone",
        ),
    ],
)
def test_what_one_rank_does_alone_is_told_in_a_sentence(
    what: str, wanted: str, tmp_path: Path
) -> None:
    # Afterwards the group is of no use, not even for a last barrier.
    told, _ = run_ranks(2, _on_one_rank_alone, what, str(tmp_path / "over"), lost=(1,))
    waiting, told = told.split("\n", maxsplit=1)
    assert waiting == f"adaptive: {wanted}: rank 0 has waited 0.2 s for others that have not yet"
    assert told.startswith(wanted)
    assert "rank 1" in told.lower() or "ranks 1" in told.lower()
