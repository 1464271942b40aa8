"""The picture of a replay: what was sent, and what would have been."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

from runs.files import not_a_link
from runs.progress import cf_name
from runs.records import Recorded
from runs.replay.replay import Replayed

_RECORDED, _REPLAYED, _INK = "#999999", "#1f5fa8", "#444444"


def draw_replay(recorded: Recorded, replayed: Replayed, path: Path, title: str) -> None:
    """Write the PNG. ImportError without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.2), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    figure.suptitle(title, fontsize=11, color=_INK, x=0.01, ha="left")
    steps = [record.report.step for record in recorded.steps]
    theirs = [record.report.cf for record in recorded.steps]
    ours = [plan.send for plan in replayed.plans]
    costs = replayed.costs
    for axes, kind in ((above, "cf"), (below, "seconds")):
        for name, cfs, colour, style in (
            ("recorded", theirs, _RECORDED, "-"),
            ("replayed", ours, _REPLAYED, "--"),
        ):
            values = cfs if kind == "cf" else list(accumulate(map(costs.seconds, cfs)))
            axes.step(steps, values, style, where="post", color=colour, linewidth=1.8, label=name)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.tick_params(labelsize=8, colors=_INK)
        axes.margins(x=0.01)
    above.set_yscale("log")
    ticks = sorted({1.0, *ours, *theirs})
    if len(ticks) <= 9:
        above.set_yticks(ticks, [cf_name(cf) for cf in ticks])
        above.minorticks_off()
    above.set_ylim(0.8, 1.4 * max(2.0, *ours, *theirs))
    above.set_ylabel("compression factor", fontsize=9, color=_INK)
    above.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, fontsize=8, frameon=False)
    below.set_ylabel("modelled seconds", fontsize=9, color=_INK)
    below.set_xlabel("step", fontsize=9, color=_INK)
    figure.savefig(not_a_link(path))
