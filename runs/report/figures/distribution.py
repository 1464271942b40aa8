"""The share of steps at each CF, as the figures of the GraVAC paper show it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import floor, log2
from typing import Any

from policies import DENSE
from runs.progress import cf_name
from runs.report.figures.panels import grid, in_pictures
from runs.report.figures.style import Picture, cf_colour, labelled
from runs.report.run import Run

_MOST = 12
"""CFs that get a bar each; of more, those within a factor of two share one."""


def make(runs: Sequence[Run]) -> list[Picture]:
    """Empty if no run has a CF history."""
    runs = [run for run in runs if run.history]
    return in_pictures("cf_distribution", runs, _picture) if runs else []


def _picture(file: str, runs: Sequence[Run], remark: str) -> Picture:
    return Picture(
        file,
        f"Distribution of CFs{remark}",
        "Share of steps sent at each compression factor: "
        + "; ".join(f"{run.name} {_told(run)}" for run in runs),
        "Share of a run's steps that were sent at each CF.",
        0.5 + 2.0 * -(-len(runs) // min(3, len(runs))),
        lambda figure: _draw(figure, runs),
    )


def _told(run: Run) -> str:
    largest = sorted(run.shares.items(), key=lambda item: -item[1])[:4]
    return ", ".join(f"{share:.0%} {_name(cf)}" for cf, share in largest)


def _name(cf: float) -> str:
    return cf_name(cf) if cf == DENSE else f"at CF {cf_name(cf)}"


def binned(shares: Mapping[float, float]) -> dict[float, float]:
    """Shares of [1], (1, 2), [2, 4), [4, 8), ...: by the lower end of each; those between dense
    and 2 by 1.0001, since they are not dense."""
    found: dict[float, float] = {}
    for cf, share in shares.items():
        low = DENSE if cf == DENSE else max(_BARELY, 2.0 ** floor(log2(cf)))
        found[low] = found.get(low, 0.0) + share
    return found


_BARELY = 1.0001


def _draw(figure: Any, runs: Sequence[Run]) -> None:
    shares = {run.name: run.shares for run in runs}
    wide = len({cf for of_run in shares.values() for cf in of_run}) > _MOST
    if wide:
        shares = {name: binned(of_run) for name, of_run in shares.items()}
    cfs = sorted({DENSE}.union(*shares.values()))
    places = range(len(cfs))
    panels = grid(figure, runs, 3, sharex=True, sharey=True)
    for axes, run in zip(panels, runs, strict=True):
        heights = [100 * shares[run.name].get(cf, 0.0) for cf in cfs]
        axes.bar(places, heights, width=0.75, color=[cf_colour(cf) for cf in cfs])
        for place, height in zip(places, heights, strict=True):
            if height:
                text = f"{height:.0f}" if height >= 1 else "<1"
                axes.text(place, height + 1.5, text, ha="center", fontsize=7, color="#444444")
        axes.set_ylim(0, 112)
        axes.set_yticks(range(0, 101, 25))
        axes.grid(axis="x", visible=False)
        labels = [_bin_name(cf) if wide else cf_name(cf) for cf in cfs]
        axes.set_xticks(places, labels, rotation=45 if len(cfs) > 6 else 0)
        axes.tick_params(axis="x", labelbottom=True)
        labelled(axes, "CF", "% of steps" if axes.get_subplotspec().is_first_col() else "")


def _bin_name(low: float) -> str:
    if low == DENSE:
        return cf_name(low)
    return "<2" if low < 2 else f"{low:g}-{2 * low:g}"
