"""A study from its beginning to its last trial: Optuna asks, `python -m runs train`'s workers
answer. All else that there is to see of a study Optuna shows."""

from __future__ import annotations

import os
import shlex
import sys
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace
from math import isfinite
from statistics import median
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.pruners import BasePruner, MedianPruner, NopPruner
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.study import MaxTrialsCallback, Study
from optuna.trial import FrozenTrial, TrialState

from policies import DENSE
from runs.build import build_policy, check, check_compression
from runs.config import TrainConfig, check_for_several
from runs.expression import is_name
from runs.interrupt import DIVERGED, GOES_ON, INTERRUPTED, PRUNED
from runs.launch import launch
from runs.parser import UsageError, option
from runs.progress import time_left
from runs.report.rows import history
from runs.report.source import read_folder
from runs.result import title
from runs.script_run import run_whole
from runs.settings import Compressing
from runs.tables import table, text_of
from runs.tune.trial import Reports, TrialJob, run_trial
from runs.tune.tuning import BY_POLICY, Tuning, make_tuning, rounded, space_text

STARTUP = 5
"""Random trials before TPE, or the median of the others, is asked."""

LEAST_WAIT = 0.05
"""Where a dense step waits for the network for a smaller share of its time, no CF is faster."""

WINDOWS = 4
"""Of a policy, that a trial needs for it to move."""

SHOWN = 10
"""Best trials in the table."""

SIGNATURE, REASON, INTERRUPT = "settings", "reason", "interrupted"
"""Attributes: what a study searches, and why a trial ended as it did; and one such reason."""

DONE = (TrialState.COMPLETE, TrialState.PRUNED)


class TrialFailedError(Exception):
    """A trial whose run has failed; the study goes on."""


