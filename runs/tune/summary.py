"""The best of each compression setting, side by side."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runs.config import write_text
from runs.tune.describe import settings_text
from runs.tune.tuning import Tuning

SUMMARY_FILE, TABLE_FILE = "settings.json", "settings.txt"


def make_summary(
    tunings: Mapping[str, Tuning], results: Mapping[str, dict[str, Any]]
) -> tuple[dict[str, Any], str]:
    """Write the files beside the studies; the result as JSON-like values, and the table.

    results: of `make_report`, for the settings that have been searched so far.
    """
    first = next(iter(tunings.values()))
    folder = first.folder.parent
    labels = first.objective.labels
    rows = [["setting", *labels, "trials", "with"]]
    for name, result in results.items():
        rows.append([name, *_cells(tunings[name], result)])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [f"the best of each setting, over {first.plan} searches of {first.trials} trials"]
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:-1], widths[1:-1], strict=True)]
        lines.append("  " + "  ".join([*cells, row[-1]]))
    missing = [name for name in tunings if name not in results]
    if missing:
        lines.append(f"note: not begun yet: {', '.join(missing)}")
    text = "\n".join([*lines, f"files in {folder}"])
    summary = {"settings": dict(results), "missing": missing, "log_dir": str(folder)}
    _write(folder, summary, text)
    return summary, text


def _cells(tuning: Tuning, result: Mapping[str, Any]) -> list[str]:
    trials = str(len(result["trials"]))
    best = next((t for t in result["trials"] if t["number"] == result["pick"]), None)
    if best is None:
        return [*("-" for _ in tuning.objective.names), trials, "no trial is complete"]
    shown = [f"{value:.4g}" for value in tuning.objective.shown(best["values"])]
    return [*shown, trials, settings_text(best["settings"])]


def _write(folder: Path, summary: Mapping[str, Any], text: str) -> None:
    dumped = json.dumps(summary, indent=2, allow_nan=False)
    write_text(folder / SUMMARY_FILE, dumped + "\n")
    write_text(folder / TABLE_FILE, text + "\n")
