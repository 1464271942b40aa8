"""One trial: a run of all workers that ends early where it is pruned or has reached its target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite

import optuna
import torch.distributed as dist

from runs.config import TrainConfig
from runs.interrupt import DIVERGED, INTERRUPTED, UNSAVED, Interrupt
from runs.logbook import Logbook, emulated
from runs.progress import Progress
from runs.report.source import read_folder
from runs.result import save_result
from runs.train import train
from runs.tune.report import Objective
from runs.worker import join

REASON = "reason"
"""The trial's attribute that says why it ended as it did."""
INTERRUPT = "interrupted"


@dataclass(frozen=True)
class TrialJob:
    """A run for a trial. pruned_by: the study, and the trial's id in its storage; None: no pruner
    is asked."""

    config: TrainConfig
    objective: Objective
    pruned_by: tuple[optuna.Study, int] | None


def run_trial(job: TrialJob, rank: int, world_size: int, init_method: str) -> int:
    """The life of a worker; returns its exit code."""
    config = job.config
    interrupt = join(config.threads, rank, world_size, init_method)
    logbook = TrialLogbook(job, interrupt) if rank == 0 else None
    try:
        outcome = train(
            config, interrupt=logbook or interrupt, logbook=logbook, keep=False, test=False
        )
    finally:
        if logbook is not None:
            logbook.close()
    dist.destroy_process_group()
    if logbook is None:
        return 0
    *_, unsaved = save_result(config, outcome, logbook)
    if interrupt.requested:  # whatever the run has come to
        return INTERRUPTED
    return DIVERGED if outcome.diverged else UNSAVED if unsaved else 0


def ending(job: TrialJob, code: int, causes: list[str]) -> list[float]:
    """The values of a run that has ended with an exit code. KeyboardInterrupt; TrialPruned where it
    has ended early, or not reached its target; ValueError where it has failed."""
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    if code not in (0, DIVERGED):
        raise ValueError(causes[0] if causes else f"exit code {code}")
    objective = job.objective
    run = read_folder(job.config.folder, "--log-dir")
    if code == DIVERGED:
        raise ValueError(f"diverged: {run.ending.diverged}")
    values = objective.values(run)
    what = f"{objective.quality_name} {run.quality:.4g} after {run.trained} steps"
    if values is None:
        raise optuna.TrialPruned(f"target {objective.target:g} not reached: {what}")
    if objective.target is None and run.trained < job.config.steps:
        raise optuna.TrialPruned(f"pruned: {what}")
    if not all(map(isfinite, values)):
        raise ValueError(f"not all values are known: {objective.told(values)}")
    return values


class TrialLogbook(Logbook):
    """A run's logbook that asks the run to stop when it is pruned or at its target, or when the
    user does. The vote carries it to all ranks with the next step's loss."""

    def __init__(self, job: TrialJob, user: Interrupt) -> None:
        name = job.config.folder.name
        link = emulated(job.config)
        said = f"{name}, {link}" if link else name
        super().__init__(job.config, 0, Progress(job.config.steps, said, note=name))
        self.enough = False
        self._job, self._user = job, user
        self._trial = None if job.pruned_by is None else optuna.Trial(*job.pruned_by)

    @property
    def requested(self) -> bool:
        """Whether the run is to stop."""
        return self._user.requested or self.enough

    def announce(self, text: str) -> None:
        """A study has many of these; they are in the trial's own files."""

    def evaluated(
        self, done: int, name: str, quality: float, beside: Mapping[str, float] | None = None
    ) -> None:
        super().evaluated(done, name, quality, beside)
        if self.enough or not isfinite(quality):
            return
        self.enough = self._job.objective.reached(quality)
        if self._trial is not None and not self.enough:
            self._trial.report(self._job.objective.intermediate(quality), done)
            self.enough = done < self.config.steps and self._trial.should_prune()
