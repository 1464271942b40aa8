"""Compression throughput (T_sys x gain) against CF: what GraVAC and goodput maximize."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np

from runs.report.figures.style import (
    INK,
    Look,
    Picture,
    cf_axis,
    labelled,
    legend,
    looks,
    tidy,
    titled,
)
from runs.report.run import Run

FILE = "throughput.png"


@dataclass(frozen=True)
class Point:
    """The compression throughput of the steps that were sent at one CF.

    Quartiles of T_comp, median T_sys, and how many were timed."""

    cf: float
    low: float
    middle: float
    high: float
    t_sys: float
    steps: int


def make(runs: Sequence[Run]) -> list[Picture]:
    """Empty if no run was timed."""
    points = {run.name: of_run for run in runs if (of_run := by_cf(run))}
    if not points:
        return []
    runs = [run for run in runs if run.name in points]
    look = looks(runs)
    told = "; ".join(
        f"{run.name} best at CF {max(points[run.name], key=lambda p: p.middle).cf:g}"
        for run in runs
    )
    links = sorted({run.link or "no link emulated" for run in runs})
    return [
        Picture(
            FILE,
            "Throughput against CF",
            f"System and compression throughput against compression factor: {told}",
            "System throughput, and compression throughput T_comp = T_sys x gain, of the CFs that "
            "were sent: medians over the steps, bars from the first to the third quartile. The "
            "gain is that of the run's policy. Different models or tasks do not compare. "
            f"Measured: {'; '.join(links)}.",
            3.6 + 0.18 * -(-len(runs) // 3),
            lambda figure: _draw(figure, runs, points, look),
        )
    ]


def by_cf(run: Run) -> list[Point]:
    """Ascending; a record's throughputs are of the step before it, at `timed_cf`."""
    found: dict[float, list[tuple[float, float]]] = {}
    for record in run.records:
        if isfinite(record.t_comp) and isfinite(record.t_sys):
            found.setdefault(record.report.timed_cf, []).append((record.t_comp, record.t_sys))
    points = []
    for cf, pairs in sorted(found.items()):
        t_comp, t_sys = np.asarray(pairs).T
        low, middle, high = np.quantile(t_comp, (0.25, 0.5, 0.75))
        points.append(
            Point(cf, float(low), float(middle), float(high), float(np.median(t_sys)), len(pairs))
        )
    return points


def _draw(
    figure: Any, runs: Sequence[Run], points: dict[str, list[Point]], look: dict[str, Look]
) -> None:
    left, right = figure.subplots(1, 2)
    lines = []
    for run in runs:
        of_run, style = points[run.name], look[run.name]
        cfs = [point.cf for point in of_run]
        shape = {"color": style.colour, "linestyle": style.dash, "linewidth": 1.4}
        left.plot(cfs, [p.t_sys for p in of_run], marker="o", markersize=4, **shape)
        middle = [p.middle for p in of_run]
        spread = [
            [p.middle - p.low for p in of_run],
            [p.high - p.middle for p in of_run],
        ]
        bars = right.errorbar(
            cfs, middle, spread, marker="o", markersize=4, capsize=2, elinewidth=0.8, **shape
        )
        lines.append(bars.lines[0])
    unit = "samples/s" if all(run.config is not None for run in runs) else "steps/s or samples/s"
    for axes, name in ((left, "T_sys"), (right, "T_comp")):
        tidy(axes)
        titled(axes, f"{name}, {unit}")
        cf_axis(axes.xaxis, [p.cf for of_run in points.values() for p in of_run])
        axes.set_ylim(bottom=0)
        labelled(axes, "CF that was sent")
        axes.yaxis.label.set_color(INK)
    legend(figure, lines, [run.name for run in runs])
