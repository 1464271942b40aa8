"""The study command: checks all runs, trains those that are not there yet, then reports."""

from __future__ import annotations

import argparse
import json
import sys

from runs.claim import claim
from runs.interrupt import INTERRUPTED, UNSAVED
from runs.parser import UsageError, fail, typed
from runs.study import gossip
from runs.study.contest import compare
from runs.study.options import HELP, Study, add_arguments, make_study, of_experiment

__all__ = ["HELP", "add_arguments", "main"]


def main(args: argparse.Namespace) -> int:
    """Run the study; returns the exit code."""
    try:
        if args.experiment == "peers":
            return compare(of_experiment(vars(args)))
        if args.experiment == "gossip":
            return gossip.study(of_experiment(vars(args)))
        study = make_study(vars(args))
        _check(study)
        with claim(study.folder, f"--log-dir {study.folder}", typed()):
            return _train(study) or _report(study)
    except UsageError as error:
        return fail("python -m runs study", error)
    except KeyboardInterrupt:
        return INTERRUPTED


def _check(study: Study) -> None:
    """Have all errors before the first worker starts."""
    from runs.build import check, check_compression
    from runs.compare.slice import steps_done

    check(study.runs[0].config)  # reads the data, the same for all
    for run in study.runs:
        check_compression(run.config)
        steps_done(run.config)


def _train(study: Study) -> int:
    """Every run that is not finished; the exit code of the first that fails."""
    from runs.compare.slice import steps_done, train_until

    out = sys.stderr if study.json else sys.stdout
    for number, run in enumerate(study.runs, start=1):
        if steps_done(run.config) >= run.config.steps:
            continue
        where = f"run {number} of {len(study.runs)}"
        print(f"{where}: {run.part}, {run.label}, seed {run.config.seed}", file=out, flush=True)
        code = train_until(run.config, run.config.steps)
        if code:
            return code
    return 0


def _report(study: Study) -> int:
    from runs.study.report import make_report

    try:
        result, text = make_report(study)
    except OSError as error:
        print(f"error: the report could not be written: {error}", file=sys.stderr)
        return UNSAVED
    out = sys.stderr if study.json else sys.stdout
    print(f"\n{text}\nfiles in {study.folder}", file=out, flush=True)
    if study.json:
        print(json.dumps(result, allow_nan=False), flush=True)
    return 0
