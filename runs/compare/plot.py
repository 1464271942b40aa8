"""The picture of a comparison: quality against time on the runs' network. A report has others."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from pathlib import Path

from runs.report.pictures import better, looks
from runs.report.rows import Row
from runs.style import GREY, RUNS, log_axis, picture

TIME_FILE = "time.png"


def draw_quality(rows: Sequence[Row], folder: Path, title: str, seconds: str) -> None:
    """Write the PNG: a line for each run, a colour for each contender, a dot at the end. Dense
    contenders are grey, behind the others. seconds: what they are, in words.

    ImportError without matplotlib."""
    found = looks([run for row in rows for run in row.runs])
    with picture(folder / TIME_FILE, title, across=seconds) as (axes,):
        for row in sorted(rows, key=lambda one: found[one.run.name][0] is not None):
            number = found[row.run.name][0]
            colour = GREY if number is None else RUNS[number % len(RUNS)]
            how = {"color": colour, "linewidth": 2.4 if number is None else 1.4}
            for i, run in enumerate(row.runs):
                points = [(run.seconds_by(done), quality) for done, quality in run.evaluations]
                points = [point for point in points if isfinite(sum(point))]
                if not points:
                    continue
                label = None if i else row.label
                axes.plot(*zip(*points, strict=True), alpha=0.8, label=label, **how)
                axes.plot(*zip(*points[-1:], strict=True), "o", color=colour)
        log_axis(axes.yaxis, [q for row in rows for run in row.runs for _, q in run.evaluations])
        axes.set_xlim(left=0)
        run = rows[0].run
        of = "" if run.config is not None and run.config.script else "held-out "
        axes.set_ylabel(f"{of}{run.quality_name} ({better(run)} is better)")
        if axes.lines:  # none without a metric, which matplotlib would warn of
            axes.legend()
