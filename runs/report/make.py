"""A report: what was recorded is read, and the page and the table are made of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from math import nan
from pathlib import Path

from adaptive import LinkSpec
from runs.files import write_json, write_text
from runs.parser import UsageError
from runs.report.page import make_page
from runs.report.pictures import make_pictures
from runs.report.rows import Row, choose_targets, link_notes, modelled, own_networks
from runs.report.run import Run
from runs.report.source import NoStepError, Place, find_places, read_run
from runs.report.table import columns, make_text, row_as_json, shown
from runs.report.verdict import headline_lines, headlines
from runs.stages import counted
from runs.tables import faint, show, strong

PAGE_FILE, RESULT_FILE = "report.html", "report.json"


def make_report(
    folders: Sequence[str],
    out: Path,
    networks: Sequence[LinkSpec],
    target: float | None,
    title: str | None,
    as_json: bool,
) -> int:
    """Make the report; returns the exit code."""
    places, notes = find_places(folders, PAGE_FILE)
    runs = _read(places, notes)
    lone = len(runs) == 1 and target is None  # which has nobody to catch up with
    targets = {} if lone else choose_targets(runs, target)
    goals = {task: chosen.quality for task, chosen in targets.items()}
    networks = networks or own_networks(runs)
    runs = [replace(modelled(run, networks), goal=goals.get(run.task, nan)) for run in runs]
    rows = [Row(run.name, (run,)) for run in runs]
    everything = columns(rows, networks)
    known = shown(everything, rows)
    pictures, missing = make_pictures(runs, networks)
    notes += [*missing, *link_notes(runs)]
    title = title or _title(runs)
    goal_lines = [
        f"target{f' of {task}' if len(targets) > 1 else ''}: {chosen.quality:.4g}, {chosen.basis}"
        for task, chosen in targets.items()
    ]
    result = {
        "title": title,
        "headlines": headlines(rows),
        "targets": [{"task": task, **asdict(chosen)} for task, chosen in targets.items()],
        "networks": list(map(str, networks)),
        "rows": [row_as_json(everything, row) for row in rows],
        "notes": list(notes),
        "page": str(out / PAGE_FILE),
    }
    try:
        out.mkdir(parents=True, exist_ok=True)
        page = make_page(title, rows, known, goal_lines, pictures, notes)
        write_text(out / PAGE_FILE, page)
        write_json(out / RESULT_FILE, result)
    except OSError as error:
        raise UsageError(
            f"--out {out}: cannot be written: {error.strerror or error}; accepted: a folder that "
            f"can be written to"
        ) from error
    notes += [f"{run.name}: {note}" for run in runs for note in run.notes]
    show(
        sys.stderr if as_json else sys.stdout,
        *make_text(known, rows),
        *goal_lines,
        *(faint(f"note: {note}") for note in notes),
        f"page in {out / PAGE_FILE}",
        *(strong(line) for line in headline_lines(rows)),
    )
    if as_json:
        print(json.dumps(result, allow_nan=False))
    return 0


def _read(places: Sequence[Place], notes: list[str]) -> list[Run]:
    """All runs; one that has not begun is a note among others, and an error alone."""
    runs: list[Run] = []
    for place in counted(places, len(places), "reading", "runs"):
        try:
            runs.append(read_run(place))
        except NoStepError:
            if place is places[-1] and not runs:
                raise
            notes.append(f"{place.name} holds no step yet, and was passed over")
    return runs


def _title(runs: Sequence[Run]) -> str:
    if len(runs) == 1:
        return f"{runs[0].name}: {runs[0].title}"
    tasks = sorted({run.task for run in runs if run.task})
    return f"{len(runs)} runs" + (f" of {' and '.join(tasks)}" if tasks else "")
