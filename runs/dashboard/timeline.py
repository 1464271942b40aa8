"""One run's row of the dashboard, as JSON-like values small enough for any run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from policies import DENSE
from runs.dashboard.thin import (
    Floats,
    Switch,
    changes,
    evenly,
    held,
    held_within,
    longest,
    marks,
)
from runs.metric import higher_is_better

SENT = "cf/sent"
ACTIVE = "time/total"
"""Seconds of steps since the run began; in runs of before it was written, wall time stands in."""

TOTALS = {"sent": "bytes/sent_total", "factor": "bytes/wire_factor_total"}
"""Since the run began: bytes sent by a worker, and how many times more they would be dense."""

LAYER = "cf_layer/"
NUMBERS = re.compile(
    r"cf/(candidate|floor)|gain/.+|throughput/(t_sys|t_comp)|bytes/(sent|wire_factor)|time/step"
)
"""Tags of what a hover shows, besides the CF."""

QUALITY = re.compile(r"loss|quality|perplexity|\bppl\b|error_rate|top1", re.I)
"""In a tag that may be a quality, as may those of which more is better."""

_OWN = re.compile(r"(cf|cf_layer|gain|gain_of_step|throughput|bytes|time|policy|gradient|final)/")

MOST = 2.0**53
"""No CF is larger, and no run takes as many seconds."""

POINTS = 400
"""Of each curve."""

PIECES = 800
"""Of the band, at most."""

MARKS = 300
"""Switches shown, at most; each tells how many more there were beside it."""

CELLS = 20_000
"""Of a heat map, at most."""

REASON = 400
"""Characters of a reason, and of a headline."""


@dataclass(frozen=True)
class Series:
    """A scalar over steps, ascending. wall: seconds since the epoch."""

    steps: Floats
    wall: Floats
    values: Floats

    def between(self, low: float, high: float) -> Series:
        """Without the points whose values lie elsewhere, or are not finite."""
        good = (self.values >= low) & (self.values <= high)
        return Series(self.steps[good], self.wall[good], self.values[good])


class Source(Protocol):
    """Where a row's data come from: TensorBoard's event files, or the records of a run."""

    def tags(self, run: str) -> list[str]:
        """Scalar tags of one run; empty if there is no such run, or none that sent a CF."""

    def scalars(self, run: str, tags: list[str]) -> dict[str, Series]:
        """The tags of a run that have points."""

    def switches(self, run: str) -> Sequence[Switch]:
        """In order of their steps."""

    def rungs(self, run: str) -> Mapping[float, str]:
        """Names of the compressors at CFs that are rungs, as far as they are known."""

    def headline(self, run: str) -> str:
        """Whether compression was worth it, as the run said last; "" if it did not."""


def quality_tags(tags: list[str]) -> list[str]:
    """Those that may be a quality (loss, accuracy, ...), the likeliest first."""
    found = [tag for tag in tags if QUALITY.search(tag) or higher_is_better(tag)]
    found = [tag for tag in found if not _OWN.match(tag)]
    return sorted(found, key=lambda tag: (tag != "eval/quality", "loss" in tag.lower(), tag))


def timeline(
    source: Source,
    run: str,
    quality: str | None,
    span: tuple[float, float] | None,
    detail: int = 1,
) -> dict[str, Any] | None:
    """Everything that one row shows; None if there is no such run.

    quality: tag to draw under it; None takes the likeliest. span: first and last step to show
    (all). Where nothing is known, values are None. Seconds are those of steps, from the run's first
    record on: pauses do not count, nor the time until a run was resumed. detail: so many times the
    points, for who cannot ask again for a part.
    """
    tags = source.tags(run)
    if not tags:
        return None
    candidates = quality_tags(tags)
    quality = quality if quality in tags else next(iter(candidates), None)
    layers = [tag for tag in tags if tag.startswith(LAYER)]
    numbers = [tag for tag in tags if NUMBERS.fullmatch(tag)]
    wanted = [SENT, ACTIVE, *TOTALS.values(), *numbers, *layers]
    read = source.scalars(run, wanted + ([quality] if quality else []))
    if SENT not in read:
        return None
    clock = _Clock(read[SENT], read.get(ACTIVE))
    switches = source.switches(run)
    changed_at, changed_to = changes(read[SENT].steps, read[SENT].values, switches)
    first, last = float(changed_at[0]), float(max(read[SENT].steps[-1], changed_at[-1]))
    low, high = (first, last) if span is None else (max(span[0], first), min(span[1], last))
    high = max(low, high)
    at, to = _within(changed_at, changed_to, low, high)
    band_at, band_cf = longest(at, to, high + 1, detail * PIECES)
    inside = [s for s in switches if low <= s.step <= high]
    shown = marks(inside, low, high + 1, detail * MARKS)
    grid = read[SENT].steps
    grid = grid[(grid >= low) & (grid <= high)]
    grid = grid[evenly(len(grid), detail * POINTS)]
    since = held(changed_at, changed_at, grid)  # a gain at another CF says nothing of this one
    columns = {
        tag: held_within(read[tag].steps, read[tag].values, grid, since)
        for tag in numbers
        if tag in read
    }
    return {
        "run": run,
        "headline": source.headline(run)[:REASON],
        "rungs": {f"{cf:g}": name for cf, name in source.rungs(run).items()},
        "dense": bool((changed_to == DENSE).all()),
        "first": first,
        "last": last,
        "seconds": float(clock(last)),
        "from": low,
        "to": high,
        "most": max([*changed_to, *(v for tag in layers if tag in read for v in read[tag].values)]),
        "band": {**_axis(band_at, clock), "cf": _plain(band_cf), "end": _point(high + 1, clock)},
        "switches": {
            **_axis(np.array([s.step for s in shown], dtype=np.float64), clock),
            "before": [s.cf_before for s in shown],
            "cf": [s.cf for s in shown],
            "others": [s.others for s in shown],
            "reason": [s.reason[:REASON] for s in shown],
        },
        "numbers": {
            **_axis(grid, clock),
            "values": {tag: _plain(column) for tag, column in columns.items()},
        },
        "totals": _totals(read, changed_at, grid),
        "quality": _quality(quality, read, clock, low, high),
        "qualities": candidates,
        "layers": _layers(
            {tag: read[tag] for tag in layers if tag in read}, clock, low, high, at, to
        ),
    }


class _Clock:
    """Seconds of steps since the run's first record, by step. active: these; None: wall time."""

    def __init__(self, sent: Series, active: Series | None) -> None:
        self._steps = sent.steps if active is None else active.steps
        seconds = sent.wall if active is None else active.values
        seconds = np.clip(np.nan_to_num(seconds), -MOST, MOST)
        self._seconds = np.maximum.accumulate(seconds - seconds[0])

    def __call__(self, steps: float | Floats) -> Any:
        return np.interp(steps, self._steps, self._seconds)


