"""`python -m runs simulate` as a user meets it: files, signals, exit codes."""

from __future__ import annotations

import errno
import json
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from adaptive import JSONLTimeline, StepRecord
from runs import checkpoint as checkpoints
from runs.__main__ import main
from runs.build import build_task
from runs.checkpoint import find_checkpoint, not_finite
from runs.config import TrainConfig
from runs.options import make_config
from runs.parser import UsageError
from runs.records import read_records
from runs.simulate.ranks import run_ranks
from runs.tasks import TextTask, tasks
from runs.train import train
from tests.distributed.setting import same
from tests.integration.commands import Start, assert_refused, python_m

SHORT = ("--batch-size", "1", "--network", "100mbit", "--policy", "goodput")


def _simulate(text: Path, folder: Path, *words: str) -> int:
    """In this process; the exit code."""
    given = ("--data", str(text), *SHORT, "--log-dir", str(folder), *words)
    return main(["simulate", *given])


def _states(folder: Path) -> list[dict[str, Any]]:
    files = sorted(folder.glob("checkpoint/step-*/rank*.pt"))
    return [torch.load(path, weights_only=True) for path in files]


@pytest.mark.long
def test_it_does_what_train_does_to_the_bit(text: Path, tmp_path: Path, capsys: Any) -> None:
    ours, theirs = tmp_path / "simulated", tmp_path / "real"
    common = ("--workers", "2", "--steps", "16", "--checkpoint-every", "16", "--eval-every", "8")
    common += ("--model-mb", "8", "--policy", "GraVAC(window=3)", "--coding", "5")
    train = ("--data", str(text), *SHORT, *common, "--fixed-clock", "0.02")
    assert main(["train", *train, "--log-dir", str(theirs)]) == 0
    capsys.readouterr()
    assert _simulate(text, ours, *common, "--step-seconds", "0.02") == 0
    said = capsys.readouterr()
    for name in ("timeline.jsonl", "metrics.jsonl"):
        assert (ours / name).read_bytes() == (theirs / name).read_bytes()
    assert len(_states(ours)) == 2
    assert same(_states(ours), _states(theirs))
    results = [json.loads((folder / "result.json").read_text()) for folder in (ours, theirs)]
    for key in ("summary", "quality", "cf_history", "evaluations", "modelled_seconds"):
        assert results[0][key] == results[1][key]
    assert len(results[0]["cf_history"]) > 1
    assert "2 simulated workers" in said.out
    assert "modelled: 0.02 s a step and what 100 Mbit/s take for its bytes, 5 ns of" in said.out
    assert any(ours.glob("events.out.tfevents.*"))
    recorded = read_records(ours / "timeline.jsonl")
    assert recorded.header is not None
    scale = 8e6 / (4 * recorded.header.numel)
    seconds = 0.0
    for report in (record.report for record in recorded.steps):
        gradients = report.wire_bytes - report.statistics_bytes
        seconds += 0.02 + (scale * gradients + report.statistics_bytes) * 8 / 1e8
        seconds += 5e-9 * 2e6 * (report.cf != 1)
    assert results[0]["modelled_seconds"] == pytest.approx(seconds)


