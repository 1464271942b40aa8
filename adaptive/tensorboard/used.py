"""Which CFs a run used and what each was worth: a histogram, and a figure of T_comp against CF."""

from __future__ import annotations

from io import BytesIO
from math import isfinite
from typing import Any

from adaptive.tensorboard.summaries import histogram_summary, image_summary
from adaptive.timeline import StepRecord

EVERY = 200
"""Steps in a histogram; the last one of a run holds the rest."""


class UsedCFs:
    """Counts steps by CF. The numbers of the figure are means over all steps at a CF."""

    def __init__(self) -> None:
        self._recent: dict[float, int] = {}
        self._steps = 0
        self._sums: dict[float, tuple[float, int]] = {}

    def add(self, record: StepRecord) -> None:
        cf = record.report.cf
        self._recent[cf] = self._recent.get(cf, 0) + 1
        self._steps += 1
        if isfinite(record.t_comp):
            total, steps = self._sums.get(cf, (0.0, 0))
            self._sums[cf] = (total + record.t_comp, steps + 1)

    @property
    def due(self) -> bool:
        return self._steps >= EVERY

    def histogram(self) -> Any:
        """Of the steps since the last one, as a summary, on a decimal-logarithmic axis; None if
        there were none."""
        recent, self._recent, self._steps = self._recent, {}, 0
        return histogram_summary("cf/log10_used", recent) if recent else None

    def figure(self) -> Any:
        """Mean T_comp against CF, as a summary; None if it is not known or without matplotlib."""
        means = {cf: total / steps for cf, (total, steps) in sorted(self._sums.items())}
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
        except ImportError:
            return None
        if not means:
            return None
        figure = Figure(figsize=(6, 3.6), dpi=110, layout="constrained")
        canvas = FigureCanvasAgg(figure)
        axes = figure.subplots()
        axes.set_xscale("log")
        axes.plot(list(means), list(means.values()), "o-", color="#2166ac")
        for cf, mean in means.items():
            steps = self._sums[cf][1]
            axes.annotate(
                f"{steps} steps",
                (cf, mean),
                textcoords="offset points",
                xytext=(0, 7),
                ha="center",
                fontsize=8,
            )
        axes.set_xticks(list(means), [f"{cf:g}" for cf in means], minor=False)
        axes.set_xticks([], minor=True)
        axes.margins(x=0.08, y=0.15)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("CF (1: dense)")
        axes.set_ylabel("mean T_comp")
        axes.spines[["top", "right"]].set_visible(False)
        png = BytesIO()
        figure.savefig(png, format="png")
        width, height = canvas.get_width_height()
        return image_summary("throughput/t_comp_by_cf", png.getvalue(), width, height)
