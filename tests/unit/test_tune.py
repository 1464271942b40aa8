"""The parts of `python -m runs tune` that start no process: space, objective, study, front."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.trial import TrialState, create_trial

from adaptive import StepRecord
from runs.config import TrainConfig
from runs.expression import policy_name
from runs.parser import UsageError
from runs.report.run import Ending
from runs.tune.study import _trained, findings, nothing_to_tune, open_study
from runs.tune.tuning import BY_POLICY, Tuning, make_space, make_tuning, usual
from tests.unit.made_runs import made, record

# -- what is searched ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("epsilon=0.1..0.5", FloatDistribution(0.1, 0.5)),
        ("window=4..9", IntDistribution(4, 9)),
        ("autocast=on,off", CategoricalDistribution([True, False])),
        ("window=4..90", IntDistribution(4, 90, log=True)),
        ("lr=0.01..1", FloatDistribution(0.01, 1, log=True)),
        ("lr_drop=5..50", IntDistribution(5, 50, log=True)),
        ("window=10,20", CategoricalDistribution((10, 20))),
        ("gain=raw,gradient", CategoricalDistribution(("raw", "gradient"))),
        ("base=topk,dgc+bf16", CategoricalDistribution(("topk", "dgc+bf16"))),
        ("omega", FloatDistribution(0.01, 0.5, log=True)),
    ],
)
def test_ranges_and_choices(spec: str, expected: BaseDistribution) -> None:
    name = spec.partition("=")[0]
    assert make_space([spec], usual(1.0), {}) == {name: expected}


def test_searched_numbers_have_few_digits_so_that_what_is_printed_is_what_ran() -> None:
    space: dict[str, BaseDistribution] = {"epsilon": FloatDistribution(0.1234567, 0.9)}
    tuning = Tuning({}, ("quality",), space, Path())
    assert tuning.chosen({"epsilon": 0.87654321}) == {"epsilon": 0.877}
    assert tuning.chosen({"epsilon": 0.12345678}) == {"epsilon": 0.1234567}


@pytest.mark.parametrize("policy", BY_POLICY)
def test_what_is_searched_of_a_policy_makes_runs(policy: str, tmp_path: Path) -> None:
    tuning = _tuning(tmp_path, policy=policy)
    assert tuple(tuning.space) == BY_POLICY[policy]
    for name, one in tuning.space.items():
        assert isinstance(one, (FloatDistribution, IntDistribution))
        tuning.config({name: one.low})
        tuning.config({name: one.high})


def _tuning(folder: Path, **given: Any) -> Tuning:
    return make_tuning({"log_dir": str(folder), "steps": 20, **given})


@pytest.mark.parametrize(
    ("given", "policy", "searched"),
    [
        ({}, "gravac", ["epsilon", "omega"]),
        ({"policy": "GraVAC(omega=0.2)"}, "gravac", ["epsilon"]),
        ({"search": ["lr"]}, "gravac", ["lr"]),
        (
            {"policy": "goodput", "search": ["margin", "base=topk,dgc"]},
            "goodput",
            ["margin", "base"],
        ),
        ({"cf": 50.0, "search": ["lr", "clip-grad"]}, "fixed", ["lr", "clip_grad"]),
        ({"base": "none", "search": ["lr"]}, "fixed", ["lr"]),
    ],
)
def test_epsilon_and_omega_first_or_what_is_named(
    given: dict[str, Any], policy: str, searched: list[str], tmp_path: Path
) -> None:
    tuning = _tuning(tmp_path, **given)
    assert policy_name(tuning.config({}).policy) == policy
    assert [*tuning.space] == searched


# -- what for ------------------------------------------------------------------------------------


def test_values_are_those_of_the_whole_run(tmp_path: Path) -> None:
    steps = [record(i) for i in range(4)]  # of 1000 bytes and half a second each
    run = made("run", steps, ((2, 6.0), (3, 5.0), (4, 4.0)))
    tuning = _tuning(tmp_path, objective=["quality", "bytes", "seconds"])
    assert tuning.values(run) == [4, 0.004, 2.0]
    assert all(map(math.isnan, tuning.values(made("run", [], ((4, 4.0),)))[2:]))


def test_an_accuracy_is_maximised(tmp_path: Path) -> None:
    assert _tuning(tmp_path).directions == ["minimize", "minimize"]
    assert _tuning(tmp_path, task="cifar10").directions == ["maximize", "minimize"]


# -- whether there is anything to tune -------------------------------------------------------------


def _waiting(step: int, cf: float, seconds: float) -> StepRecord:
    """A step of half a second that waits so long for the network."""
    one = record(step, cf)
    return replace(one, report=replace(one.report, exchange_seconds=seconds))


def _studied(folder: Path) -> optuna.Study:
    """A study with a trial that is complete."""
    study = optuna.create_study(directions=["minimize", "minimize"])
    study.add_trial(create_trial(values=[7.0, 1.0]))
    (folder / "runs" / "trial0").mkdir(parents=True)
    return study


@pytest.mark.parametrize(("waited", "nothing"), [(0.001, True), (0.2, False)])
def test_there_is_nothing_to_tune_where_dense_steps_do_not_wait(
    waited: float, nothing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = [_waiting(i, 1.0, waited) for i in range(9)]
    steps += [_waiting(i, 10.0, 0.0) for i in range(9, 12)]
    monkeypatch.setattr("runs.tune.study.read_folder", lambda *_: made("run", steps))
    why = nothing_to_tune(_studied(tmp_path), _tuning(tmp_path))
    assert bool(why) == nothing
    assert not nothing or "75% of the steps were sent dense" in why


def test_a_run_without_dense_steps_does_not_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = [_waiting(i, 10.0, 0.0) for i in range(9)]
    monkeypatch.setattr("runs.tune.study.read_folder", lambda *_: made("run", steps))
    assert nothing_to_tune(_studied(tmp_path), _tuning(tmp_path)) == ""


def test_a_trial_whose_run_is_elsewhere_does_not_tell(tmp_path: Path) -> None:
    """As where commands on several machines share a study."""
    study = _studied(tmp_path)
    assert nothing_to_tune(study, _tuning(tmp_path / "other")) == ""


# -- a trial -------------------------------------------------------------------------------------


def test_a_trial_that_stopped_early_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = made("run", [record(i) for i in range(6)], ((3, 5.0), (6, 6.0)))
    monkeypatch.setattr("runs.tune.study.launch", lambda *_: 0)
    tuning = _tuning(tmp_path, patience=1)
    study = optuna.create_study(directions=tuning.directions)
    early = replace(run, ending=Ending(steps=6, quality=5.0, best_step=3))
    monkeypatch.setattr("runs.tune.study.read_folder", lambda *_: early)
    assert _trained(tuning, study, study.ask(), {})[0] == 5.0
    monkeypatch.setattr("runs.tune.study.read_folder", lambda *_: run)
    with pytest.raises(optuna.TrialPruned):
        _trained(tuning, study, study.ask(), {})


# -- the study -----------------------------------------------------------------------------------


def test_the_same_options_find_the_same_folder() -> None:
    def folder(**given: Any) -> Path:
        return make_tuning(given).folder

    assert folder() == folder(steps=TrainConfig.steps)
    assert folder(steps=11) != folder(steps=12)
    assert folder(search=["lr"]) != folder(search=["lr=0.1..1"])
    assert folder(objective=["quality"]) != folder()


def test_the_first_trial_has_the_policys_defaults(tmp_path: Path) -> None:
    study = open_study(_tuning(tmp_path, search=["epsilon", "window=1000..2000"]))
    [first] = study.get_trials()
    assert first.state == TrialState.WAITING
    assert first.system_attrs["fixed_params"] == {"epsilon": 0.3}  # no window lies in that range


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_a_study_holds_the_numbers_that_ran(sampler: str, tmp_path: Path) -> None:
    tuning = _tuning(tmp_path, search=["epsilon", "lr", "window=10..200"], objective=["quality"])
    study = open_study(tuning, sampler=sampler)
    ran: list[dict[str, Any]] = []

    def trial(one: optuna.Trial) -> float:
        params = {name: one._suggest(name, each) for name, each in tuning.space.items()}
        ran.append(tuning.chosen(params))
        return float(sum(params.values()))

    study.optimize(trial, n_trials=9)
    assert [one.params for one in study.get_trials()] == ran
    assert len({one["lr"] for one in ran}) > 3


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"steps": 30}, "--steps: .* begun with 20, not 30"),
        ({"seed": 1}, "--seed: .* begun with None, not 1"),
        ({"network": "1gbit"}, "--network: .* begun with None, not 1gbit"),
        ({"search": ["lr"]}, "--search: .* begun with epsilon=.*, not lr=.*"),
        ({"objective": ["quality"]}, "--objective: .* begun with .*bytes"),
    ],
)
def test_a_study_of_something_else_is_refused_by_name(
    other: dict[str, Any], said: str, tmp_path: Path
) -> None:
    directions = {"objective": ["quality", "seconds"]} if "objective" in other else {}
    open_study(_tuning(tmp_path, **directions))
    open_study(_tuning(tmp_path, **directions), sampler="random")  # how, and not what
    other = {"objective": ["quality", "bytes"]} if directions else other
    said = "--objective: .*begun with .*seconds.*, not .*bytes" if directions else said
    with pytest.raises(UsageError, match=said):
        open_study(_tuning(tmp_path, **other))


def test_a_storage_that_does_not_open_keeps_its_password_to_itself(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--storage") as refused:
        open_study(_tuning(tmp_path), "nothing://me:secret@host/name")
    assert "secret" not in str(refused.value)


def test_the_findings_name_the_best_and_what_failed(tmp_path: Path) -> None:
    tuning = _tuning(tmp_path, search=["lr=0.1..1"])
    study = optuna.create_study(directions=tuning.directions)
    failed = {"state": TrialState.FAIL, "user_attrs": {"reason": "diverged"}}
    study.add_trial(create_trial(**failed))
    assert findings(tuning, study, "") == [
        "no trial is complete (1 failed); the last: failed: diverged"
    ]
    for i in range(9):
        lr = 0.1 + i / 10
        study.add_trial(
            create_trial(values=[1 + lr, 2 - lr], params={"lr": lr}, distributions=tuning.space)
        )
    interrupted = {"state": TrialState.FAIL, "user_attrs": {"reason": "interrupted"}}
    study.add_trial(create_trial(**interrupted))
    answer, *_, count, command = findings(tuning, study, "")
    assert answer.startswith("lr 0.1 (trial 1): held-out perplexity 1.1")
    assert count == "trials: 9 complete, 1 failed, 1 interrupted"
    assert "--lr 0.1" in command
    assert findings(tuning, study, "nothing to tune: why")[0] == "nothing to tune: why"


def test_settings_that_made_no_difference_are_said_to_be_so(tmp_path: Path) -> None:
    tuning = _tuning(tmp_path, search=["lr=0.1..1"])
    study = optuna.create_study(directions=tuning.directions)
    study.add_trials([create_trial(values=[7.0, 2.0]) for _ in range(3)])
    assert "made no difference" in findings(tuning, study, "")[0]
