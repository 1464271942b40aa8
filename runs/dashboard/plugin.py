"""What TensorBoard loads: the entry point `tensorboard_plugins` names `Loader`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tensorboard import errors, plugin_util
from tensorboard.backend.http_util import Respond
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import FrontendMetadata, TBContext, TBLoader, TBPlugin
from werkzeug.wrappers import Request, Response

from runs.dashboard.reader import PLUGIN, Reader
from runs.dashboard.series import quality_tags
from runs.dashboard.timeline import timeline

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
