"""One trial: a run of all workers that ends early where it is pruned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite

import optuna
import torch.distributed as dist

from runs.config import TrainConfig
from runs.interrupt import DIVERGED, INTERRUPTED, UNSAVED, Interrupt
from runs.logbook import Logbook
from runs.progress import Progress
from runs.result import save_result
from runs.train import train
from runs.worker import join


@dataclass(frozen=True)
class TrialJob:
    """A run for a trial. pruned_by: the study, and the trial's id in its storage; None: no pruner
    is asked. verbose: the run tells of its steps."""

    config: TrainConfig
    pruned_by: tuple[optuna.Study, int] | None
    verbose: bool = False


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


@dataclass
class Reports:
    """Where a script's values go, and whether the trial is pruned by them. trial: see
    `TrialJob.pruned_by`."""

    trial: tuple[optuna.Study, int]
    last: int = -1

    def __call__(self, done: int, value: float) -> bool:
        if done <= self.last:
            return False  # a step has one value
        self.last = done
        trial = optuna.Trial(*self.trial)
        trial.report(value, done)
        return trial.should_prune()


class TrialLogbook(Logbook):
    """A run's logbook that asks the run to stop when it is pruned, or when the user does. The vote
    carries it to all ranks with the next step's loss."""

    def __init__(self, job: TrialJob, user: Interrupt) -> None:
        name = job.config.folder.name
        super().__init__(
            job.config, 0, Progress(job.config.steps, name, name, quiet=not job.verbose)
        )
        self._user, self._pruned = user, False
        self._trial = None if job.pruned_by is None else optuna.Trial(*job.pruned_by)

    @property
    def requested(self) -> bool:
        """Whether the run is to stop."""
        return self._user.requested or self._pruned

    def announce(self, text: str) -> None:
        """A study has many of these; they are in the trial's own files."""

    def evaluated(
        self, done: int, name: str, quality: float, beside: Mapping[str, float] | None = None
    ) -> None:
        super().evaluated(done, name, quality, beside)
        if self._trial is not None and isfinite(quality) and not self._pruned:
            self._trial.report(quality, done)
            self._pruned = done < self.config.steps and self._trial.should_prune()
