"""The pictures of a comparison: quality against time on the runs' network, and against bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from runs.compare.digest import Digest
from runs.compare.standing import Standing

PLOT_FILE = "quality.png"
TIME_FILE = "time.png"

_COLOURS = ("#1f5fa8", "#e08214", "#5aae61", "#b2182b", "#7b3294", "#018571", "#a6611a")
_DENSE, _INK = "#999999", "#444444"


def draw_quality(
    standings: Sequence[Standing],
    path: Path,
    title: str,
    quality_name: str,
    higher_is_better: bool,
    *,
    dense: str,
) -> None:
    """Write the PNG of quality against bytes sent. ImportError without matplotlib.

    dense: the contender that is drawn in grey, behind the others.
    """

    def megabytes(run: Digest, done: int) -> float:
        return run.sent[done - 1] / 1e6

    figure, axes = _figure(title, quality_name, higher_is_better)
    _lines(axes, standings, megabytes, dense)
    if all(run.sent and run.sent[0] > 0 for standing in standings for run in standing.runs):
        axes.set_xscale("log")
    axes.set_xlabel("MB sent by a worker", fontsize=9, color=_INK)
    axes.legend(fontsize=8, frameon=False)
    figure.savefig(path)


def draw_time(
    standings: Sequence[Standing],
    path: Path,
    title: str,
    quality_name: str,
    higher_is_better: bool,
    *,
    dense: str,
    how: str,
) -> None:
    """Write the PNG of quality against seconds. ImportError without matplotlib.

    dense: see `draw_quality`. how: the seconds in words.
    """

    def seconds(run: Digest, done: int) -> float:
        return run.clock[done - 1] if done <= len(run.clock) else float("nan")

    figure, axes = _figure(title, quality_name, higher_is_better)
    _lines(axes, standings, seconds, dense)
    axes.set_xlim(left=0)
    axes.set_xlabel(how, fontsize=9, color=_INK)
    axes.legend(fontsize=8, frameon=False)
    figure.savefig(path)


def _figure(title: str, quality_name: str, higher_is_better: bool) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    figure.suptitle(title, fontsize=11, color=_INK, x=0.01, ha="left")
    better = "higher" if higher_is_better else "lower"
    axes.set_ylabel(f"held-out {quality_name} ({better} is better)", fontsize=9, color=_INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8, colors=_INK)
    return figure, axes


def _lines(
    axes: Any, standings: Sequence[Standing], place: Callable[[Digest, int], float], dense: str
) -> None:
    """A line for each run, a colour for each contender, a dot at the end.

    place: where an evaluation after so many steps goes on the horizontal axis; nan: nowhere.
    """
    others = [standing for standing in standings if standing.label != dense]
    colours = {one.label: _COLOURS[i % len(_COLOURS)] for i, one in enumerate(others)}
    for standing in standings:
        is_dense = standing.label not in colours
        colour = _DENSE if is_dense else colours[standing.label]
        for j, run in enumerate(standing.runs):
            points = [(place(run, done), quality) for done, quality in run.evaluations]
            points = [point for point in points if isfinite(point[0])]
            if not points:
                continue
            xs, ys = zip(*points, strict=True)
            axes.plot(
                xs,
                ys,
                color=colour,
                linewidth=2.4 if is_dense else 1.4,
                alpha=0.8,
                zorder=1 if is_dense else 2,
                label=standing.label if j == 0 else None,
            )
            axes.plot(xs[-1:], ys[-1:], "o", color=colour, markersize=5)
