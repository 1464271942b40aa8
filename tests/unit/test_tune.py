"""The parts of `python -m runs tune` that start no process: space, objective, study, front."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.trial import TrialState, create_trial

from adaptive import LinkSpec
from runs.build import build_compressor
from runs.config import TrainConfig
from runs.options import make_config
from runs.parser import UsageError
from runs.policy_expression import policy_name, written_arguments
from runs.tune.options import ACCEPTED, HARRIS_SETTINGS
from runs.tune.report import importances, knee, make_report, make_snippet, pareto_front
from runs.tune.run import answering
from runs.tune.space import BY_POLICY, ON_REQUEST, Parameter, search
from runs.tune.storage import RETRY
from runs.tune.study import (
    COMMAND,
    INTERRUPTED,
    OWNER,
    REASON,
    SETTINGS,
    SeededByTrial,
    finish,
    make_pruner,
    next_trial,
    open_study,
    trials_that_count,
)
from runs.tune.tuning import Objective, Tuning, make_tuning, make_tunings
from tests.unit.made_runs import made, record

# -- what is searched ----------------------------------------------------------------------------


@given(
    st.integers(4, 100_000),
    st.floats(1e-4, 10),
    st.sampled_from([(p, name) for p, names in BY_POLICY.items() for name in names + ON_REQUEST]),
    st.integers(0, 2**32 - 1),
)
def test_what_is_drawn_lies_in_the_space_and_makes_a_run(
    steps: int, lr: float, what: tuple[str, str], seed: int
) -> None:
    policy, name = what
    [parameter] = search([name], policy, steps, lr)
    one = parameter.distribution
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed))
    value = parameter.value(study.ask({name: one}).params[name])
    if isinstance(one, CategoricalDistribution):
        assert value in one.choices
    else:
        assert one.low <= float(value) <= one.high
        assert isinstance(value, int) == isinstance(one, IntDistribution)
    assert parameter.value(value) == value
    written = "Schedule({0: 10})" if policy == "schedule" else policy
    config = make_config({"policy": written, name: value, "log_dir": "x"})
    own = written_arguments(config.policy)
    argument = name.removeprefix(f"{policy}_")
    assert (own[argument] if argument in own else getattr(config, name)) == value


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("epsilon=0.1..0.5", FloatDistribution(0.1, 0.5)),
        ("window=4..9", IntDistribution(4, 9, log=True)),
        ("window=10,20", CategoricalDistribution((10, 20))),
        ("lr=0.1,1", CategoricalDistribution((0.1, 1.0))),
        ("base=topk,dgc+bf16", CategoricalDistribution(("topk", "dgc+bf16"))),
        ("clip-norm=1..2", FloatDistribution(1, 2, log=True)),
    ],
)
def test_ranges_and_choices(spec: str, expected: BaseDistribution) -> None:
    name = spec.partition("=")[0].replace("-", "_")
    assert search([spec], "gravac", 300, 1.0) == (Parameter(name, expected),)


def test_searched_numbers_have_few_digits_so_that_what_is_printed_is_what_ran() -> None:
    assert Parameter("epsilon", FloatDistribution(0.05, 0.9)).value(0.123456789) == 0.123
    assert Parameter("epsilon", FloatDistribution(0.1234567, 0.9)).value(0.12345678) == 0.1234567


def _tuning(folder: Path, **given: Any) -> Tuning:
    return make_tuning({"log_dir": str(folder), "steps": 20, **given})


def test_what_is_given_is_not_searched_and_what_is_asked_for_is(tmp_path: Path) -> None:
    names = [p.name for p in _tuning(tmp_path, epsilon=0.4, also=["lr", "base"]).space]
    assert names == ["omega", "window", "scaling", "gain", "lr", "base"]
    written = _tuning(tmp_path, policy="GraVAC(gain='raw', cooldown=3)", epsilon=0.4)
    assert [p.name for p in written.space] == ["omega", "window", "scaling"]
    assert written.config({"window": 7}).policy == (
        'GraVAC(cooldown=3, epsilon=0.4, gain="raw", window=7)'
    )
    assert [p.name for p in _tuning(tmp_path, search=["lr"]).space] == ["lr"]
    harris = _tuning(tmp_path, plan="random", base="dgc", cf=100.0, policy="fixed")
    assert [p.name for p in harris.space] == ["lr", "clip_norm"]
    assert harris.objective.names == ("quality",)
    assert harris.pruner == "none"
    assert _tuning(tmp_path, target=5.0).objective.names == ("seconds",)
    assert _tuning(tmp_path, target=5.0).pruner == "median"


def test_harris_searches_each_compression_setting_on_its_own(tmp_path: Path) -> None:
    tunings = make_tunings({"plan": "random", "trials": 60, "log_dir": str(tmp_path)})
    assert list(tunings) == list(HARRIS_SETTINGS)
    for tuning in tunings.values():
        assert tuning.trials == 60
        assert tuning.objective.names == ("quality",)
        assert [parameter.name for parameter in tuning.space] == ["lr", "clip_norm"]
        assert tuning.folder.parent == tmp_path
    configs = [tuning.config() for tuning in tunings.values()]
    policies = [(config.policy, config.base) for config in configs[:2]]
    assert policies == [("fixed", "none"), ("Fixed(cf=50)", "topk")]
    assert len({tuning.name for tuning in tunings.values()}) == len(tunings)
    one = make_tunings({"plan": "random", "policy": "gravac", "log_dir": str(tmp_path)})
    assert [tuning.config().policy for tuning in one.values()] == ["gravac"]


# -- what for ------------------------------------------------------------------------------------


def _objective(*names: str, target: float | None = None, higher: bool = False) -> Objective:
    return Objective(names, target, None, "accuracy" if higher else "perplexity", higher)


def test_values_are_those_at_the_first_evaluation_at_the_target() -> None:
    steps = [record(i) for i in range(4)]  # of 1000 bytes and half a second each
    run = made("run", steps, ((2, 6.0), (3, 5.0), (4, 4.0)))
    assert _objective("quality", "bytes").values(run) == [4, 4000]
    assert _objective("bytes", target=5.5).values(run) == [3000]
    assert _objective("seconds", target=5.5).values(run) == [1.5]
    assert _objective("seconds", target=3.0).values(run) is None
    network = LinkSpec.parse("1gbit")
    there = replace(_objective("seconds", target=5.5), network=network)
    assert there.values(replace(run, modelled={network: (2.0, 4.0, 6.0, 8.0)})) == [6]
    [unknown] = _objective("seconds").values(made("run", [], ((4, 4.0),))) or []
    assert math.isnan(unknown)


def test_the_pruner_compares_qualities_in_the_direction_of_the_study() -> None:
    assert _objective("quality").intermediate(3.0) == 3.0
    assert _objective("seconds", target=1.0).intermediate(3.0) == 3.0
    assert _objective("quality", higher=True).intermediate(3.0) == 3.0  # maximised
    assert _objective("seconds", target=1.0, higher=True).intermediate(3.0) == -3.0
    assert _objective("quality", higher=True).directions == ["maximize"]
    assert _objective("bytes", target=5.0).reached(5.0)
    assert not _objective("bytes", target=5.0).reached(5.1)
    assert not _objective("bytes", target=5.0).reached(-inf)
    assert _objective("bytes", target=0.5, higher=True).reached(0.6)


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12),
    st.booleans(),
)
def test_the_front_is_what_nothing_beats(points: list[tuple[int, int]], higher: bool) -> None:
    study = optuna.create_study(directions=_objective("quality", "bytes", higher=higher).directions)
    study.add_trials([_trial([float(q), float(b)]) for q, b in points])
    front = pareto_front(study)
    kept = [tuple(trial.values) for trial in front]
    sign = -1 if higher else 1
    for quality, cost in points:
        beaten = any(
            sign * q <= sign * quality and b <= cost and (q, b) != (quality, cost)
            for q, b in points
        )
        assert ((quality, cost) in kept) == (not beaten)
    assert len(set(kept)) == len(kept)
    assert kept == sorted(kept, key=lambda value: sign * value[0])
    assert knee(front) in front


def test_the_settings_shown_are_those_nearest_to_the_best_of_both() -> None:
    front = [_trial([1.0, 100.0]), _trial([1.2, 10.0]), _trial([9.0, 9.0])]
    assert knee(front) is front[1]
    assert knee([]) is None


def _trial(found: list[float], **attrs: Any) -> optuna.trial.FrozenTrial:
    return create_trial(values=found, user_attrs=attrs)


@pytest.mark.parametrize(
    ("given", "policy", "searched"),
    [
        ({}, "goodput", ["margin", "power"]),
        ({"margin": 0.1}, "goodput", ["power"]),
        ({"search": ["lr"]}, "goodput", ["lr"]),
        ({"search": ["epsilon", "omega=0.1,0.2"]}, "gravac", ["epsilon", "omega"]),
        ({"search": ["gain"]}, "gravac", ["gain"]),
        ({"epsilon": 0.4, "search": ["omega"]}, "gravac", ["omega"]),
        ({"omega": 0.1, "also": ["lr"]}, "gravac", ["epsilon", "window", "scaling", "gain", "lr"]),
        ({"search": ["warmup-steps"]}, "warmup", ["warmup_steps"]),
        ({"base": "powersgd", "search": ["epsilon"]}, "gravac", ["epsilon"]),
    ],
)
def test_the_policy_is_the_default_one_or_the_one_whose_settings_are_named(
    given: dict[str, Any], policy: str, searched: list[str], tmp_path: Path
) -> None:
    tuning = make_tuning({**given, "log_dir": str(tmp_path)})
    assert policy_name(tuning.config().policy) == policy
    assert [parameter.name for parameter in tuning.space] == searched


# -- the study -----------------------------------------------------------------------------------


def test_the_same_options_find_the_same_folder_whatever_the_trials(tmp_path: Path) -> None:
    def folder(**given: Any) -> Path:
        return make_tuning(given).folder

    assert folder(trials=3) == folder(trials=9, plan_seed=3, steps=TrainConfig.steps)
    assert folder(steps=11) != folder(steps=12)
    assert folder(search=["lr"]) != folder(search=["lr=0.1..1"])
    assert folder(objective=["quality"]) != folder()
    signature = _tuning(tmp_path, cf_range=[10.0, 20.0]).signature
    assert json.loads(json.dumps(signature)) == signature


@pytest.fixture
def begin(tmp_path: Path) -> Callable[..., tuple[Tuning, optuna.Study]]:
    def _begin(**given: Any) -> tuple[Tuning, optuna.Study]:
        tuning = _tuning(tmp_path, **given)
        tuning.folder.mkdir(parents=True, exist_ok=True)
        return tuning, open_study(tuning)

    return _begin


Begin = Callable[..., tuple[Tuning, optuna.Study]]


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"steps": 30}, "--steps: .* begun with 20, not 30"),
        ({"seeds": [1, 2]}, "--seeds: .* begun with 0, not 1 2"),
        ({"link": "1gbit"}, "--link: .* begun with None, not 1gbit"),
        ({"also": ["memory"]}, "--search: .* begun with .*power=.*, not .*memory=residual"),
        ({"objective": ["quality"]}, "--objective: .* begun with quality bytes, not quality;"),
    ],
)
def test_a_study_of_something_else_is_refused_by_name(
    begin: Begin, other: dict[str, Any], said: str
) -> None:
    begin()
    begin(trials=99, plan_seed=5)  # not what is tuned, but how
    with pytest.raises(UsageError, match=said):
        begin(**other)


def _ask(tuning: Tuning, study: optuna.Study, owner: str = "process") -> optuna.Trial:
    trial = next_trial(tuning, study, owner)
    assert trial is not None
    return trial


def test_trials_of_dead_processes_are_given_up_and_their_parameters_queued_once(
    begin: Begin, tmp_path: Path
) -> None:
    tuning, study = begin(objective=["quality"], search=["lr=0.1..1"])
    first, second = (_ask(tuning, study, f"process {i}") for i in range(2))
    with answering(first), answering(second):
        pass  # they give a sign of life, and have given it
    with sqlite3.connect(tuning.folder / "study.db") as database:  # one has not been heard of
        database.execute("UPDATE trial_heartbeats SET heartbeat='2020-01-01' WHERE trial_id=1")
    again = _ask(tuning, study, "process 3")
    states = [trial.state for trial in study.trials]
    assert states == [TrialState.FAIL, TrialState.RUNNING, TrialState.RUNNING]
    assert again.params == first.params != second.params
    assert RETRY.retried_trial_number(study.trials[again.number]) == first.number
    assert [trial.number for trial in trials_that_count(study)] == [1, 2]
    assert study.trials[again.number].user_attrs[OWNER] == "process 3"


def test_an_interrupted_trial_is_queued_again_and_does_not_count(begin: Begin) -> None:
    tuning, study = begin(objective=["quality"], search=["lr=0.1..1"], trials=2)
    first = _ask(tuning, study)
    finish(study, first, TrialState.FAIL, INTERRUPTED)
    again = _ask(tuning, study)
    assert again.params == first.params
    assert len(trials_that_count(study)) == 1
    finish(study, again, TrialState.FAIL, "diverged")
    assert [study.trials[i].user_attrs[REASON] for i in (0, 1)] == [INTERRUPTED, "diverged"]
    assert [trial.number for trial in trials_that_count(study)] == [1]
    assert _ask(tuning, study).number == 2
    assert next_trial(tuning, study, "process") is None


def test_what_was_given_up_does_not_count_and_failures_do(begin: Begin) -> None:
    _, study = begin(objective=["quality"])
    for why in (INTERRUPTED, "diverged"):
        study.add_trial(create_trial(state=TrialState.FAIL, user_attrs={REASON: why}))
    study.add_trial(create_trial(state=TrialState.FAIL))
    study.enqueue_trial({"lr": 1.0})
    study.add_trial(create_trial(value=1.0))
    assert [trial.number for trial in trials_that_count(study)] == [1, 4]


def test_samples_depend_on_the_plans_seed_and_the_trials_number_alone() -> None:
    def sampled(plan: str, seed: int, fresh: bool) -> list[float]:
        study = optuna.create_study(sampler=SeededByTrial(plan, seed))
        found = []
        for _ in range(8):
            if fresh:  # as in another process
                study.sampler = SeededByTrial(plan, seed)
            trial = study.ask()
            found.append(trial.suggest_float("x", 0, 1))
            study.tell(trial, (found[-1] - 0.3) ** 2)
        return found

    for plan in ("random", "tpe"):
        first = sampled(plan, 1, fresh=False)
        assert first == sampled(plan, 1, fresh=True)
        assert first != sampled(plan, 2, fresh=False)
        assert len(set(first)) == 8


@pytest.mark.parametrize("name", ["median", "hyperband"])
def test_pruners_stop_what_falls_behind_but_not_at_once(name: str) -> None:
    study = optuna.create_study(pruner=make_pruner(name, steps=40, eval_every=4), study_name="x")
    pruned_at: dict[bool, list[int]] = {True: [], False: []}
    for number in range(24):
        good = number % 2 == 0 or number < 10
        trial = study.ask()
        for step in range(4, 41, 4):
            trial.report(1.0 if good else 9.0, step)
            if trial.should_prune():
                pruned_at[good].append(step)
                study.tell(trial, state=TrialState.PRUNED)
                break
        else:
            study.tell(trial, 1.0 if good else 9.0)
    assert pruned_at[False]
    assert not pruned_at[True]
    assert min(pruned_at[False]) >= (12 if name == "median" else 4)


def _with_trials(begin: Begin, **given: Any) -> tuple[Tuning, optuna.Study]:
    """Nine complete trials, none of which beats another in both."""
    tuning, study = begin(search=["lr"], **given)
    space = {one.name: one.distribution for one in tuning.space}
    for i in range(9):
        lr = 0.1 + i / 10
        attrs = {SETTINGS: {"lr": lr}, COMMAND: "<b>", REASON: ""}
        found = [1 + lr, 2e6 - lr][: len(tuning.objective.names)]
        study.add_trial(
            create_trial(
                values=found,
                params={"lr": lr},
                distributions=space,
                user_attrs=attrs,
                intermediate_values={} if len(found) > 1 else {2: 9.0, 4: 5.0},
            )
        )
    return tuning, study


def test_the_report_leaves_out_what_was_given_up(begin: Begin) -> None:
    tuning, study = begin(search=["lr"])
    assert make_report(tuning, study)[0]["pick"] is None
    tuning, study = _with_trials(begin)
    study.add_trial(create_trial(state=TrialState.FAIL, user_attrs={REASON: INTERRUPTED}))
    study.add_trial(create_trial(state=TrialState.FAIL, user_attrs={REASON: "diverged"}))
    result, text = make_report(tuning, study)
    assert len(result["trials"]) == 10
    assert len(result["front"]) == 9
    assert result["importances"] == [{"lr": 1.0}, {"lr": 1.0}]
    assert importances(study, "minimize", 0) == {"lr": 1.0}
    assert "10 of 30 trials: 9 complete, 1 failed; one seed each; few for 1" in text
    assert "failed: diverged" in text


@pytest.mark.parametrize(
    ("names", "pictures"),
    [(["quality", "bytes"], {"front", "settings"}), (["quality"], {"curves", "settings"})],
)
def test_every_picture_there_is_something_to_show_in_is_on_the_page(
    names: list[str], pictures: set[str], begin: Begin, tmp_path: Path
) -> None:
    tuning, study = _with_trials(begin, objective=names)
    result, _ = make_report(tuning, study)
    assert {path.stem for path in tmp_path.glob("*.png")} == pictures
    page = (tmp_path / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 2
    assert "&lt;b&gt;" in page
    assert page.count('<tr class="front">') == len(result["front"])
    assert page.index(result["answer"][0]) < page.index("<img")


# -- the settings to paste -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"policy": "gravac", "epsilon": 0.31, "window": 7, "scaling": "geometric", "lr": 0.5},
        {"policy": "fixed", "cf": 12.5, "base": "dgc+bf16", "memory": "residual"},
        {"policy": "fixed", "base": "none", "clip_norm": 2.5},
        {"policy": "accordion", "eta": 0.25, "interval": 9, "cf_range": (10.0, 200.0)},
        {"policy": "warmup", "warmup_steps": 5, "masking": False, "link": "1gbit"},
        {"policy": "goodput", "margin": 0.1},
        {"policy": "Schedule({0: 1, 20: 50.5}, gain='raw')"},
        {"policy": "goodput", "exchange": "sharded"},
    ],
)
def test_the_snippet_makes_the_compressor_that_ran(settings: dict[str, Any]) -> None:
    config = make_config({**settings, "log_dir": "x"})
    names: dict[str, Any] = {}
    exec(make_snippet(config), names)
    ran = build_compressor(replace(config, link=None), samples_per_step=1)
    pasted, wanted = names["compressor"]._settings, ran._settings
    for name in ("cf_range", "exchange", "granularity", "dense_below", "clip_norm"):
        assert getattr(pasted, name) == getattr(wanted, name)
    for ours, theirs in zip(
        (pasted.policy, pasted.base, pasted.memory),
        (wanted.policy, wanted.base, wanted.memory),
        strict=True,
    ):
        assert type(ours) is type(theirs)
        assert _plain(ours) == _plain(theirs)
    assert ("learning rate" in make_snippet(config)) == ("lr" in settings)
    assert "1gbit" not in make_snippet(config)


def _plain(thing: object) -> dict[str, Any]:
    kinds = (int, float, str, tuple, type(None))
    return {name: value for name, value in vars(thing).items() if isinstance(value, kinds)}


def test_labels_say_how_the_seconds_came_about() -> None:
    measured = _objective("quality", "seconds")
    assert measured.labels == ["held-out perplexity", "measured seconds"]
    modelled = replace(measured, network=LinkSpec.parse("1gbit,5ms"))
    assert modelled.labels[1] == "modelled s at 1 Gbit/s, 5 ms"
    assert _objective("bytes", target=5.5).labels == ["MB sent by a worker to perplexity 5.5"]
    assert _objective("quality", "bytes").shown([3.0, 2e6]) == [3.0, 2.0]
    assert set(ACCEPTED) >= {("quality",), ("quality", "bytes")}


def test_no_two_processes_are_given_the_same_queued_trial(tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path}/one.db"  # for commands with folders of their own
    tunings = [
        _tuning(tmp_path / str(i) / "study", trials=24, search=["lr=0.5,1,2"], storage=storage)
        for i in range(4)
    ]
    study = open_study(tunings[0])
    for _ in range(24):
        study.enqueue_trial({"lr": 1.0})

    def take(i: int) -> list[int]:
        ours = open_study(tunings[i])  # as in a process of its own
        return [_ask(tunings[i], ours, f"process {i}").number for _ in range(6)]

    with ThreadPoolExecutor(4) as pool:
        numbers = [number for taken in pool.map(take, range(4)) for number in taken]
    assert sorted(numbers) == list(range(24))
