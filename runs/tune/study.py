"""A study from its beginning to its last trial: Optuna asks, `python -m runs train`'s workers
answer."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.pruners import BasePruner, MedianPruner, NopPruner
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.storages import RDBStorage, RetryHeartbeatStaleTrialCallback
from optuna.study import MaxTrialsCallback
from optuna.trial import FrozenTrial, TrialState

from runs.build import build_policy, check, check_compression, learning_rate
from runs.config import TrainConfig
from runs.expression import argument_names, policy_name, written_arguments
from runs.interrupt import GOES_ON, INTERRUPTED
from runs.launch import launch
from runs.options import CONFIG_OPTIONS, make_config, policy_for
from runs.parser import UsageError, check_writable, option
from runs.result import title
from runs.tasks import TASKS
from runs.tune.report import Objective, make_report, nothing_to_tune
from runs.tune.space import BY_POLICY, chosen, make_space, setting, settings_text, space_text, usual
from runs.tune.trial import INTERRUPT, REASON, TrialJob, ending, run_trial

TRIALS = 30
EVALUATIONS = 10
"""In a trial, unless --eval-every says otherwise."""
STARTUP = 5
"""Random trials before TPE, or the median of the others, is asked."""
BEAT, GRACE = 30, 120
"""Seconds between signs of life of a running trial, and without one until it is given up."""

SIGNATURE = "settings"
"""The study's attribute that says what it searches."""

DONE = (TrialState.COMPLETE, TrialState.PRUNED)


class TrialFailedError(Exception):
    """A trial whose run has failed; the study goes on."""


@dataclass(frozen=True)
class Tuning:
    """The settings of `python -m runs tune`. common: train's options, the same for all trials.
    seeds: each trial trains with all of them. space: what is searched, by name."""

    common: dict[str, Any]
    seeds: tuple[int, ...]
    objective: Objective
    space: dict[str, BaseDistribution]
    folder: Path

    def config(self, settings: Mapping[str, Any], number: int = 0, seed: int = 0) -> TrainConfig:
        """A trial's run with one seed. UsageError if its settings do not go together."""
        folder = self.folder / "runs" / f"trial{number}-seed{seed}"
        return make_config({**self.common, **settings, "seed": seed, "log_dir": str(folder)})

    @property
    def signature(self) -> dict[str, Any]:
        """What two commands must have in common to add to the same study, as JSON-like values."""
        return _signature(self.config({}), self.seeds, self.objective, self.space)


def tune(given: dict[str, Any]) -> int:
    """The study, and its report; returns the exit code."""
    if "RANK" in os.environ:
        raise UsageError("tune starts its own workers; accepted: without torchrun")
    given = dict(given)
    trials, anyway = given.pop("trials", TRIALS), given.pop("anyway", False)
    as_json, storage = bool(given.pop("json", False)), given.pop("storage", None)
    sampler, pruner = given.pop("sampler", None), given.pop("pruner", None)
    tuning = make_tuning(given)
    check(tuning.config({}))
    check_writable(tuning.folder)
    out = sys.stderr if as_json else sys.stdout
    study = open_study(tuning, storage, sampler, pruner)
    begun = f", {_done(study)} of them done already" if _done(study) else ""
    print(
        f"{title(tuning.config({}))}, {tuning.config({}).steps} steps",
        f"searching {space_text(tuning.space)} for {' and '.join(tuning.objective.labels)}",
        f"{trials} trials{begun}, files in {tuning.folder}",
        sep="\n",
        file=out,
        flush=True,
    )
    code, why = 0, ""
    try:
        why = "" if anyway else _first(study, tuning, trials, out)
        left = trials - _done(study)
        if left > 0 and not why:
            _optimize(study, tuning, left, trials, out)
    except KeyboardInterrupt:
        code = INTERRUPTED
    result, text = make_report(tuning.objective, tuning.space, study, why)
    if result["front"]:
        result["command"] = _config_of(tuning, study, result["front"][0]["number"]).command
        text += f"\nthe command: {result['command']}"
    if storage is None:
        text += f"\nlook at it: optuna-dashboard sqlite:///{tuning.folder / 'study.db'}"
    print(f"\n{text}", file=out, flush=True)
    if as_json:
        print(json.dumps(result, allow_nan=False), flush=True)
    if code == INTERRUPTED:
        print(GOES_ON, file=sys.stderr)
    elif not result["front"]:
        print(f"error: {result['answer']}", file=sys.stderr)
        code = 1
    return code


def _first(study: optuna.Study, tuning: Tuning, trials: int, out: Any) -> str:
    """Run the trial with the policy's defaults, if there was none yet; why there is nothing to
    tune, or ""."""
    if not study.get_trials(deepcopy=False, states=DONE) and trials > 1:
        _optimize(study, tuning, 1, trials, out)
    complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    if not complete or set(tuning.space) - {*BY_POLICY["gravac"], *BY_POLICY["goodput"]}:
        return ""
    return nothing_to_tune(_config_of(tuning, study, complete[0].number).folder)


