"""What a study has found so far, as plain values."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from math import log

import optuna
from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from runs.tune.objective import Objective
from runs.tune.study import INTERRUPTED, SURPLUS, reason

LEAST = 8
"""Finished trials without which an importance means nothing."""


@dataclass(frozen=True)
class Findings:
    """What a study has found so far.

    trials: all but those that were given up, in order. front: the trials that no other beats in
    everything, best quality first; with one objective the best alone. pick: of those the one whose
    settings are shown; None before a trial is complete. importances: by objective, then by
    parameter, sum 1; empty where too little is known.
    """

    trials: tuple[FrozenTrial, ...]
    front: tuple[FrozenTrial, ...]
    pick: FrozenTrial | None
    importances: tuple[dict[str, float], ...]

    def of(self, state: TrialState) -> list[FrozenTrial]:
        return [trial for trial in self.trials if trial.state == state]


def find(study: optuna.Study, objective: Objective) -> Findings:
    trials = tuple(trial for trial in study.get_trials(deepcopy=False) if _is_shown(trial))
    complete = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    front = pareto_front(objective, complete)
    count = len(objective.names)
    return Findings(
        trials, tuple(front), knee(front), tuple(_importances(study, i) for i in range(count))
    )


def pareto_front(objective: Objective, complete: list[FrozenTrial]) -> list[FrozenTrial]:
    """The trials that no other one beats, by the first value, best first; of equals the first."""
    front: list[FrozenTrial] = []
    for trial in complete:
        beaten = any(objective.better(other.values, trial.values) for other in complete)
        if not beaten and all(other.values != trial.values for other in front):
            front.append(trial)
    sign = 1 if objective.directions[0] == "minimize" else -1
    return sorted(front, key=lambda trial: sign * trial.values[0])


def knee(front: list[FrozenTrial]) -> FrozenTrial | None:
    """The trial nearest to having the best of everything.

    Each value is scaled to 0 at the front's best and 1 at its worst; logarithms, where all are
    positive, since bytes and seconds range over powers of ten.
    """
    if not front:
        return None
    distances = [0.0] * len(front)
    # The front runs from the best first value to the worst, so the other way in the second.
    for column, best_at in zip(zip(*(t.values for t in front), strict=True), (0, -1), strict=False):
        scaled = [log(v) for v in column] if min(column) > 0 else list(column)
        width = max(scaled) - min(scaled) or 1.0
        for i, value in enumerate(scaled):
            distances[i] += ((value - scaled[best_at]) / width) ** 2
    return front[min(range(len(front)), key=distances.__getitem__)]


def _importances(study: optuna.Study, objective: int) -> dict[str, float]:
    complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    if len(complete) < LEAST or len({trial.values[objective] for trial in complete}) < 2:
        return {}
    sign = 1 if study.directions[objective] == StudyDirection.MINIMIZE else -1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return get_param_importances(
                study,
                evaluator=PedAnovaImportanceEvaluator(),
                target=lambda trial: sign * trial.values[objective],  # the smaller, the better
            )
        except (ValueError, RuntimeError):  # too few different values
            return {}


def _is_shown(trial: FrozenTrial) -> bool:
    given_up = trial.state == TrialState.FAIL and reason(trial) in (None, INTERRUPTED, SURPLUS)
    return not given_up and trial.state != TrialState.WAITING
