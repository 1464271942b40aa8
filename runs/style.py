"""The style of all pictures that matplotlib draws: one palette, and sizes, axes and legends that
stand here alone.

The colours are those of the dashboard and of reports (`dashboard/static/colours.js`, light)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from textwrap import fill
from typing import Any

from runs.files import not_a_link

RUNS = ("#1f5fa8", "#d9730d", "#2f8f4e", "#b2182b", "#7b3294", "#018571", "#a6611a", "#6f78b8")
"""Colours of runs beside one another, or of what is told apart in one run."""

GREY = "#9aa0a8"
"""Of what is dense, or else stands behind what a picture is about."""

_INK = "#444444"
_LOG_FROM = 3.0
"""Values whose largest is so many times the least are drawn on a logarithmic axis."""

_STYLE: Any = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), _INK),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    **dict.fromkeys(("xtick.labelsize", "ytick.labelsize", "legend.fontsize", "axes.titlesize"), 8),
    "text.parse_math": False,  # a user's names are none
    "figure.dpi": 130,
    "savefig.dpi": "figure",
    "figure.titlesize": 10,
    "axes.labelsize": 9,
    "axes.titlelocation": "right",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.xmargin": 0.01,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
}


@contextmanager
def picture(
    path: Path,
    title: str,
    heights: Sequence[float] = (1,),
    size: tuple[float, float] = (8, 5),
    across: str = "step",
    columns: int = 1,
) -> Iterator[list[Any]]:
    """Draw on the axes that this gives, row by row, and the PNG is written at the end.

    heights: of the rows, in proportion. size: inches. across: what the horizontal axes are, which a
    column shares. ImportError without matplotlib.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context(_STYLE):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        shared: dict[str, Any] = {"sharex": "col", "sharey": "row", "squeeze": False}
        grid = figure.subplots(len(heights), columns, height_ratios=heights, **shared)
        lines = [fill(line, int(13 * size[0])) for line in title.splitlines()]  # none is cut off
        figure.suptitle("\n".join(lines), x=0.01, ha="left")
        for axes in grid[-1]:
            axes.set_xlabel(across)
        yield grid.ravel().tolist()
        figure.savefig(not_a_link(path))


def log_axis(axis: Any, values: Iterable[float]) -> None:
    """Make an axis logarithmic if its values spread, with numbers as people write them."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    known = [value for value in values if isfinite(value)]
    if not known or not 0 < _LOG_FROM * min(known) < max(known):
        return
    few = max(known) < 10 * min(known)  # of 1, 2 and 5 perhaps one alone would be inside
    axis.axes.set_xscale("log") if axis.axis_name == "x" else axis.axes.set_yscale("log")
    axis.set_major_locator(LogLocator(subs=(1, 1.5, *range(2, 10)) if few else (1, 2, 5)))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())
