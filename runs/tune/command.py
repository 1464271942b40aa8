"""The tune command: checks everything, then one study after another."""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TextIO

from runs.interrupt import INTERRUPTED
from runs.parser import UsageError, check_writable, fail
from runs.tune.options import HELP, OPTIONS

if TYPE_CHECKING:
    import optuna

    from runs.tune.screen import Record
    from runs.tune.tuning import Tuning

__all__ = ["HELP", "OPTIONS", "main"]

GOES_ON = "interrupted; the same command goes on from here"


def main(given: dict[str, Any]) -> int:
    """Run the study, or one for each setting; returns the exit code."""
    if find_spec("optuna") is None:
        raise UsageError("needs the optuna package: pip install 'adaptive-compression[tune]'")
    from runs.tune.storage import LostStorageError

    try:
        return _tune(given)
    except LostStorageError as error:
        fail("python -m runs tune", error)
        return 1
    except KeyboardInterrupt:
        print(GOES_ON, file=sys.stderr)
        return INTERRUPTED


def _tune(given: dict[str, Any]) -> int:
    from runs.build import check
    from runs.tune.report import make_report, make_summary
    from runs.tune.run import run_trials, run_with_workers
    from runs.tune.screen import read
    from runs.tune.storage import needed
    from runs.tune.tuning import make_tunings
    from runs.worker import join

    rank, started = int(os.environ.get("RANK", 0)), os.environ.get("WORLD_SIZE")  # by torchrun
    if started is not None:
        given = {"workers": int(started), **given}
        if given["workers"] != int(started):
            raise UsageError(
                f"--workers {given['workers']}: torchrun has started {started}; accepted: "
                f"{started}, or leave it out"
            )
    tunings = make_tunings(given)
    records = []
    for tuning in tunings.values():  # have all errors before the first worker starts
        check(tuning.config())
        check_writable(tuning.folder)
        records.append(None if tuning.timeline is None else read(tuning))
    as_json = bool(given.get("json", False))
    out = sys.stderr if as_json else sys.stdout
    results: dict[str, dict[str, Any]] = {}
    code, interrupt = 0, None
    for (label, tuning), record in zip(tunings.items(), records, strict=True):
        with needed(tuning.url):
            study = _begin(label, tuning, record, out) if rank == 0 else None
            if started is not None:
                interrupt = interrupt or join(
                    tuning.config().threads, rank, int(started), "env://"
                )  # which a process can do once
                code = run_trials(tuning, rank, interrupt)
            elif study is not None:
                code = run_with_workers(tuning, study, out)
            if study is not None:
                results[label], text = make_report(tuning, study)
                print(f"\n{text}\nfiles in {tuning.folder}\n", file=out, flush=True)
        if code:
            break
    if rank == 0:
        result = results.get("")
        if result is None:
            result, text = make_summary(tunings, results)
            print(text, file=out, flush=True)
        if code == INTERRUPTED:
            print(GOES_ON, file=out, flush=True)
        if as_json:
            print(json.dumps(result, allow_nan=False), flush=True)
    return code


def _begin(label: str, tuning: Tuning, record: Record | None, out: TextIO) -> optuna.Study:
    """The study, settings screened on the record. No folder without a storage."""
    from runs.result import title
    from runs.tune.screen import screen
    from runs.tune.study import open_study, trials_that_count

    if tuning.storage is None:
        tuning.folder.mkdir(parents=True, exist_ok=True)
    study = open_study(tuning)
    tuning.folder.mkdir(parents=True, exist_ok=True)
    config, done = tuning.config(), len(trials_that_count(study))
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
    if record is not None:
        screen(tuning, record, study, out)
    return study
