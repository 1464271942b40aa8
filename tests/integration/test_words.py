"""The word-level model in whole runs: resumed to the bit, stopped early, looked at, compared."""

from __future__ import annotations

import json
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import torch

from runs.__main__ import main
from runs.build import build_task
from runs.config import TrainConfig
from runs.options import make_config
from runs.simulate.ranks import run_ranks
from runs.tasks import trainable
from runs.train import Trainer, train
from tests.distributed.setting import same
from tests.integration.commands import Start, python_m

TASK = ("--task", "words", "--batch-size", "2", "--eval-every", "4")


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three texts, of which one would like to know the next word."""
    folder = tmp_path_factory.mktemp("words")
    for name, lines in (("train", 500), ("valid", 60), ("test", 50)):
        text = "".join(f"{i % 17} times {i % 13} is {i % 17 * (i % 13)} .\n" for i in range(lines))
        (folder / f"{name}.txt").write_text(text)
    return folder


def _simulate(data: Path, folder: Path, *options: object, task: tuple[str, ...] = TASK) -> int:
    given = [*task, "--data", data, "--log-dir", folder, "--workers", 2, *options]
    return main(["simulate", *map(str, given)])


def _states(folder: Path) -> list[dict[str, Any]]:
    """Of all ranks, without what says how many steps were wanted."""
    files = sorted(folder.glob("checkpoint/step-*/rank*.pt"))
    states = [torch.load(path, weights_only=True) for path in files]
    return [{key: value for key, value in one.items() if key != "run"} for one in states]


def _metrics(folder: Path) -> list[str]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [line for line in lines if "loss" in line]


@pytest.mark.long
def test_a_resumed_run_is_one_that_was_never_stopped(
    words: Path, tmp_path: Path, capsys: Any
) -> None:
    options = ("--policy", "GraVAC(window=2)", "--clip-local", 0.1)
    options += ("--patience", 5, "--checkpoint-every", 5)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert _simulate(words, whole, "--steps", 20, *options) == 0
    assert _simulate(words, parts, "--steps", 10, *options) == 0
    states = _states(parts)
    carried = [state["model"]["_extra_state"] for state in states]
    assert carried[0].shape == (2, 2, 2, 128)  # states, layers, rows, hidden
    assert not torch.equal(*carried)  # each rank reads tracks of its own
    assert states[0]["early"]["best"] is not None
    assert main(["simulate", "--resume", str(parts), "--steps", "20"]) == 0
    assert same(_states(whole), _states(parts))
    assert _metrics(whole) == _metrics(parts)

    results = [json.loads((folder / "result.json").read_text()) for folder in (whole, parts)]
    for key in ("quality", "test", "best_step", "summary"):
        assert results[0][key] == results[1][key]
    assert results[0]["test"] != results[0]["quality"]
    said = capsys.readouterr().out
    assert "test perplexity" in said
    assert "the best model is that after" in said
    assert main(["report", str(whole), str(parts), "--out", str(tmp_path / "page")]) == 0
    said = capsys.readouterr().out
    assert "test perplexity" in said
    # with another number of workers nobody goes on with what rank 0 carried
    assert main(["simulate", "--resume", str(parts), "--workers", "3", "--steps", "21"]) == 0


@pytest.mark.long
def test_a_run_that_does_not_get_better_stops_and_takes_its_best_model(
    words: Path, tmp_path: Path, capsys: Any
) -> None:
    options = ("--steps", 60, "--patience", 2, "--lr", 12, "--checkpoint-every", 50)
    assert _simulate(words, tmp_path / "run", *options) == 0
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    found = {one["step"]: one["quality"] for one in result["evaluations"]}
    assert result["steps"] == max(found) < 60
    assert result["quality"] == min(found.values()) == found[result["best_step"]]
    assert result["steps"] == result["best_step"] + 8
    assert not result["interrupted"]
    assert "2 evaluations in a row" in result["stopped_early"]
    assert len(_states(tmp_path / "run")) == 2  # of its last step
    capsys.readouterr()
    assert main(["report", str(tmp_path / "run"), "--out", str(tmp_path / "p"), "--json"]) == 0
    row = json.loads(capsys.readouterr().out)["rows"][0]
    assert row["runs"][0]["finished"]
    assert row["quality"]["mean"] == result["quality"]
    assert row["beside"]["test perplexity"]["mean"] == result["test"]


@pytest.mark.long
def test_decisions_rest_on_validation_data_and_trials_never_see_the_test(
    words: Path, tmp_path: Path
) -> None:
    given = {"task": "words", "data": str(words), "batch_size": 2, "steps": 2, "workers": 1}
    config = make_config({**given, "policy": "ddp", "log_dir": str(tmp_path)})

    def work(rank: int, group: object) -> list[Any]:
        outcomes = [train(config, keep=False, test=test) for test in (False, True)]
        return [(outcome.quality, outcome.test) for outcome in outcomes]

    trial, final = run_ranks(1, work)[0]
    assert trial == (final[0], None)  # as `tune` trains
    assert final[1] > 1
    assert final[1] != final[0]
    (words / "test.txt").rename(words / "kept")
    (words / "test.txt").write_text("quite another text\n" * 40)
    try:
        assert run_ranks(1, work)[0][1][0] == final[0]  # the quality is of other data
    finally:
        (words / "kept").rename(words / "test.txt")


def test_local_clipping_is_of_the_whole_gradient_of_each_worker(text: Path) -> None:
    limit = 0.02
    config = make_config(
        {
            **{"data": str(text), "batch_size": 1, "clip_local": limit, "momentum": 0.0},
            **{"policy": "ddp", "log_dir": "unused", "lr": 0.5},
        }
    )

    def work(rank: int, group: object) -> dict[str, Any]:
        trainer = Trainer(config)
        before = [p.detach().clone() for p in trainable(trainer.model)]
        trainer.descend(trainer.loss())
        return {
            "step": [b - p.detach() for b, p in zip(before, trainable(trainer.model), strict=True)],
            "own": _clipped(config, rank, limit / sqrt(2)),
        }

    first, second = run_ranks(2, work)
    for moved, other, one, two in zip(
        first["step"], second["step"], first["own"], second["own"], strict=True
    ):
        assert torch.equal(moved, other)
        torch.testing.assert_close(moved, 0.5 * (one + two) / 2, rtol=1e-3, atol=5e-7)


def _clipped(config: TrainConfig, rank: int, limit: float) -> list[torch.Tensor]:
    """The gradient of a rank's first batch, clipped as torch does it."""
    task = build_task(config)
    model = task.build_model()
    task.loss(model, task.batch(0, rank, 2)).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
    assert norm > limit
    return [p.grad for p in model.parameters()]


