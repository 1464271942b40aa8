"""The options of `python -m runs replay`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tyro.conf import Positional

from runs.option_types import Count, Pair, metavar, spec
from runs.parser import options
from runs.policy_expression import Typed
from runs.settings import PolicyArguments

HELP = """\
Run a policy over a recorded run: which CFs it would have chosen, and why. Nothing is trained.

examples:
  python -m runs replay logs/demo
      the recorded policy on its own record: the decisions are the same, bit for bit
  python -m runs replay mine.jsonl
      the same of a script of your own: AdaptiveCompressor(timeline=JSONLTimeline("mine.jsonl")), or
      a TensorBoardTimeline, whose folder is then named
  python -m runs replay logs/demo --policy "GraVAC(epsilon=0.5, window=100)"
  python -m runs replay logs/demo/timeline.jsonl --policy accordion --cf-range 10 200 --json

As long as the policy plans what was recorded, it sees what was recorded. From then on it sees a
model: gains of each CF as last measured (interpolated in log CF between those measured), times
from a + b x bytes + compress fitted to the CFs that were really sent, bytes in proportion. The
gradients stay those of the recorded run, whatever CF the policy chooses: the model says what the
policy would have decided, not how well the network would have trained. A record that measured many
CFs tells most (train --policy "Fixed(probe=(10, 40, 100, 1000))"). A policy that reads each layer
("Accordion(per_layer=True)", --layerwise on) is replayed on records of the same readings only."""


@dataclass(frozen=True, kw_only=True)
class Replaying:
    """What to replay, and which policy."""

    timeline: Annotated[Positional[str], metavar("TIMELINE")]
    """Log folder, timeline file, or folder of event files."""
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