class _Rounding(BaseSampler):
    """Draws numbers as they are run, so that a study holds what has run."""

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        drawn = super().sample_relative(study, trial, search_space)  # type: ignore[safe-super]
        return {name: rounded(search_space[name], value) for name, value in drawn.items()}

    def sample_independent(
        self,
        study: Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        drawn = super().sample_independent(  # type: ignore[safe-super]
            study, trial, param_name, param_distribution
        )
        return rounded(param_distribution, drawn)


class _Random(_Rounding, RandomSampler):
    pass


class _TPE(_Rounding, TPESampler):
    pass


def tune(given: dict[str, Any]) -> int:
    """The study, and what it has found; returns the exit code."""
    if "RANK" in os.environ:
        raise UsageError("tune starts its own workers; accepted: without torchrun")
    given = dict(given)
    trials, anyway = given.pop("trials", 30), given.pop("anyway", False)
    storage, sampler = given.pop("storage", None), given.pop("sampler", "tpe")
    verbose = given.pop("verbose", False)
    tuning = replace(make_tuning(given), verbose=verbose)
    config = tuning.config({})
    if not config.script:
        check(config)
    check_for_several(tuning.folder)
    study = open_study(tuning, storage, sampler)
    begun = f", {_done(study)} of them done already" if _done(study) else ""
    print(title(config) + ("" if config.script else f", {config.steps} steps"))
    print(f"searching {space_text(tuning.space)} for {' and '.join(tuning.labels)}")
    print(f"{trials} trials{begun}, files in {tuning.folder}", flush=True)
    code, why = 0, ""
    try:
        if not study.get_trials(deepcopy=False, states=DONE) and trials > 1:
            _optimize(study, tuning, 1, trials)
        why = "" if anyway else nothing_to_tune(study, tuning)
        if not why:
            _optimize(study, tuning, trials - _done(study), trials)
    except KeyboardInterrupt:
        code = INTERRUPTED
    answer, *more = findings(tuning, study, why)
    print("", answer, *more, sep="\n")
    if storage is None:
        url = shlex.quote(f"sqlite:///{tuning.folder / 'study.db'}")
        print(f"look at it: optuna-dashboard {url}", flush=True)
    if code == INTERRUPTED:
        print(GOES_ON, file=sys.stderr)
    elif not study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
        print(f"error: {answer}", file=sys.stderr)
        code = 1
    return code


def open_study(
    tuning: Tuning, storage: str | None = None, sampler: str | None = None
) -> optuna.Study:
    """The study of that name, begun if there is none. UsageError if it searches something else, or
    the storage cannot be opened."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # what has failed is told once
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    if storage is None:
        tuning.folder.mkdir(parents=True, exist_ok=True)
    try:
        study = optuna.create_study(
            study_name=tuning.folder.name,
            storage=storage or f"sqlite:///{tuning.folder / 'study.db'}",
            directions=tuning.directions,
            # Each process draws other numbers.
            sampler=_Random()
            if sampler == "random"
            else _TPE(n_startup_trials=STARTUP, multivariate=True, constant_liar=True),
            pruner=_pruner(tuning),
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
        return study
    for name in {**saved, **tuning.signature}:
        before, now = saved.get(name), tuning.signature.get(name)
        if before != now:
            raise UsageError(
                f"{option(name)}: study {study.study_name!r} was begun with {before}, not {now}; "
                f"accepted: the same options, or another --log-dir"
            )
    return study


def _pruner(tuning: Tuning, study: optuna.Study | None = None) -> BasePruner:
    """Of one objective, from the fourth part of a trial on. How long a script is, the trials tell
    that have come to their end."""
    if len(tuning.names) > 1:
        return NopPruner()
    config, steps = tuning.config({}), 0
    if not config.script:
        steps = config.steps
    elif study is not None:
        complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        steps = max((trial.last_step or 0 for trial in complete), default=0)
    return MedianPruner(STARTUP, n_warmup_steps=steps // 4)


def _defaults(tuning: Tuning) -> dict[str, Any]:
    """The policy's own values of what is searched, as far as they lie in the ranges."""
    policy, found = build_policy(tuning.config({})), {}
    for name, one in tuning.space.items():
        value = getattr(policy, name, None)
        if value is not None and one._contains(one.to_internal_repr(value)):
            found[name] = value
    return found


def nothing_to_tune(study: optuna.Study, tuning: Tuning) -> str:
    """Why nothing that is searched can make a run faster, or "". The first trial tells, by the
    steps that were sent dense: how long they took, and how much of it they waited for the
    network."""
    complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    if not complete or set(tuning.space) - {*BY_POLICY["gravac"], *BY_POLICY["goodput"]}:
        return ""
    folder = tuning.config({}, complete[0].number).folder
    if not folder.is_dir():  # on another machine that shares the study
        return ""
    run = read_folder(folder, "--log-dir")
    reports = [record.report for record in run.records]
    dense = [r for r in reports if r.timed_cf == DENSE and r.seconds > 0 and r.wait_seconds >= 0]
    if not dense:
        return ""
    share = median(report.wait_seconds / report.seconds for report in dense)
    if share >= LEAST_WAIT:
        return ""
    return (
        f"nothing to tune: a dense step waits {share:.0%} of its "
        f"{median(report.seconds for report in dense):.3g} s for the network, so no CF makes it "
        f"much faster, and {run.shares.get(DENSE, 0):.0%} of the steps were sent dense; a slower "
        f"network is --network, and --anyway goes on for fewer bytes"
    )


def _optimize(study: optuna.Study, tuning: Tuning, count: int, trials: int) -> None:
    """So many more trials of this process, until all processes have made what is wanted."""

    def told(study: optuna.Study, trial: FrozenTrial) -> None:
        text = _outcome(tuning, trial)
        print(f"trial {trial.number}: {text}; {_settings(tuning, trial)}", flush=True)

    began, before = time.monotonic(), _done(study)

    def values(trial: optuna.Trial) -> list[float]:
        done = _done(study)
        left = time_left(time.monotonic() - began, done - before, trials - done)
        print(f"trial {trial.number}: {done + 1} of {trials}{left}", flush=True)
        return _values(tuning, study, trial)

    if count > 0:
        study.optimize(
            values,
            n_trials=count,
            callbacks=[told, MaxTrialsCallback(trials, states=DONE)],
            catch=(TrialFailedError,),
        )


def _values(tuning: Tuning, study: optuna.Study, trial: optuna.Trial) -> list[float]:
    """Train, and what came of it. TrialFailedError, TrialPruned; KeyboardInterrupt after the
    parameters were queued again."""
    params = {name: trial._suggest(name, one) for name, one in tuning.space.items()}
    try:
        return _trained(tuning, study, trial, params)
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


def _trained(
    tuning: Tuning, study: optuna.Study, trial: optuna.Trial, params: dict[str, Any]
) -> list[float]:
    config = tuning.config(tuning.chosen(params), trial.number)
    check_compression(config)
    pruned_by = (study, trial._trial_id) if len(tuning.names) == 1 else None
    causes: list[str] = []
    if config.script:
        study.pruner = _pruner(tuning, study)
        reports = None if pruned_by is None else Reports(pruned_by)
        code = run_whole(config, tuning.verbose, reports, causes.append)
    else:
        job = TrialJob(config, pruned_by, tuning.verbose)
        code = launch(run_trial, job, config.workers, causes.append)
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    if code not in (0, DIVERGED, PRUNED):
        raise ValueError(causes[0] if causes else f"exit code {code}")
    run = read_folder(config.folder, "--log-dir")
    if code == DIVERGED:
        raise ValueError(f"diverged: {run.ending.diverged}")
    values = tuning.values(run)
    if code == PRUNED or not (run.finished or config.script):
        quality = f"{run.quality_name} {run.quality:.4g}"
        raise optuna.TrialPruned(f"pruned: {quality} after {run.trained} steps")
    if not all(map(isfinite, values)):
        raise ValueError(f"not all values are known: {tuning.told(values)}")
    return values


def _done(study: optuna.Study) -> int:
    """Trials that count: those that were interrupted or lost run again."""
    failed = study.get_trials(deepcopy=False, states=(TrialState.FAIL,))
    counted = [trial for trial in failed if _state(trial) != INTERRUPT]
    return len(study.get_trials(deepcopy=False, states=DONE)) + len(counted)


# -- in words --------------------------------------------------------------------------------------


def findings(tuning: Tuning, study: optuna.Study, why: str) -> list[str]:
    """Lines, the answer first. why: there is nothing to tune."""
    trials = study.get_trials(deepcopy=False)
    complete = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    states = Counter(map(_state, trials))
    count = ", ".join(f"{number} {state}" for state, number in sorted(states.items()))
    if not complete:
        failed = [_outcome(tuning, t) for t in trials if t.state == TrialState.FAIL]
        last = f"; the last: {failed[-1]}" if failed else ""
        return [f"no trial is complete ({count or 'none begun'}){last}"]
    upward = tuning.directions[0] == "maximize"
    front = sorted(study.best_trials, key=lambda trial: trial.values[0], reverse=upward)
    best = front[0]
    config = tuning.config(tuning.chosen(best.params), best.number)
    more = [f"trials: {count}", f"the command: {config.command}"]
    if config.script:
        more.append(f"in the script: {written(config)}")
    if why:
        return [why, *more]
    if len(complete) > 1 and len({tuple(trial.values) for trial in complete}) == 1:
        told = f"the settings made no difference: {tuning.told(best.values)} in all"
        return [told + _why_none(tuning, complete), *more]
    rows = [
        [f"{t.number}", *(f"{value:.4g}" for value in t.values), _settings(tuning, t)]
        for t in front[:SHOWN]
    ]
    heads = ["trial", *tuning.labels, "settings"]
    return [
        f"{_settings(tuning, best)} (trial {best.number}): {tuning.told(best.values)}",
        "Pareto front:" if len(tuning.names) > 1 else "the best:",
        text_of(table(heads, rows, left=(len(heads) - 1,), indent=2)),
        *more,
    ]


def _state(trial: FrozenTrial) -> str:
    """A trial's state in a word. One that was lost, with its process, gave no reason."""
    failed = trial.state == TrialState.FAIL
    if failed and trial.user_attrs.get(REASON, INTERRUPT) == INTERRUPT:
        return INTERRUPT
    return "failed" if failed else trial.state.name.lower()


def _why_none(tuning: Tuning, trials: Sequence[FrozenTrial]) -> str:
    """Why settings made no difference, as far as the runs' records tell."""
    found = {tuning.config({}, trial.number).folder for trial in trials}
    runs = [read_folder(folder, "--log-dir") for folder in found if folder.is_dir()]
    histories = {tuple((part.last, part.cf) for part in run.history) for run in runs}
    if len(histories) != 1 or not all(run.records for run in runs):
        return ""
    sent = history(runs[0])
    policy, steps = build_policy(tuning.config(tuning.chosen(trials[0].params))), runs[0].trained
    window = getattr(policy, "window", None)
    few = ""
    if isinstance(window, int) and steps < WINDOWS * window:
        few = (
            f"; {policy.name} decides once in window={window} steps, and a trial has {steps}: "
            f"accepted: more steps, or --search window=5,10,20"
        )
    return f", since all trials sent the same ({sent}){few}"


def written(config: TrainConfig) -> str:
    """The settings of a run as Python writes them."""
    names = (each.name for each in fields(Compressing) if each.name not in ("ddp_hook", "network"))
    given = {name: getattr(config, name) for name in names}
    arguments = []
    for name, value in given.items():
        call = isinstance(value, str) and not is_name(value.replace("+", ""))
        if value is not None:
            arguments.append(f"{name}={value if call else repr(value)}")
    return f"AdaptiveCompressor({', '.join(arguments)})"


def _outcome(tuning: Tuning, trial: FrozenTrial) -> str:
    """A trial's values, or why it has none."""
    if trial.state == TrialState.COMPLETE:
        return tuning.told(trial.values)
    why = trial.user_attrs.get(REASON) or trial.state.name.lower()
    return f"failed: {why}" if trial.state == TrialState.FAIL else str(why)


def _settings(tuning: Tuning, trial: FrozenTrial) -> str:
    """A trial's settings, to be read."""
    settings = tuning.chosen(trial.params).items()
    told = [f"{n} {v:g}" if isinstance(v, float) else f"{n} {v}" for n, v in settings]
    return ", ".join(told) or "the policy's defaults"