def test_autocast_computes_in_bfloat16_and_keeps_float32(text: Path) -> None:
    given = {"data": str(text), "batch_size": 1, "policy": "ddp", "log_dir": "unused"}

    def work(rank: int, group: object) -> list[Any]:
        found: list[Any] = []
        for autocast in (False, True):
            trainer = Trainer(make_config({**given, "autocast": autocast}))
            loss = trainer.loss()
            trainer.descend(loss)
            kept = {p.dtype for p in trainable(trainer.model)}
            found += [loss.item(), loss.dtype, kept]
        return found

    wide, *kinds, narrow, dtype, kept = run_ranks(1, work)[0]
    assert 0 < abs(wide - narrow) < 0.01 * wide
    assert [dtype, kept] == kinds == [torch.float32, {torch.float32}]


@pytest.mark.long
def test_real_workers_do_what_simulated_ones_do(words: Path, tmp_path: Path) -> None:
    common = ("--steps", 12, "--checkpoint-every", 6, "--patience", 4)
    common += ("--base", "topk", "--policy", "fixed", "--cf", 20)
    given = [*TASK, "--data", words, "--workers", 2, *common, "--log-dir", tmp_path / "real"]
    assert main(["train", *map(str, given), "--fixed-clock", "0.1"]) == 0
    assert _simulate(words, tmp_path / "ours", *common) == 0
    assert same(_states(tmp_path / "real"), _states(tmp_path / "ours"))
    assert _metrics(tmp_path / "real") == _metrics(tmp_path / "ours")


@pytest.mark.long
def test_a_suite_is_interrupted_and_continued(words: Path, tmp_path: Path, start: Start) -> None:
    options = ("--suite", "harris", "--steps", 8, "--data", words, "--batch-size", 2)
    options += ("--eval-every", 4, "--json", "--workers", 2)
    folder = tmp_path / "log"
    ours = (*options, "--only", "none", "k 50x", "--slice", 4, "--simulated", "on")
    first = start(*python_m("compare"), *ours, "--log-dir", folder)
    first.until(lambda: "turn 2 of 12" in first.err)
    first.interrupt()
    assert first.end() == 130, first.err
    second = start(*python_m("compare"), *ours, "--log-dir", folder)
    assert second.end() == 0, second.err
    assert "turn 1 of 12" not in second.err
    result = json.loads(second.out)
    assert result["suite"]["name"] == "harris"
    assert [row["contender"] for row in result["suite"]["rows"]] == ["none", "top-k 50x"]
    assert "speeds are modelled, 0.2 s of computing" in second.err
    perplexity = result["suite"]["rows"][1]["columns"][0]
    assert perplexity["paper"] == 89.6
    assert perplexity["here"]["mean"] > 1

    real = start(*python_m("compare"), *options, "--only", "none", "--log-dir", tmp_path / "real")
    assert real.end() == 0, real.err
    assert json.loads(real.out)["suite"]["rows"] == result["suite"]["rows"][:1]
