"""What a row is made of: scalars over steps, by the tags that `adaptive`'s sink gives them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from runs.dashboard.thin import Floats, Switch

SENT = "cf/sent"
ACTIVE = "time/total"
"""Seconds of steps since the run began; in runs of before it was written, wall time stands in."""

TOTALS = {"sent": "bytes/sent_total", "dense": "bytes/dense_total"}
"""Bytes since the run began: sent by a worker, and what they would have been dense."""

LAYER = "cf_layer/"
NUMBERS = re.compile(
    r"cf/(candidate|floor)|gain/.+|throughput/(t_sys|t_comp)|bytes/(sent|wire_factor)|time/step"
)
"""Tags of what a hover shows, besides the CF."""

QUALITY = re.compile(r"loss|quality|acc|perplexity|\bppl\b|error_rate|top1|bleu|f1|reward", re.I)

_OWN = re.compile(r"(cf|cf_layer|gain|gain_of_step|throughput|bytes|time|policy|gradient|final)/")

MOST = 2.0**53
"""No CF is larger, and no run takes as many seconds."""


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

    def headline(self, run: str) -> str:
        """Whether compression was worth it, as the run said last; "" if it did not."""


def quality_tags(tags: list[str]) -> list[str]:
    """Those that may be a quality (loss, accuracy, ...), the likeliest first."""
    found = [tag for tag in tags if QUALITY.search(tag) and not _OWN.match(tag)]
    return sorted(found, key=lambda tag: (tag != "eval/quality", "loss" in tag.lower(), tag))
