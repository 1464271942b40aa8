"""The replay command: its options, and what it does."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional

from runs.needs import check_installed
from runs.option_types import Count, Pair, metavar, spec
from runs.parser import UsageError, options
from runs.policy_expression import Typed
from runs.settings import PolicyArguments

HELP = """\
Run a policy over a recorded run: which CFs it would have chosen, and why. Nothing is trained.

examples:
  python -m runs replay logs/demo
      the recorded policy on its own record: the decisions are the same, bit for bit
  python -m runs replay mine.jsonl
      the same of a script of your own: AdaptiveCompressor(timeline=JSONLTimeline("mine.jsonl"))
  python -m runs replay logs/demo --policy "GraVAC(epsilon=0.5, window=100)"
  python -m runs replay logs/demo/timeline.jsonl --policy accordion --cf-range 10 200 --json

As long as the policy plans what was recorded, it sees what was recorded. From then on it sees a
model: gains of each CF as last measured (interpolated in log CF between those measured), times
from a + b x bytes + compress fitted to the CFs that were really sent, bytes in proportion. The
gradients stay those of the recorded run, whatever CF the policy chooses: the model says what the
policy would have decided, not how well the network would have trained. A record that measured many
CFs tells most (train --policy "Fixed(probe=(10, 40, 100, 1000))"). A policy that reads each layer
("Accordion(per_layer=True)") is replayed on records of the same readings only."""


@dataclass(frozen=True, kw_only=True)
class Replaying:
    """What to replay, and which policy."""

    timeline: Annotated[Positional[str], metavar("TIMELINE")]
    """Log folder or timeline file."""
    policy: Annotated[str | None, spec("POLICY", Typed)] = None
    """As of train (the recorded one, with the recorded settings)."""
    cf_range: Pair | None = None
    """Smallest and largest CF beside dense (the recorded run's, else 10 1000)."""
    base: Annotated[str | None, metavar("NAME")] = None
    """Compressor (the recorded run's, else topk)."""
    workers: Count | None = None
    """Of the run, if nothing recorded tells (2)."""


@dataclass(frozen=True, kw_only=True)
class Output:
    """What is kept."""

    plot: Annotated[str | None, metavar("FILE")] = None
    """The picture (replay-POLICY.png beside the timeline)."""
    json: bool = False
    """Print the result as JSON on stdout."""


OPTIONS = {
    "replay": options(Replaying),
    "policy": options(PolicyArguments),
    "output": options(Output),
}


def main(given: dict[str, Any]) -> int:
    """Replay; returns the exit code."""
    plot = given.pop("plot", None)
    if plot is not None:
        check_installed("plots", f"--plot {plot}")
    # torch is imported late, so that help and wrong options need not wait for it.
    from runs.replay.make import make_config_for, start_policy
    from runs.replay.replay import replay
    from runs.replay.result import draw_replay, make_result, make_table
    from runs.replay.source import read_source
    from runs.tables import show

    timeline = given.pop("timeline")
    as_json = bool(given.pop("json", False))
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
