"""The study in Optuna: opened or begun, its trials asked for, counted, and told what came of them.

A trial that was interrupted, or whose process died, does not count: its parameters are queued
again. One that failed does, and is recorded with the reason.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import optuna
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, NopPruner
from optuna.samplers import TPESampler
from optuna.storages import fail_stale_trials
from optuna.trial import FrozenTrial, TrialState

from runs.build import check_compression
from runs.config import TrainConfig, as_today
from runs.parser import UsageError, option
from runs.tune.space import Value
from runs.tune.storage import RETRY, open_storage, shown_url, turn
from runs.tune.tuning import Objective, Tuning

REASON, OWNER, SIGNATURE = "reason", "owner", "signature"
"""User attributes: of a trial (why it ended as it did, whose it is), and of the study."""

SETTINGS, COMMAND, HEADLINE = "settings", "command", "headline"
"""Of a trial, too: what it ran with, train's command line, and whether compression was worth it."""

INTERRUPTED = "interrupted"

STARTUP = 5
"""Random trials before TPE, or the median of the others, is asked."""


class SeededByTrial(TPESampler):
    """Optuna's sampler with a seed of each trial's own: every process, and every continuation,
    would otherwise begin with the same random numbers. With plan "random" it never stops being
    random."""

    def __init__(self, plan: str, seed: int) -> None:
        self._plan, self._plan_seed = plan, seed
        super().__init__()

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        super().__init__(
            n_startup_trials=STARTUP if self._plan == "tpe" else 10**9,
            multivariate=True,
            constant_liar=True,
            seed=seed_of(self._plan_seed, trial.number),
        )
        super().before_trial(study, trial)


def seed_of(seed: int, number: int) -> int:
    """Seeds of neighbouring trials have nothing in common."""
    return random.Random(f"{seed}/{number}").getrandbits(32)


def make_pruner(name: str, steps: int, eval_every: int) -> BasePruner:
    """By the quality at the same step of other trials; no trial before a quarter of its steps."""
    if name == "median":
        return MedianPruner(n_startup_trials=STARTUP, n_warmup_steps=steps // 4)
    if name == "hyperband":
        least = max(1, min(steps, max(eval_every, steps // 9)))
        return HyperbandPruner(min_resource=least, max_resource=steps, reduction_factor=3)
    return NopPruner()


def open_study(tuning: Tuning) -> optuna.Study:
    """The study of that name, begun if there is none. UsageError if it is of something else."""
    config = tuning.config()
    study = optuna.create_study(
        study_name=tuning.name,
        storage=open_storage(tuning.url),
        directions=tuning.objective.directions,
        sampler=SeededByTrial(tuning.plan, tuning.plan_seed),
        pruner=make_pruner(tuning.pruner, config.steps, config.eval_every),
        load_if_exists=True,
    )
    saved = study.user_attrs.get(SIGNATURE)
    if saved is None and not study.get_trials(deepcopy=False):
        study.set_user_attr(SIGNATURE, tuning.signature)
    else:
        check_signature(tuning, saved or {})
    return study


def check_signature(tuning: Tuning, saved: Mapping[str, Any]) -> None:
    """UsageError naming the first option in which the study differs from this command."""
    defaults = {field.name: field.default for field in fields(TrainConfig)}
    saved = as_today(saved)
    for name, value in tuning.signature.items():
        before = saved.get(name, defaults.get(name))  # an option may be newer than the study
        if before != value:
            was, now = (
                " ".join(map(str, one)) if isinstance(one, list) else one for one in (before, value)
            )
            raise UsageError(
                f"{option(name)}: study {tuning.name!r} in {shown_url(tuning.url)} was begun with "
                f"{was}, not {now}; accepted: the same options, or another --log-dir"
            )


# -- its trials ----------------------------------------------------------------------------------


def trials_that_count(study: optuna.Study) -> list[FrozenTrial]:
    """Begun and not given up, in order."""
    trials = study.get_trials(deepcopy=False)
    return [t for t in trials if t.state != TrialState.WAITING and not _given_up(t)]


def _given_up(trial: FrozenTrial) -> bool:
    """It does not count: it was interrupted, or its process has gone and left no reason."""
    reason = trial.user_attrs.get(REASON)
    return trial.state == TrialState.FAIL and reason in (None, INTERRUPTED)


def trials_of(study: optuna.Study, owner: str) -> list[FrozenTrial]:
    """Those that were begun for a process, whatever came of them."""
    trials = study.get_trials(deepcopy=False)
    begun = [trial for trial in trials if trial.state != TrialState.WAITING]
    return [trial for trial in begun if trial.user_attrs.get(OWNER) == owner]


def next_trial(tuning: Tuning, study: optuna.Study, owner: str) -> optuna.Trial | None:
    """A trial that can run, with its settings as an attribute; None if the study has all that it
    wants. owner: the process that answers for it. Settings that do not go together are a failed
    trial."""
    fail_stale_trials(study)
    while True:
        with turn(tuning.url):
            if len(trials_that_count(study)) >= tuning.trials:
                return None
            trial = study.ask({one.name: one.distribution for one in tuning.space})
        trial.set_user_attr(OWNER, owner)
        trial.set_user_attr(REASON, None)  # of the trial that this one repeats
        chosen = {one.name: one.value(trial.params[one.name]) for one in tuning.space}
        trial.set_user_attr(SETTINGS, chosen)
        try:
            config = tuning.config(chosen, trial.number, tuning.seeds[0])
            check_compression(config)
        except UsageError as error:
            finish(study, trial, TrialState.FAIL, str(error))
            continue
        trial.set_user_attr(COMMAND, config.command)
        return trial


def finish(
    study: optuna.Study,
    trial: optuna.Trial | FrozenTrial,
    state: TrialState,
    why: str = "",
    values: Sequence[float] | None = None,
) -> FrozenTrial:
    """Tell what came of a running trial; one that was interrupted is queued again."""
    study._storage.set_trial_user_attr(trial._trial_id, REASON, why)
    study.tell(trial.number, values, state=state, skip_if_finished=True)
    ended = study.get_trials(deepcopy=False)[trial.number]
    if why == INTERRUPTED:
        RETRY(study, ended)
    return ended


# -- in words ------------------------------------------------------------------------------------


def line(objective: Objective, trial: FrozenTrial) -> str:
    """What came of a trial, and its settings, to be read."""
    chosen = settings_text(trial.user_attrs.get(SETTINGS, {}))
    return f"trial {trial.number}: {outcome_text(objective, trial)}; {chosen}"


def outcome_text(objective: Objective, trial: FrozenTrial) -> str:
    """Its values, or why it has none."""
    if trial.state == TrialState.COMPLETE:
        return objective.told(trial.values)
    why = " ".join((trial.user_attrs.get(REASON) or "").split())
    return f"failed: {why}" if trial.state == TrialState.FAIL else why or trial.state.name.lower()


def settings_text(settings: Mapping[str, Value]) -> str:
    """As NAME VALUE, NAME VALUE."""
    return ", ".join(
        f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in settings.items()
    )
