"""`python -m runs train` as a user meets it: real processes, signals, files and exit codes."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from runs.config import TrainConfig
from runs.records import read_records
from tests.distributed.setting import same
from tests.integration.commands import Start, alive, python_m, torchrun

TRAIN = python_m("train")
LINK = "emulated 100 Mbit/s link"


def _json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.long
def test_a_run_ends_with_consistent_files(text: Path, tmp_path: Path, start: Start) -> None:
    folder = tmp_path / "log"
    options = (
        "--policy",
        "gravac",
        "--steps",
        16,
        "--batch-size",
        1,
        "--eval-every",
        8,
        "--network",
        "100mbit",
        "--json",
    )
    command = start(*TRAIN, "--data", text, "--log-dir", folder, *options)
    assert command.end() == 0, command.err

    printed = json.loads(command.out)  # JSON and nothing else on stdout
    result = json.loads((folder / "result.json").read_text())
    assert printed == result
    assert result["steps"] == 16
    assert not result["interrupted"]
    assert 1 < result["quality"] < 256
    assert result["quality_name"] == "perplexity"
    assert [e["step"] for e in result["evaluations"]] == [8, 16]
    assert result["emulated_link"] == LINK

    recorded = read_records(folder / "timeline.jsonl")
    assert [record.report.step for record in recorded.steps] == list(range(16))
    assert recorded.events[0].step == 10
    assert result["summary"]["bytes_sent"] == recorded.bytes_sent
    assert result["summary"]["wire_factor"] == pytest.approx(recorded.wire_factor, rel=1e-12)
    assert f"(wire factor {recorded.wire_factor:.2f})" in command.err
    assert [(p["first"], p["last"], p["cf"]) for p in result["cf_history"]] == [
        (0, 9, 1.0),
        (10, 15, 10.0),
    ]
    metrics = _json_lines(folder / "metrics.jsonl")
    assert [m["step"] for m in metrics if "loss" in m] == list(range(16))

    assert json.loads((folder / "config.json").read_text())["network"] == "100mbit"
    sent = set(_scalar_steps(folder, "cf/sent"))  # thinned out, but around the switch
    assert {0, 9, 10, 15} <= sent <= set(range(16))
    assert _scalar_steps(folder, "train/loss") == list(range(16))
    assert _scalar_steps(folder, "eval/quality") == [7, 15]

    titles = [line for line in command.err.splitlines() if line.startswith("text (")]
    told = [line for line in command.err.splitlines() if line.startswith("step ")]
    assert len(titles) == 2
    assert told
    assert all(LINK in line for line in titles)
    assert not any(LINK in line for line in told)
    assert f"tensorboard --logdir {folder}" in command.err


@pytest.mark.long
def test_every_knob_of_compression_on_three_workers(
    text: Path, tmp_path: Path, start: Start
) -> None:
    options = "--steps 8 --batch-size 1 --workers 3 --json --base dgc+int8 --cf-range 4 1000"
    options += " --policy Warmup(steps=1) --exchange sharded --dense-below 500"
    command = start(*TRAIN, "--data", text, "--log-dir", tmp_path / "log", *options.split())
    assert command.end() == 0, command.err
    history = [(p["first"], p["last"], p["cf"]) for p in json.loads(command.out)["cf_history"]]
    assert history == [(0, 0, 4), (1, 1, 16), (2, 2, 64), (3, 3, 256), (4, 7, 1000)]


@pytest.mark.long
def test_a_run_goes_on_with_another_number_of_workers(
    text: Path, tmp_path: Path, start: Start
) -> None:
    folder = tmp_path / "log"
    options = "--steps 6 --batch-size 1 --checkpoint-every 6 --fixed-clock 0.1"
    before = start(*TRAIN, "--data", text, "--log-dir", folder, *options.split())
    assert before.end() == 0, before.err
    for steps, old, new in ((12, 2, 3), (15, 3, 1)):
        more = start(*TRAIN, "--resume", folder, "--workers", new, "--steps", steps)
        assert more.end() == 0, more.err
        assert f"goes on with {new} workers instead of {old}: a step has {new} samples" in more.err
        assert "the learning rate is not scaled" in more.err
        saved = folder / "checkpoint" / f"step-{steps}"
        assert len(list(saved.glob("rank*.pt"))) == new
    result = json.loads((folder / "result.json").read_text())
    assert result["steps"] == 15
    records = [line for line in _json_lines(folder / "timeline.jsonl") if line["kind"] == "step"]
    assert [line["report"]["step"] for line in records] == list(range(15))


def _scalar_steps(folder: Path, tag: str) -> list[int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return [event.step for event in events.Scalars(tag)]


@pytest.mark.long
def test_interrupted_and_resumed_equals_straight_under_torchrun(
    text: Path, tmp_path: Path, start: Start
) -> None:
    options = ("--data", text, "--steps", 60, "--batch-size", 1, "--fixed-clock", 0.1)
    options += ("--policy", "GraVAC(window=6)", "--checkpoint-every", 30)
    straight = start(*torchrun("train"), *options, "--log-dir", tmp_path / "straight")
    assert straight.end() == 0, straight.err

    folder = tmp_path / "stopped"
    stopped = start(*TRAIN, *options, "--log-dir", folder)
    stopped.until(lambda: "step 10: CF 10" in stopped.err)
    stopped.interrupt()
    assert stopped.end() == 130, stopped.err
    assert "Traceback" not in stopped.err
    assert f"--resume {folder}" in stopped.out
    result = json.loads((folder / "result.json").read_text())
    assert result["interrupted"]
    assert 10 < result["steps"] < 60
    assert json.loads((folder / "checkpoint" / "meta.json").read_text())["step"] == result["steps"]
    with (folder / "timeline.jsonl").open("a") as file:  # of steps after the checkpoint
        file.write(json.dumps({"kind": "event", "step": 59, "cf_before": 1, "cf": 2}) + '\n{"kin')

    resumed = start(*TRAIN, "--resume", folder)
    assert resumed.end() == 0, resumed.err
    assert f"resumed after step {result['steps']}" in resumed.out

    for rank in range(2):
        states = [
            torch.load(path / "checkpoint" / "step-60" / f"rank{rank}.pt", weights_only=True)
            for path in (tmp_path / "straight", folder)
        ]
        assert states[0]["compressor"]["memory"]
        assert same(*states)
    timelines = [_json_lines(p / "timeline.jsonl") for p in (tmp_path / "straight", folder)]
    for lines in timelines:
        for line in lines:
            line.pop("elapsed", None)
    assert timelines[0] == timelines[1]
    assert sum(line["kind"] == "event" for line in timelines[0]) >= 2


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.long
@pytest.mark.parametrize("killed", ["worker", "parent"])
def test_killing_one_process_ends_all(
    killed: str, text: Path, tmp_path: Path, start: Start
) -> None:
    options = ("--steps", 100_000, "--batch-size", 1, "--log-dir", tmp_path / "log")
    command = start(*TRAIN, "--data", text, *options)
    command.until(lambda: "step      1/" in command.err)
    workers = command.workers()
    assert len(workers) == 2
    os.kill(workers[1] if killed == "worker" else command.process.pid, signal.SIGKILL)
    code = command.end(limit=20)
    if killed == "worker":
        assert code == 1
        assert f"worker 1 (pid {workers[1]}) was ended by SIGKILL" in command.err
    deadline = time.monotonic() + 10
    while any(map(alive, workers)):
        assert time.monotonic() < deadline, "orphans"
        time.sleep(0.05)


@pytest.mark.long
def test_a_closed_terminal_saves_a_checkpoint_and_gives_the_folder_back(
    text: Path, tmp_path: Path, start: Start
) -> None:
    folder = tmp_path / "log"
    options = ("--steps", 100_000, "--batch-size", 1, "--policy", "ddp")
    command = start(*TRAIN, "--data", text, "--log-dir", folder, *options)
    command.until(lambda: "step      1/" in command.err)
    os.killpg(command.process.pid, signal.SIGHUP)
    assert command.end() == 130, command.err
    assert "Traceback" not in command.err
    saved = json.loads((folder / "checkpoint" / "meta.json").read_text())
    assert json.loads((folder / "result.json").read_text())["steps"] == saved["step"] > 0


@pytest.mark.long
def test_sigterm_stops_cleanly_and_a_checkpoint_that_does_not_fit_is_refused(
    text: Path, tmp_path: Path, start: Start
) -> None:
    folder = tmp_path / "log"
    options = ("--steps", 100_000, "--batch-size", 1, "--policy", "ddp")
    command = start(*TRAIN, "--data", text, "--log-dir", folder, *options)
    command.until(lambda: "step      1/" in command.err)
    command.process.terminate()  # the parent alone
    assert command.end(limit=30) == 130, command.err
    assert not (folder / "timeline.jsonl").exists()
    assert json.loads((folder / "result.json").read_text())["summary"]["wire_factor"] == 1

    meta = folder / "checkpoint" / "meta.json"
    saved = json.loads(meta.read_text())
    path = folder / "checkpoint" / f"step-{saved['step']}" / "rank1.pt"
    state = torch.load(path, weights_only=True)
    torch.save({**state, "model": {}}, path)
    records = (folder / "metrics.jsonl").read_bytes()
    damaged = start(*TRAIN, "--resume", folder)
    assert damaged.end() == 2
    assert f"{path} is missing or damaged: its SHA-256" in damaged.err
    assert (folder / "metrics.jsonl").read_bytes() == records

    saved["digests"][1] = hashlib.sha256(path.read_bytes()).hexdigest()
    meta.write_text(json.dumps(saved))
    broken = start(*TRAIN, "--resume", folder)  # a program whose model is another
    assert broken.end() == 2
    assert "Traceback" not in broken.err
    assert "does not fit this program: RuntimeError('Error(s) in loading state_dict" in broken.err


@pytest.mark.long
def test_a_schedule_with_a_learning_rate_that_drops_and_no_momentum(
    text: Path, start: Start, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    words = "--policy Schedule({0:10,2:20},gain='error_fed') --lr-drop 3 --momentum 0"
    options = (*words.split(), "--lr", "0.5", "--steps", "5", "--data", text, "--log-dir", log)
    command = start(*TRAIN, *options)
    assert command.end() == 0, command.err
    reports = [record.report for record in read_records(log / "timeline.jsonl").steps]
    assert [report.cf for report in reports] == [10, 10, 20, 20, 20]
    assert [report.lr for report in reports] == [0.5, 0.5, 0.5, 0.05, 0.05]
    saved = json.loads((log / "config.json").read_text())
    policy = "Schedule({0:10,2:20},gain='error_fed')"
    assert TrainConfig.from_json(saved).policy == policy
    assert "--momentum 0" in saved["command"]
