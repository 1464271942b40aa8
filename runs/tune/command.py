"""The tune command: checks everything, then one study after another."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from typing import Any

from runs.interrupt import INTERRUPTED
from runs.parser import UsageError, fail
from runs.tune.options import HELP, OPTIONS

__all__ = ["HELP", "OPTIONS", "main"]

GOES_ON = "interrupted; the same command goes on from here"


def main(given: dict[str, Any]) -> int:
    """Run the study, or one for each setting; returns the exit code."""
    if find_spec("optuna") is None:
        raise UsageError("needs the optuna package: pip install 'adaptive-compression[tune]'")
    try:
        return _tune(given)
    except KeyboardInterrupt:
        print(GOES_ON, file=sys.stderr)
        return INTERRUPTED


def _tune(given: dict[str, Any]) -> int:
    from runs.tune.report import make_report, make_summary
    from runs.tune.run import Place, check_all, conduct
    from runs.tune.storage import LostStorageError, needed
    from runs.tune.tuning import make_tunings

    where = Place.of_environment()
    tunings = make_tunings(where.options(given))
    records = check_all(list(tunings.values()))
    as_json = bool(given.get("json", False))
    out = sys.stderr if as_json else sys.stdout
    results: dict[str, dict[str, Any]] = {}
    code = 0
    for (label, tuning), record in zip(tunings.items(), records, strict=True):
        if label and where.rank == 0:
            print(f"setting {label}", file=out, flush=True)
        try:
            with needed(tuning.url):
                study, code = conduct(tuning, record, where, out)
                if study is not None:
                    results[label], text = make_report(tuning, study)
        except LostStorageError as error:
            fail("python -m runs tune", error)
            return 1
        if study is not None:
            print(f"\n{text}\nfiles in {tuning.folder}\n", file=out, flush=True)
        if code:
            break
    if where.rank == 0:
        result = results.get("")
        if result is None:
            result, text = make_summary(tunings, results)
            print(text, file=out, flush=True)
        if code == INTERRUPTED:
            print(GOES_ON, file=out, flush=True)
        if as_json:
            print(json.dumps(result, allow_nan=False), flush=True)
    return code