def test_what_is_read_and_run_again(text: Path, tmp_path: Path, capsys: Any) -> None:
    first, again = tmp_path / "first", tmp_path / "again"
    assert _simulate(text, first, "--workers", "3", "--steps", "12", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    command = shlex.split(result["command"])
    assert command[:4] == ["python", "-m", "runs", "simulate"]
    assert TrainConfig.from_json(json.loads((first / "config.json").read_text())).simulated
    assert main([*command[3:], "--log-dir", str(again)]) == 0
    assert (first / "timeline.jsonl").read_bytes() == (again / "timeline.jsonl").read_bytes()
    capsys.readouterr()
    assert main(["report", str(first), "--out", str(tmp_path / "page"), "--json"]) == 0
    notes = json.dumps(json.loads(capsys.readouterr().out))
    assert "its step times are modelled, not measured" in notes


class _Broken(TextTask):
    """Has no batch for one rank in one step."""

    def batch(self, step: int, rank: int, world_size: int) -> Any:
        if (step, rank) == (3, 2):
            raise OSError("the disk\nis gone")
        return super().batch(step, rank, world_size)


def test_a_failed_worker_ends_the_run_as_in_train(
    text: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tasks(), "text", _Broken)
    handler = signal.getsignal(signal.SIGINT)
    assert _simulate(text, tmp_path / "run", "--workers", "4", "--steps", "9") == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == (
        "error: worker 2 failed: OSError: the disk is gone (traceback above); all ended"
    )
    assert any("in batch" in line for line in lines)
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ("--policy ddp", "--policy ddp leaves out"),
        ("--workers 0", "--workers: must be an integer >= 1"),
        ("--step-seconds 0", "--step-seconds: must be a finite number > 0"),
        ("--fixed-clock 1", "--fixed-clock"),
        ("--exchange postal", "--exchange"),
        ("--exchange TwoLevel(node=2)", "exchange on one level"),
        ("--workers 100000", "--batch-size"),
    ],
)
def test_wrong_options_are_one_line(
    text: Path, tmp_path: Path, capfd: Any, words: str, what: str
) -> None:
    given = ("--data", text, "--log-dir", tmp_path / "run", *words.split())
    assert_refused(capfd, "simulate", *given, parts=[what])


@pytest.mark.long
def test_an_interrupted_run_goes_on_as_if_nothing_had_been(
    text: Path, tmp_path: Path, start: Start, capsys: Any
) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    steps = ("--workers", "3", "--steps", "400")
    words = ("--data", str(text), *SHORT, *steps, "--log-dir", str(run))
    command = start(*python_m("simulate"), *words)
    command.until(lambda: "\nstep" in f"\n{command.err}")
    command.process.send_signal(signal.SIGINT)
    assert command.end() == 130, command.err
    assert "stopping after this step" in command.err
    assert f"python -m runs simulate --resume {run}" in command.out
    done = json.loads((run / "result.json").read_text())["steps"]
    assert 0 < done < 400
    assert main(["train", "--resume", str(run)]) == 2
    assert "accepted: python -m runs simulate --resume" in capsys.readouterr().err
    last = str(done + 4)
    assert main(["simulate", "--resume", str(run), "--steps", last]) == 0
    assert _simulate(text, whole, "--workers", "3", "--steps", last) == 0
    ours, theirs = (read_records(folder / "timeline.jsonl").steps for folder in (run, whole))
    assert repr(ours) == repr(theirs)
    assert len(ours) == done + 4


@pytest.mark.parametrize(
    "sync", [pytest.param("EveryStep()", marks=pytest.mark.long), "LocalSteps(2)"]
)
def test_a_run_as_of_a_transformer_goes_on_to_the_bit(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync: str
) -> None:
    """Its moments are restored, and its learning rate falls as if it had never stopped."""
    given = {"data": str(text), "workers": 2, "batch_size": 1, "steps": 5, "checkpoint_every": 5}
    given |= {"optimizer": "adamw", "warmup": 2, "lr_schedule": "cosine", "clip_grad": 0.5}
    given |= {"policy": "fixed", "fixed_clock": 1.0, "simulated": True, "sync": sync}
    task = build_task(make_config(given))
    monkeypatch.setattr(task, "evaluate", lambda _: 0.0)  # which would take longer than the steps

    def run(folder: Path, **how: Any) -> None:
        config = make_config({**given, "log_dir": str(folder)})
        run_ranks(2, lambda _, group: train(config, task=task, voters=group, **how))

    run(tmp_path / "whole")
    run(tmp_path / "stopped", pause_at=3)
    checkpoint = find_checkpoint(tmp_path / "stopped")
    assert checkpoint.step == 3
    run(tmp_path / "stopped", checkpoint=checkpoint)
    states = _states(tmp_path / "whole")
    assert [state["step"] for state in states] == [5, 5]
    assert [group["lr"] for group in states[0]["optimizers"][0]["param_groups"]] == [0, 0]
    assert same(_states(tmp_path / "stopped"), states)


