"""Runs as TensorBoard's data provider knows them: local folders and remote ones alike."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tensorboard.data.provider import DataProvider, RunTagFilter

from runs.dashboard.series import ACTIVE, LAYER, MOST, SENT, Series
from runs.dashboard.thin import Switch

PLUGIN = "cf_timeline"
SWITCHES = f"{PLUGIN}/switches"
HEADLINE = f"{PLUGIN}/headline"
_ALL = 1_000_000  # more than TensorBoard keeps


class Reader:
    """What the dashboard asks of a data provider, for one request.

    ctx, experiment: of the request.
    """

    def __init__(self, provider: DataProvider, ctx: Any, experiment: str) -> None:
        self._provider = provider
        self._asked = {"ctx": ctx, "experiment_id": experiment}

    def runs(self) -> dict[str, list[str]]:
        """Scalar tags of each run that says which CF it sent, by name."""
        listed = self._provider.list_scalars(**self._asked, plugin_name="scalars")
        return {run: sorted(listed[run]) for run in sorted(listed) if SENT in listed[run]}

    def tags(self, run: str) -> list[str]:
        """Scalar tags of one run; empty if there is no such run, or none that sent a CF."""
        return self.runs().get(run, [])

    def scalars(self, run: str, tags: list[str]) -> dict[str, Series]:
        """The tags of a run that have points. Any program can write event files: a CF below 1, or
        seconds before the beginning, are left out."""
        read = self._provider.read_scalars(
            **self._asked,
            plugin_name="scalars",
            downsample=_ALL,
            run_tag_filter=RunTagFilter(runs=[run], tags=tags),
        )
        found = {tag: _series(points) for tag, points in read.get(run, {}).items() if points}
        for tag in found:
            if tag in (SENT, ACTIVE) or tag.startswith(LAYER):
                found[tag] = found[tag].between(0.0 if tag == ACTIVE else 1.0, MOST)
        return {tag: series for tag, series in found.items() if len(series.steps)}

    def switches(self, run: str) -> list[Switch]:
        """In order of their steps. What cannot be read is left out."""
        found = [_switch(point.step, point.numpy) for point in self._texts(run, SWITCHES)]
        return sorted((s for s in found if s is not None), key=lambda switch: switch.step)

    def headline(self, run: str) -> str:
        """Whether compression was worth it, as the run said last; "" if it did not."""
        points = self._texts(run, HEADLINE)
        if not points:
            return ""
        try:  # any program can write event files
            content = np.asarray(max(points, key=lambda point: point.step).numpy).item()
        except ValueError:
            return ""
        return content.decode("utf-8", "replace") if isinstance(content, bytes) else str(content)

    def _texts(self, run: str, tag: str) -> Sequence[Any]:
        read: Mapping[str, Mapping[str, Any]] = self._provider.read_tensors(
            **self._asked,
            plugin_name=PLUGIN,
            downsample=_ALL,
            run_tag_filter=RunTagFilter(runs=[run], tags=[tag]),
        )
        return read.get(run, {}).get(tag, ())


def _series(points: Any) -> Series:
    table = np.array([(p.step, p.wall_time, p.value) for p in points], dtype=np.float64)
    steps, wall, values = table[np.argsort(table[:, 0], kind="stable")].T
    return Series(steps, wall, values)


def _switch(step: int, content: Any) -> Switch | None:
    """Any program can write event files: this one may not be ours."""
    try:
        known = json.loads(np.asarray(content).item())
        before, cf = float(known["cf_before"]), float(known["cf"])
        is_one = 1 <= before <= MOST and 1 <= cf <= MOST
        return Switch(step, before, cf, str(known["reason"])) if is_one else None
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None