def _optimize(study: optuna.Study, tuning: Tuning, count: int, trials: int, out: Any) -> None:
    """So many more trials of this process, until all processes have made what is wanted."""

    def told(study: optuna.Study, trial: FrozenTrial) -> None:
        text = tuning.objective.outcome(trial)
        print(f"trial {trial.number}: {text}; {settings_text(tuning.space, trial)}", file=out)

    study.optimize(
        lambda trial: _values(tuning, study, trial),
        n_trials=count,
        callbacks=[told, MaxTrialsCallback(trials, states=DONE)],
        catch=(TrialFailedError,),
    )


def _values(tuning: Tuning, study: optuna.Study, trial: optuna.Trial) -> list[float]:
    """Train with each seed, and what came of it. TrialFailedError, TrialPruned; KeyboardInterrupt
    after the parameters were queued again."""
    params = {name: trial._suggest(name, one) for name, one in tuning.space.items()}
    settings = chosen(tuning.space, params)
    found = []
    try:
        for seed in tuning.seeds:
            config = tuning.config(settings, trial.number, seed)
            check_compression(config)
            first = seed == tuning.seeds[0] and len(tuning.objective.names) == 1
            job = TrialJob(config, tuning.objective, (study, trial._trial_id) if first else None)
            causes: list[str] = []
            code = launch(run_trial, job, config.workers, causes.append)
            found.append(ending(job, code, causes))
    except optuna.TrialPruned as pruned:
        trial.set_user_attr(REASON, str(pruned))
        raise
    except KeyboardInterrupt:
        trial.set_user_attr(REASON, INTERRUPT)
        study.enqueue_trial(params)
        raise
    except (UsageError, ValueError, OSError) as error:
        trial.set_user_attr(REASON, " ".join(str(error).split()))
        raise TrialFailedError(str(error)) from error
    return [sum(values) / len(found) for values in zip(*found, strict=True)]


def _done(study: optuna.Study) -> int:
    """Trials that count: those that were interrupted or lost run again."""
    failed = study.get_trials(deepcopy=False, states=(TrialState.FAIL,))
    counted = [t for t in failed if t.user_attrs.get(REASON, INTERRUPT) != INTERRUPT]
    return len(study.get_trials(deepcopy=False, states=DONE)) + len(counted)


def _config_of(tuning: Tuning, study: optuna.Study, number: int) -> TrainConfig:
    params = study.get_trials(deepcopy=False)[number].params
    return tuning.config(chosen(tuning.space, params), number, tuning.seeds[0])


# -- from options --------------------------------------------------------------------------------


