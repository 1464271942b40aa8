"""Studies from their beginnings to their last trials. Each trial is a run of all workers: rank 0
asks for it, all ranks train it, and rank 0 tells what came of it."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from math import inf, isfinite
from multiprocessing import parent_process
from statistics import fmean
from typing import Any, NamedTuple, TextIO, TypeVar

import optuna
import torch.distributed as dist
from optuna.trial import TrialState

from runs.build import check
from runs.config import TrainConfig
from runs.interrupt import GOES_ON, INTERRUPTED, Interrupt
from runs.launch import launch
from runs.logbook import Logbook, emulated
from runs.parser import UsageError, check_writable
from runs.progress import Progress
from runs.report.rows import modelled
from runs.report.source import read_folder
from runs.result import save_result, title
from runs.train import Outcome, train
from runs.tune import study as book
from runs.tune.report import make_report, make_summary, nothing_found
from runs.tune.storage import BEAT, needed
from runs.tune.tuning import Objective, Tuning, make_tunings
from runs.worker import join, output

TRIALS_A_START = 20
"""Trials that the same worker processes run: starting them takes seconds, and memory adds up."""

_T = TypeVar("_T")


class Ending(NamedTuple):
    """What came of a run or a trial. why: it has that state; values: of one that is complete."""

    state: TrialState
    why: str = ""
    values: list[float] | None = None


def tune(given: dict[str, Any]) -> int:
    """One study after another, and their reports; returns the exit code."""
    rank, started = int(os.environ.get("RANK", 0)), os.environ.get("WORLD_SIZE")  # by torchrun
    if started is not None:
        given = {"workers": int(started), **given}
        if given["workers"] != int(started):
            raise UsageError(
                f"--workers {given['workers']}: torchrun has started {started}; accepted: "
                f"{started}, or leave it out"
            )
    tunings = make_tunings(given)
    for tuning in tunings.values():  # have all errors before the first worker starts
        check(tuning.config())
        check_writable(tuning.folder)
    as_json = bool(given.get("json", False))
    out = sys.stderr if as_json else sys.stdout
    results: dict[str, dict[str, Any]] = {}
    code, interrupt = 0, None
    for label, tuning in tunings.items():
        with needed(tuning.url):
            study = _begin(label, tuning, out) if rank == 0 else None
            if started is not None:
                interrupt = interrupt or join(
                    tuning.config().threads, rank, int(started), "env://"
                )  # which a process can do once
                code = run_trials(tuning, rank, interrupt)
            elif study is not None:
                code = _with_our_workers(tuning, study, out)
            if study is not None:
                results[label], text = make_report(tuning, study)
                print(f"\n{text}\nfiles in {tuning.folder}\n", file=out, flush=True)
        if code:
            break
    if rank == 0:
        in_vain = [why for each in results.values() if (why := nothing_found(each))]
        result = results.get("")
        if result is None:
            result, text = make_summary(tunings, results)
            print(text, file=out, flush=True)
        if code == INTERRUPTED:
            print(GOES_ON, file=out, flush=True)
        if as_json:
            print(json.dumps(result, allow_nan=False), flush=True)
        if not code and len(in_vain) == len(tunings):
            print(f"error: {in_vain[-1]}", file=sys.stderr)
            return 1
    return code


def _begin(label: str, tuning: Tuning, out: TextIO) -> optuna.Study:
    """The study. No folder without a storage."""
    if tuning.storage is None:
        tuning.folder.mkdir(parents=True, exist_ok=True)
    study = book.open_study(tuning)
    tuning.folder.mkdir(parents=True, exist_ok=True)
    config, done = tuning.config(), len(book.trials_that_count(study))
    begun = f", {done} of them begun already" if done else ""
    print(
        *([f"setting {label}"] if label else []),
        f"{title(config)}, {config.steps} steps",
        f"searching {', '.join(map(str, tuning.space))}",
        f"for {' and '.join(tuning.objective.labels)}: {tuning.trials} trials{begun}, "
        f"files in {tuning.folder}",
        sep="\n",
        file=out,
        flush=True,
    )
    return study


def _with_our_workers(tuning: Tuning, study: optuna.Study, out: TextIO) -> int:
    """Start workers until the study is full; returns the exit code. A crash costs one trial."""
    owner, code = _owner(), 0
    while code == 0 and len(book.trials_that_count(study)) < tuning.trials:
        begun = len(book.trials_of(study, owner))
        causes: list[str] = []
        try:
            code = launch(_work, tuning, tuning.config().workers, causes.append)
        except UsageError as error:
            code = 1
            causes.append(str(error))
        cause = causes[0] if causes else "its workers ended without a word"
        ours = book.trials_of(study, owner)
        for trial in ours:
            if trial.state == TrialState.RUNNING:
                why = book.INTERRUPTED if code == INTERRUPTED else cause
                ended = book.finish(study, trial, TrialState.FAIL, why)
                print(book.line(tuning.objective, ended), file=out, flush=True)
        if len(ours) == begun:
            if code not in (0, INTERRUPTED):  # not a trial has failed, but the workers' start
                print(f"error: {cause}", file=sys.stderr)
            break  # or another process has taken the last
        code = code if code == INTERRUPTED else 0
    return code


def _work(tuning: Tuning, rank: int, world_size: int, init_method: str) -> int:
    """The life of a worker that we have started."""
    interrupt = join(tuning.config().threads, rank, world_size, init_method)
    code = run_trials(tuning, rank, interrupt, most=TRIALS_A_START)
    dist.destroy_process_group()
    return code


def run_trials(tuning: Tuning, rank: int, interrupt: Interrupt, most: float = inf) -> int:
    """Be one rank of a process group for so many trials, or for all that are left; returns the exit
    code (130 if interrupted)."""
    made, stopped = 0, False
    with needed(tuning.url):
        study = book.open_study(tuning) if rank == 0 else None
        while made < most and not stopped:
            trial = None
            if study is not None and not interrupt.requested:
                trial = book.next_trial(tuning, study, _owner())
            runs = _rank_0s([] if trial is None else _runs(tuning, trial))
            if not runs:
                break
            with nullcontext() if trial is None else answering(trial):
                ending = _train(tuning, runs, trial, interrupt)
            if trial is not None:
                ended = book.finish(trial.study, trial, *ending)
                print(book.line(tuning.objective, ended), file=output(runs[0]), flush=True)
            made += 1
            stopped = _rank_0s(interrupt.requested)
        stopped = stopped or _rank_0s(interrupt.requested)
    return INTERRUPTED if stopped else 0


def _owner() -> str:
    """The process that answers for trials: the one that has started the workers, if we have."""
    parent = parent_process()
    return f"{socket.gethostname()}:{os.getpid() if parent is None else parent.pid}"


def _rank_0s(value: _T) -> _T:
    """What rank 0 says, on all ranks."""
    said = [value]
    dist.broadcast_object_list(said, src=0)
    return said[0]


@contextmanager
def answering(trial: optuna.Trial) -> Iterator[None]:
    """While a trial is under way, give signs of life (Optuna does in `optimize` alone), so that
    others see when this process is gone; and say what went wrong where no launcher does."""
    storage: Any = trial.study._storage
    ended = threading.Event()
    storage.record_heartbeat(trial._trial_id)

    def beat() -> None:
        while not ended.wait(BEAT):
            with suppress(Exception):  # a busy or restarted database: the next beat will do
                storage.record_heartbeat(trial._trial_id)

    threading.Thread(target=beat, name="heartbeat", daemon=True).start()
    try:
        yield
    except Exception as error:
        if parent_process() is None:
            why = f"{type(error).__name__}: {error}"
            book.finish(trial.study, trial, TrialState.FAIL, why)
        raise
    finally:
        ended.set()


# -- one trial ------------------------------------------------------------------------------------


def _runs(tuning: Tuning, trial: optuna.Trial) -> list[TrainConfig]:
    """One with each seed."""
    chosen = trial.user_attrs[book.SETTINGS]
    return [tuning.config(chosen, trial.number, seed) for seed in tuning.seeds]


def _train(
    tuning: Tuning, runs: list[TrainConfig], trial: optuna.Trial | None, user: Interrupt
) -> Ending:
    """Make the runs one after another, for as long as nothing speaks against it. trial: rank 0's,
    which alone knows the ending."""
    found: list[list[float]] = []
    for config in runs:
        logbook = None
        if trial is not None:
            place = len(book.trials_that_count(trial.study))
            of_several = f", seed {config.seed}" if len(runs) > 1 else ""
            name = f"trial {trial.number}, {place} of {tuning.trials}{of_several}"
            prunes = config is runs[0] and len(tuning.objective.names) == 1
            pruned_by = trial if prunes else None
            logbook = TrialLogbook(config, tuning.objective, pruned_by, user, name)
        try:
            outcome = train(
                config, interrupt=logbook or user, logbook=logbook, keep=False, test=False
            )
        finally:
            if logbook is not None:
                logbook.close()
        ending = Ending(TrialState.COMPLETE)
        if trial is not None and logbook is not None:
            ending = _ending(tuning.objective, config, outcome, logbook)
            trial.set_user_attr(book.HEADLINE, outcome.summary.headline)
            found.append(ending.values or [])
        if _rank_0s(ending.state) != TrialState.COMPLETE:
            return ending
    return Ending(TrialState.COMPLETE, values=[fmean(each) for each in zip(*found, strict=True)])


def _ending(
    objective: Objective, config: TrainConfig, outcome: Outcome, logbook: TrialLogbook
) -> Ending:
    """On rank 0, what a run has come to."""
    _, _, unsaved = save_result(config, outcome, logbook)
    if unsaved:
        return Ending(TrialState.FAIL, "; ".join(unsaved))
    if logbook.ending is not None and logbook.ending.state != TrialState.COMPLETE:
        return logbook.ending
    if outcome.diverged:
        return Ending(TrialState.FAIL, f"diverged: {outcome.diverged}")
    if logbook.ending is None and outcome.interrupted:
        return Ending(TrialState.FAIL, book.INTERRUPTED)
    run = read_folder(config.folder, "--log-dir")
    networks = [] if objective.network is None else [objective.network]
    values = objective.values(modelled(run, networks))
    if values is None:
        end = f"{objective.quality_name} {run.quality:.4g} at the end"
        return Ending(TrialState.PRUNED, f"target {objective.target:g} not reached: {end}")
    if not all(map(isfinite, values)):
        return Ending(TrialState.FAIL, f"not all values are known: {objective.told(values)}")
    return Ending(TrialState.COMPLETE, values=values)


class TrialLogbook(Logbook):
    """A run's logbook that wants the run to stop when it is pruned, at its target, or diverged, or
    when the user does. The vote carries it to all ranks with the next step's loss.

    trial: decides on pruning; None: nothing does. ending: why it stops, unless the user wants it.
    """

    def __init__(
        self,
        config: TrainConfig,
        objective: Objective,
        trial: optuna.Trial | None,
        user: Interrupt,
        name: str,
    ) -> None:
        link = emulated(config)
        said = f"{name}, {link}" if link else name
        super().__init__(config, 0, Progress(config.steps, said, note=name))
        self.ending: Ending | None = None
        self._objective, self._trial, self._user = objective, trial, user

    @property
    def requested(self) -> bool:
        """Whether the run is to stop."""
        return self._user.requested or self.ending is not None

    def announce(self, text: str) -> None:
        """A study has many of these; they are in the trial's own files."""

    def evaluated(
        self, done: int, name: str, quality: float, beside: Mapping[str, float] | None = None
    ) -> None:
        super().evaluated(done, name, quality, beside)
        if self.ending is not None:
            return
        what = f"{name} {quality:.4g} after {done} steps"
        if not isfinite(quality):
            self.ending = Ending(TrialState.FAIL, f"diverged: {what}")
        elif self._objective.reached(quality):
            self.ending = Ending(TrialState.COMPLETE, f"target reached: {what}")
        elif self._trial is not None:
            self._trial.report(self._objective.intermediate(quality), done)
            if self._trial.should_prune() and done < self.config.steps:
                self.ending = Ending(TrialState.PRUNED, f"pruned: {what}")
