"""A study from its beginning to its last trial: starts workers, of which each trial is a run.

Rank 0 asks for a trial, all ranks train it, and rank 0 tells what came of it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite, nan
from typing import Any, TextIO, TypeVar

import optuna
import torch.distributed as dist
from optuna.trial import TrialState

from runs.build import check
from runs.config import TrainConfig
from runs.interrupt import INTERRUPTED, Interrupt, Stop
from runs.launch import launch
from runs.logbook import Logbook, emulated
from runs.parser import UsageError, check_writable
from runs.progress import Progress
from runs.report.rows import modelled
from runs.report.source import read_folder
from runs.result import save_result, title
from runs.train import Outcome, train
from runs.tune import study as book
from runs.tune.screen import Record, read, screen
from runs.tune.storage import needed, open_storage
from runs.tune.study import Desk, Order
from runs.tune.tuning import Metrics, Objective, Tuning, measure
from runs.worker import join

TRIALS_A_START = 20
"""Trials that the same worker processes run: starting them takes seconds, and memory adds up."""

_T = TypeVar("_T")


@dataclass
class Place:
    """The place of this process among those that torchrun has started.

    rank, world_size: torchrun's; 0 and None where we start the workers ourselves. interrupt: of
    the process group, which torchrun's processes enter once, for all studies.
    """

    rank: int
    world_size: int | None
    interrupt: Interrupt | None = None

    @classmethod
    def of_environment(cls) -> Place:
        if {"RANK", "WORLD_SIZE"} <= set(os.environ):
            return cls(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        return cls(0, None)

    def options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The command's options, with torchrun's number of workers."""
        if self.world_size is None:
            return dict(given)
        workers = given.get("workers", self.world_size)
        if workers != self.world_size:
            raise UsageError(
                f"--workers {workers}: torchrun has started {self.world_size}; accepted: "
                f"{self.world_size}, or leave it out"
            )
        return {**given, "workers": self.world_size}


def check_all(tunings: list[Tuning]) -> list[Record | None]:
    """Have all errors before the first worker starts; returns the records to screen on."""
    records = []
    for tuning in tunings:
        check(tuning.config())
        check_writable(tuning.folder)
        records.append(None if tuning.screen is None else read(tuning))
    return records


def conduct(
    tuning: Tuning, record: Record | None, where: Place, out: TextIO
) -> tuple[optuna.Study | None, int]:
    """Run the study until it is full; the study (None but on rank 0) and the exit code. record: to
    screen on, if that is wanted."""
    study = _begin(tuning, record, out) if where.rank == 0 else None
    if where.world_size is not None:
        if where.interrupt is None:
            threads = tuning.config().threads
            where.interrupt = join(threads, where.rank, where.world_size, "env://")
        session = Session(tuning, book.owner(), most=None)
        return study, run_trials(session, where.rank, where.interrupt)
    assert study is not None
    return study, _with_our_workers(tuning, study, out)


def _begin(tuning: Tuning, record: Record | None, out: TextIO) -> optuna.Study:
    """The study, settings screened. No folder without a storage."""
    if tuning.keeps_study:
        tuning.folder.mkdir(parents=True, exist_ok=True)
    study = book.open_study(tuning, open_storage(tuning.url))
    tuning.folder.mkdir(parents=True, exist_ok=True)
    config, done = tuning.config(), len(book.trials_that_count(study))
    begun = f", {done} of them begun already" if done else ""
    print(
        f"{title(config)}, {config.steps} steps\n"
        f"searching {', '.join(map(str, tuning.space))}\n"
        f"for {' and '.join(tuning.objective.labels)}: {tuning.trials} trials{begun}, "
        f"files in {tuning.folder}",
        file=out,
        flush=True,
    )
    if record is not None:
        screen(tuning, record, study, out)
    return study


def _with_our_workers(tuning: Tuning, study: optuna.Study, out: TextIO) -> int:
    """Start workers until the study is full: a crash costs one trial."""
    session = Session(tuning, book.owner(), most=TRIALS_A_START)
    code = 0
    while code == 0 and len(book.trials_that_count(study)) < tuning.trials:
        begun = len(book.trials_of(study, session.owner))
        causes: list[str] = []
        try:
            code = launch(run_session, session, tuning.config().workers, causes.append)
        except UsageError as error:
            code = 1
            causes.append(str(error))
        cause = causes[0] if causes else "its workers ended without a word"
        ours = book.trials_of(study, session.owner)
        for trial in ours:
            if trial.state == TrialState.RUNNING:
                why = book.INTERRUPTED if code == INTERRUPTED else cause
                book.end(study, trial, why)
                print(f"trial {trial.number}: failed: {why}", file=out, flush=True)
        if len(ours) == begun:
            if code not in (0, INTERRUPTED):  # not a trial has failed, but the workers' start
                print(f"error: {cause}", file=sys.stderr)
            break  # or another process has taken the last
        code = code if code == INTERRUPTED else 0
    return code


# -- the workers ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Session:
    """The part that these processes have in a study.

    most: trials that these processes run; None: all that are left. owner: of those trials."""

    tuning: Tuning
    owner: str
    most: int | None


