"""The record of a script of one's own is all that `report` and `replay` need."""

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
    Policy,
    TopK,
    Warmup,
)
from runs.__main__ import main
from runs.modelled_clock import ModelledClock
from runs.simulate.ranks import run_ranks
from tests.unit.ranks import simulates

pytestmark = simulates

STEPS = 40


class Mine(TopK):
    """A compressor that no other program knows by its name."""

    name = "mine"


class Every(Warmup):
    """A policy that no other program knows."""

    name = "every"


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


def _replayed(capsys: Any, *words: object) -> dict[str, Any]:
    assert main(["replay", *map(str, words), "--json"]) == 0
    captured = capsys.readouterr()
    first = captured.err.splitlines()[0]
    result = dict(json.loads(captured.out))
    # The first line says what the rest is worth.
    assert ("identical to the record" in first) == result["identical"]
    assert all(what in first for what in result["beyond_measured"])
    return result


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
    result = _replayed(capsys, files)
    assert result["identical"]
    assert result["beyond_measured"] == []
    assert Path(result["plot"]).is_file()
    if policy is not _nested:
        return
    other = _replayed(capsys, files, "--policy", "fixed", "--cf", 5000)
    assert other["followed"] == 0
    assert any("step times of CF 5000" in what for what in other["beyond_measured"])
    assert any("gains above CF" in what for what in other["beyond_measured"])
    assert main(["report", str(files), "--out", str(tmp_path / "out"), "--json"]) == 0
    [row] = json.loads(capsys.readouterr().out)["rows"]
    assert "topk+int4, CF 10 to 100, 2 workers" in row["runs"][0]["title"]


def test_a_policy_of_ones_own_is_not_imported(tmp_path: Path, capsys: Any) -> None:
    files = _recorded(tmp_path, lambda: Every(steps=2))
    assert main(["replay", str(files)]) == 2
    error = capsys.readouterr().err
    assert f"{Every.__module__}.Every(" in error
    assert "is not imported" in error
    assert _replayed(capsys, files, "--policy", "gravac")["steps"] == STEPS
    assert main(["report", str(files), "--out", str(tmp_path / "out")]) == 0