@pytest.mark.long
@pytest.mark.parametrize("good", [0, 5])
@pytest.mark.parametrize("lr", [1e25, 1e38])
def test_a_run_that_diverges_stops_and_keeps_the_checkpoint_from_before(
    text: Path,
    tmp_path: Path,
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
    lr: float,
    good: int,
) -> None:
    """After so many good steps one update spoils the model, though every number is finite yet."""
    factor = lr / TextTask.learning_rates["lstm"]
    monkeypatch.setattr("runs.trainer.lr_factor", lambda _, step: factor if step >= good else 1.0)
    run = tmp_path / "run"
    assert _simulate(text, run, "--steps", "12", "--workers", "2", "--checkpoint-every", "1") == 3
    lines = capsys.readouterr().err.splitlines()
    said = lines[-1]
    assert "error: the run has diverged by step" in said
    if good:
        checkpoint = find_checkpoint(run)
        assert checkpoint.step == good
        assert f"the last checkpoint is of step {good}, in {run / 'checkpoint'}" in said
        states = _states(run)
        assert [state["step"] for state in states] == [good] * 2
        assert not_finite(states) == ""
    else:
        with pytest.raises(UsageError, match="there is no checkpoint"):
            find_checkpoint(run)
    result = json.loads((run / "result.json").read_text())
    assert result["steps"] < 12
    assert result["quality"] is None
    assert result["diverged"] in said


def test_a_full_disk_costs_records_and_checkpoints_and_not_the_training(
    text: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full from step 3 on; what can still be written at the end is."""
    full = OSError(errno.ENOSPC, "No space left on device")
    real_step, real_write = JSONLTimeline.step, checkpoints._write

    def step(self: JSONLTimeline, record: StepRecord) -> None:
        if record.report.step >= 3:
            raise full
        real_step(self, record)

    def write(path: Path, state: dict[str, Any]) -> str:
        if state["step"] > 3 and path.name == "rank1.pt":
            raise full
        return real_write(path, state)

    def add_scalar(*_: object) -> None:
        raise full

    monkeypatch.setattr(JSONLTimeline, "step", step)
    monkeypatch.setattr(checkpoints, "_write", write)
    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter.add_scalar", add_scalar)
    run = tmp_path / "run"
    options = ("--workers", "2", "--checkpoint-every", "3", "--steps", "8")
    assert _simulate(text, run, *options) == 4
    err = capsys.readouterr().err
    for said in (
        "JSONLTimeline has failed",
        "TensorBoard's event file",
        "the checkpoint of step 6 could not be saved, and the one of step 3 stays",
        "error: the last checkpoint could not be saved",
    ):
        assert err.count(said) == 1, err
    assert f"the last checkpoint is of step 3, in {run / 'checkpoint'}" in err
    assert find_checkpoint(run).step == 3
    assert len(_states(run)) == 2
    result = json.loads((run / "result.json").read_text())
    assert result["steps"] == 8
    assert result["quality"] is not None
    assert result["modelled_seconds"] is None  # of steps that are not all on record
    assert len(read_records(run / "timeline.jsonl").steps) == 3
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 9  # is not on that disk

    monkeypatch.undo()
    assert main(["simulate", "--resume", str(run), "--steps", "9"]) == 0
    assert find_checkpoint(run).step == 9


def test_a_result_that_cannot_be_written_is_an_exit_status(
    text: Path, tmp_path: Path, capsys: Any
) -> None:
    run = tmp_path / "run"
    (run / "result.json" / "x").mkdir(parents=True)  # in its way
    assert _simulate(text, run, "--workers", "1", "--steps", "2") == 4
    said = capsys.readouterr()
    assert f"error: {run / 'result.json'} could not be written" in said.err
    assert "held-out perplexity" in said.out