def run_session(session: Session, rank: int, world_size: int, init_method: str) -> int:
    """Be one of `world_size` ranks for some trials; returns the exit code (130 if interrupted)."""
    interrupt = join(session.tuning.config().threads, rank, world_size, init_method)
    with needed(session.tuning.url):
        code = run_trials(session, rank, interrupt)
    dist.destroy_process_group()
    return code


def run_trials(session: Session, rank: int, interrupt: Interrupt) -> int:
    """The same in a process group that is there already."""
    tuning = session.tuning
    out = sys.stderr if tuning.json else sys.stdout
    desk = Desk(tuning, session.owner, out) if rank == 0 else None
    made, stopped = 0, False
    while not stopped and (session.most is None or made < session.most):
        order = _rank_0s(None if desk is None or interrupt.requested else desk.ask())
        if order is None:
            break
        try:
            _run(tuning, order, desk, interrupt)
        except Exception as error:
            if desk is not None and session.most is None:  # no parent that would record it
                desk.failed(f"{type(error).__name__}: {error}")
            raise
        made += 1
        stopped = _rank_0s(interrupt.requested)
    stopped = stopped or _rank_0s(interrupt.requested)
    return INTERRUPTED if stopped else 0


def _run(tuning: Tuning, order: Order, desk: Desk | None, interrupt: Interrupt) -> None:
    """Train with one seed after another, for as long as nothing speaks against it."""
    runs: list[Metrics] = []
    for seed in tuning.seeds:
        config = tuning.config(order.values, order.number, seed)
        logbook = None
        if desk is not None:
            of_several = f", seed {seed}" if len(tuning.seeds) > 1 else ""
            name = f"trial {order.number}, {order.place} of {tuning.trials}{of_several}"
            prune = desk.prune if seed == tuning.seeds[0] else None
            logbook = TrialLogbook(config, tuning.objective, prune, interrupt, name)
        try:
            outcome = train(
                config, interrupt=logbook or interrupt, logbook=logbook, keep=False, test=False
            )
        finally:
            if logbook is not None:
                logbook.close()
        ended = None
        if desk is not None and logbook is not None:
            ended = _ended(tuning, config, outcome, desk, logbook)
        if not _rank_0s(ended is not None):
            return
        runs += [ended] if ended is not None else []
    if desk is not None:
        desk.finished(runs)


def _ended(
    tuning: Tuning, config: TrainConfig, outcome: Outcome, desk: Desk, logbook: TrialLogbook
) -> Metrics | None:
    """On rank 0, what a run has come to; None after telling why the trial is over."""
    if outcome.diverged:
        logbook.end(DIVERGED, outcome.diverged)
    _, _, unsaved = save_result(config, outcome, logbook)
    if unsaved:
        raise OSError("; ".join(unsaved))
    if logbook.ending is None and outcome.interrupted:
        desk.failed(book.INTERRUPTED)
    elif logbook.ending == PRUNED:
        desk.pruned(f"{PRUNED}: {logbook.detail}")
    elif logbook.ending == DIVERGED:
        desk.failed(f"{DIVERGED}: {logbook.detail}")
    else:
        network = tuning.objective.network
        run = read_folder(config.folder, "--log-dir")
        ends = logbook.ends if network is None else modelled(run, [network]).modelled[network]
        return measure(tuning.objective, run, ends)
    return None


def _rank_0s(value: _T) -> _T:
    """What rank 0 says, on all ranks."""
    said = [value]
    dist.broadcast_object_list(said, src=0)
    return said[0]


# -- rank 0's eye on a trial's run ---------------------------------------------------------------

PRUNED, REACHED, DIVERGED = "pruned", "target reached", "diverged"


class TrialLogbook(Logbook):
    """A run's logbook that wants the run to stop when it is pruned, at its target, or diverged, or
    when the user does. The vote carries it to all ranks with the next step's loss.

    prune: (steps done, intermediate value) -> is this trial to be pruned? None: it is not. ending:
    why it stops, unless the user wants it. ends: when each step ended, in measured seconds since
    the end of the first one, in which processes warm up; evaluations are not counted.
    """

    def __init__(
        self,
        config: TrainConfig,
        objective: Objective,
        prune: Callable[[int, float], bool] | None,
        user: Stop,
        name: str,
    ) -> None:
        link = emulated(config)
        said = f"{name}, {link}" if link else name
        super().__init__(config, 0, Progress(config.steps, said))
        self.ending: str | None = None
        self.detail = ""
        self.ends: list[float] = []
        self._objective, self._prune, self._user = objective, prune, user
        self._mark = 0.0

    @property
    def requested(self) -> bool:
        """Whether the run is to stop."""
        return self._user.requested or self.ending is not None

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
        elif (
            self._prune is not None
            and self._prune(done, self._objective.intermediate(quality))
            and done < self.config.steps
        ):
            self.end(PRUNED, f"{name} {quality:.4g} after {done} steps")

    def _modelled(self, compute: float) -> float:
        """Seconds of a step with --fixed-clock; the last report has those of the step before."""
        seconds = nan if self.last is None else self.last.report.seconds
        return seconds if isfinite(seconds) else compute

    def end(self, why: str, detail: str) -> None:
        """The run is to stop, unless it was to before."""
        if self.ending is None:
            self.ending, self.detail = why, detail
