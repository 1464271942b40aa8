"""A trial in one line, to be read."""

from __future__ import annotations

from collections.abc import Mapping

from optuna.trial import FrozenTrial, TrialState

from runs.tune.objective import Objective
from runs.tune.parameter import Value
from runs.tune.study import reason


def line(objective: Objective, trial: FrozenTrial) -> str:
    """What came of a trial, and its settings."""
    chosen = settings_text(trial.user_attrs.get("settings", {}))
    return f"trial {trial.number}: {outcome_text(objective, trial)}; {chosen}"


def outcome_text(objective: Objective, trial: FrozenTrial) -> str:
    """Its values, or why it has none."""
    if trial.state == TrialState.COMPLETE:
        values = zip(objective.labels, objective.shown(trial.values), strict=True)
        return ", ".join(f"{label} {value:.4g}" for label, value in values)
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
