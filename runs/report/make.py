"""A report: what was recorded is read, and the page and the table are made of it. The page is one
file that holds everything, to be read without a server."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from math import isfinite, nan
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from runs.files import known, write_text
from runs.parser import UsageError
from runs.report.cfs import CFS_FILE, draw_cfs
from runs.report.pictures import STATIC, make_pictures, scripts
from runs.report.rows import Row
from runs.report.run import Run
from runs.report.source import NoStepError, Place, find_places, read_run
from runs.report.table import Column, columns, make_text, reading, row_as_json, shown
from runs.report.verdict import headline_lines, headlines
from runs.tables import faint, show, strong

PAGE_FILE = "report.html"


def make_report(
    folders: Sequence[str], out: Path, target: float | None, title: str | None, as_json: bool
) -> int:
    """Make the report; returns the exit code."""
    notes: list[str] = []
    runs = _read(find_places(folders), notes)
    goal, basis = choose_target(runs, target)
    runs = [replace(run, goal=goal) for run in runs]
    rows = [Row(run.name, (run,)) for run in runs]
    everything = columns(rows, ())
    found = shown(everything, rows)
    notes += difference_notes(runs)
    title = title or _title(runs)
    goals = [f"target: {goal:.4g}, {basis}"] if basis else []
    page = out / PAGE_FILE
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_text(page, make_page(title, rows, found, goals, notes))
        draw_cfs(rows, out, title)
    except ImportError:
        notes.append(f"no {CFS_FILE}: matplotlib is not installed")
    except OSError as error:
        raise UsageError(
            f"--out {out}: cannot be written: {error.strerror or error}; accepted: a folder that "
            f"can be written to"
        ) from error
    show(
        sys.stderr if as_json else sys.stdout,
        *make_text(found, rows),
        *goals,
        *(faint(f"note: {note}") for note in notes),
        *(faint(f"note: {run.name}: {note}") for run in runs for note in run.notes),
        f"page in {page}",
        *(strong(line) for line in headline_lines(rows)),
    )
    if as_json:
        result = {
            "title": title,
            "headlines": headlines(rows),
            "target": known(goal),
            "rows": [row_as_json(everything, row) for row in rows],
            "notes": notes,
            "page": str(page),
        }
        print(json.dumps(result, allow_nan=False))
    return 0


def make_page(
    title: str,
    rows: Sequence[Row],
    found: Sequence[Column],
    goals: Sequence[str],
    notes: Sequence[str],
) -> str:
    """HTML, with everything that it draws in it. found: the table's columns. goals: what was to be
    reached, in words. Values are escaped, but for `Markup`; bytes of file names that are no text
    become question marks."""
    pictures = make_pictures([row.run for row in rows])
    environment = Environment(
        loader=FileSystemLoader(STATIC),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    page = environment.get_template("report.html").render(
        title=title,
        styles=Markup(pictures.styles()),
        verdicts=headlines(rows),
        caption=pictures.caption,
        groups=[(name, len(list(of_it))) for name, of_it in groupby(found, lambda c: c.group)],
        columns=[column.name for column in found],
        cells={row.label: [column.text(row) for column in found] for row in rows},
        runs=[row.run for row in rows],
        warnings=notes,
        reading=[*reading(found, rows), *goals],
        timelines=bool(pictures.rows),
        data=Markup(pictures.as_json()),
        scripts=Markup(scripts()),
    )
    return page.encode("utf-8", "replace").decode("utf-8")


def _read(places: Sequence[Place], notes: list[str]) -> list[Run]:
    """All runs; one that has not begun is a note among others, and an error alone."""
    runs: list[Run] = []
    for place in places:
        try:
            runs.append(read_run(place))
        except NoStepError:
            if place is places[-1] and not runs:
                raise
            notes.append(f"{place.name} holds no step yet, and was passed over")
    names = sorted({run.quality_name for run in runs if run.task})
    if len(names) > 1:
        raise UsageError(
            f"LOGDIR: the runs have different qualities ({', '.join(names)}); accepted: runs of "
            f"one task"
        )
    return runs


def choose_target(runs: Sequence[Run], wanted: float | None) -> tuple[float, str]:
    """The quality that the runs are compared at, and where it comes from; see the command's help.
    nan and "" if there is none: nobody was evaluated, or a lone run has nobody to catch up with."""
    evaluated = [run for run in runs if isfinite(run.quality)]
    if wanted is not None and evaluated:
        return wanted, "as asked for"
    if len(runs) == 1 or not evaluated:
        return nan, ""
    finished = [run for run in evaluated if run.finished] or evaluated
    dense = [run for run in finished if run.is_dense]
    chosen = dense or finished
    pick = min if chosen[0].higher_is_better else max
    worst = pick(chosen, key=lambda run: run.quality)
    if len(chosen) == 1:
        return worst.quality, f"the final quality of {worst.name}"
    of = "dense runs" if dense else "runs"
    return worst.quality, f"the worst final quality of the {of} ({worst.name})"


def difference_notes(runs: Sequence[Run]) -> list[str]:
    """That runs on different links, or of different numbers of workers, do not compare in all."""
    links: dict[str, list[str]] = {}
    sizes: dict[str, list[str]] = {}
    for run in runs:
        links.setdefault(run.link or "no emulated link", []).append(run.name)
        workers = f"{run.workers} worker{'' if run.workers == 1 else 's'}"
        if run.workers:  # else it is not known
            sizes.setdefault(workers, []).append(run.name)
    differ = (
        ("links", links, "steps/s and measured seconds"),
        ("numbers of workers", sizes, "quality after equal steps, bytes and seconds"),
    )
    notes = []
    for what, found, numbers in differ:
        if len(found) > 1:
            told = "; ".join(f"{each}: {', '.join(names)}" for each, names in found.items())
            notes.append(f"the runs had different {what} ({told}): their {numbers} do not compare")
    return notes


def _title(runs: Sequence[Run]) -> str:
    if len(runs) == 1:
        return f"{runs[0].name}: {runs[0].title}"
    tasks = sorted({run.task for run in runs if run.task})
    return f"{len(runs)} runs" + (f" of {' and '.join(tasks)}" if tasks else "")
