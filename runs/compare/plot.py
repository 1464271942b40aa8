"""The pictures of a comparison: quality against time on the runs' network, and against bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite
from pathlib import Path

from runs.report.looks import looks
from runs.report.rows import Row
from runs.report.run import Run
from runs.style import GREY, RUNS, log_axis, picture

PLOT_FILE = "quality.png"
TIME_FILE = "time.png"


def draw_quality(rows: Sequence[Row], folder: Path, title: str, seconds: str) -> None:
    """Write both PNGs: a line for each run, a colour for each contender, a dot at the end.
    ImportError without matplotlib.

    Dense contenders are grey, behind the others. seconds: what they are, in words.
    """
    _draw(rows, folder / TIME_FILE, title, seconds, Run.seconds_by)
    by_bytes = "MB sent by a worker"
    _draw(rows, folder / PLOT_FILE, title, by_bytes, lambda r, done: 1e-6 * r.sent_by(done))


def _draw(
    rows: Sequence[Row],
    path: Path,
    title: str,
    across: str,
    place: Callable[[Run, int], float],
) -> None:
    """place: of an evaluation after so many steps, on the horizontal axis; nan: nowhere."""
    found = looks([run for row in rows for run in row.runs])
    with picture(path, title, across=across) as (axes,):
        places: list[float] = []
        for row in sorted(rows, key=lambda one: found[one.run.name][0] is not None):
            number = found[row.run.name][0]
            colour = GREY if number is None else RUNS[number % len(RUNS)]
            how = {"color": colour, "linewidth": 2.4 if number is None else 1.4}
            for i, run in enumerate(row.runs):
                points = [(place(run, done), quality) for done, quality in run.evaluations]
                points = [point for point in points if isfinite(sum(point))]
                if not points:
                    continue
                places += [x for x, _ in points]
                label = None if i else row.label
                axes.plot(*zip(*points, strict=True), alpha=0.8, label=label, **how)
                axes.plot(*zip(*points[-1:], strict=True), "o", color=colour)
        log_axis(axes.yaxis, [q for row in rows for run in row.runs for _, q in run.evaluations])
        if path.name == PLOT_FILE:
            log_axis(axes.xaxis, places)
        else:
            axes.set_xlim(left=0)
        better = "higher" if rows[0].run.higher_is_better else "lower"
        axes.set_ylabel(f"held-out {rows[0].run.quality_name} ({better} is better)")
        axes.legend()
