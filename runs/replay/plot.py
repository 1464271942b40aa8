"""The picture of a replay: what was sent, and what would have been."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

from runs.records import Recorded
from runs.replay.replay import Replayed
from runs.style import BLUE, GREY, cf_axis, legend, picture, steps


def draw_replay(recorded: Recorded, replayed: Replayed, path: Path, title: str) -> None:
    """Write the PNG. ImportError without matplotlib."""
    xs = [record.report.step for record in recorded.steps]
    theirs = [record.report.cf for record in recorded.steps]
    ours = [plan.send for plan in replayed.plans]
    with picture(path, title, heights=(3, 2), size=(9, 5.2)) as (above, below):
        for name, cfs, colour, style in (
            ("recorded", theirs, GREY, "-"),
            ("replayed", ours, BLUE, "--"),
        ):
            how = {"color": colour, "linestyle": style}
            steps(above, xs, cfs, name, **how)
            steps(below, xs, list(accumulate(map(replayed.costs.seconds, cfs))), name, **how)
        cf_axis(above, (*ours, *theirs))
        legend(above)
        below.set_ylabel("modelled seconds")
