"""A report: what was recorded is read, and the page and the table are made of it."""

from __future__ import annotations

import json
import sys

from runs.config import write_text
from runs.parser import UsageError
from runs.report.command import ReportOptions
from runs.report.page import make_page
from runs.report.pictures import make_pictures
from runs.report.result import headline_lines, make_result, run_notes
from runs.report.run import Run
from runs.report.source import NoStepError, Place, find_places, read_run
from runs.report.table import link_notes, make_rows, make_text, own_networks
from runs.report.target import choose_targets
from runs.stages import counted
from runs.tables import faint, show, strong

PAGE_FILE, RESULT_FILE = "report.html", "report.json"


def make_report(options: ReportOptions) -> int:
    """Make the report; returns the exit code."""
    places, notes = find_places(options.given, PAGE_FILE)
    runs = _read(places, notes)
    lone = len(runs) == 1 and options.target is None  # which has nobody to catch up with
    targets = {} if lone else choose_targets(runs, options.target)
    networks = options.networks or own_networks(runs)
    rows = make_rows(runs, targets, networks)
    pictures, missing = make_pictures(rows, targets, networks)
    notes += [*missing, *link_notes(runs)]
    title = options.title or _title(runs)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        result = make_result(rows, targets, networks, title, notes)
        page = make_page(title, rows, targets, networks, pictures, notes)
        write_text(options.out / PAGE_FILE, page)
        result["page"] = str(options.out / PAGE_FILE)
        text = json.dumps(result, indent=2, allow_nan=False)
        write_text(options.out / RESULT_FILE, text + "\n")
    except OSError as error:
        raise UsageError(
            f"--out {options.out}: cannot be written: {error.strerror or error}; accepted: a "
            f"folder that can be written to"
        ) from error
    out = sys.stderr if options.json else sys.stdout

    def of(task: str) -> str:
        return f" of {task}" if len(targets) > 1 else ""

    notes += [f"{run.name}: {note}" for run in runs for note in run_notes(run)]
    show(
        out,
        *make_text(rows, networks),
        *(f"target{of(task)}: {goal.quality:.4g}, {goal.basis}" for task, goal in targets.items()),
        *(faint(f"note: {note}") for note in notes),
        f"page in {options.out / PAGE_FILE}",
        *(strong(line) for line in headline_lines(runs)),
    )
    if options.json:
        print(json.dumps(result, allow_nan=False))
    return 0


def _read(places: list[Place], notes: list[str]) -> list[Run]:
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


def _title(runs: list[Run]) -> str:
    if len(runs) == 1:
        return f"{runs[0].name}: {runs[0].title}"
    tasks = sorted({run.task for run in runs if run.task})
    return f"{len(runs)} runs" + (f" of {' and '.join(tasks)}" if tasks else "")
