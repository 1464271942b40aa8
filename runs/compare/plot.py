"""The picture of a comparison: quality against bytes sent."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from runs.compare.standing import Standing

PLOT_FILE = "quality.png"

_COLOURS = ("#444444", "#1f5fa8", "#e08214", "#5aae61", "#b2182b", "#7b3294", "#018571", "#a6611a")
_INK = "#444444"


def draw_quality(
    standings: Sequence[Standing],
    path: Path,
    title: str,
    quality_name: str,
    higher_is_better: bool,
) -> None:
    """Write the PNG: a line for each run, a colour for each contender, a dot at the end.

    ImportError without matplotlib.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    figure.suptitle(title, fontsize=11, color=_INK, x=0.01, ha="left")
    for i, standing in enumerate(standings):
        colour = _COLOURS[i % len(_COLOURS)]
        for j, run in enumerate(standing.runs):
            points = [(run.sent[done - 1] / 1e6, quality) for done, quality in run.evaluations]
            if not points:
                continue
            megabytes, qualities = zip(*points, strict=True)
            axes.plot(
                megabytes,
                qualities,
                color=colour,
                linewidth=1.4,
                alpha=0.8,
                label=standing.label if j == 0 else None,
            )
            axes.plot(megabytes[-1:], qualities[-1:], "o", color=colour, markersize=5)
    if all(run.sent and run.sent[0] > 0 for standing in standings for run in standing.runs):
        axes.set_xscale("log")
    axes.set_xlabel("MB sent by a worker", fontsize=9, color=_INK)
    better = "higher" if higher_is_better else "lower"
    axes.set_ylabel(f"held-out {quality_name} ({better} is better)", fontsize=9, color=_INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8, colors=_INK)
    axes.legend(fontsize=8, frameon=False)
    figure.savefig(path)
