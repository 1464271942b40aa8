"""The pictures of a report: what the scripts in `static/` draw, as JSON-like values.

The lines of the chart may have several horizontal axes, of which the reader chooses; the rows are
those of the dashboard. Values that are not known are None.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from adaptive.timeline.records import scalars
from policies import DENSE
from runs import dashboard
from runs.dashboard.thin import Switch
from runs.dashboard.timeline import ACTIVE, LAYER, MOST, NUMBERS, SENT, TOTALS, Series, timeline
from runs.files import known
from runs.report.run import Run

STATIC = Path(__file__).parent / "static"
SHARED = Path(dashboard.__file__).parent / "static"

DETAIL = 4
"""Times as many points as a screen of the dashboard, which would ask for more at a zoom."""

LOG_FROM = 2.5
"""Qualities whose largest is so many times the least are drawn on a logarithmic axis."""

SCRIPTS = (
    *(SHARED / f"{name}.js" for name in ("page", "colours", "draw", "pointer", "tip", "row")),
    *(SHARED / "rows.js", STATIC / "chart.js", STATIC / "report.js"),
)
"""Scripts of the dashboard that a report has, too, and its own."""


@dataclass(frozen=True)
class Pictures:
    """Everything that a page draws. chart: quality against time; None: no run was evaluated.
    caption: what can be said of it in words."""

    chart: dict[str, Any] | None
    caption: str
    rows: list[dict[str, Any]]

    def as_json(self) -> str:
        """For a script element: no text of a user's can end it."""
        text = json.dumps({"chart": self.chart, "rows": self.rows}, allow_nan=False)
        return text.replace("<", "\\u003c")

    @staticmethod
    def styles() -> str:
        """Of the dashboard, and of the page."""
        return (SHARED / "style.css").read_text("utf-8") + (STATIC / "report.css").read_text(
            "utf-8"
        )


def make_pictures(runs: Sequence[Run]) -> Pictures:
    """All that the runs have the data for."""
    some = [run for run in runs if any(isfinite(quality) for _, quality in run.evaluations)]
    some.sort(key=lambda run: not run.is_dense)  # first, and so behind the others
    rows = [row for run in runs if (row := _timeline(run)) is not None]
    if not some:
        return Pictures(None, "", rows)
    ends = "; ".join(f"{run.name} ends at {run.quality:.4g}" for run in some)
    caption = f"Held-out {some[0].quality_name} ({better(some[0])} is better): {ends}"
    return Pictures(_quality(some, looks(runs)), caption, rows)


def scripts() -> str:
    """All scripts as one: a page alone has no place from which one module could import another."""
    parts = [path.read_text("utf-8") for path in SCRIPTS]
    return re.sub(r"^import [^;]*;\n|^export ", "", "\n".join(parts), flags=re.M)


def looks(runs: Sequence[Run]) -> dict[str, tuple[int | None, int]]:
    """Colour (None: that of dense) and dash of each run by its name: one colour for all runs of the
    same settings, a dash for each. The order of the runs does not matter: a run has the same
    colour in every picture of the same runs."""
    kinds: dict[object, list[Run]] = {}
    for run in sorted(runs, key=lambda run: run.name):
        kind = replace(run.config, seed=0, log_dir="", json=False) if run.config else run.name
        kinds.setdefault(kind, []).append(run)
    found: dict[str, tuple[int | None, int]] = {}
    coloured, grey = count(), count()
    for alike in kinds.values():
        colour = None if alike[0].is_dense else next(coloured)
        for i, run in enumerate(alike):
            found[run.name] = colour, next(grey) if colour is None else i
    return found


def better(run: Run) -> str:
    """Which of two qualities is."""
    return "higher" if run.higher_is_better else "lower"


# -- quality -----------------------------------------------------------------------------------


