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
    TensorBoardTimeline,
    TopK,
    Warmup,
)
from runs.__main__ import main
from runs.modelled_clock import ModelledClock
from runs.records import read_records
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
    timelines = [JSONLTimeline(folder / "mine.jsonl"), TensorBoardTimeline(folder / "board")]
    compressor = AdaptiveCompressor(
        base() if callable(base) else base,
        (10, 100),
        policy=policy() if callable(policy) else policy,
        network=Network(clock=ModelledClock(0.01, LinkSpec(2e5, 0.001))),
        timeline=timelines,
    ).attach(model, optimizer=optimizer)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(8, 12)).square().mean().backward()
        optimizer.step()
    compressor.close()


def _recorded(folder: Path, policy: Any = None, base: Any = "topk") -> list[Path]:
    run_ranks(2, lambda rank, _: _train(rank, folder, policy, base))
    return [folder / "mine.jsonl", folder / "board"]


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
    files, board = _recorded(tmp_path, policy, base)
    assert read_records(files) == read_records(board)
    for path in (files, board):
        result = _replayed(capsys, path)
        assert result["identical"], path
        assert result["beyond_measured"] == []
        assert Path(result["plot"]).is_file()
    if policy is not _nested:
        return
    other = _replayed(capsys, files, "--policy", "fixed", "--cf", 5000)
    assert other["followed"] == 0
    assert any("step times of CF 5000" in what for what in other["beyond_measured"])
    assert any("gains above CF" in what for what in other["beyond_measured"])
    assert main(["report", str(files), str(board), "--out", str(tmp_path / "out"), "--json"]) == 0
    one, two = json.loads(capsys.readouterr().out)["rows"]
    for name in ("steps", "bytes_sent", "modelled_seconds"):
        assert one[name] == two[name]
    (run,), (same,) = one["runs"], two["runs"]
    assert "topk+int4, CF 10 to 100, 2 workers" in run["title"]
    for name in ("title", "share_at_cf", "cf_history"):
        assert run[name] == same[name]


def test_a_policy_of_ones_own_is_not_imported(tmp_path: Path, capsys: Any) -> None:
    files, _ = _recorded(tmp_path, lambda: Every(steps=2))
    assert main(["replay", str(files)]) == 2
    error = capsys.readouterr().err
    assert f"{Every.__module__}.Every(" in error
    assert "is not imported" in error
    assert _replayed(capsys, files, "--policy", "gravac")["steps"] == STEPS
    assert main(["report", str(files), "--out", str(tmp_path / "out")]) == 0


def test_event_files_that_are_damaged(tmp_path: Path, capsys: Any) -> None:
    _, board = _recorded(tmp_path, "gravac")
    [path] = board.glob("*tfevents*")
    whole, content = read_records(path), path.read_bytes()
    assert len(whole.steps) == STEPS
    path.write_bytes(content[: len(content) * 2 // 3])
    cut = read_records(board)
    assert cut.steps == whole.steps[: len(cut.steps)]
    assert "ends in the middle" in cut.damage
    packed = content.index(b"\x78\x9c")  # where zlib's output begins
    path.write_bytes(content[: packed + 20] + b"\0" * 20 + content[packed + 40 :])
    assert "damaged line" in read_records(board).damage
    path.write_bytes(b"\xff" * 1000)
    assert read_records(board).steps == []
    assert main(["replay", str(board)]) == 2
    assert "holds no step" in capsys.readouterr().err
