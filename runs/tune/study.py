"""The study in Optuna: opened or begun, its trials asked for, counted, and told what came of them.

A trial that was interrupted, or whose process died, does not count: its parameters are queued
again. One that failed does, and is recorded with the reason.
"""

from __future__ import annotations

import os
import random
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from math import isfinite
from typing import Any, TextIO

import optuna
from optuna.distributions import BaseDistribution
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, NopPruner
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.storages import RDBStorage, fail_stale_trials
from optuna.trial import FrozenTrial, TrialState

from runs.build import check_compression
from runs.config import TrainConfig, as_today
from runs.parser import UsageError
from runs.tune.space import Value
from runs.tune.storage import BEAT, RETRY, open_storage, shown_url, turn
from runs.tune.tuning import Metrics, Objective, Tuning, values

REASON, OWNER, SIGNATURE = "reason", "owner", "signature"
"""User attributes: of a trial (why it ended as it did, whose it is), and of the study."""

SETTINGS, COMMAND = "settings", "command"
"""Of a trial, too: what it ran with, and train's command line."""

INTERRUPTED, SURPLUS = "interrupted", "not needed any more"

STARTUP = 5
"""Random trials before TPE, or the median of the others, is asked."""


class SeededByTrial(BaseSampler):
    """Hands over to a sampler with a seed of each trial's own.

    Every process, and every continuation, would otherwise begin with the same random numbers.
    """

    def __init__(self, plan: str, seed: int) -> None:
        self._plan, self._seed = plan, seed
        self._sampler: BaseSampler = RandomSampler()

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        seed = seed_of(self._seed, trial.number)
        if self._plan == "random":
            self._sampler = RandomSampler(seed=seed)
        else:
            self._sampler = TPESampler(
                n_startup_trials=STARTUP, multivariate=True, constant_liar=True, seed=seed
            )

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        return self._sampler.infer_relative_search_space(study, trial)

    def sample_relative(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self._sampler.sample_relative(*args, **kwargs)

    def sample_independent(self, *args: Any, **kwargs: Any) -> Any:
        return self._sampler.sample_independent(*args, **kwargs)


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
    saved = as_today(saved)
    for name, value in tuning.signature.items():
        before = saved.get(name, defaults.get(name))  # an option may be newer than the study
        if before != value:
            was, now = (
                " ".join(map(str, one)) if isinstance(one, list) else one for one in (before, value)
            )
            raise UsageError(
                f"--{name.replace('_', '-')}: study {tuning.name!r} in {shown_url(tuning.url)} was "
                f"begun with {was}, not {now}; accepted: the same options, or another --log-dir"
            )


# -- its trials ----------------------------------------------------------------------------------


def reason(trial: FrozenTrial) -> str | None:
    """Why it was pruned or failed; None if nobody was left to say."""
    value: str | None = trial.user_attrs.get(REASON)
    return value


def given_up(trial: FrozenTrial) -> bool:
    """It does not count: it was interrupted, its process has gone, or it was one too many."""
    return trial.state == TrialState.FAIL and reason(trial) in (None, INTERRUPTED, SURPLUS)


def trials_that_count(study: optuna.Study) -> list[FrozenTrial]:
    """Begun and not given up, in order."""
    trials = study.get_trials(deepcopy=False)
    return [t for t in trials if t.state != TrialState.WAITING and not given_up(t)]


def trials_of(study: optuna.Study, whose: str) -> list[FrozenTrial]:
    """Those that a process has begun, whatever came of them."""
    trials = study.get_trials(deepcopy=False)
    begun = [trial for trial in trials if trial.state != TrialState.WAITING]
    return [trial for trial in begun if trial.user_attrs.get(OWNER) == whose]


def owner() -> str:
    """This process, as trials name it."""
    return f"{socket.gethostname()}:{os.getpid()}"


def end(study: optuna.Study, trial: FrozenTrial, why: str) -> None:
    """A running trial of any process has failed; one that was interrupted is queued again."""
    study._storage.set_trial_user_attr(trial._trial_id, REASON, why)
    study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)
    if why == INTERRUPTED:
        RETRY(study, trial)


def line(objective: Objective, trial: FrozenTrial) -> str:
    """What came of a trial, and its settings, to be read."""
    chosen = settings_text(trial.user_attrs.get(SETTINGS, {}))
    return f"trial {trial.number}: {outcome_text(objective, trial)}; {chosen}"


def outcome_text(objective: Objective, trial: FrozenTrial) -> str:
    """Its values, or why it has none."""
    if trial.state == TrialState.COMPLETE:
        found = zip(objective.labels, objective.shown(trial.values), strict=True)
        return ", ".join(f"{label} {value:.4g}" for label, value in found)
    if trial.state in (TrialState.FAIL, TrialState.PRUNED):
        why = " ".join((reason(trial) or "its process has gone").split())
        return f"failed: {why}" if trial.state == TrialState.FAIL else why
    return trial.state.name.lower()


