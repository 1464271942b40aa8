"""Rank 0's eye on a trial's run: intermediate quality to Optuna, and when to stop early."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from math import isfinite, nan
from typing import Any

from runs.config import TrainConfig
from runs.interrupt import Stop
from runs.logbook import Logbook, emulated
from runs.progress import Progress
from runs.tune.objective import Objective

PRUNED, REACHED, DIVERGED = "pruned", "target reached", "diverged"

Prune = Callable[[int, float], bool]
"""(steps done, intermediate value) -> is this trial to be pruned?"""


class TrialLogbook(Logbook):
    """A run's logbook that wants the run to stop when it is pruned, at its target, or diverged.

    ending: why, once it does. ends: when each step ended, in measured seconds since the end of the
    first one, in which processes warm up; evaluations are not counted.
    """

    def __init__(
        self, config: TrainConfig, objective: Objective, prune: Prune, progress: Progress
    ) -> None:
        super().__init__(config, 0, progress)
        self.ending: str | None = None
        self.detail = ""
        self.ends: list[float] = []
        self._objective, self._prune = objective, prune
        self._mark = 0.0

    def announce(self, text: str) -> None:
        """A study has many of these; they are in the trial's own files."""

    def trained(self, done: int, loss: float) -> None:
        super().trained(done, loss)
        now = time.perf_counter()
        if self.config.fixed_clock is not None:
            self.ends.append(sum(self.ends[-1:]) + self._modelled(self.config.fixed_clock))
        else:
            self.ends.append(self.ends[-1] + now - self._mark if self.ends else 0.0)
        self._mark = now
        if not isfinite(loss):
            self.end(DIVERGED, f"loss {loss} in step {done}")

    def evaluated(
        self, done: int, name: str, quality: float, beside: Mapping[str, float] | None = None
    ) -> None:
        super().evaluated(done, name, quality, beside)
        self._mark = time.perf_counter()  # what has come between is no training
        if self.ending is not None:
            return
        if not isfinite(quality):
            self.end(DIVERGED, f"{name} {quality} after {done} steps")
        elif self._objective.reached(quality):
            self.end(REACHED, f"{name} {quality:.4g} after {done} steps")
        elif self._prune(done, self._objective.intermediate(quality)) and done < self.config.steps:
            self.end(PRUNED, f"{name} {quality:.4g} after {done} steps")

    def _modelled(self, compute: float) -> float:
        """Seconds of a step with --fixed-clock; the last report has those of the step before."""
        seconds = nan if self.last is None else self.last.report.seconds
        return seconds if isfinite(seconds) else compute

    def end(self, why: str, detail: str) -> None:
        """The run is to stop, unless it was to before."""
        if self.ending is None:
            self.ending, self.detail = why, detail


class StopFor:
    """Asks to stop when the user does, or the logbook (rank 0's; None on the others).

    The vote carries it to all ranks with the next step's loss.
    """

    def __init__(self, user: Stop, logbook: TrialLogbook | None) -> None:
        self._user, self._logbook = user, logbook

    @property
    def requested(self) -> bool:
        wanted = self._logbook is not None and self._logbook.ending is not None
        return self._user.requested or wanted


class StudyProgress(Progress):
    """The bar of a whole study; between two trials it is taken away."""

    def __init__(self, config: TrainConfig, runs_done: int, runs: int, trial: str) -> None:
        link = emulated(config)
        super().__init__(0, config.steps, f"{trial}, {link}" if link else trial)
        bar: Any = self._bar
        if bar is not None:
            bar.leave = False
            bar.total = runs * config.steps
            bar.n = bar.initial = runs_done * config.steps
