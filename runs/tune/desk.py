"""Rank 0's side of a trial: it asks Optuna for parameters, and tells it what came of them."""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass
from math import isfinite, nan
from statistics import fmean
from typing import Any, TextIO

import optuna
from optuna.trial import TrialState

from runs.build import check_compression
from runs.parser import UsageError
from runs.tune.describe import line
from runs.tune.objective import Metrics, values
from runs.tune.parameter import Value
from runs.tune.storage import BEAT, open_storage, turn
from runs.tune.study import (
    INTERRUPTED,
    OWNER,
    REASON,
    SURPLUS,
    open_study,
    queue_again,
    trials_that_count,
)
from runs.tune.tuning import Tuning
from runs.tune.watch import DIVERGED, PRUNED

SETTINGS, METRICS, COMMAND = "settings", "metrics", "command"
"""User attributes of a trial: what it ran with, what came out, and train's command line."""


@dataclass(frozen=True)
class Order:
    """What all ranks do next: a trial, the values of its parameters, and its place in the study."""

    number: int
    values: dict[str, Value]
    place: int


class Desk:
    """The desk of a study, on rank 0: it hands out trials and notes how they end.

    owner: the process that answers for the trials. out: where text for people goes."""

    def __init__(self, tuning: Tuning, owner: str, out: TextIO) -> None:
        self._tuning, self._owner, self._out = tuning, owner, out
        self._storage = open_storage(tuning.url)
        self.study = open_study(tuning, self._storage)
        self._turn = turn(tuning.url)
        self._trial: optuna.Trial | None = None
        self._heart: _Heart | None = None

    def ask(self) -> Order | None:
        """The next trial that can run; None if the study has all it wants.

        Settings that do not go together are a failed trial.
        """
        while len(trials_that_count(self.study)) < self._tuning.trials:
            with self._turn:
                trial = self.study.ask()
            self._heart = _Heart(self._storage, trial)
            self._trial = trial
            trial.set_user_attr(OWNER, self._owner)
            before = [t for t in trials_that_count(self.study) if t.number < trial.number]
            if len(before) >= self._tuning.trials:  # another process asked at the same time
                self._end(TrialState.FAIL, SURPLUS)
                return None
            chosen = {parameter.name: parameter.suggest(trial) for parameter in self._tuning.space}
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
        trial = self._running
        if len(self._tuning.objective.names) > 1:
            return False
        trial.report(value, step)
        return bool(trial.should_prune())

    def finished(self, runs: list[Metrics]) -> None:
        """All seeds have run to their ends."""
        trial, objective = self._running, self._tuning.objective
        found = values(objective, runs)
        trial.set_user_attr(METRICS, _means(runs))
        missed = [run.quality for run in runs if not run.reached]
        if missed:
            self._end(
                TrialState.PRUNED,
                f"target {objective.target:g} not reached: {objective.quality_name} "
                f"{missed[0]:.4g} at the end",
            )
        elif not all(map(isfinite, found)):
            unknown = [n for n, v in zip(objective.names, found, strict=True) if not isfinite(v)]
            self._end(TrialState.FAIL, f"{', '.join(unknown)} not known")
        else:
            self._silence()
            self.study.tell(trial.number, found)
            self._say(trial)

    def stopped(self, why: str, detail: str) -> None:
        """Pruned or diverged, after as many steps as `detail` says."""
        state = TrialState.PRUNED if why == PRUNED else TrialState.FAIL
        assert why in (PRUNED, DIVERGED)
        self._end(state, f"{why}: {detail}")

    def failed(self, why: str) -> None:
        """It could not run to its end."""
        self._end(TrialState.FAIL, why)

    def interrupted(self) -> None:
        """The user wanted it to stop; its parameters are queued for the next time."""
        self._end(TrialState.FAIL, INTERRUPTED)
        queue_again(self.study)

    @property
    def _running(self) -> optuna.Trial:
        assert self._trial is not None, "no trial was asked for"
        return self._trial

    def _end(self, state: TrialState, why: str) -> None:
        trial = self._running
        self._silence()
        trial.set_user_attr(REASON, why)
        self.study.tell(trial.number, state=state)
        if why != SURPLUS:
            self._say(trial)

    def _silence(self) -> None:
        if self._heart is not None:
            self._heart.stop()

    def _say(self, trial: optuna.Trial) -> None:
        trials = self.study.get_trials(deepcopy=False)
        print(line(self._tuning.objective, trials[trial.number]), file=self._out, flush=True)


class _Heart:
    """Signs of life of a running trial, so that others see when its process is gone."""

    def __init__(self, storage: Any, trial: optuna.Trial) -> None:
        self._stopped = threading.Event()
        self._storage, self._id = storage, trial._trial_id
        storage.record_heartbeat(self._id)
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        while not self._stopped.wait(BEAT):
            try:
                self._storage.record_heartbeat(self._id)
            except Exception:  # a busy or restarted database: the next beat will do
                continue

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()


def _means(runs: list[Metrics]) -> dict[str, float | None]:
    """Over the seeds; None for what is not known."""
    rows = [asdict(run) for run in runs]
    means = {name: fmean(float(row[name]) for row in rows) if rows else nan for name in rows[0]}
    return {name: value if isfinite(value) else None for name, value in means.items()}