def _quality(runs: Sequence[Run], look: dict[str, tuple[int | None, int]]) -> dict[str, Any]:
    links = {run.link or "no link emulated" for run in runs}
    clocks = any(run.config and run.config.fixed_clock is not None for run in runs)
    where = links.pop() if len(links) == 1 else "of different links: do not compare"
    axes: dict[str, Callable[[Run, int], float]] = {
        f"seconds {'by a fixed clock' if clocks else 'measured'} ({where})": Run.seconds_by,
        "MB sent by a worker": lambda run, done: run.sent_by(done) / 1e6,
        "steps": lambda run, done: done,
    }
    qualities = [q for run in runs for _, q in run.evaluations if isfinite(q)]
    goal = runs[0].goal
    sent = [run.sent_by(run.evaluations[-1][0]) for run in runs]
    sent = [nbytes for nbytes in sent if isfinite(nbytes)]
    spread = bool(sent) and 0 < min(sent) < max(sent) / 30  # of dense and of compressed runs
    lines = []
    for run in runs:
        colour, dash = look[run.name]
        xs = [[known(axis(run, done)) for done, _ in run.evaluations] for axis in axes.values()]
        lines.append(
            {
                "name": f"{run.name}: {run.quality:.4g} at the end",
                "run": colour,
                "dash": dash % 4,
                "x": xs,
                "y": [known(quality) for _, quality in run.evaluations],
            }
        )
    return {
        "xs": [{"title": name, "log": spread and name.startswith("MB")} for name in axes],
        "lines": lines,
        "y": {
            "title": f"{runs[0].quality_name} ({better(runs[0])} is better)",
            "log": 0 < LOG_FROM * min(qualities) < max(qualities),
        },
        "limit": {"value": goal, "title": f"target {goal:.4g}"} if isfinite(goal) else None,
    }


# -- the dashboard's rows ----------------------------------------------------------------------


class Records:
    """A `Source` of the dashboard: one run's records, by the tags that the sink would write."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._points: dict[str, list[tuple[float, float, float]]] = {}
        layers: dict[str, float] = {}
        for record in run.records:
            step, cf = record.report.step, record.report.cf
            layers = {**dict.fromkeys(layers, cf), **record.layer_cfs}
            own = {f"{LAYER}{name}": value for name, value in layers.items()}
            for tag, value in (scalars(record) | own).items():
                if tag == ACTIVE:  # as the table has it, not by the record's own medians
                    value = run.seconds_by(step + 1)
                if tag in (SENT, ACTIVE, *TOTALS.values()) or tag in own or NUMBERS.fullmatch(tag):
                    self._add(tag, step, record.elapsed, value)
        if not run.records and run.history:  # plain DDP
            self._add(SENT, 0, 0.0, DENSE)
            self._add(SENT, run.trained - 1, run.seconds_by(run.trained), DENSE)
        for done, quality in run.evaluations:
            self._add(run.quality_name, done - 1, 0.0, quality)

    def _add(self, tag: str, step: int, elapsed: float, value: float) -> None:
        if isfinite(value):
            self._points.setdefault(tag, []).append((step, elapsed, min(value, MOST)))

    def tags(self, run: str) -> list[str]:
        return list(self._points) if SENT in self._points else []

    def scalars(self, run: str, tags: Sequence[str]) -> dict[str, Series]:
        return {
            tag: Series(*np.asarray(self._points[tag], dtype=np.float64).T)
            for tag in tags
            if tag in self._points
        }

    def rungs(self, run: str) -> Mapping[float, str]:
        header = self._run.recorded.header
        return {} if header is None else header.rungs

    def headline(self, run: str) -> str:
        return ""  # the page's first card has it

    def switches(self, run: str) -> list[Switch]:
        return [Switch(e.step, e.cf_before, e.cf, e.reason) for e in self._run.recorded.events]


def _timeline(run: Run) -> dict[str, Any] | None:
    return timeline(Records(run), run.name, run.quality_name, None, DETAIL)