def make_tuning(given: dict[str, Any]) -> Tuning:
    """UsageError names the option, its value and what is accepted."""
    given = dict(given)
    folder, specs = given.pop("log_dir", None), given.pop("search", None)
    seeds = tuple(dict.fromkeys(given.pop("seeds", (0,))))
    objective = _objective(given)
    given.setdefault("policy", _policy(given, specs or ()))
    steps = given.setdefault("steps", TrainConfig.steps)
    given.setdefault("eval_every", max(1, steps // EVALUATIONS))
    config = make_config({**given, "log_dir": "."})
    policy = policy_name(config.policy)
    fixed = {**given, **written_arguments(config.policy)}
    if specs is None:
        own = () if config.base == "none" else BY_POLICY.get(policy, ())
        specs = [name for name in own if name not in fixed]
    task = TASKS[config.task]
    lr = learning_rate(config) or task.learning_rates.get(config.model or task.models[0], 1.0)
    space = make_space(specs, usual(steps, lr), fixed)
    if not space:
        raise UsageError(f"--policy {config.policy}: --search says what is searched; e.g. lr")
    if folder is None:
        what = json.dumps(_signature(config, seeds, objective, space), sort_keys=True)
        digest = hashlib.sha256(what.encode()).hexdigest()[:8]
        folder = f"logs/tune-{config.task}-{digest}"
    tuning = Tuning(given, seeds, objective, space, Path(folder))
    for name, one in space.items():  # also what only a trial would find out
        for value in getattr(one, "choices", None) or (one.low, one.high):  # type: ignore[attr-defined]
            try:
                check_compression(tuning.config({name: value}))
            except UsageError as error:
                raise UsageError(f"--search {name}={value}: {error}") from error
    return tuning


def _policy(given: dict[str, Any], specs: Sequence[str]) -> str:
    """GraVAC, or the policy that has what is given and what is to be searched."""
    named = {setting(spec): None for spec in specs} | given
    if given.get("base") != "none" and {*named} - CONFIG_OPTIONS <= {*argument_names("gravac")}:
        return "gravac"
    try:
        return policy_for(named)
    except UsageError:  # which of them fits no policy is told where it is read
        return "gravac"


def _objective(given: dict[str, Any]) -> Objective:
    target = given.pop("target", None)
    default = ("quality", "bytes") if target is None else ("seconds",)
    names = tuple(given.pop("objective", default))
    if not names or set(names) - {"quality", "bytes", "seconds"} or len({*names}) < len(names):
        raise UsageError(
            f"--objective {' '.join(names)}: accepted: one or several of quality, bytes, seconds"
        )
    if target is None and "quality" not in names:
        raise UsageError(
            f"--objective {' '.join(names)}: needs --target, the quality that is counted to, or "
            f"quality beside it"
        )
    if target is not None and "quality" in names:
        raise UsageError(f"--target {target:g}: is for --objective bytes or seconds")
    name = given.get("task", TrainConfig.task)
    if name not in TASKS:
        raise UsageError(f"--task {name!r} is unknown; accepted: {', '.join(TASKS)}")
    return Objective(names, target, TASKS[name].quality_name, TASKS[name].higher_is_better)


def _signature(
    config: TrainConfig,
    seeds: tuple[int, ...],
    objective: Objective,
    space: Mapping[str, BaseDistribution],
) -> dict[str, Any]:
    of_one_run = ("log_dir", "seed", "checkpoint_every", "json")
    options = {name: value for name, value in asdict(config).items() if name not in of_one_run}
    what = {
        **options,
        "seeds": seeds,
        "objective": objective.names,
        "target": objective.target,
        "search": space_text(space),
    }
    return dict(json.loads(json.dumps(what)))


# -- the study in Optuna ---------------------------------------------------------------------------


def open_study(
    tuning: Tuning,
    storage: str | None = None,
    sampler: str | None = None,
    pruner: str | None = None,
) -> optuna.Study:
    """The study of that name, begun if there is none. UsageError if it searches something else, or
    the storage cannot be opened."""
    single = len(tuning.objective.names) == 1
    if pruner not in (None, "none") and not single:
        raise UsageError(f"--pruner {pruner}: Optuna prunes with one objective only")
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # what has failed is told once
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    if storage is None:
        tuning.folder.mkdir(parents=True, exist_ok=True)
    url = storage or f"sqlite:///{tuning.folder / 'study.db'}"
    patient = {"connect_args": {"timeout": 60}} if url.startswith("sqlite") else {}
    try:
        study = optuna.create_study(
            study_name=tuning.folder.name,
            storage=RDBStorage(
                url,
                engine_kwargs=patient,
                heartbeat_interval=BEAT,
                grace_period=GRACE,
                heartbeat_stale_trial_callback=RetryHeartbeatStaleTrialCallback(),
            ),
            directions=tuning.objective.directions,
            sampler=_sampler(sampler),
            pruner=make_pruner(pruner or ("median" if single else "none"), tuning.config({}).steps),
            load_if_exists=True,
        )
    except Exception as error:  # each database has its own; the text may hold the URL's password
        raise UsageError(
            f"--storage: cannot be opened ({type(error).__name__}); accepted: a URL of Optuna, "
            f"e.g. sqlite:///study.db or postgresql+psycopg2://HOST/NAME"
        ) from None
    saved = study.user_attrs.get(SIGNATURE)
    if saved is None:
        study.set_user_attr(SIGNATURE, tuning.signature)
        if defaults := _defaults(tuning):
            study.enqueue_trial(defaults)
    for name, value in tuning.signature.items():
        before = value if saved is None else saved.get(name)
        if before != value:
            raise UsageError(
                f"{option(name)}: study {study.study_name!r} was begun with {before}, not {value}; "
                f"accepted: the same options, or another --log-dir"
            )
    return study


def _sampler(name: str | None) -> BaseSampler:
    """Optuna's. Each process draws other numbers."""
    if name == "random":
        return RandomSampler()
    return TPESampler(n_startup_trials=STARTUP, multivariate=True, constant_liar=True)


def make_pruner(name: str, steps: int) -> BasePruner:
    """By the quality at the same step of other trials; no trial before a quarter of its steps."""
    if name == "median":
        return MedianPruner(n_startup_trials=STARTUP, n_warmup_steps=steps // 4)
    return NopPruner()


def _defaults(tuning: Tuning) -> dict[str, Any]:
    """The policy's own values of what is searched, as far as they lie in the ranges."""
    config, found = tuning.config({}), {}
    policy = build_policy(config)
    for name, one in tuning.space.items():
        value = getattr(policy, name, None)
        inside = value is not None and one._contains(one.to_internal_repr(value))
        if inside:
            found[name] = value
    return found
