"""How gradient values are distributed before and after compression, as the figures of Harris (2020)
show it."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor, log10
from typing import Any

from runs.densities import Densities, Density, edges
from runs.report.figures.panels import grid, in_pictures
from runs.report.figures.style import INK, Picture, labelled, legend
from runs.report.run import Run

_BEFORE, _AFTER = "#8c96c6", "#e08214"


def make(runs: Sequence[Run]) -> list[Picture]:
    """Empty if no run has histograms (`train --densities N`)."""
    runs = [run for run in runs if run.densities]
    return in_pictures("densities", runs, _picture) if runs else []


def _picture(file: str, runs: Sequence[Run], remark: str) -> Picture:
    return Picture(
        file,
        f"Gradient values before and after compression{remark}",
        "Histograms of gradient values: "
        + "; ".join(f"{run.name}, {_told(run.densities[-1])}" for run in runs),
        "Share of the gradient's elements by their values, in the last step that was recorded; "
        "zeros are not drawn, but in the share. Before: rank 0's own gradient. After: the mean of "
        "what all ranks have kept, with what had waited in residuals, as the optimizer gets it "
        "(with momentum correction, velocities).",
        0.8 + 2.3 * -(-len(runs) // min(2, len(runs))),
        lambda figure: _draw(figure, runs),
    )


def _told(found: Densities) -> str:
    return (
        f"step {found.step}: {_zeros(found.before)} zeros before and {_zeros(found.after)} after "
        f"compression"
    )


def _zeros(one: Density) -> str:
    return f"{one.zeros / max(1, one.values):.1%}"


def _draw(figure: Any, runs: Sequence[Run]) -> None:
    from matplotlib.ticker import NullLocator

    panels = grid(figure, runs, 2, sharex=True, sharey=True)
    at = edges()
    reached = [
        i
        for run in runs
        for one in (run.densities[-1].before, run.densities[-1].after)
        for counts in (one.negative, one.positive)
        for i, count in enumerate(counts)
        if count
    ]
    low = at[min(reached, default=0)]
    for axes, run in zip(panels, runs, strict=True):
        found = run.densities[-1]
        for one, colour, name in (
            (found.before, _BEFORE, "before"),
            (found.after, _AFTER, "after"),
        ):
            for sign, counts in ((-1, one.negative), (1, one.positive)):
                axes.stairs(
                    *_mirrored(sign, one.shares(counts), at),
                    color=colour,
                    linewidth=1.4,
                    fill=name == "before",
                    alpha=0.6 if name == "before" else 1.0,
                    label=name if sign > 0 else None,
                )
        axes.set_xscale("symlog", linthresh=low, linscale=0.2)
        axes.set_yscale("log")
        highest = at[max(reached, default=len(at) - 2) + 1]
        axes.set_xlim(-highest, highest)
        ticks = [10.0**power for power in range(floor(log10(highest)), ceil(log10(low)), -2)]
        places = [*(-tick for tick in ticks), *ticks]
        axes.set_xticks(places, [f"{place:g}" for place in places], rotation=45)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(lambda share, _: f"{share:g}")
        text = f"zeros: {_zeros(found.before)} before, {_zeros(found.after)} after"
        axes.text(0.02, 0.95, text, transform=axes.transAxes, fontsize=7, color=INK, va="top")
        labelled(axes, f"value, step {found.step}", "share of elements")
    handles, labels = panels[0].get_legend_handles_labels()
    legend(figure, handles, labels)


def _mirrored(
    sign: int, shares: Sequence[float], at: Sequence[float]
) -> tuple[list[float], list[float]]:
    """Heights and edges of the bins, from left to right."""
    if sign > 0:
        return list(shares), list(at)
    return list(reversed(shares)), [-edge for edge in reversed(at)]
