"""The workers of a study: rank 0 asks for a trial, all train it, rank 0 tells what came of it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist

from runs.compare.digest import read_digest
from runs.config import TrainConfig
from runs.interrupt import INTERRUPTED, Interrupt
from runs.result import save_result
from runs.train import train
from runs.tune.desk import Desk, Order
from runs.tune.objective import Metrics, measure
from runs.tune.storage import needed
from runs.tune.tuning import Tuning
from runs.tune.watch import DIVERGED, REACHED, StopFor, StudyProgress, TrialLogbook
from runs.worker import join

_T = TypeVar("_T")


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
    for i, seed in enumerate(tuning.seeds):
        config = tuning.config(order.values, order.number, seed)
        logbook = None
        if desk is not None:
            desk_prune = desk.prune if i == 0 else (lambda step, value: False)
            total = tuning.trials * len(tuning.seeds)
            done = (order.place - 1) * len(tuning.seeds) + i
            name = f"trial {order.number}, {order.place} of {tuning.trials}"
            if len(tuning.seeds) > 1:
                name += f", seed {seed}"
            progress = StudyProgress(config, done, total, name)
            logbook = TrialLogbook(config, tuning.objective, desk_prune, progress)
        go_on = _rank_0s(_train(tuning, config, desk, logbook, interrupt, runs))
        if not go_on:
            return
    if desk is not None:
        desk.finished(runs)


def _train(
    tuning: Tuning,
    config: TrainConfig,
    desk: Desk | None,
    logbook: TrialLogbook | None,
    interrupt: Interrupt,
    runs: list[Metrics],
) -> bool:
    """One run; is the next seed to follow? (rank 0's word counts)"""
    try:
        stop = StopFor(interrupt, logbook)
        outcome = train(config, interrupt=stop, logbook=logbook, keep=False, test=False)
    finally:
        if logbook is not None:
            logbook.close()
    if desk is None or logbook is None:
        return False
    if outcome.diverged:
        logbook.end(DIVERGED, outcome.diverged)
    _, _, unsaved = save_result(config, outcome, logbook)
    if unsaved:
        raise OSError("; ".join(unsaved))
    if outcome.interrupted and logbook.ending is None:
        desk.interrupted()
        return False
    metrics = _measure(tuning, config, logbook)
    if logbook.ending not in (None, REACHED):
        desk.stopped(logbook.ending, logbook.detail)
        return False
    runs.append(metrics)
    return True


def _measure(tuning: Tuning, config: TrainConfig, logbook: TrialLogbook) -> Metrics:
    network = tuning.objective.network
    digest = read_digest(config, [] if network is None else [network])
    return measure(tuning.objective, digest, digest.ends[0] if digest.ends else logbook.ends)


def _rank_0s(value: _T) -> _T:
    """What rank 0 says, on all ranks."""
    said = [value]
    dist.broadcast_object_list(said, src=0)
    return said[0]
