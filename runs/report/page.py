"""The page: one HTML file that holds everything, to be read without a server."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from math import isfinite
from statistics import median
from typing import Any

from markupsafe import Markup

from policies.words import named
from runs.pages import render
from runs.parser import shown
from runs.progress import number_text
from runs.report.pictures import Pictures, scripts
from runs.report.rows import UNKNOWN, Row
from runs.report.run import Run
from runs.report.table import Column, reading
from runs.report.verdict import headlines

LISTED = 400
"""Switches listed of one run; the middle of more is left out (the pictures show all)."""


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
    stayed = bool(run.records) and len(run.history) == 1
    settings = run.config.as_json().items() if run.config is not None else ()
    return {
        "name": run.name,
        "title": run.title,
        "notes": run.notes,
        "command": run.config.command if run.config is not None else "",
        "folder": run.folder,
        "always": named(run.history[0].cf) if stayed else "",
        "switched": len(run.history) - 1,
        "switches": _switches(run),
        "by_cf": _by_cf(run),
        "gain_kind": run.gain_kind,
        "settings": [(n, shown(v)) for n, v in settings if v is not None and n != "command"],
    }


def _switches(run: Run) -> list[tuple[object, ...]]:
    """Step, CFs before and after, and the reason."""
    rows: list[tuple[object, ...]] = [
        (part.first, named(before.cf), named(part.cf), part.reason)
        for before, part in zip(run.history, run.history[1:], strict=False)
    ]
    if len(rows) > LISTED:
        left_out, half = len(rows) - LISTED, LISTED // 2
        rows[half : half + left_out] = [("...", "", "", f"{left_out} more, in timeline.jsonl")]
    return rows if run.records else []


def _by_cf(run: Run) -> list[tuple[str, ...]]:
    """What the steps at each CF took."""
    steps: dict[float, list[tuple[float, float, float]]] = {}
    for record, seconds in zip(run.records, run.step_seconds, strict=True):
        taken = seconds, record.report.wire_bytes / 1e6, record.gain
        steps.setdefault(record.report.cf, []).append(taken)
    return [
        (
            named(cf),
            f"{len(values)} ({len(values) / len(run.records):.0%})",
            *(_median([value[i] for value in values]) for i in range(3)),
        )
        for cf, values in sorted(steps.items())
    ]


def _median(values: Sequence[float]) -> str:
    known = [value for value in values if isfinite(value)]
    return number_text(median(known), 3) if known else UNKNOWN
