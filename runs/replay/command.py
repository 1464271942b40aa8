"""The replay command."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from runs.parser import UsageError
from runs.replay.options import HELP, OPTIONS

__all__ = ["HELP", "OPTIONS", "main"]


def main(given: dict[str, Any]) -> int:
    """Replay; returns the exit code."""
    # torch is imported late, so that help and wrong options need not wait for it.
    from runs.replay.make import make_config_for, start_policy
    from runs.replay.replay import replay
    from runs.replay.result import draw_replay, make_result, make_table
    from runs.replay.source import read_source
    from runs.tables import show

    timeline = given.pop("timeline")
    as_json, plot = bool(given.pop("json", False)), given.pop("plot", None)
    source = read_source(timeline)
    config = make_config_for(source, given)
    replayed = replay(start_policy(config, source), source.recorded, told=True)
    result = make_result(source, config, replayed)
    name = result["policy"]
    folder = source.path if source.path.is_dir() else source.path.parent
    path = folder / f"replay-{name}.png" if plot is None else Path(str(plot))
    how = "as recorded" if result["identical"] else "a model"
    title = f"{name} replayed over {folder.name or source.path.name} ({how})"
    try:
        draw_replay(source.recorded, replayed, path, title)
        result["plot"] = str(path)
    except ImportError:
        result["notes"].append("no plot: matplotlib is not installed")
    except (OSError, ValueError) as error:
        if plot is not None:
            raise UsageError(f"--plot {plot}: cannot be written: {error}") from error
        result["notes"].append(f"no plot, {path} cannot be written: {error}")
    show(sys.stderr if as_json else sys.stdout, *make_table(result))
    if as_json:
        print(json.dumps(result, allow_nan=False))
    elif "plot" in result:
        print(f"plot in {path}")
    return 0
