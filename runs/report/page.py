"""The page: one HTML file that holds everything, to be read without a server."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from markupsafe import Markup

from runs.pages import render
from runs.report.pictures import Pictures, scripts
from runs.report.rows import Row
from runs.report.run import Run
from runs.report.table import Column, reading
from runs.report.verdict import headlines


def make_page(
    title: str,
    rows: Sequence[Row],
    columns: Sequence[Column],
    goals: Sequence[str],
    pictures: Pictures,
    notes: Sequence[str],
) -> str:
    """HTML, with everything that it draws in it. goals: what was to be reached, in words."""
    groups = [(name, len(list(of_it))) for name, of_it in groupby(columns, lambda c: c.group)]
    return render(
        "report.html",
        title=title,
        verdicts=headlines(rows),
        quality=pictures.quality,
        groups=[("", 1), *groups],
        columns=["run", *(column.name for column in columns)],
        runs=[{"cells": [column.text(row) for column in columns], **_run(row.run)} for row in rows],
        warnings=notes,
        reading=[*reading(columns, rows), *goals],
        charts=pictures.charts,
        timelines=bool(pictures.rows),
        data=Markup(pictures.as_json()),
        scripts=Markup(scripts()),
    )


def _run(run: Run) -> dict[str, Any]:
    """What the template tells of a run."""
    return {
        "name": run.name,
        "title": run.title,
        "notes": run.notes,
        "command": run.config.command if run.config is not None else "",
        "folder": run.folder,
    }
