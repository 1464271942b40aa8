"""The quality that is to be reached, and when each run did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from runs.parser import UsageError
from runs.report.run import Run


@dataclass(frozen=True)
class Target:
    """The quality that the runs of a report are compared at.

    basis: where it comes from, in words."""

    quality: float
    basis: str

    def first(self, run: Run) -> int | None:
        """Steps done at the first evaluation that is at least as good; None: there is none."""
        for done, quality in run.evaluations:
            if quality >= self.quality if run.higher_is_better else quality <= self.quality:
                return done
        return None


def choose_targets(runs: Sequence[Run], wanted: float | None) -> dict[str, Target]:
    """By task; a task whose runs were never evaluated has none.

    UsageError if one value is wanted for qualities of several tasks.
    """
    by_task: dict[str, list[Run]] = {}
    for run in runs:
        if isfinite(run.quality):
            by_task.setdefault(run.task, []).append(run)
    if wanted is not None and len({run.quality_name for run in runs if run.task}) > 1:
        raise UsageError(
            f"--target {wanted:g}: the runs have different qualities "
            f"({', '.join(sorted({run.quality_name for run in runs if run.task}))}); accepted: "
            f"runs of one task, or no --target"
        )
    if wanted is not None:
        return {task: Target(wanted, "as asked for") for task in by_task}
    return {task: _choose(of_task) for task, of_task in by_task.items()}


def _choose(runs: list[Run]) -> Target:
    """See the command's help."""
    finished = [run for run in runs if run.finished] or runs
    dense = [run for run in finished if run.is_dense]
    chosen = dense or finished
    pick = min if chosen[0].higher_is_better else max
    worst = pick(chosen, key=lambda run: run.quality)
    if len(chosen) == 1:
        basis = f"the final quality of {worst.name}"
    else:
        basis = f"the worst final quality of the {'dense ' if dense else ''}runs ({worst.name})"
    return Target(worst.quality, basis)
