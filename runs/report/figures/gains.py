"""Gain curves: what each CF would have kept, over the steps, as far as it was measured."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, nan
from typing import Any

from policies import DENSE
from runs.progress import cf_name
from runs.report.figures.panels import grid, in_pictures
from runs.report.figures.style import Picture, cf_colour, labelled, legend, titled
from runs.report.run import Run
from runs.report.thin import buckets

_BUCKETS = 240
_LISTED = 14


def make(runs: Sequence[Run]) -> list[Picture]:
    """Empty if nothing was measured."""
    curves = {run.name: _curves(run) for run in runs}
    runs = [run for run in runs if any(curves[run.name])]
    if not runs:
        return []
    return in_pictures(
        "gains", runs, lambda file, some, remark: _picture(file, some, remark, curves)
    )


_Curves = dict[float, tuple[list[int], list[float]]]


def _curves(run: Run) -> tuple[_Curves, _Curves]:
    """By CF, steps and gains: of those measured, and of the shadow ladder's steady state."""
    measured: _Curves = {}
    steady: _Curves = {}
    for record in run.records:
        report = record.report
        gains = {cf: m.gain(run.gain_kind) for cf, m in report.measurements.items()}
        if isfinite(record.gain):
            gains[report.cf] = record.gain  # what decides, as the policy averages it
        for curves, by_cf in ((measured, gains), (steady, report.steady)):
            for cf, gain in by_cf.items():
                if isfinite(gain) and cf != DENSE:
                    steps, values = curves.setdefault(cf, ([], []))
                    steps.append(report.step)
                    values.append(gain)
    return measured, steady


def _picture(
    file: str, runs: Sequence[Run], remark: str, curves: dict[str, tuple[_Curves, _Curves]]
) -> Picture:
    told = []
    for run in runs:
        ends = [f"{values[-1]:.2f} at CF {cf:g}" for cf, (_, values) in _shown(curves[run.name])]
        told.append(f"{run.name} ends with {', '.join(ends[:6])}")
    steady = any(curves[run.name][1] for run in runs)
    return Picture(
        file,
        f"Gain of each CF over steps{remark}",
        "Gain of each compression factor against step, a panel for each run: " + "; ".join(told),
        "The gain: the share of the gradient that survives, by the definition that the run's "
        "policy decides on; only of CFs that were sent or probed."
        + (
            " Dashed: what each CF's residual would keep in steady state (the error-fed gain, from "
            "the shadow ladder), which is another number where the policy decides on another gain."
            if steady
            else ""
        ),
        0.9 + 1.9 * len(runs),
        lambda figure: _draw(figure, runs, curves),
    )


def _shown(curves: tuple[_Curves, _Curves]) -> list[tuple[float, tuple[list[int], list[float]]]]:
    return sorted((curves[0] or curves[1]).items())


def _draw(figure: Any, runs: Sequence[Run], curves: dict[str, tuple[_Curves, _Curves]]) -> None:
    lines: dict[float, Any] = {}
    panels = grid(figure, runs, 1, sharex=True, sharey=True)
    for axes, run in zip(panels, runs, strict=True):
        first, last = run.records[0].report.step, run.records[-1].report.step
        for kind, style in zip(curves[run.name], ("-", "--"), strict=True):
            for cf, (steps, values) in sorted(kind.items()):
                thinned = buckets(steps, values, first, last, _BUCKETS)
                line = _draw_curve(axes, thinned, cf, style)
                if style == "-" or cf not in lines:
                    lines[cf] = line
        epsilon = [record.status.get("epsilon", nan) for record in run.records[-1:]]
        remark = f"gain: {run.gain_kind}"
        if epsilon and isfinite(epsilon[0]):
            axes.axhline(epsilon[0], color="#b2182b", linewidth=1, linestyle=":")
            remark += f"; dotted: epsilon {epsilon[0]:g}"
        titled(axes, axes.get_title(loc="left"), remark)
        axes.set_ylim(0, 1.03)
        axes.margins(x=0.01)
        labelled(axes, y="gain")
    labelled(panels[-1], "step", "gain")
    cfs = sorted(lines)
    if len(cfs) > _LISTED:
        cfs = [cfs[round(i * (len(cfs) - 1) / (_LISTED - 1))] for i in range(_LISTED)]
    legend(figure, [lines[cf] for cf in cfs], [f"CF {cf_name(cf)}" for cf in cfs], columns=7)


def _draw_curve(axes: Any, thinned: Any, cf: float, style: str) -> Any:
    colour = cf_colour(cf)
    if style == "-":
        axes.fill_between(
            thinned.steps, thinned.low, thinned.high, color=colour, alpha=0.15, linewidth=0
        )
    return axes.plot(
        thinned.steps,
        thinned.mean,
        linestyle=style,
        color=colour,
        linewidth=1.3 if style == "-" else 0.9,
        marker="." if style == "-" else "",
        markersize=2.5,
    )[0]
