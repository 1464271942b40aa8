"""The pictures of a report: what the scripts in `static/` draw, as JSON-like values.

The lines of a chart may have several horizontal axes, of which the reader chooses; the rows are
those of the dashboard. Values that are not known are None.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, pairwise
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
from runs.densities import edges
from runs.files import known
from runs.progress import cf_name
from runs.report.run import Run

DETAIL = 4
"""Times as many points as a screen of the dashboard, which would ask for more at a zoom."""

BUCKETS, STRETCHES = 240, 12
"""Points of a gain's curve, each the mean of the steps in it: of one that was sent, and of one of
the shadow ladder, where single steps say little."""

LOG_FROM = 2.5
"""Qualities whose largest is so many times the least are drawn on a logarithmic axis."""

SHARED = ("page", "colours", "draw", "pointer", "tip", "row", "rows")
OWN = ("chart", "report")
"""Scripts of the dashboard that a report has, too, and its own."""

_Place = Callable[[Run, int], float]
"""Where an evaluation after so many steps goes on the horizontal axis; nan: nowhere."""


@dataclass(frozen=True)
class Pictures:
    """Everything that a page draws. charts: by name, as "gains RUN" and "densities RUN". quality:
    names of charts and what can be said of them in words, in the order of the page."""

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
    for run in runs:
        if lines := _gains(run):
            charts[f"gains {run.name}"] = {
                "xs": [{"title": "step", "log": False}],
                "lines": lines,
                "y": {"title": "gain", "log": False, "low": 0, "high": 1},
            }
        if run.densities:
            charts[f"densities {run.name}"] = _densities(run)
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


def looks(runs: Sequence[Run]) -> dict[str, tuple[int | None, int]]:
    """Colour (None: that of dense) and dash of each run by its name: one colour for all runs of the
    same settings, a dash for each."""
    kinds: dict[object, list[Run]] = {}
    for run in runs:
        kind = replace(run.config, seed=0, log_dir="", json=False) if run.config else run.name
        kinds.setdefault(kind, []).append(run)
    found: dict[str, tuple[int | None, int]] = {}
    coloured, grey = count(), count()
    for alike in kinds.values():
        colour = None if alike[0].is_dense else next(coloured)
        for i, run in enumerate(alike):
            found[run.name] = colour, next(grey) if colour is None else i
    return found


def _quality(
    runs: Sequence[Run],
    networks: Sequence[LinkSpec],
    look: Mapping[str, tuple[int | None, int]],
) -> dict[str, Any]:
    links = {run.link or "no link emulated" for run in runs}
    clocks = any(run.config and run.config.fixed_clock is not None for run in runs)
    where = links.pop() if len(links) == 1 else "of different links: do not compare"
    measured = f"seconds {'by a fixed clock' if clocks else 'measured'} ({where})"
    places: list[tuple[str, _Place]] = [
        (f"seconds on {network}, modelled", partial(Run.modelled_by, network=network))
        for network in networks
        if any(run.records for run in runs)
    ]
    # The runs' own link comes first, and then what they took on it.
    places.insert(1 if any(run.link for run in runs) else 0, (measured, Run.seconds_by))
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
            "title": runs[0].quality_name,
            "log": 0 < LOG_FROM * min(qualities) < max(qualities),
        },
        "limit": {"value": goal, "title": f"target {goal:.4g}"} if isfinite(goal) else None,
    }


def _told(runs: Sequence[Run]) -> str:
    run = runs[0]
    better = "higher" if run.higher_is_better else "lower"
    ends = "; ".join(f"{run.name} ends at {run.quality:.4g}" for run in runs)
    return f"Held-out {run.quality_name} ({better} is better): {ends}"


# -- gains -------------------------------------------------------------------------------------


def _gains(run: Run) -> list[dict[str, Any]]:
    """The part of the gradient that got through at each CF that was sent or probed; dashed: that
    would at each, if it were sent all the time, from the shadow ladder. Both by the definition that
    the policy decides on."""
    found: dict[tuple[float, int], list[tuple[int, float, float]]] = {}
    for record in run.records:
        report = record.report
        measured = {cf: report.gain(cf, run.gain_kind) for cf in report.measurements}
        if isfinite(record.gain):
            measured[report.cf] = record.gain  # what decides, as the policy averages it
        ladder, whole = report.steady_gain, 1.0
        if run.gain_kind == "signal":
            ladder, whole = report.peers, report.peers_total
        for dash, gains, of in ((0, measured, 1.0), (1, ladder, whole)):
            for cf, gain in gains.items():
                if isfinite(gain) and isfinite(of) and cf != DENSE:
                    found.setdefault((cf, dash), []).append((report.step, gain, of))
    return [
        {
            "name": f"CF {cf_name(cf)}{', if sent all the time' if dash else ''}",
            "cf": cf,
            "dash": dash,
            **curve(points, run.trained, STRETCHES if dash else BUCKETS),
        }
        for (cf, dash), points in sorted(found.items())
    ]


def curve(
    points: Sequence[tuple[int, float, float]], trained: int, most: int
) -> dict[str, list[Any]]:
    """Ratios of means over at most `most` stretches of a run, with gaps where nothing is known.
    points: (step, numerator, denominator)."""
    each = -(-trained // most)
    sums: dict[int, list[float]] = {}
    for step, part, whole in points:
        total = sums.setdefault(step // each, [0.0, 0.0, 0.0, 0.0])
        for i, value in enumerate((step, part, whole, 1)):
            total[i] += value
    x: list[float | None] = []
    y: list[float | None] = []
    last = min(sums)
    for at, (place, part, whole, many) in sorted(sums.items()):
        gap = [None] if at > last + 1 else []
        x += [*gap, float(f"{place / many:.5g}")]
        y += [*gap, float(f"{min(1.0, max(0.0, part / whole)):.5g}") if whole > 0 else None]
        last = at
    return {"x": [x], "y": y}


# -- densities ---------------------------------------------------------------------------------


def _densities(run: Run) -> dict[str, Any]:
    """Histograms of the magnitudes of gradient values in the last step that has some (Harris 2020),
    negative and positive ones together."""
    found, at = run.densities[-1], edges()
    lines = []
    for name, run_colour, one in (("before", None, found.before), ("after", 0, found.after)):
        counts = [a + b for a, b in zip(one.negative, one.positive, strict=True)]
        lines.append(
            {
                "name": f"{name} compression, {one.zeros / max(1, one.values):.1%} of them 0",
                "run": run_colour,
                "dash": 0,
                "x": [_rounded((a * b) ** 0.5 for a, b in pairwise(at))],
                "y": [count / one.values if count else None for count in counts],
            }
        )
    return {
        "xs": [{"title": "magnitude", "log": True}],
        "lines": lines,
        "y": {"title": f"share of gradient values, step {found.step}", "log": True},
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


def _rounded(values: Iterable[float]) -> list[float]:
    return [float(f"{value:.5g}") for value in values]
