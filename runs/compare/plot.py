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

_COLOURS = ("#1f5fa8", "#d9730d", "#2f8f4e", "#b2182b", "#7b3294", "#018571", "#a6611a", "#6f78b8")
_LOG_FROM = 3  # times the least quality, the largest
_DENSE, _INK = "#9aa0a8", "#444444"


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
        _log(axes.xaxis)
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


def _log(axis: Any) -> None:
    """A logarithmic axis whose numbers are written as people write them."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axis.axes.set_xscale("log") if axis.axis_name == "x" else axis.axes.set_yscale("log")
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def _lines(
    axes: Any, standings: Sequence[Standing], place: Callable[[Digest, int], float], dense: str
) -> None:
    """A line for each run, a colour for each contender, a dot at the end.

    place: where an evaluation after so many steps goes on the horizontal axis; nan: nowhere.
    """
    others = [standing for standing in standings if standing.label != dense]
    colours = {one.label: _COLOURS[i % len(_COLOURS)] for i, one in enumerate(others)}
    for standing in sorted(standings, key=lambda one: one.label in colours):  # dense first
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
    qualities = [q for standing in standings for run in standing.runs for _, q in run.evaluations]
    if qualities and 0 < _LOG_FROM * min(qualities) < max(qualities):
        _log(axes.yaxis)
