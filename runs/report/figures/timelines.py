"""Which CF was sent when: a panel for each run, every switch in it."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, log
from typing import Any

import numpy as np

from runs.records import planned
from runs.report.figures.panels import grid, in_pictures
from runs.report.figures.style import Picture, cf_axis, labelled, legend, titled
from runs.report.run import Run
from runs.report.thin import buckets, corners

_SENT, _CANDIDATE, _FLOOR, _MEAN = "#1f5fa8", "#e08214", "#5aae61", "#222222"
_ORDER = ("sent", "switch", "candidate", "floor", "sent, crowded", "mean of log CF")
_MEANS = 200
_MARKED = 150
"""Switches that get a mark each; the line shows more of them well enough."""
_CROWDED = 1000
"""Switches that run into one another: more are drawn as a shade, with the mean CF over it."""


def make(runs: Sequence[Run]) -> list[Picture]:
    """Empty if no run has a CF history."""
    runs = [run for run in runs if run.history]
    return in_pictures("cf_timeline", runs, _picture) if runs else []


def _picture(file: str, runs: Sequence[Run], remark: str) -> Picture:
    most = max(runs, key=lambda run: len(run.history))
    return Picture(
        file,
        f"CF over steps{remark}",
        "Compression factor against step, a panel for each run: "
        + "; ".join(f"{run.name} {_told(run)}" for run in runs),
        "Every switch is drawn, also in long runs. Candidate and floor are the policy's own, where "
        f"it has them. Most switches: {most.name}, {len(most.history) - 1}.",
        0.9 + 1.55 * len(runs),
        lambda figure: _draw(figure, runs),
    )


def _told(run: Run) -> str:
    switches = len(run.history) - 1
    last = run.history[-1].cf
    return f"{switches} switch{'es' if switches != 1 else ''}, CF {last:g} at the end"


def _draw(figure: Any, runs: Sequence[Run]) -> None:
    panels = grid(figure, runs, 1, sharex=True, sharey=True)
    lines: dict[str, Any] = {}
    cfs = {part.cf for run in runs for part in run.history}
    for axes, run in zip(panels, runs, strict=True):
        for name, colour, style in (("candidate", _CANDIDATE, "--"), ("floor", _FLOOR, ":")):
            values = [planned(record, name) for record in run.records]
            if any(map(isfinite, values)):
                steps, kept = corners([r.report.step for r in run.records], values)
                if len(kept) > _CROWDED:
                    continue
                cfs.update(filter(isfinite, kept))
                lines[name] = axes.step(
                    steps, kept, where="post", color=colour, linestyle=style, linewidth=1.2
                )[0]
        switches = run.history[1:]
        crowded = len(switches) > _CROWDED
        lines["sent, crowded" if crowded else "sent"] = _draw_sent(axes, run, crowded)
        if crowded:
            lines["mean of log CF"] = _draw_mean(axes, run)
        if 0 < len(switches) <= _MARKED:
            lines["switch"] = axes.plot(
                [part.first for part in switches],
                [part.cf for part in switches],
                "o",
                color=_SENT,
                markersize=4 if len(switches) < 50 else 2,
                markerfacecolor="white",
            )[0]
        count = len(switches)
        titled(axes, axes.get_title(loc="left"), f"{count} switch{'es' if count != 1 else ''}")
        axes.margins(x=0.01)
        labelled(axes, y="CF")
    cf_axis(panels[0].yaxis, cfs)
    labelled(panels[-1], "step", "CF")
    order = [name for name in _ORDER if name in lines]
    legend(figure, [lines[name] for name in order], order, columns=len(_ORDER))


def _draw_sent(axes: Any, run: Run, crowded: bool) -> Any:
    """From the CF history: as many points as switches, however many steps."""
    steps = [part.first for part in run.history] + [run.history[-1].last + 1]
    cfs = [part.cf for part in run.history] + [run.history[-1].cf]
    if not crowded:
        return axes.step(steps, cfs, where="post", color=_SENT, linewidth=1.8)[0]
    axes.step(steps, cfs, where="post", color=_SENT, linewidth=0.3, alpha=0.25)
    return axes.fill_between([], [], color=_SENT, alpha=0.25, linewidth=0)  # for the legend


def _draw_mean(axes: Any, run: Run) -> Any:
    logs = [log(record.report.cf) for record in run.records]
    steps = [record.report.step for record in run.records]
    thinned = buckets(steps, logs, steps[0], steps[-1], _MEANS)
    return axes.plot(thinned.steps, np.exp(thinned.mean), color=_MEAN, linewidth=1.5)[0]
