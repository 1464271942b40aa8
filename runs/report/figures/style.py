"""How all pictures look: colours, axes, legends."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import log10
from pathlib import Path
from typing import Any

from policies import DENSE
from runs.files import not_a_link
from runs.progress import cf_name
from runs.report.run import Run

INK, GRID = "#444444", "#dddddd"
_COLOURS = ("#1f5fa8", "#e08214", "#5aae61", "#b2182b", "#7b3294", "#018571", "#a6611a", "#8c96c6")
_DASHES = ("-", "--", ":", "-.")
_WIDTH, _DPI = 9.0, 130
_LONGEST = 36
"""Characters of a name in a picture; the page has the whole name."""


@dataclass(frozen=True)
class Picture:
    """A picture of the report, drawn when the page is written.

    file: name of the PNG. alt: what is to be seen, for those who cannot. height: inches.
    draw: fills an empty figure.
    """

    file: str
    heading: str
    alt: str
    caption: str
    height: float
    draw: Callable[[Any], None]


def paint(picture: Picture, path: Path) -> None:
    """Write the PNG. ImportError without matplotlib, OSError if it cannot be written."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Names of runs are shown as they are: a $ in one is no formula, a letter that the font lacks
    # no reason to complain.
    with rc_context({"text.parse_math": False}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*[Gg]lyph.*")
        figure = Figure(figsize=(_WIDTH, picture.height), dpi=_DPI, layout="constrained")
        FigureCanvasAgg(figure)
        picture.draw(figure)
        figure.savefig(not_a_link(path))


@dataclass(frozen=True)
class Look:
    """How a run's lines look: one colour for all runs of the same settings, a dash for each."""

    colour: str
    dash: str


def looks(runs: Sequence[Run]) -> dict[str, Look]:
    """By name of the run."""
    kinds: dict[object, list[str]] = {}
    for run in runs:
        kind: object = run.name
        if run.config is not None:
            kind = replace(run.config, seed=0, log_dir="", json=False)
        kinds.setdefault(kind, []).append(run.name)
    dense = next((run.name for run in runs if run.is_dense), "")
    found = {}
    for i, names in enumerate(kinds.values()):
        colour = INK if dense in names else _COLOURS[i % len(_COLOURS)]
        for j, name in enumerate(names):
            found[name] = Look(colour, _DASHES[(j + i // len(_COLOURS)) % len(_DASHES)])
    return found


def cf_colour(cf: float) -> Any:
    """The same in all pictures: dense grey, larger CFs from blue to red, dark enough for lines."""
    from matplotlib import colormaps

    if cf == DENSE:
        return "#999999"
    red, green, blue, _ = colormaps["turbo"](min(1.0, log10(max(cf, 1.0)) / 3.2))
    return 0.85 * red, 0.85 * green, 0.85 * blue


def short(name: str) -> str:
    """A name for a picture. (Labels that begin with _ are left out of legends.)"""
    if len(name) > _LONGEST:
        half = _LONGEST // 2 - 1
        name = f"{name[:half]}…{name[-half:]}"
    return f" {name}" if name.startswith("_") else name


def tidy(axes: Any) -> None:
    """No frame, a light grid, small print."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#aaaaaa")
    axes.grid(color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8, colors=INK, which="both")


def titled(axes: Any, left: str, right: str = "") -> None:
    """A panel's heading, with a remark at the other end."""
    axes.set_title(left, fontsize=9, color=INK, loc="left")
    axes.set_title(right, fontsize=8, color=INK, loc="right")


def labelled(axes: Any, x: str = "", y: str = "") -> None:
    axes.set_xlabel(x, fontsize=9, color=INK)
    axes.set_ylabel(y, fontsize=9, color=INK)


def legend(figure: Any, handles: Sequence[Any], labels: Sequence[str], columns: int = 3) -> None:
    """Under all panels, where it covers nothing."""
    figure.legend(
        handles,
        [short(label) for label in labels],
        loc="outside lower left",
        ncols=min(columns, len(labels)),
        fontsize=8,
        frameon=False,
        labelcolor=INK,
    )


def cf_axis(axis: Any, cfs: Iterable[float]) -> None:
    """Log scale with the CFs themselves as ticks, as far as they do not collide."""
    ascending = sorted({DENSE, *cfs})
    span = log10(max(10.0, ascending[-1]))
    ticks: list[float] = []
    for cf in ascending:
        if not ticks or log10(cf / ticks[-1]) >= span / 9:
            ticks.append(cf)
    axis.axes.set_xscale("log") if axis.axis_name == "x" else axis.axes.set_yscale("log")
    axis.set_ticks(ticks, [cf_name(cf) for cf in ticks])
    axis.set_ticks([], minor=True)
    limits = (0.8, 1.35 * max(2.0, ascending[-1]))
    axis.axes.set_xlim(limits) if axis.axis_name == "x" else axis.axes.set_ylim(limits)
