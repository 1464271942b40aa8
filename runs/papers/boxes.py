"""The picture of a suite whose entries have their own learning rates: a box for each technique."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import isfinite
from pathlib import Path

from runs.papers.suite_table import at_best_rates
from runs.papers.suites import Plan
from runs.report.rows import Row
from runs.style import RUNS, log_axis, picture

BOXES_FILE = "techniques.png"


def by_technique(plan: Plan, rows: Sequence[Row]) -> dict[str, list[float]]:
    """The qualities of a technique's settings and seeds, each setting at its best learning rate.

    The technique is what an entry's name begins with, before its numbers: "top-k" of "top-k 50x".
    Runs that have diverged are left out."""
    found: dict[str, list[float]] = {}
    for row in at_best_rates(plan, rows)[0]:
        technique = re.split(r" (?=\d)", row.label)[0]
        known = [run.quality for run in row.runs if isfinite(run.quality)]
        found.setdefault(technique, []).extend(known)
    return {technique: qualities for technique, qualities in found.items() if qualities}


def draw_boxes(plan: Plan, rows: Sequence[Row], folder: Path, title: str) -> None:
    """Write the PNG: the spread of each technique's best settings. ImportError without
    matplotlib."""
    found = by_technique(plan, rows)
    if not found:
        return
    with picture(folder / BOXES_FILE, title, across="technique") as (axes,):
        boxes = axes.boxplot(list(found.values()), patch_artist=True, widths=0.5)
        axes.set_xticks(range(1, len(found) + 1), list(found))
        for box, colour in zip(boxes["boxes"], RUNS * len(found), strict=False):
            box.set(facecolor=colour, alpha=0.5)
        log_axis(axes.yaxis, [quality for each in found.values() for quality in each])
        run = rows[0].run
        better = "higher" if run.higher_is_better else "lower"
        axes.set_ylabel(f"held-out {run.quality_name} of each best setting ({better} is better)")
