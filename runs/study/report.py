"""What a study has found: study.json, table.txt and the plot."""

from __future__ import annotations

import json
from math import isfinite
from typing import Any

from runs.config import write_text
from runs.files import read_json
from runs.parser import UsageError
from runs.progress import cf_name
from runs.records import TIMELINE_FILE, read_records
from runs.result import RESULT_FILE
from runs.study.frontier import bytes_at
from runs.study.options import Run, Study
from runs.study.phases import gains, phases
from runs.study.plot import PLOT_FILE, draw_signal
from runs.study.table import STUDY_FILE, TABLE_FILE, make_table


def make_report(study: Study) -> tuple[dict[str, Any], str]:
    """Write the files; returns the result, as JSON-like values, and the table."""
    ends = [_end(run) for run in study.runs]
    result: dict[str, Any] = {
        "quality_name": ends[0]["quality_name"],
        "higher_is_better": ends[0]["higher_is_better"],
        "cfs": list(study.cfs),
        "lr_drop": study.drop,
        "gains": _gains(study),
        "runs": [_shown(run, end) for run, end in zip(study.runs, ends, strict=True)],
        "notes": [],
    }
    _compare_with_fixed(result)
    try:
        draw_signal(study, study.folder / PLOT_FILE)
    except ImportError:
        result["notes"].append("no plot: matplotlib is not installed")
    result = _plain(result)
    text = make_table(result)
    write_text(study.folder / STUDY_FILE, json.dumps(result, indent=2, allow_nan=False) + "\n")
    write_text(study.folder / TABLE_FILE, text + "\n")
    return result, text


def _end(run: Run) -> dict[str, Any]:
    path = run.config.folder / RESULT_FILE
    try:
        return dict(read_json(path))
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(
            f"--log-dir: {path} is damaged: {error}; accepted: the same command without that "
            f"folder, to train the run again"
        ) from error


def _shown(run: Run, end: dict[str, Any]) -> dict[str, Any]:
    shares = end["summary"]["steps_at_cf"]
    return {
        "part": run.part,
        "label": run.label,
        "seed": run.config.seed,
        "quality": end["quality"],
        "bytes": end["summary"]["bytes_sent"],
        "wire_factor": end["summary"]["wire_factor"],
        "steps_at_cf": {cf_name(cf): steps for cf, steps in shares},
        "command": run.config.command,
    }


def _gains(study: Study) -> list[dict[str, Any]]:
    """Of each fixed CF and phase, over all seeds."""
    found = []
    for label in dict.fromkeys(run.label for run in study.runs if run.part == "fixed"):
        same = [run for run in study.runs if run.part == "fixed" and run.label == label]
        reports = [_reports(run) for run in same]
        for name, steps in phases(study.drop, same[0].config.steps).items():
            inside = [report for one in reports for report in one if report.step in steps]
            found.append({"sent": label, "phase": name, **gains(inside, study.cfs)})
    return found


def _reports(run: Run) -> list[Any]:
    return [record.report for record in read_records(run.config.folder / TIMELINE_FILE).steps]


def _compare_with_fixed(result: dict[str, Any]) -> None:
    """bytes_of_fixed: what fixed CFs would have sent for the quality of each run, of its seed."""
    higher = result["higher_is_better"]
    for run in result["runs"]:
        points = [
            (other["bytes"], other["quality"])
            for other in result["runs"]
            if other["part"] == "fixed" and not other["label"].startswith("residual")
            if other["seed"] == run["seed"] and other["quality"] is not None
        ]
        known = run["part"] != "fixed" and run["quality"] is not None
        run["bytes_of_fixed"] = bytes_at(points, run["quality"], higher) if known else None


def _plain(value: Any) -> Any:
    """JSON has no nan, and only strings as keys."""
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, dict):
        return {k if isinstance(k, str) else f"{k:g}": _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list) else value