def settings_text(settings: Mapping[str, Value]) -> str:
    """As NAME VALUE, NAME VALUE."""
    return ", ".join(
        f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in settings.items()
    )


# -- rank 0's side of a trial --------------------------------------------------------------------


@dataclass(frozen=True)
class Order:
    """What all ranks do next: a trial, the values of its parameters, and its place in the study."""

    number: int
    values: dict[str, Value]
    place: int


class Desk:
    """The desk of a study, on rank 0: it hands out trials and notes how they end.

    Optuna's own `optimize` would have a trial that a worker's death has ended fail before the
    launcher, which knows of what it died, can say so. owner: the process that answers for the
    trials. out: where text for people goes."""

    def __init__(self, tuning: Tuning, owner: str, out: TextIO) -> None:
        self._tuning, self._owner, self._out = tuning, owner, out
        self._storage = open_storage(tuning.url)
        self.study = open_study(tuning, self._storage)
        self._turn = turn(tuning.url)
        self._trial: optuna.Trial | None = None
        self._ended = threading.Event()

    def ask(self) -> Order | None:
        """The next trial that can run; None if the study has all it wants.

        Settings that do not go together are a failed trial.
        """
        space = self._tuning.space
        fail_stale_trials(self.study)
        while len(trials_that_count(self.study)) < self._tuning.trials:
            with self._turn:
                trial = self.study.ask({one.name: one.distribution for one in space})
            self._trial = trial
            self._begin_to_beat(trial)
            trial.set_user_attr(OWNER, self._owner)
            trial.set_user_attr(REASON, None)  # of the trial that this one repeats
            before = [t for t in trials_that_count(self.study) if t.number < trial.number]
            if len(before) >= self._tuning.trials:  # another process asked at the same time
                self.failed(SURPLUS)
                return None
            chosen = {one.name: one.value(trial.params[one.name]) for one in space}
            trial.set_user_attr(SETTINGS, chosen)
            try:
                config = self._tuning.config(chosen, trial.number, self._tuning.seeds[0])
                check_compression(config)
            except UsageError as error:
                self.failed(str(error))
                continue
            trial.set_user_attr(COMMAND, config.command)
            return Order(trial.number, chosen, len(before) + 1)
        return None

    def prune(self, step: int, value: float) -> bool:
        """Take an intermediate value to Optuna; is the trial to be pruned?"""
        if len(self._tuning.objective.names) > 1:
            return False
        self._running.report(value, step)
        return bool(self._running.should_prune())

    def finished(self, runs: list[Metrics]) -> None:
        """All seeds have run to their ends."""
        objective = self._tuning.objective
        found = values(objective, runs)
        missed = [run.quality for run in runs if not run.reached]
        if missed:
            self.pruned(
                f"target {objective.target:g} not reached: {objective.quality_name} "
                f"{missed[0]:.4g} at the end"
            )
        elif not all(map(isfinite, found)):
            unknown = [n for n, v in zip(objective.names, found, strict=True) if not isfinite(v)]
            self.failed(f"{', '.join(unknown)} not known")
        else:
            self._tell(None, values=found)

    def pruned(self, why: str) -> None:
        """It was stopped, or has not come to the target."""
        self._tell(why, state=TrialState.PRUNED)

    def failed(self, why: str) -> None:
        """It could not run to its end; one that was interrupted is queued for the next time."""
        self._tell(why, state=TrialState.FAIL)
        if why == INTERRUPTED:
            RETRY(self.study, self._frozen())

    @property
    def _running(self) -> optuna.Trial:
        assert self._trial is not None, "no trial was asked for"
        return self._trial

    def _tell(self, why: str | None, **what: Any) -> None:
        trial = self._running
        self._ended.set()
        trial.set_user_attr(REASON, why)
        self.study.tell(trial.number, **what)
        if why != SURPLUS:
            print(line(self._tuning.objective, self._frozen()), file=self._out, flush=True)

    def _frozen(self) -> FrozenTrial:
        return self.study.get_trials(deepcopy=False)[self._running.number]

    def _begin_to_beat(self, trial: optuna.Trial) -> None:
        """Signs of life, so that others see when this process is gone: Optuna gives them in
        `optimize` alone."""
        ended = self._ended = threading.Event()
        self._storage.record_heartbeat(trial._trial_id)

        def beat() -> None:
            while not ended.wait(BEAT):
                with suppress(Exception):  # a busy or restarted database: the next beat will do
                    self._storage.record_heartbeat(trial._trial_id)

        threading.Thread(target=beat, name="heartbeat", daemon=True).start()
