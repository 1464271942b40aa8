"""The record of a script of one's own is all that `report` and
`examples/replay_policy.py` need."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD

from adaptive import (
    AdaptiveCompressor,
    GraVAC,
    JSONLTimeline,
    LinkSpec,
    Network,
    Plan,
    Policy,
    TopK,
    Warmup,
)
from examples import replay_policy
from examples.replay_policy import replay
from runs.__main__ import main
from runs.expression import UntrustedPolicyError, policy_from
from runs.modelled_clock import ModelledClock
from runs.records import read_records
from runs.simulate.ranks import run_ranks
from tests.unit.ranks import simulates
from tests.unit.test_own_policy import Planned

pytestmark = simulates

STEPS = 40


class Mine(TopK):
    """A compressor that no other program knows by its name."""

    name = "mine"


class Every(Warmup):
    """A policy that no other program knows."""

    name = "every"


class Alternating(Planned):
    """A policy whose class does not tell how it is made."""

    name = "by turns"


def _nested() -> Policy:
    return Warmup(steps=3, then=GraVAC(window=4, dense_window=3))


def _train(rank: int, folder: Path, policy: Any, base: Any) -> None:
    torch.manual_seed(rank)
    model = DDP(nn.Sequential(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 3)))
    optimizer = SGD(model.parameters(), lr=0.02, momentum=0.9)
    compressor = AdaptiveCompressor(
        base() if callable(base) else base,
        (10, 100),
        policy=policy() if callable(policy) else policy,
        network=Network(clock=ModelledClock(0.01, LinkSpec(2e5, 0.001))),
        timeline=JSONLTimeline(folder / "mine.jsonl"),
    ).attach(model, optimizer=optimizer)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(8, 12)).square().mean().backward()
        optimizer.step()
    compressor.close()


def _recorded(folder: Path, policy: Any = None, base: Any = "topk") -> Path:
    run_ranks(2, lambda rank, _: _train(rank, folder, policy, base))
    return folder / "mine.jsonl"


@pytest.mark.parametrize(
    ("policy", "base"),
    [
        ("goodput", "topk"),
        pytest.param(_nested, "topk", marks=pytest.mark.long),
        ("gravac", Mine),
    ],
)
def test_a_record_alone_is_replayed_bit_for_bit(
    policy: Any, base: Any, tmp_path: Path, capsys: Any
) -> None:
    files = _recorded(tmp_path, policy, base)
    recorded = read_records(files)
    assert recorded.header is not None
    plans, end = replay(policy_from(recorded.header.expression), recorded)
    assert (len(plans), end) == (STEPS, "")
    told = [(r.report.step, p.reason) for p, r in zip(plans, recorded.steps, strict=True)]
    assert [each for each in told if each[1]] == [(e.step, e.reason) for e in recorded.events]
    if policy is not _nested:
        return
    assert main(["report", str(files), "--out", str(tmp_path / "out"), "--json"]) == 0
    [row] = json.loads(capsys.readouterr().out)["rows"]
    assert "topk+int4, CF 10 to 100, 2 workers" in row["runs"][0]["title"]


def test_a_policy_of_ones_own_is_not_imported(tmp_path: Path, capsys: Any) -> None:
    files = _recorded(tmp_path, lambda: Every(steps=2))
    header = read_records(files).header
    assert header is not None
    with pytest.raises(UntrustedPolicyError, match="is not imported") as refused:
        policy_from(header.expression)
    assert f"{Every.__module__}.Every(" in str(refused.value)
    assert main(["report", str(files), "--out", str(tmp_path / "out")]) == 0


@pytest.mark.parametrize("inside", [False, True])
def test_what_makes_a_policy_is_left_out_where_its_class_does_not_tell_it(
    inside: bool, tmp_path: Path, capsys: Any
) -> None:
    files = _recorded(tmp_path, lambda: _unknown(inside))
    header = read_records(files).header
    assert header is not None
    assert header.expression == ""
    assert main(["report", str(files), "--out", str(tmp_path / "out"), "--json"]) == 0
    [row] = json.loads(capsys.readouterr().out)["rows"]
    name = "warmup" if inside else "by turns"
    assert row["runs"][0]["title"].endswith(f"2 workers, {name}")
    with pytest.raises(SystemExit):
        replay_policy.main([str(files)])
    assert f"how to make '{name}' is not recorded" in capsys.readouterr().err


def _unknown(inside: bool) -> Policy:
    policy = Alternating(Plan(10.0))
    return Warmup(policy, steps=3) if inside else policy
