"""What a study searches for, what it has found, and whether there is anything to find."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any, Literal

import optuna
from optuna.distributions import BaseDistribution
from optuna.trial import FrozenTrial, TrialState

from policies import DENSE
from runs.report.run import Run
from runs.report.source import read_folder
from runs.tables import table, text_of
from runs.tune.space import chosen, settings_text

LEAST_WAIT = 0.05
"""Where a dense step waits for the network for a smaller share of its time, no CF is faster."""

SHOWN = 10
"""Best trials in the table."""


@dataclass(frozen=True)
class Objective:
    """What a study minimises or maximises. names: of quality, bytes and seconds. target: the
    quality that bytes or seconds are counted to."""

    names: tuple[str, ...]
    target: float | None
    quality_name: str
    higher_is_better: bool

    @property
    def directions(self) -> list[Literal["minimize", "maximize"]]:
        """In Optuna's words."""
        up = self.higher_is_better
        return ["maximize" if up and name == "quality" else "minimize" for name in self.names]

    @property
    def labels(self) -> list[str]:
        """The values' names, with units."""
        to = "" if self.target is None else f" to {self.quality_name} {self.target:g}"
        names = {
            "quality": f"held-out {self.quality_name}",
            "bytes": f"MB sent by a worker{to}",
            "seconds": f"seconds of steps{to}",
        }
        return [names[name] for name in self.names]

    def shown(self, values: Sequence[float]) -> list[str]:
        """The values in the units of `labels`."""
        pairs = zip(self.names, values, strict=True)
        return [f"{value / 1e6 if name == 'bytes' else value:.4g}" for name, value in pairs]

    def told(self, values: Sequence[float]) -> str:
        """The values as a sentence's part."""
        pairs = zip(self.labels, self.shown(values), strict=True)
        return ", ".join(f"{label} {value}" for label, value in pairs)

    def outcome(self, trial: FrozenTrial) -> str:
        """A trial's values, or why it has none."""
        if trial.state == TrialState.COMPLETE:
            return self.told(trial.values)
        why = trial.user_attrs.get("reason") or trial.state.name.lower()
        return f"failed: {why}" if trial.state == TrialState.FAIL else str(why)

    def reached(self, quality: float) -> bool:
        """Whether there is a target, and the quality is as good."""
        if self.target is None:
            return False
        return quality >= self.target if self.higher_is_better else quality <= self.target

    def intermediate(self, quality: float) -> float:
        """What the pruner compares, in the direction of the first objective."""
        same = self.names[0] == "quality" or not self.higher_is_better
        return quality if same else -quality

    def values(self, run: Run) -> list[float] | None:
        """Of a run that is over; nan for what is not known, None if the target was not reached."""
        done, sent = run.trained, run.bytes_sent
        if self.target is not None:
            steps = run.steps_to(self.target)
            if not isfinite(steps):
                return None
            done = int(steps)
            sent = run.sent_by(done)
        found = {"quality": run.quality, "bytes": sent, "seconds": run.seconds_by(done)}
        return [found[name] for name in self.names]


def nothing_to_tune(folder: Path) -> str:
    """Why no CF can make the run in a folder faster, or "". It goes by the steps that were sent
    dense: how long they took, and how much of it they waited for the network."""
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
        f"network is --link, and --anyway goes on for fewer bytes"
    )


def make_report(
    objective: Objective, space: Mapping[str, BaseDistribution], study: optuna.Study, why: str
) -> tuple[dict[str, Any], str]:
    """What the study has found, as JSON-like values, and to be read; all else that there is to see
    of it Optuna shows. why: there is nothing to tune."""
    trials = study.get_trials(deepcopy=False)
    complete = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    front = best_trials(study) if complete else []
    states = Counter(trial.state.name.lower() for trial in trials)
    count = ", ".join(f"{number} {state}" for state, number in sorted(states.items()))
    rows = [
        [str(trial.number), *objective.shown(trial.values), settings_text(space, trial)]
        for trial in front[:SHOWN]
    ]
    if not front:
        failed = [objective.outcome(t) for t in trials if t.state == TrialState.FAIL]
        last = f"; the last: {failed[-1]}" if failed else ""
        answer = f"no trial is complete ({count or 'none begun'}){last}"
    elif len(complete) > 1 and len({tuple(trial.values) for trial in complete}) == 1:
        answer = f"the settings made no difference: {objective.told(complete[0].values)} in all"
    else:
        answer = f"{rows[0][-1]} (trial {rows[0][0]}): {objective.told(front[0].values)}"
    lines = [why or answer, f"trials: {count}"]
    if front and not why:
        heads = ["trial", *objective.labels, "settings"]
        left = (len(heads) - 1,)
        lines += [
            "Pareto front:" if len(objective.names) > 1 else "the best:",
            text_of(table(heads, rows, left=left, indent=2)),
        ]
    result = {
        "answer": why or answer,
        "nothing_to_tune": bool(why),
        "objectives": objective.labels,
        "front": [
            {
                "number": trial.number,
                "settings": chosen(space, trial.params),
                "values": trial.values,
            }
            for trial in front
        ],
    }
    return result, "\n".join(lines)


def best_trials(study: optuna.Study) -> list[FrozenTrial]:
    """Optuna's Pareto front, the best first value first; of trials that came to the same the first.
    With one objective the best trial."""
    by_values = {tuple(trial.values): trial for trial in reversed(study.best_trials)}
    upward = study.directions[0] == optuna.study.StudyDirection.MAXIMIZE
    return sorted(by_values.values(), key=lambda trial: trial.values[0], reverse=upward)
