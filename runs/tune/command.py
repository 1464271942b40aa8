"""The tune command: checks everything, then one trial after another until the study is full."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from runs.interrupt import INTERRUPTED
from runs.parser import UsageError, fail
from runs.tune.options import HELP, add_arguments, make_tuning
from runs.tune.tuning import Tuning

if TYPE_CHECKING:
    import optuna

__all__ = ["HELP", "add_arguments", "main"]

TRIALS_A_START = 20
"""Trials that the same worker processes run: starting them takes seconds, and memory adds up."""
GOES_ON = "interrupted; the same command goes on from here"
SAY = 5.0
"""Seconds that the first worker under torchrun gets to say what is wrong."""


def main(args: argparse.Namespace) -> int:
    """Run the study; returns the exit code."""
    torchrun = {"RANK", "WORLD_SIZE"} <= set(os.environ)
    try:
        _need_optuna()
        return _as_torchrun_worker(args, os.environ) if torchrun else _tune(args)
    except UsageError as error:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(SAY)  # the first worker says it; torchrun ends all when one has ended
            return 2
        return fail("python -m runs tune", error)
    except KeyboardInterrupt:
        print(GOES_ON, file=sys.stderr)
        return INTERRUPTED


def _tune(args: argparse.Namespace) -> int:
    """Start workers until the study is full: a crash costs one trial."""
    from runs.launch import launch
    from runs.tune.study import INTERRUPTED as GIVEN_UP
    from runs.tune.study import (
        count_begun,
        end,
        owner,
        queue_again,
        running_of,
        trials_that_count,
    )
    from runs.tune.trial import Session, run_session

    tuning = make_tuning(vars(args))
    study = _begin(tuning)
    session, out = Session(tuning, owner(), most=TRIALS_A_START), _out(tuning)
    code = 0
    while code == 0 and len(trials_that_count(study)) < tuning.trials:
        begun = count_begun(study)
        causes: list[str] = []
        try:
            code = launch(run_session, session, tuning.config().workers, causes.append)
        except UsageError as error:
            code = 1
            causes.append(str(error))
        left = running_of(study, session.owner)
        for trial in left:
            why = GIVEN_UP if code == INTERRUPTED else (causes or ["ended without a word"])[0]
            end(study, trial, _fail_state(), why)
            print(f"trial {trial.number}: failed: {why}", file=out, flush=True)
        if left and code != INTERRUPTED:
            code = 0  # it is recorded, and the study goes on
        elif code not in (0, INTERRUPTED) and causes:
            print(f"error: {causes[0]}", file=sys.stderr)
        if code == 0 and not left and begun == count_begun(study):
            break  # another process has taken the last
    queue_again(study)
    return _report(tuning, study, code)


def _as_torchrun_worker(args: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """The processes are there already, and run all trials."""
    from runs.tune.study import owner
    from runs.tune.trial import Session, run_session

    rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    given = dict(vars(args))
    workers = given.setdefault("workers", world_size)
    if workers != world_size:
        raise UsageError(
            f"--workers {workers}: torchrun has started {world_size}; accepted: {world_size}, or "
            f"leave it out"
        )
    tuning = make_tuning(given)
    study = _begin(tuning) if rank == 0 else None
    code = run_session(Session(tuning, owner(), most=None), rank, world_size, "env://")
    return code if study is None else _report(tuning, study, code)


def _begin(tuning: Tuning) -> optuna.Study:
    """Have all errors before the first worker starts; the study, dead trials given up."""
    from runs.build import check
    from runs.tune.study import give_up_dead, open_storage, open_study

    check(tuning.config())
    _check_folder(tuning.folder)
    source = None
    if tuning.screen is not None:
        from runs.tune.screen import read

        source = read(tuning)
    tuning.folder.mkdir(parents=True, exist_ok=True)
    study = open_study(tuning, open_storage(tuning.url))
    give_up_dead(study)
    print(_heading(tuning, study), file=_out(tuning), flush=True)
    if source is not None:
        from runs.tune.screen import screen

        screen(tuning, source, study, _out(tuning))
    return study


def _heading(tuning: Tuning, study: optuna.Study) -> str:
    from runs.result import title
    from runs.tune.study import trials_that_count

    config = tuning.config()
    done = len(trials_that_count(study))
    begun = f", {done} of them begun already" if done else ""
    return (
        f"{title(config)}, {config.steps} steps\n"
        f"searching {', '.join(map(str, tuning.space))}\n"
        f"for {' and '.join(tuning.objective.labels)}: {tuning.trials} trials{begun}, "
        f"files in {tuning.folder}"
    )


def _report(tuning: Tuning, study: optuna.Study, code: int) -> int:
    from runs.tune.report import make_report

    out = _out(tuning)
    result, text = make_report(tuning, study)
    print(f"\n{text}\nfiles in {tuning.folder}", file=out, flush=True)
    if code == INTERRUPTED:
        print(GOES_ON, file=out, flush=True)
    if tuning.json:
        print(json.dumps(result, allow_nan=False), flush=True)
    return code


def _need_optuna() -> None:
    try:
        import optuna  # noqa: F401
    except ImportError as error:
        raise UsageError(
            "needs the optuna package: pip install 'adaptive-compression[tune]'"
        ) from error


def _fail_state() -> optuna.trial.TrialState:
    from optuna.trial import TrialState

    return TrialState.FAIL


def _check_folder(folder: Path) -> None:
    above = folder
    while not above.exists():
        above = above.parent
    if not (above.is_dir() and os.access(above, os.W_OK)):
        raise UsageError(f"--log-dir {folder}: {above} is not a folder that can be written to")


def _out(tuning: Tuning) -> TextIO:
    return sys.stderr if tuning.json else sys.stdout
