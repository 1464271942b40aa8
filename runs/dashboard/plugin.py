"""What TensorBoard loads: the entry point `tensorboard_plugins` names `Loader`. Runs are read as
TensorBoard's data provider knows them, from local folders and remote ones alike."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tensorboard import errors, plugin_util
from tensorboard.backend.http_util import Respond
from tensorboard.context import RequestContext
from tensorboard.data.provider import DataProvider, RunTagFilter
from tensorboard.plugins.base_plugin import FrontendMetadata, TBContext, TBLoader, TBPlugin
from werkzeug.wrappers import Request, Response

from runs.dashboard.thin import Switch
from runs.dashboard.timeline import ACTIVE, LAYER, MOST, SENT, Series, quality_tags, timeline

PLUGIN = "cf_timeline"
SWITCHES = f"{PLUGIN}/switches"
HEADLINE = f"{PLUGIN}/headline"
_ALL = 1_000_000  # more than TensorBoard keeps

NAME = 40
"""Characters of a compressor's name."""

STATIC = Path(__file__).parent / "static"
TYPES = {".js": "application/javascript", ".css": "text/css"}


class CFTimelinePlugin(TBPlugin):
    """The "CF Timeline" tab: its page, and two questions to ask.

    /runs: the runs that have a CF, and which of their scalars may be a quality.
    /timeline?run=NAME[&quality=TAG][&from=STEP&to=STEP]: one run's row.
    """

    plugin_name = PLUGIN

    def __init__(self, context: TBContext) -> None:
        super().__init__(context)
        self._provider = context.data_provider

    def frontend_metadata(self) -> FrontendMetadata:
        return FrontendMetadata(es_module_path="/index.js", tab_name="CF Timeline")

    def is_active(self) -> bool:
        """Whether any run has a CF."""
        return bool(Reader(self._provider, RequestContext(), "").runs())

    def get_plugin_apps(self) -> dict[str, Any]:
        """Routes: the files of the page, each by its name, and the questions."""
        files = {f"/{path.name}": _file(path) for path in STATIC.iterdir() if path.suffix in TYPES}
        return {**files, "/runs": self._answer(_runs), "/timeline": self._answer(_timeline)}

    def _answer(self, question: Callable[[Reader, Request], Any]) -> Any:
        @Request.application
        def app(request: Request) -> Response:
            environ = request.environ
            experiment = plugin_util.experiment_id(environ)
            reader = Reader(self._provider, plugin_util.context(environ), experiment)
            text = json.dumps(question(reader, request), allow_nan=False, separators=(",", ":"))
            return Respond(request, text, "application/json")

        return app


class Loader(TBLoader):
    """Makes the plugin, and has TensorBoard keep all of its switches: of a kind of data that it
    does not know it keeps ten."""

    def fix_flags(self, flags: Any) -> None:
        flags.samples_per_plugin.setdefault(PLUGIN, 0)  # 0: all

    def load(self, context: TBContext) -> CFTimelinePlugin:
        return CFTimelinePlugin(context)


def _runs(reader: Reader, request: Request) -> dict[str, Any]:
    return {
        "runs": [{"name": run, "qualities": quality_tags(t)} for run, t in reader.runs().items()]
    }


def _timeline(reader: Reader, request: Request) -> dict[str, Any]:
    run = request.args.get("run", "")
    if not run:
        raise errors.InvalidArgumentError("run must name a run")
    span = _span(request.args.get("from"), request.args.get("to"))
    row = timeline(reader, run, request.args.get("quality"), span)
    if row is None:
        raise errors.NotFoundError(f"run must be one with a CF, got {run!r}")
    return row


def _span(first: str | None, last: str | None) -> tuple[float, float] | None:
    if first is None and last is None:
        return None
    try:
        low, high = float(first or 0), float(last or "inf")
    except ValueError:
        low = high = math.nan
    if not (low <= high and math.isfinite(low)):
        raise errors.InvalidArgumentError(
            f"from and to must be steps, from <= to, got {first!r} and {last!r}"
        )
    return low, high


def _file(path: Path) -> Any:
    @Request.application
    def app(request: Request) -> Response:
        return Respond(request, path.read_bytes(), TYPES[path.suffix])

    return app


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

    def rungs(self, run: str) -> dict[float, str]:
        """Names of the compressors at CFs of the run's switches. What cannot be read is left
        out."""
        found: dict[float, str] = {}
        for point in self._texts(run, SWITCHES):
            try:
                named = json.loads(np.asarray(point.numpy).item())["rungs"].items()
                found |= {float(cf): str(name)[:NAME] for cf, name in named}
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                continue
        return found

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
