"""A study from its beginning to the last trial, on workers of our own or on torchrun's."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TextIO

import optuna
from optuna.trial import TrialState

from runs.build import check
from runs.interrupt import INTERRUPTED, Interrupt
from runs.launch import launch
from runs.parser import UsageError, check_writable
from runs.result import title
from runs.tune import study as book
from runs.tune.screen import Record, read, screen
from runs.tune.storage import open_storage
from runs.tune.trial import Session, run_session, run_trials
from runs.tune.tuning import Tuning
from runs.worker import join

TRIALS_A_START = 20
"""Trials that the same worker processes run: starting them takes seconds, and memory adds up."""


@dataclass
class Place:
    """The place of this process among those that torchrun has started.

    rank, world_size: torchrun's; 0 and None where we start the workers ourselves. interrupt: of
    the process group, which torchrun's processes enter once, for all studies.
    """

    rank: int
    world_size: int | None
    interrupt: Interrupt | None = None

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


def place(environment: Mapping[str, str]) -> Place:
    """Where this process is."""
    if {"RANK", "WORLD_SIZE"} <= set(environment):
        return Place(int(environment["RANK"]), int(environment["WORLD_SIZE"]))
    return Place(0, None)


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


def _with_our_workers(tuning: Tuning, study: optuna.Study, out: TextIO) -> int:
    """Start workers until the study is full: a crash costs one trial."""
    session = Session(tuning, book.owner(), most=TRIALS_A_START)
    code = 0
    while code == 0 and len(book.trials_that_count(study)) < tuning.trials:
        begun = book.count_begun(study)
        causes: list[str] = []
        try:
            code = launch(run_session, session, tuning.config().workers, causes.append)
        except UsageError as error:
            code = 1
            causes.append(str(error))
        left = book.running_of(study, session.owner)
        cause = causes[0] if causes else "its workers ended without a word"
        for trial in left:
            why = book.INTERRUPTED if code == INTERRUPTED else cause
            book.end(study, trial, TrialState.FAIL, why)
            print(f"trial {trial.number}: failed: {why}", file=out, flush=True)
        if code not in (0, INTERRUPTED):
            if not left:  # not a trial that failed, but the workers' start
                print(f"error: {cause}", file=sys.stderr)
                break
            code = 0
        if book.count_begun(study) == begun:
            break  # another process has taken the last
    book.queue_again(study)
    return code


def _begin(tuning: Tuning, record: Record | None, out: TextIO) -> optuna.Study:
    """The study, dead trials given up, settings screened. No folder without a storage."""
    if tuning.keeps_study:
        tuning.folder.mkdir(parents=True, exist_ok=True)
    study = book.open_study(tuning, open_storage(tuning.url))
    tuning.folder.mkdir(parents=True, exist_ok=True)
    book.give_up_dead(study)
    print(_heading(tuning, study), file=out, flush=True)
    if record is not None:
        screen(tuning, record, study, out)
    return study


def _heading(tuning: Tuning, study: optuna.Study) -> str:
    config = tuning.config()
    done = len(book.trials_that_count(study))
    begun = f", {done} of them begun already" if done else ""
    return (
        f"{title(config)}, {config.steps} steps\n"
        f"searching {', '.join(map(str, tuning.space))}\n"
        f"for {' and '.join(tuning.objective.labels)}: {tuning.trials} trials{begun}, "
        f"files in {tuning.folder}"
    )
