"""The study in its storage: opened or begun, its trials counted, those of dead processes given up.

A trial that was interrupted, or whose process died, does not count: its parameters are queued
again. One that failed does, and is recorded with the reason.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import fields
from datetime import datetime, timedelta
from typing import Any

import optuna
from optuna.storages import RDBStorage, fail_stale_trials
from optuna.trial import FrozenTrial, TrialState

from runs.config import TrainConfig
from runs.parser import UsageError
from runs.tune.sampler import SeededByTrial, make_pruner
from runs.tune.storage import GRACE, shown_url
from runs.tune.tuning import Tuning

REASON, OWNER, AGAIN, SIGNATURE = "reason", "owner", "again", "signature"
"""User attributes: of a trial (why it ended as it did, whose it is, which one it repeats), and of
the study."""

INTERRUPTED, SURPLUS = "interrupted", "not needed any more"


def open_study(tuning: Tuning, storage: RDBStorage) -> optuna.Study:
    """The study of that name, begun if there is none. UsageError if it is of something else."""
    config = tuning.config()
    study = optuna.create_study(
        study_name=tuning.name,
        storage=storage,
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
    for name, value in tuning.signature.items():
        before = saved.get(name, defaults.get(name))  # an option may be newer than the study
        if before != value:
            raise UsageError(
                f"--{name.replace('_', '-')}: study {tuning.name!r} in {shown_url(tuning.url)} was "
                f"begun with {_shown(before)}, not {_shown(value)}; accepted: the same "
                f"options, or another --log-dir"
            )


def trials_that_count(study: optuna.Study) -> list[FrozenTrial]:
    """Begun and not given up, in order."""
    return [trial for trial in study.get_trials(deepcopy=False) if _counts(trial)]


def count_begun(study: optuna.Study) -> int:
    """Trials that were ever asked for, whatever came of them."""
    trials = study.get_trials(deepcopy=False)
    return sum(trial.state != TrialState.WAITING for trial in trials)


def reason(trial: FrozenTrial) -> str | None:
    """Why it was pruned or failed; None if nobody was left to say."""
    value: str | None = trial.user_attrs.get(REASON)
    return value


def owner() -> str:
    """This process, as trials name it."""
    return f"{socket.gethostname()}:{os.getpid()}"


def end(study: optuna.Study, trial: FrozenTrial, state: TrialState, why: str | None = None) -> None:
    """End a running trial of any process without a value."""
    if why is not None:
        study._storage.set_trial_user_attr(trial._trial_id, REASON, why)
    study.tell(trial.number, state=state, skip_if_finished=True)


def give_up_dead(study: optuna.Study) -> None:
    """Fail the running trials whose process is gone, and queue their parameters again."""
    fail_stale_trials(study)
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        if _is_gone(trial):
            end(study, trial, TrialState.FAIL)
    queue_again(study)


def queue_again(study: optuna.Study) -> None:
    """The parameters of trials that were given up, once each."""
    trials = study.get_trials(deepcopy=False)
    queued = {trial.user_attrs.get(AGAIN) for trial in trials}
    for trial in trials:
        given_up = trial.state == TrialState.FAIL and reason(trial) in (None, INTERRUPTED)
        if given_up and trial.params and trial.number not in queued:
            study.enqueue_trial(trial.params, user_attrs={AGAIN: trial.number})


def running_of(study: optuna.Study, whose: str) -> list[FrozenTrial]:
    """The trials that a process has left running."""
    running = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
    return [trial for trial in running if trial.user_attrs.get(OWNER) == whose]


def _counts(trial: FrozenTrial) -> bool:
    if trial.state == TrialState.FAIL:
        return reason(trial) not in (None, INTERRUPTED, SURPLUS)
    return trial.state != TrialState.WAITING


def _is_gone(trial: FrozenTrial) -> bool:
    """Its process was on this machine and is not there any more, or never said who it is."""
    whose = trial.user_attrs.get(OWNER)
    if whose is None:
        began = trial.datetime_start
        return began is not None and datetime.now() - began > timedelta(seconds=GRACE)
    host, _, pid = whose.rpartition(":")
    if host != socket.gethostname():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