def _within(at: Floats, to: Floats, low: float, high: float) -> tuple[Floats, Floats]:
    """The pieces between low and high; the first begins at low."""
    begin = max(int(np.searchsorted(at, low, side="right")) - 1, 0)
    end = max(int(np.searchsorted(at, high, side="right")), begin + 1)
    cut = at[begin:end].copy()
    cut[0] = max(cut[0], low)
    return cut, to[begin:end]


def _totals(read: dict[str, Series], changed_at: Floats, grid: Floats) -> dict[str, Any]:
    """Bytes and switches from the run's beginning to each step of the grid."""
    columns = {
        name: np.interp(grid, read[tag].steps, read[tag].values)
        if tag in read
        else np.full(len(grid), np.nan)
        for name, tag in TOTALS.items()
    }
    columns["dense"] = columns["sent"] * columns.pop("factor")
    columns["moves"] = np.searchsorted(changed_at[1:], grid, side="right").astype(np.float64)
    return {name: _plain(column) for name, column in columns.items()}


def _quality(
    tag: str | None, read: dict[str, Series], clock: _Clock, low: float, high: float
) -> dict[str, Any] | None:
    if tag is None or tag not in read:
        return None
    series = read[tag]
    # With the points before and after, so that the curve goes to the edges of what is shown.
    first = max(int(np.searchsorted(series.steps, low)) - 1, 0)
    inside = np.arange(first, int(np.searchsorted(series.steps, high, side="right")) + 1)
    inside = inside[inside < len(series.steps)]
    inside = inside[evenly(len(inside), POINTS)]
    return {
        "tag": tag,
        **_axis(series.steps[inside], clock),
        "values": _plain(series.values[inside]),
    }


def _layers(
    found: dict[str, Series],
    clock: _Clock,
    low: float,
    high: float,
    at: Floats,
    to: Floats,
) -> dict[str, Any] | None:
    """Columns of equal CFs, layer by layer; before a layer's first own CF it has the model's."""
    if not found:
        return None
    names = sorted(found, key=_natural)
    cuts = np.unique(np.concatenate([at, *(series.steps for series in found.values())]))
    cuts = cuts[(cuts >= low) & (cuts <= high)]
    cuts = np.union1d(cuts, [low])
    cuts = cuts[evenly(len(cuts), max(20, CELLS // len(names)))]
    model = held(at, to, cuts)
    rows = []
    for name in names:
        own = held(found[name].steps, found[name].values, cuts)
        rows.append(_plain(np.where(np.isnan(own), model, own)))
    return {
        "names": [name.removeprefix(LAYER) for name in names],
        **_axis(cuts, clock),
        "end": _point(high + 1, clock),
        "cf": rows,
    }


def _natural(name: str) -> list[tuple[int, str]]:
    """A key by which block2 comes before block10."""
    return [
        (int(part), "") if part.isdecimal() and len(part) < 20 else (-1, part)
        for part in re.split(r"(\d+)", name)
    ]


def _axis(steps: Floats, clock: _Clock) -> dict[str, Any]:
    return {"step": _plain(steps), "second": _plain(clock(steps))}


def _point(step: float, clock: _Clock) -> dict[str, float]:
    return {"step": float(step), "second": float(clock(step))}


def _plain(values: Floats) -> list[float | None]:
    """Six digits are more than a screen shows, and half of the bytes."""
    return [float(f"{v:.7g}") if np.isfinite(v) else None for v in values.tolist()]
