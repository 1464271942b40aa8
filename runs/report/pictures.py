"""The pictures of a report: what the scripts in `static/` draw, as JSON-like values.

The lines of a chart may have several horizontal axes, of which the reader chooses; the rows are
those of the dashboard. Values that are not known are None.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from adaptive import LinkSpec
from adaptive.timeline.records import scalars
from policies import DENSE
from runs import dashboard
from runs.dashboard.thin import Switch
from runs.dashboard.timeline import ACTIVE, LAYER, MOST, NUMBERS, SENT, TOTALS, Series, timeline
from runs.files import known
from runs.report.looks import looks
from runs.report.run import Run

DETAIL = 4
"""Times as many points as a screen of the dashboard, which would ask for more at a zoom."""

LOG_FROM = 2.5
"""Qualities whose largest is so many times the least are drawn on a logarithmic axis."""

SHARED = ("page", "colours", "draw", "pointer", "tip", "row", "rows")
OWN = ("chart", "report")
"""Scripts of the dashboard that a report has, too, and its own."""

_Place = Callable[[Run, int], float]
"""Where an evaluation after so many steps goes on the horizontal axis; nan: nowhere."""


@dataclass(frozen=True)
class Pictures:
    """Everything that a page draws. charts: by name. quality: names of charts and
    what can be said of them in words, in the order of the page."""

    charts: dict[str, Any]
    rows: list[dict[str, Any]]
    quality: list[tuple[str, str]]

    def as_json(self) -> str:
        """For a script element: no text of a user's can end it."""
        text = json.dumps({"charts": self.charts, "rows": self.rows}, allow_nan=False)
        return text.replace("<", "\\u003c")


def make_pictures(runs: Sequence[Run], networks: Sequence[LinkSpec]) -> tuple[Pictures, list[str]]:
    """All that the runs have the data for, and notes on those that they have not."""
    look = looks(runs)
    charts: dict[str, Any] = {}
    quality, notes = [], []
    for task in dict.fromkeys(run.task for run in runs if run.has_quality):
        some = [run for run in runs if run.task == task and run.has_quality]
        some.sort(key=lambda run: not run.is_dense)  # first, and so behind the others
        charts[f"quality {task}"] = _quality(some, networks, look)
        quality.append((f"quality {task}", _told(some)))
    drawn = [row for run in runs if (row := _timeline(run)) is not None]
    if not quality:
        notes.append("no run was evaluated: no quality to draw")
    if not drawn:
        notes.append("no run has a timeline: no CFs to draw")
    return Pictures(charts, drawn, quality), notes


def scripts() -> str:
    """All scripts as one: a page alone has no place from which one module could import another."""
    folders = [Path(dashboard.__file__).parent] * len(SHARED) + [Path(__file__).parent] * len(OWN)
    parts = [
        (folder / "static" / f"{name}.js").read_text("utf-8")
        for folder, name in zip(folders, (*SHARED, *OWN), strict=True)
    ]
    return re.sub(r"^import [^;]*;\n|^export ", "", "\n".join(parts), flags=re.M)


# -- quality -----------------------------------------------------------------------------------


def _quality(
    runs: Sequence[Run],
    networks: Sequence[LinkSpec],
    look: Mapping[str, tuple[int | None, int]],
) -> dict[str, Any]:
    links = {run.link or "no link emulated" for run in runs}
    clocks = any(run.config and run.config.fixed_clock is not None for run in runs)
    where = links.pop() if len(links) == 1 else "of different links: do not compare"
    measured = f"seconds {'by a fixed clock' if clocks else 'measured'} ({where})"
    places: list[tuple[str, _Place]] = [(measured, Run.seconds_by)]
    places += [
        (f"seconds on {network}, modelled", partial(Run.modelled_by, network=network))
        for network in networks
        if any(run.records for run in runs)
    ]
    places.append(("MB sent by a worker", lambda run, done: run.sent_by(done) / 1e6))
    places.append(("steps", lambda run, done: done))
    qualities = [q for run in runs for _, q in run.evaluations if isfinite(q)]
    goal = runs[0].goal
    sent = [run.sent_by(run.evaluations[-1][0]) for run in runs]
    sent = [nbytes for nbytes in sent if isfinite(nbytes)]
    spread = bool(sent) and 0 < min(sent) < max(sent) / 30  # of dense and of compressed runs
    return {
        "xs": [{"title": name, "log": spread and name.startswith("MB")} for name, _ in places],
        "lines": [
            {
                "name": f"{run.name}: {run.quality:.4g} at the end",
                "run": look[run.name][0],
                "dash": look[run.name][1] % 4,
                "x": [
                    _known(place(run, done) for done, _ in run.evaluations) for _, place in places
                ],
                "y": _known(quality for _, quality in run.evaluations),
            }
            for run in runs
        ],
        "y": {
            "title": f"{runs[0].quality_name} ({better(runs[0])} is better)",
            "log": 0 < LOG_FROM * min(qualities) < max(qualities),
        },
        "limit": {"value": goal, "title": f"target {goal:.4g}"} if isfinite(goal) else None,
    }


def better(run: Run) -> str:
    """Which of two qualities is."""
    return "higher" if run.higher_is_better else "lower"


def _told(runs: Sequence[Run]) -> str:
    run = runs[0]
    ends = "; ".join(f"{run.name} ends at {run.quality:.4g}" for run in runs)
    return f"Held-out {run.quality_name} ({better(run)} is better): {ends}"


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
                if tag in _KEPT or tag in own or NUMBERS.fullmatch(tag):
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

    def headline(self, run: str) -> str:
        return ""  # the page's first card has it

    def switches(self, run: str) -> list[Switch]:
        return [Switch(e.step, e.cf_before, e.cf, e.reason) for e in self._run.recorded.events]


_KEPT = (SENT, ACTIVE, *TOTALS.values())


def _timeline(run: Run) -> dict[str, Any] | None:
    return timeline(Records(run), run.name, run.quality_name, None, DETAIL)


def _known(values: Any) -> list[float | None]:
    return [known(value) for value in values]
