"""The picture of a study: signal gain of each CF over training."""

from __future__ import annotations

from math import isfinite, nan
from pathlib import Path
from typing import Any

from policies.signal_gain import SignalGain
from runs.records import TIMELINE_FILE, read_records
from runs.study.options import Study

PLOT_FILE = "signal.png"

_COLOURS = ("#1f5fa8", "#e08214", "#5aae61", "#b2182b", "#7b3294")
_INK = "#444444"


def draw_signal(study: Study, path: Path) -> None:
    """Write the PNG: by the ranks' products (left) and the next step's (right), while dense is
    sent; as a policy sees them, first seed. ImportError without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    run = next(run for run in study.runs if run.label == "dense")
    records = read_records(run.config.folder / TIMELINE_FILE).steps
    figure = Figure(figsize=(8, 3), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, name in zip(panels, ("peers", "next step"), strict=True):
        gain = SignalGain()
        ratio = gain.peers if name == "peers" else gain.next
        lines: dict[float, list[float]] = {cf: [] for cf in study.cfs}
        for record in records:
            gain.observe(record.report)
            for cf in study.cfs:
                value = ratio.value(cf)
                lines[cf].append(value if ratio.clear and isfinite(value) else nan)
        for (cf, values), colour in zip(lines.items(), _COLOURS * 9, strict=False):
            axes.plot(values, color=colour, linewidth=1.4, label=f"CF {cf:g}")
        _style(axes, f"against {name}, where clear", study.drop)
    panels[0].set_ylabel("signal gain", fontsize=9, color=_INK)
    panels[0].legend(fontsize=8, frameon=False)
    figure.savefig(path)


def _style(axes: Any, title: str, drop: int) -> None:
    axes.axvline(drop, color=_INK, linewidth=0.8, linestyle=":")
    axes.set_title(title, fontsize=9, color=_INK, loc="left")
    axes.set_xlabel("step", fontsize=9, color=_INK)
    axes.set_ylim(-0.05, 1.05)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.tick_params(labelsize=8, colors=_INK)
