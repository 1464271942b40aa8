"""`python -m runs tune`: real studies on two workers, and what a user meets at their edges."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.distributions import CategoricalDistribution
from optuna.trial import TrialState, create_trial

from runs.__main__ import main
from runs.records import read_records
from runs.tune.storage import RETRY
from runs.tune.study import OWNER, REASON, SETTINGS, open_study
from runs.tune.tuning import Tuning, make_tuning
from tests.integration.commands import Command, Start, assert_refused, python_m, torchrun

TUNE = python_m("tune")
TORCHRUN = torchrun("tune")
SHORT = {"batch_size": 1, "steps": 12, "eval_every": 6, "fixed_clock": 0.1}


class Case:
    """A study begun by the test, so that it can queue the trials that it wants first."""

    def __init__(self, folder: Path, **given: Any) -> None:
        self._given = {"log_dir": str(folder), **given}
        self.tuning: Tuning = make_tuning(self._given)
        folder.mkdir(parents=True, exist_ok=True)
        self.study: optuna.Study = open_study(self.tuning)

    @property
    def words(self) -> list[str]:
        words = []
        for name, value in self._given.items():
            words.append("--" + name.replace("_", "-"))
            words += map(str, value if isinstance(value, list) else [value])
        return words


# -- two processes, two objectives, a trial that fails -------------------------------------------


@pytest.fixture(scope="module")
def shared(
    text: Path, tmp_path_factory: pytest.TempPathFactory, begin: Start
) -> tuple[Case, list[Command]]:
    """A study of four trials that two commands have run at the same time."""
    space = ["lr=0.5,1,1e30", "epsilon=0.05..0.2", "window=2..3"]
    folder = tmp_path_factory.mktemp("shared") / "study"
    case = Case(folder, data=str(text), trials=4, search=space, **SHORT)
    for lr in (1e30, 1.0, 0.5):
        case.study.enqueue_trial({"lr": lr})
    commands = [begin(*TUNE, *case.words, "--json") for _ in range(2)]
    for command in commands:
        assert command.end() == 0, command.err
    return case, commands


@pytest.mark.long
def test_two_processes_share_a_study_and_a_failure_does_not_stop_it(
    shared: tuple[Case, list[Command]],
) -> None:
    case, commands = shared
    trials = case.study.trials
    assert [trial.state for trial in trials].count(TrialState.COMPLETE) >= 2
    failed = trials[0]
    assert failed.state == TrialState.FAIL
    assert failed.user_attrs[REASON].startswith("diverged: ")
    counted = [trial for trial in trials if trial.state != TrialState.FAIL or trial is failed]
    assert len(counted) == 4
    assert len({trial.user_attrs[OWNER] for trial in counted}) == 2
    assert [trial.user_attrs[SETTINGS]["lr"] for trial in trials[:3]] == [1e30, 1.0, 0.5]
    for command in commands:
        assert "Traceback" not in command.err
        assert "trial 0: failed: diverged" in commands[0].err + commands[1].err
        json.loads(command.out)  # JSON and nothing else on stdout


@pytest.mark.long
def test_its_files_and_its_front(shared: tuple[Case, list[Command]], capfd: Any) -> None:
    case, _ = shared
    folder = case.tuning.folder
    assert main(["tune", *case.words, "--json"]) == 0  # nothing is left but to report
    captured = capfd.readouterr()
    result = json.loads(captured.out)
    assert result == json.loads((folder / "tune.json").read_text())
    assert result["finished"]
    assert result["objectives"] == ["held-out perplexity", "MB sent by a worker"]
    complete = [trial for trial in result["trials"] if trial["state"] == "complete"]
    values = {trial["number"]: trial["values"] for trial in complete}
    for number in result["front"]:
        quality, cost = values[number]
        assert not any(q < quality and c <= cost for q, c in values.values())
    assert "Pareto front" in captured.err
    assert result["pick"] in result["front"]

    for trial in complete:  # a trial is a run like any other, and repeats to the bit
        run = Path(trial["log_dirs"][0])
        made = json.loads((run / "result.json").read_text())
        assert made["quality"] == trial["values"][0]
        assert read_records(run / "timeline.jsonl").bytes_sent == trial["values"][1]
        assert made["command"] == trial["command"]
        assert made["config"]["lr"] == trial["settings"]["lr"]
    for name in ("front.png", "settings.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
    page = (folder / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 2
    assert "diverged" in page
    names: dict[str, Any] = {}
    exec(result["snippet"], names)
    settings = values and complete[[t["number"] for t in complete].index(result["pick"])]
    assert names["compressor"]._settings.policy.window == settings["settings"]["window"]


@pytest.mark.long
def test_its_trials_are_in_tensorboards_hparams(shared: tuple[Case, list[Command]]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    case, _ = shared
    folder = case.tuning.config({}, number=1).folder
    events = EventAccumulator(str(folder))
    events.Reload()
    found = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    params = HParamsPluginData.FromString(found).session_start_info.hparams
    assert params["lr"].number_value == 1.0
    quality = events.Scalars("eval/quality")[-1].value
    assert quality == pytest.approx(case.study.trials[1].values[0])


# -- interrupted, crashed, continued -------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.long
def test_interrupted_crashed_and_continued(text: Path, tmp_path: Path, begin: Start) -> None:
    """A learning rate that learns nothing never comes to the target, and so never ends."""
    given = {**SHORT, "steps": 100_000, "eval_every": 2}
    space = ["lr=1e-9,1"]
    case = Case(
        *(tmp_path / "study",),
        **given,
        **{"data": str(text), "trials": 3, "search": space, "policy": "fixed"},
        **{"target": 150, "objective": ["bytes"]},
    )
    for lr in (1.0, 1e-9):
        case.study.enqueue_trial({"lr": lr})
    words = [word for word in case.words if word != "--json"]

    first = begin(*TUNE, *words)
    first.until(lambda: "(trial 1, 2 of 3)" in first.err)
    os.killpg(first.process.pid, signal.SIGINT)  # as a terminal does it
    assert first.end() == 130, first.err
    assert "Traceback" not in first.err
    assert "the same command goes on" in first.out
    again = case.study.trials[2]
    assert case.study.trials[1].user_attrs[REASON] == "interrupted"
    assert (again.state, RETRY.retried_trial_number(again)) == (TrialState.WAITING, 1)
    assert case.study.trials[0].state == TrialState.COMPLETE

    case.study.enqueue_trial({"lr": 1.0})
    second = begin(*TUNE, *words)
    second.until(lambda: "(trial 2, 2 of 3)" in second.err and len(second.workers()) == 2)
    killed = second.workers()[1]
    os.kill(killed, signal.SIGKILL)
    assert second.end() == 0, second.err
    assert "1 of them begun already" in second.out
    assert f"(pid {killed}) was ended by SIGKILL" in case.study.trials[2].user_attrs[REASON]
    assert [trial.state for trial in case.study.trials] == [
        TrialState.COMPLETE,
        TrialState.FAIL,
        TrialState.FAIL,
        TrialState.COMPLETE,
    ]
    assert case.study.trials[3].values == case.study.trials[0].values
    assert "3 of 3 trials: 2 complete, 1 failed" in second.out
    sent = read_records(case.tuning.config({}, number=3).folder / "timeline.jsonl")
    assert case.study.trials[3].values[0] < sent.bytes_sent  # it stops one step later


@pytest.mark.parametrize("complete", [False, True])
def test_a_study_whose_trials_all_fail_ends_with_an_error(
    text: Path, tmp_path: Path, capfd: Any, complete: bool
) -> None:
    given = {**SHORT, "data": str(text), "trials": 2, "objective": ["quality"]}
    case = Case(tmp_path / "study", **given, search=["lr=0.5,1"])
    space = {"lr": CategoricalDistribution((0.5, 1.0))}
    attributes = {SETTINGS: {"lr": 1.0}, "command": "-"}
    for number in range(2):
        ended: dict[str, Any] = {"state": TrialState.FAIL}
        if complete and number == 0:
            ended = {"value": 100.0}
        why = {**attributes, REASON: "diverged: the loss was nan"}
        case.study.add_trial(
            create_trial(**ended, params={"lr": 1.0}, distributions=space, user_attrs=why)
        )
    assert main(["tune", *case.words]) == (0 if complete else 1)
    errors = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error")]
    told = (
        "error: no trial is complete, 2 of 2 trials: 2 failed; trial 1: diverged: the loss was nan"
    )
    assert errors == ([] if complete else [told])


# -- pruning, under torchrun ---------------------------------------------------------------------


@pytest.mark.long
def test_a_pruned_trial_stops_on_all_ranks_and_the_same_processes_go_on(
    text: Path, tmp_path: Path, begin: Start
) -> None:
    case = Case(
        *(tmp_path / "study",),
        **{**SHORT, "eval_every": 3, "data": str(text), "trials": 7, "objective": ["quality"]},
        **{"search": ["lr=1e-9,1"], "base": "none"},
    )
    space = {"lr": CategoricalDistribution((1e-9, 1.0))}
    for _ in range(5):  # those that a pruner has seen before
        trial = create_trial(
            value=100.0,
            params={"lr": 1.0},
            distributions=space,
            intermediate_values=dict.fromkeys((3, 6, 9, 12), 200.0),
            user_attrs={SETTINGS: {"lr": 1.0}, REASON: ""},
        )
        case.study.add_trial(trial)
    for lr in (1e-9, 1.0):
        case.study.enqueue_trial({"lr": lr})
    command = begin(*TORCHRUN, *case.words)
    assert command.end() == 0, command.err
    pruned, complete = case.study.trials[5:]
    assert (pruned.state, complete.state) == (TrialState.PRUNED, TrialState.COMPLETE)
    assert "after 3 steps" in pruned.user_attrs[REASON]
    result = json.loads(
        (case.tuning.config({}, number=5).folder / "result.json").read_text(encoding="utf-8")
    )
    assert result["steps"] == 4  # agreed with the next step's vote
    assert "7 of 7 trials: 6 complete, 1 pruned" in command.out
    assert not list(case.tuning.folder.glob("runs/*/checkpoint"))


# -- what cannot be done -------------------------------------------------------------------------

BAD = {
    "--objective speed": ["--objective speed", "quality bytes"],
    "--objective bytes": ["--objective bytes", "--target"],
    "--objective quality --target 5": ["--target 5", "bytes or seconds"],
    "--bandwidth 1gbit": ["--bandwidth 1gbit", "seconds"],
    "--objective quality seconds --bandwidth fast": ["--bandwidth fast", "100mbit"],
    "--pruner median": ["--pruner median", "one objective"],
    "--plan grid": ["--plan", "'grid'", "random"],
    "--search speed": ["--search speed", "unknown", "margin"],
    "--policy gravac --search eta": ["--search eta", "--policy accordion"],
    "--search gain=0..1": ["--search gain=0..1", "accepted: gradient"],
    "--search lr=1..0.1": ["--search lr=1..0.1", "LOW <= HIGH"],
    "--search window=1.5..2": ["'1.5'", "integer"],
    "--search lr=a,b": ["'a'", "finite number"],
    "--search base=topk,foo": ["base=topk,foo", "got 'foo'", "dgc"],
    "--search memory=bar": ["'bar'", "residual, momentum"],
    "--search gain=raw,rare": ["'rare'", "error_fed"],
    "--search base=topk,topk": ["base=topk,topk", "each once"],
    "--search epsilon --epsilon 0.5": ["--search epsilon", "--epsilon fixes it"],
    "--base none": ["nothing is left to search", "lr"],
    "--policy off --also lr": ["--policy off", "--base none"],
    "--epsilon 7": ["--policy", "epsilon=7", "(0, 1]"],
    "--trials 0": ["--trials", "'0'", ">= 1"],
    "--setting nothing": ["--setting nothing", "dense", "topk"],
    "--setting topk@50 --setting topk@50": ["--setting topk@50", "twice"],
    "--setting topk@50 --base dgc": ["--setting topk@50", "--base dgc", "one of the two"],
    "--storage nothing://": ["--storage nothing://", "sqlite:///"],
    "--task x": ["--task 'x'", "cifar10"],
    "--log-dir /dev/null/x": ["--log-dir", "/dev/null", "folder"],
}


@pytest.mark.parametrize("options", BAD)
def test_bad_options_are_one_line(
    options: str, text: Path, tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("runs.tune.run.launch", lambda *_: pytest.fail("started workers"))
    monkeypatch.setattr("runs.tune.storage.ATTEMPTS", 1)
    words = ("--data", text, "--batch-size", 1, *options.split())
    assert_refused(capfd, "tune", *words, parts=BAD[options])


def test_a_study_of_something_else_in_the_folder_is_refused(
    text: Path, tmp_path: Path, capfd: Any
) -> None:
    case = Case(tmp_path / "study", data=str(text), **SHORT)
    words = [word if word != "12" else "13" for word in case.words]
    assert main(["tune", *words]) == 2
    assert "--steps: study 'study'" in capfd.readouterr().err


def test_help_has_the_grammar(capfd: Any) -> None:
    with pytest.raises(SystemExit):
        main(["tune", "--help"])
    out = capfd.readouterr().out
    for part in ("NAME=LOW..HIGH", "--plan random --trials 60", "logs/tune-TASK"):
        assert part in out
