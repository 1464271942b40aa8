"""`python -m runs train` as a user meets it: real processes, signals, files and exit codes."""

from __future__ import annotations

import io
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from runs.__main__ import main
from runs.config import TrainConfig
from runs.options import add_arguments, make_config
from runs.parser import OneLineParser
from runs.progress import Progress
from runs.records import read_records
from tests.distributed.setting import same

ROOT = Path(__file__).parents[2]
TRAIN = (sys.executable, "-m", "runs", "train")
TORCHRUN = (
    *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
    *("-m", "runs", "train"),
)
LIMIT = 150  # seconds that a command may take on a busy machine
LINK = "emulated 100 Mbit/s link"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text small enough that reading and evaluating it take no time."""
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("".join(f"{i} times {i} is {i * i}.\n" for i in range(1500)))
    return path


class Command:
    """A running command in a process group of its own; what it says goes to files."""

    def __init__(self, words: tuple[str, ...], folder: Path) -> None:
        self._out, self._err = folder / "out", folder / "err"
        environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process = subprocess.Popen(
                words, cwd=ROOT, stdout=out, stderr=err, env=environment, start_new_session=True
            )

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def until(self, condition: Callable[[], object], limit: float = LIMIT) -> None:
        """Wait for the condition; fails when the time is up or the command ends before."""
        deadline = time.monotonic() + limit
        while not condition():
            assert time.monotonic() < deadline, f"took over {limit} s:\n{self.out}{self.err}"
            assert self.process.poll() is None or condition(), f"ended:\n{self.out}{self.err}"
            time.sleep(0.05)

    def end(self, limit: float = LIMIT) -> int:
        """Wait for the end; the exit code."""
        try:
            return self.process.wait(limit)
        except subprocess.TimeoutExpired:
            pytest.fail(f"took over {limit} s:\n{self.out}{self.err}")

    def workers(self) -> list[int]:
        """The process ids of the workers (not of multiprocessing's tracker)."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [pid for pid in map(int, children.split()) if "spawn_main" in _words_of(pid)]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """start(*words): a `Command`; whatever is left of it afterwards is killed."""
    started: list[Command] = []

    def begin(*words: object) -> Command:
        folder = tmp_path / f"command{len(started)}"
        folder.mkdir()
        started.append(Command(tuple(map(str, words)), folder))
        return started[-1]

    yield begin
    for command in started:
        try:
            os.killpg(command.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
        command.process.wait()


def _words_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def _alive(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def _json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_ends_with_consistent_files(
    text: Path, tmp_path: Path, start: Callable[..., Command]
) -> None:
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
        "--link",
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

    assert json.loads((folder / "config.json").read_text())["link"] == "100mbit"
    assert (folder / "cf_timeline.png").read_bytes().startswith(b"\x89PNG")
    sent = set(_scalar_steps(folder, "cf/sent"))  # thinned out, but around the switch
    assert {0, 9, 10, 15} <= sent <= set(range(16))
    assert {"policy", "link", "steps"} <= _settings(folder)
    assert _scalar_steps(folder, "train/loss") == list(range(16))
    assert _scalar_steps(folder, "eval/quality") == [7, 15]

    titles = [line for line in command.err.splitlines() if line.startswith("text (")]
    told = [line for line in command.err.splitlines() if line.startswith("step ")]
    assert len(titles) == 2
    assert told
    assert all(LINK in line for line in titles + told)
    assert f"tensorboard --logdir {folder}" in command.err


def test_every_knob_of_compression_on_three_workers(
    text: Path, tmp_path: Path, start: Callable[..., Command]
) -> None:
    options = "--steps 8 --batch-size 1 --workers 3 --json --base dgc+int8 --cf-range 4 1000"
    options += " --policy warmup --warmup-steps 1 --exchange sharded --dense-below 500"
    command = start(*TRAIN, "--data", text, "--log-dir", tmp_path / "log", *options.split())
    assert command.end() == 0, command.err
    history = [(p["first"], p["last"], p["cf"]) for p in json.loads(command.out)["cf_history"]]
    assert history == [(0, 0, 4), (1, 1, 16), (2, 2, 64), (3, 3, 256), (4, 7, 1000)]


def _settings(folder: Path) -> set[str]:
    """Names on the HParams page."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import metadata

    tag = metadata.SESSION_START_INFO_TAG
    content = EventAccumulator(str(folder)).Reload().SummaryMetadata(tag).plugin_data.content
    return set(metadata.parse_session_start_info_plugin_data(content).hparams)


def _scalar_steps(folder: Path, tag: str) -> list[int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return [event.step for event in events.Scalars(tag)]


@pytest.mark.long
def test_interrupted_and_resumed_equals_straight_under_torchrun(
    text: Path, tmp_path: Path, start: Callable[..., Command]
) -> None:
    options = ("--data", text, "--steps", 60, "--batch-size", 1, "--fixed-clock", 0.1)
    options += ("--window", 6, "--checkpoint-every", 30)
    straight = start(*TORCHRUN, *options, "--log-dir", tmp_path / "straight")
    assert straight.end() == 0, straight.err

    folder = tmp_path / "stopped"
    stopped = start(*TRAIN, *options, "--log-dir", folder)
    stopped.until(lambda: "step 10: scale up" in stopped.err)
    os.killpg(stopped.process.pid, signal.SIGINT)  # as a terminal does it
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
@pytest.mark.parametrize("killed", ["worker", "parent"])
def test_killing_one_process_ends_all(
    killed: str, text: Path, tmp_path: Path, start: Callable[..., Command]
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
    while any(map(_alive, workers)):
        assert time.monotonic() < deadline, "orphans"
        time.sleep(0.05)


def test_sigterm_stops_cleanly_and_a_failing_worker_ends_all_with_its_traceback(
    text: Path, tmp_path: Path, start: Callable[..., Command]
) -> None:
    folder = tmp_path / "log"
    options = ("--steps", 100_000, "--batch-size", 1, "--policy", "off")
    command = start(*TRAIN, "--data", text, "--log-dir", folder, *options)
    command.until(lambda: "step      1/" in command.err)
    command.process.terminate()  # the parent alone
    assert command.end(limit=30) == 130, command.err
    assert not (folder / "timeline.jsonl").exists()
    assert json.loads((folder / "result.json").read_text())["summary"]["wire_factor"] == 1

    step = json.loads((folder / "checkpoint" / "meta.json").read_text())["step"]
    path = folder / "checkpoint" / f"step-{step}" / "rank1.pt"
    state = torch.load(path, weights_only=True)
    torch.save({**state, "model": {}}, path)
    broken = start(*TRAIN, "--resume", folder)
    assert broken.end() == 1
    assert broken.err.count("Traceback") == 1
    assert "Missing key(s) in state_dict" in broken.err
    assert "worker 1 failed" in broken.err


BAD = {
    "--task x": ["--task", "'x'", "text, cifar10"],
    "--model x": ["--model", "'x'", "lstm, gpt"],
    "--data /nowhere": ["--data", "/nowhere", "text file or a folder"],
    "--workers 0": ["--workers", "'0'", "integer >= 1"],
    "--steps many": ["--steps", "'many'", "integer >= 1"],
    "--lr -1": ["--lr", "'-1'", "> 0"],
    "--policy x": ["--policy", "'x'", "gravac"],
    "--base x": ["--base", "'x'", "adacomp, bf16, dgc"],
    "--base int8+bf16": ["--base", "'int8+bf16'", "sparsifier"],
    "--base topk+x": ["--base", "'topk+x'", "bf16, fp16"],
    "--exchange x": ["--exchange", "'x'", "all_gather, sharded"],
    "--base qsgd --exchange all_reduce": ["--exchange", "'all_reduce'", "all_gather"],
    "--granularity x": ["--granularity", "'x'", "layer, bucket"],
    "--dense-below -1": ["--dense-below", "'-1'", ">= 0"],
    "--base fp16 --dense-below 9": ["--dense-below", "9", "half"],
    "--policy budget --share 1.5": ["--share", "1.5", "(0, 1"],
    "--policy goodput --margin 0": ["--margin", "0", "(0, 1]"],
    "--policy schedule": ["--policy schedule", "--schedule STEP:CF"],
    "--policy schedule --schedule 0:1 9": ["--schedule", "STEP:CF", "'9'"],
    "--policy schedule --schedule 0:0.5": ["--schedule", "CF >= 1", "'0:0.5'"],
    "--policy schedule --schedule -1:2": ["--schedule"],
    "--policy schedule --schedule 5:2 05:3": ["--schedule", "step 5 twice"],
    "--policy schedule --schedule 5:2 --cf-range 10 20": ["CF 2", "--cf-range 10 20"],
    "--schedule 0:1 5:2": ["--schedule 0:1 5:2", "--policy schedule"],
    "--warmup-steps 5": ["--warmup-steps", "5", "--policy warmup"],
    "--cf-range 1000 10": ["--cf-range", "1000", "low <= high"],
    "--cf-range 0 10": ["--cf-range", "0.0", "1 <= low"],
    "--cf-range 10": ["--cf-range", "expected 2"],
    "--cf-range nan 10": ["--cf-range", "'nan'", "finite"],
    "--epsilon 1.5": ["--epsilon", "1.5", "(0, 1]"],
    "--omega 0": ["--omega", "0", "(0, 1]"],
    "--scaling x": ["--scaling", "'x'", "'geometric'"],
    "--gain x": ["--gain", "'x'", "'error_fed'"],
    "--memory x": ["--memory", "'x'", "momentum"],
    "--masking x": ["--masking", "'x'", "on, off"],
    "--masking 0.5": ["--masking", "0.5", "CF >= 1"],
    "--link slow": ["--link", "'slow'", "100mbit,5ms"],
    "--cf 10": ["--cf", "10", "--policy fixed"],
    "--policy accordion --gain raw": ["--gain", "raw", "--policy gravac"],
    "--policy goodput --gain raw": ["--gain", "'raw'", "'signal'"],
    "--base powersgd --policy gravac --gain x": ["--gain", "'x'", "'signal'"],
    "--momentum 1": ["--momentum", "'1'", "[0, 1)"],
    "--lr-drop 0": ["--lr-drop", "'0'", ">= 1"],
    "--policy fixed --cf 0.5": ["--cf", "0.5", ">= 1"],
    "--policy fixed --cf-range 10 20": ["--cf-range", "10 20", "--cf"],
    "--policy accordion --epsilon 0.5": ["--epsilon", "0.5", "--policy gravac"],
    "--policy accordion --eta 0": ["--eta", "0", "> 0"],
    "--policy off --link 1gbit": ["--link", "1gbit", "--policy off"],
    "--base none --policy gravac": ["--base none", "--policy gravac"],
    "--memory residual --masking on": ["--masking", "on", "--memory momentum"],
    "--model-mb 170": ["--model-mb 170", "--fixed-clock"],
    "--batch-size 99999999": ["--batch", "99999999", "smaller"],
    "--resume /nowhere": ["--resume", "/nowhere", "--checkpoint-every"],
    "--resume": ["--resume", "logs/", "LOGDIR"],
    "--resume /nowhere --lr 1": ["--lr", "1", "--steps"],
    "--log-dir /dev/null/x": ["--log-dir", "/dev/null", "folder"],
}


def test_a_schedule_with_a_learning_rate_that_drops_and_no_momentum(
    text: Path, start: Callable[..., Command], tmp_path: Path
) -> None:
    log = tmp_path / "log"
    words = "--policy schedule --schedule 0:10 2:20 --gain signal --lr-drop 3 --momentum 0"
    options = (*words.split(), "--lr", "0.5", "--steps", "5", "--data", text, "--log-dir", log)
    command = start(*TRAIN, *options)
    assert command.end() == 0, command.err
    reports = [record.report for record in read_records(log / "timeline.jsonl").steps]
    assert [report.cf for report in reports] == [10, 10, 20, 20, 20]
    assert [report.lr for report in reports] == [0.5, 0.5, 0.5, 0.05, 0.05]
    assert all(set(report.signal) == {10.0, 20.0} for report in reports)
    assert reports[0].peers_total == 0 != reports[1].peers_total
    saved = json.loads((log / "config.json").read_text())
    assert TrainConfig.from_json(saved).schedule == ("0:10", "2:20")
    assert "--momentum 0" in saved["command"]


@pytest.mark.parametrize("options", BAD)
def test_bad_options_are_one_line(
    options: str, text: Path, tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("runs.launch.launch", lambda *_: pytest.fail("started workers"))
    words = ["train", *options.split()]
    if "--data" not in options and "--resume" not in options:
        words += ["--data", str(text)]
    try:
        code = main(words)
    except SystemExit as error:  # argparse's way
        code = int(str(error.code))
    out, err = capfd.readouterr()
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("python -m runs train: error: ")
    for part in BAD[options]:
        assert part in err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_a_run_is_neither_overwritten_nor_resumed_with_other_workers(
    text: Path, tmp_path: Path, capfd: Any
) -> None:
    run = tmp_path / "run"
    (run / "checkpoint" / "step-5").mkdir(parents=True)
    config = {"log_dir": str(run), "data": str(text), "steps": 5}
    (run / "config.json").write_text(json.dumps(config))
    assert main(["train", "--log-dir", str(run)]) == 2
    assert f"--log-dir {run}: holds a run already" in capfd.readouterr().err

    meta = {"step": 5, "world_size": 2, "config": config}
    (run / "checkpoint" / "meta.json").write_text(json.dumps(meta))
    assert main(["train", "--resume", str(run)]) == 2
    assert "rank0.pt is missing" in capfd.readouterr().err
    for rank in range(2):
        (run / "checkpoint" / "step-5" / f"rank{rank}.pt").touch()
    assert main(["train", "--resume", str(run), "--workers", "3"]) == 2
    assert "--workers 3: " in capfd.readouterr().err
    assert main(["train", "--resume", str(run)]) == 2
    assert "--steps above 5" in capfd.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        "--link 1gbit,5ms --steps 7 --lr 0.25 --epsilon 0.4 --cf-range 1.5 200 --seed 3",
        "--policy fixed --cf 1 --masking off --clip-norm 2.5 --memory momentum",
        "--policy accordion --eta 0.3 --interval 9 --masking 50 --eval-every 4",
        "--policy off --task text --model gpt --batch-size 2 --checkpoint-every 5",
        "--base none --threads 2",
        "--policy goodput --margin 0.1 --cf-range 5 50",
        "--policy budget --share 0.1",
        "--policy schedule --schedule 0:1 100:10 300:12.5",
        "--base dgc+bf16 --policy warmup --warmup-steps 3 --exchange sharded --dense-below 99",
    ],
)
def test_the_command_that_is_saved_makes_the_same_run(options: str) -> None:
    def config(words: list[str]) -> TrainConfig:
        parser = OneLineParser("train")
        add_arguments(parser)
        return make_config(vars(parser.parse_args([*words, "--log-dir", "logs/x"])))

    made = config(options.split())
    assert config(shlex.split(made.command)[4:]) == made
    assert TrainConfig.from_json(json.loads(json.dumps(made.as_json()))) == made


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_bar_on_a_terminal_says_what_is_emulated() -> None:
    terminal = _Terminal()
    progress = Progress(0, 3, LINK, stream=terminal)
    for step in range(1, 4):
        progress.update(step, 1.5, None)
    progress.say("a switch")
    progress.close()
    assert "loss=1.500" in terminal.getvalue()
    assert f"a switch  ({LINK})" in terminal.getvalue()
    drawn = [part for part in terminal.getvalue().split("\r") if "%|" in part]
    assert drawn
    assert all(part.startswith(f"{LINK}: ") for part in drawn)


def test_a_wrong_command_names_the_right_ones(capfd: Any) -> None:
    assert main(["trian"]) == 2
    assert capfd.readouterr().err.count("\n") == 1
    assert main(["--help"]) == 0
    assert "train" in capfd.readouterr().out
