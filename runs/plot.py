"""The picture of a run: which CF was sent when, the gain it had, and the bytes it took."""

from __future__ import annotations

from math import isfinite, nan
from pathlib import Path
from typing import Any

from adaptive import StepRecord
from policies.base import DENSE, GainKind
from runs.files import not_a_link
from runs.progress import cf_name
from runs.records import Recorded, planned

PLOT_FILE = "cf_timeline.png"

_SENT, _CANDIDATE, _FLOOR, _LIMIT, _INK = "#1f5fa8", "#e08214", "#5aae61", "#b2182b", "#444444"


def draw_timeline(recorded: Recorded, path: Path, title: str, gain: GainKind = "gradient") -> None:
    """Write the PNG. ImportError without matplotlib; ValueError if there are no steps.

    gain: the kind that the policy decided on.
    """
    if not recorded.steps:
        raise ValueError("recorded must have steps to draw")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6.4), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    cf, gains, traffic = figure.subplots(3, 1, sharex=True, height_ratios=(3, 2, 1.2), squeeze=True)
    figure.suptitle(title, fontsize=11, color=_INK, x=0.01, ha="left")
    _draw_cf(cf, recorded)
    _draw_gain(gains, recorded.steps, gain)
    _draw_bytes(traffic, recorded)
    for axes in (cf, gains, traffic):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.tick_params(labelsize=8, colors=_INK)
        axes.margins(x=0.01)
    traffic.set_xlabel("step", fontsize=9, color=_INK)
    figure.savefig(not_a_link(path))


def _draw_cf(axes: Any, recorded: Recorded) -> None:
    steps = _numbers(recorded.steps)
    axes.set_yscale("log")
    for name, colour, style in (("candidate", _CANDIDATE, "--"), ("floor", _FLOOR, ":")):
        values = [planned(record, name) for record in recorded.steps]
        if any(map(isfinite, values)):
            axes.step(
                steps,
                values,
                where="post",
                color=colour,
                linestyle=style,
                linewidth=1.3,
                label=name,
            )
    sent = [record.report.cf for record in recorded.steps]
    axes.step(steps, sent, where="post", color=_SENT, linewidth=2, label="sent")
    switches = [event for event in recorded.events if event.cf != event.cf_before]
    if switches:
        axes.plot(
            [e.step for e in switches],
            [e.cf for e in switches],
            "o",
            color=_SENT,
            markersize=4,
            markerfacecolor="white",
            label="switch",
        )
    wanted = {planned(record, n) for record in recorded.steps for n in ("candidate", "floor")}
    ticks = sorted({DENSE, *sent, *filter(isfinite, wanted)})
    if len(ticks) <= 9:
        axes.set_yticks(ticks, [cf_name(cf) for cf in ticks])
        axes.minorticks_off()
    axes.set_ylim(0.8, 1.4 * max(2.0, *ticks))
    _label(axes, "compression factor", columns=4)


def _draw_gain(axes: Any, records: list[StepRecord], kind: GainKind) -> None:
    steps = _numbers(records)
    axes.plot(
        steps,
        [record.gain for record in records],
        ".",
        color=_SENT,
        alpha=0.35,
        markersize=3,
        label="of what was sent",
    )
    for name, colour, style in (("candidate", _CANDIDATE, "--"), ("floor", _FLOOR, ":")):
        values = [record.status.get(f"gain_{name}", nan) for record in records]
        if any(map(isfinite, values)):
            axes.plot(
                steps,
                values,
                color=colour,
                linestyle=style,
                linewidth=1.3,
                label=f"{name}, averaged",
            )
    epsilon = _finite(records, "epsilon")
    if epsilon:
        axes.axhline(epsilon[-1], color=_LIMIT, linewidth=1, label=f"epsilon {epsilon[-1]:g}")
    axes.set_ylim(0, 1.05)
    _label(axes, f"gain ({kind})", columns=4)


def _draw_bytes(axes: Any, recorded: Recorded) -> None:
    share = [
        100 * record.report.wire_bytes / record.report.dense_wire_bytes
        if record.report.dense_wire_bytes
        else nan
        for record in recorded.steps
    ]
    steps = _numbers(recorded.steps)
    axes.fill_between(steps, share, step="post", color=_SENT, alpha=0.25, linewidth=0)
    axes.step(steps, share, where="post", color=_SENT, linewidth=1)
    axes.set_ylim(0, 1.1 * max([100.0, *filter(isfinite, share)]))
    _label(axes, "bytes sent,\n% of dense", columns=0)
    axes.set_title(
        f"whole run: wire factor {recorded.wire_factor:.1f}", fontsize=8, color=_INK, loc="right"
    )


def _label(axes: Any, text: str, columns: int) -> None:
    axes.set_ylabel(text, fontsize=9, color=_INK)
    if columns:
        axes.legend(
            loc="lower right",
            bbox_to_anchor=(1, 1),
            ncols=columns,
            fontsize=8,
            frameon=False,
            borderaxespad=0.1,
        )


def _numbers(records: list[StepRecord]) -> list[int]:
    return [record.report.step for record in records]


def _finite(records: list[StepRecord], name: str) -> list[float]:
    return [v for record in records if isfinite(v := record.status.get(name, nan))]
