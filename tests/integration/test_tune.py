"""`python -m runs tune` as it is used: real trials, interrupted, pruned and failed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from runs.__main__ import main
from runs.interrupt import INTERRUPTED
from runs.tune.study import open_study
from runs.tune.tuning import make_tuning
from tests.integration.commands import Start, assert_refused, python_m

SHORT = {"batch_size": 1, "steps": 12, "eval_every": 6, "fixed_clock": 0.1, "workers": 1}


def _words(folder: Path, **given: Any) -> list[str]:
    words = []
    for name, value in {"log_dir": folder, **SHORT, **given}.items():
        words.append("--" + name.replace("_", "-"))
        words += map(str, value if isinstance(value, list) else [value])
    return words


def _study(folder: Path) -> optuna.Study:
    return optuna.load_study(study_name=folder.name, storage=f"sqlite:///{folder}/study.db")


@pytest.mark.long
def test_a_study_goes_on_after_failures_and_after_ctrl_c(
    text: Path, tmp_path: Path, begin: Start, capfd: Any
) -> None:
    """Its trials are runs like any other, and Optuna's own tools read it."""
    given = {"data": str(text), "trials": 3, "search": ["lr=0.5,1,1e30"]}
    folder = tmp_path / "study"
    made = {**SHORT, **given, "log_dir": str(folder)}
    made.pop("trials")
    study = open_study(make_tuning(made))
    for lr in (1.0, 1e30, 0.5):
        study.enqueue_trial({"lr": lr})
    first = begin(*python_m("tune"), "--verbose", *_words(folder, **given))
    first.until(lambda: "(trial0)" in first.err)
    os.killpg(first.process.pid, signal.SIGINT)  # as a terminal does it
    assert first.end() == INTERRUPTED, first.err
    assert "Traceback" not in first.err
    assert "the same command goes on" in first.err

    assert main(["tune", *_words(folder, **given)]) == 0
    assert "optuna-dashboard sqlite:///" in capfd.readouterr().out
    trials = _study(folder).trials
    assert [trial.state.name for trial in trials].count("COMPLETE") == 2
    assert trials[0].user_attrs["reason"] == "interrupted"
    assert [trial.params["lr"] for trial in trials] == [1.0, 1e30, 0.5, 1.0]
    failed = [trial.user_attrs["reason"] for trial in trials if trial.state.name == "FAIL"]
    assert any(reason.startswith("diverged: ") for reason in failed)
    for trial in _study(folder).best_trials:
        saved = json.loads((folder / "runs" / f"trial{trial.number}" / "result.json").read_text())
        assert saved["quality"] == trial.values[0]
        assert saved["config"]["lr"] == trial.params["lr"]


@pytest.mark.long
def test_a_pruned_trial_stops_on_all_ranks(text: Path, tmp_path: Path, capfd: Any) -> None:
    folder = tmp_path / "study"
    given = {"data": str(text), "objective": ["quality"], "search": ["lr=1e-9,1"]}
    given |= {"eval_every": 3, "base": "none", "workers": 2}
    study = open_study(make_tuning({**SHORT, **given, "log_dir": str(folder)}))
    one = {"lr": optuna.distributions.CategoricalDistribution((1e-9, 1.0))}
    for _ in range(5):  # those that a pruner has seen before
        study.add_trial(
            optuna.trial.create_trial(
                value=100.0,
                params={"lr": 1.0},
                distributions=one,
                intermediate_values=dict.fromkeys((3, 6, 9, 12), 200.0),
            )
        )
    study.enqueue_trial({"lr": 1e-9})
    assert main(["tune", *_words(folder, trials=6, **given)]) == 0
    pruned = _study(folder).trials[5]
    assert pruned.state == TrialState.PRUNED
    assert "after 4 steps" in pruned.user_attrs["reason"]  # agreed with the next step's vote
    assert not list(folder.glob("runs/*/checkpoint"))


@pytest.mark.parametrize("failing", [True, False])
def test_trials_that_all_fail_end_with_an_error(
    failing: bool, text: Path, tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a process: what a run comes to is made up."""

    def found(tuning: Any, study: Any, trial: optuna.Trial, params: Any) -> list[float]:
        if failing or trial.number == 1:
            raise ValueError("diverged: the loss was nan")
        return [7.0, 1.0]

    monkeypatch.setattr("runs.tune.study._trained", found)
    monkeypatch.setattr("runs.tune.study.nothing_to_tune", lambda *_: "")
    words = _words(tmp_path / "study", data=text, trials=3)
    assert main(["tune", *words]) == (1 if failing else 0)
    out, err = capfd.readouterr()
    told = "error: no trial is complete (3 failed); the last: failed: diverged: the loss was nan"
    assert err.splitlines()[-1:] == ([told] if failing else err.splitlines()[-1:])
    assert ("2 complete, 1 failed" in out) != failing


def test_it_says_first_that_there_is_nothing_to_tune(
    text: Path, tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[int] = []

    def found(tuning: Any, study: Any, trial: optuna.Trial, params: Any) -> list[float]:
        trained.append(trial.number)
        return [7.0, 1.0]

    monkeypatch.setattr("runs.tune.study._trained", found)
    monkeypatch.setattr("runs.tune.study.nothing_to_tune", lambda *_: "nothing to tune: why")
    words = _words(tmp_path / "study", data=text, trials=4)
    assert main(["tune", *words]) == 0
    assert trained == [0]
    assert "\nnothing to tune: why" in capfd.readouterr().out
    assert main(["tune", *words, "--anyway"]) == 0
    assert trained == [0, 1, 2, 3]


def test_it_is_not_for_torchrun(capfd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    assert_refused(capfd, "tune", parts=["starts its own workers", "torchrun"])


BAD = {
    "--objective speed": ["--objective speed", "quality, alone or with bytes"],
    "--objective bytes": ["--objective bytes", "quality"],
    "--sampler grid": ["--sampler", "'grid'", "random"],
    "--search speed": ["--search speed", "needs a range"],
    "--search epsilon=": ["--search epsilon=", "needs a range"],
    "--search speed=1..2": ["speed", "GraVAC takes no speed"],
    "--policy gravac --search eta": ["eta", "GraVAC takes no eta"],
    "--search gain=0..1": ["gain"],
    "--search lr=1..0.1": ["--search lr=1..0.1", "LOW <= HIGH"],
    "--search lr=0.1..1 lr=0.2..2": ["--search lr=0.2..2", "lr is searched already"],
    "--search lr=a,b": ["'a'", "finite number"],
    "--search base=topk,foo": ["base=foo", "dgc"],
    "--search base=topk,topk": ["base=topk,topk", "each once"],
    "--search epsilon --policy GraVAC(epsilon=0.5)": ["--search epsilon", "given twice"],
    "--base none": ["--search says what is searched", "lr"],
    "--policy GraVAC(epsilon=7)": ["--policy", "epsilon=7", "(0, 1]"],
    "--trials 0": ["--trials", "'0'", ">= 1"],
    "--storage nothing://": ["--storage", "sqlite:///"],
    "--task x": ["--task 'x'", "cifar10"],
    "--log-dir /dev/null/x": ["--log-dir", "/dev/null", "folder"],
}


@pytest.mark.parametrize("options", BAD)
def test_bad_options_are_one_line(
    options: str, text: Path, tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("runs.tune.study.launch", lambda *_: pytest.fail("started workers"))
    words = ("--data", text, "--batch-size", 1, *options.split())
    assert_refused(capfd, "tune", *words, parts=BAD[options])
