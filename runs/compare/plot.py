"""The pictures of a comparison: quality against time on the runs' network, and against bytes."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, nan
from pathlib import Path

from runs.compare.digest import Digest
from runs.compare.standing import Standing
from runs.style import GREY, RUNS, log_axis, picture

PLOT_FILE = "quality.png"
TIME_FILE = "time.png"


def draw_quality(
    standings: Sequence[Standing],
    folder: Path,
    title: str,
    quality_name: str,
    higher_is_better: bool,
    dense: str,
    seconds: str,
) -> None:
    """Write both PNGs: a line for each run, a colour for each contender, a dot at the end.
    ImportError without matplotlib.

    dense: the contender that is drawn in grey, behind the others. seconds: what they are, in words.
    """
    others = [standing.label for standing in standings if standing.label != dense]
    colours = {label: RUNS[i % len(RUNS)] for i, label in enumerate(others)}
    better = "higher" if higher_is_better else "lower"
    for name, across in ((TIME_FILE, seconds), (PLOT_FILE, "MB sent by a worker")):
        with picture(folder / name, title, across=across) as (axes,):
            places: list[float] = []
            for standing in sorted(standings, key=lambda one: one.label in colours):
                colour = colours.get(standing.label, GREY)
                how = {"color": colour, "linewidth": 1.4 if standing.label in colours else 2.4}
                for i, run in enumerate(standing.runs):
                    points = [(_place(run, done, name), q) for done, q in run.evaluations]
                    points = [point for point in points if isfinite(point[0])]
                    if not points:
                        continue
                    places += [x for x, _ in points]
                    label = None if i else standing.label
                    axes.plot(*zip(*points, strict=True), alpha=0.8, label=label, **how)
                    axes.plot(*zip(*points[-1:], strict=True), "o", color=colour)
            runs = [run for standing in standings for run in standing.runs]
            log_axis(axes.yaxis, [q for run in runs for _, q in run.evaluations])
            if name == PLOT_FILE:
                log_axis(axes.xaxis, places)
            else:
                axes.set_xlim(left=0)
            axes.set_ylabel(f"held-out {quality_name} ({better} is better)")
            axes.legend()


def _place(run: Digest, done: int, name: str) -> float:
    """Where an evaluation after so many steps goes on the horizontal axis; nan: nowhere."""
    values = run.sent if name == PLOT_FILE else run.clock
    scale = 1e-6 if name == PLOT_FILE else 1.0
    return scale * values[done - 1] if done <= len(values) else nan
