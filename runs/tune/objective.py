"""What a study is after: final quality, bytes or seconds, alone or quality against one of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, nan
from statistics import fmean
from typing import Literal

from adaptive import LinkSpec
from runs.compare.digest import Digest
from runs.compare.network import seconds_to

Direction = Literal["minimize", "maximize"]

ACCEPTED = {
    ("quality",): False,
    ("bytes",): True,
    ("seconds",): True,
    ("quality", "bytes"): False,
    ("quality", "seconds"): False,
}
"""The objectives that there are, and whether they need a target."""


@dataclass(frozen=True)
class Objective:
    """What a study minimises or maximises.

    names: of ACCEPTED. target: the quality that bytes or seconds are counted to.

    network: seconds are modelled on it, by compare's model; None: as measured.
    """

    names: tuple[str, ...]
    target: float | None
    network: LinkSpec | None
    quality_name: str
    higher_is_better: bool

    @property
    def directions(self) -> list[Direction]:
        """In Optuna's words."""
        better: Direction = "maximize" if self.higher_is_better else "minimize"
        return [better if name == "quality" else "minimize" for name in self.names]

    @property
    def labels(self) -> list[str]:
        """What the values are, with units, for people."""
        to = "" if self.target is None else f" to {self.quality_name} {self.target:g}"
        names = {
            "quality": f"held-out {self.quality_name}",
            "bytes": f"MB sent by a worker{to}",
            "seconds": f"{self.seconds_name}{to}",
        }
        return [names[name] for name in self.names]

    @property
    def seconds_name(self) -> str:
        """How the seconds came about."""
        return "measured seconds" if self.network is None else f"modelled s at {self.network}"

    def shown(self, values: Sequence[float]) -> list[float]:
        """The values in the units of `labels`."""
        return [
            value / 1e6 if name == "bytes" else value
            for name, value in zip(self.names, values, strict=True)
        ]

    def reached(self, quality: float) -> bool:
        """Is there a target, and is this quality as good?"""
        if self.target is None or not isfinite(quality):
            return False
        return quality >= self.target if self.higher_is_better else quality <= self.target

    def intermediate(self, quality: float) -> float:
        """What the pruner compares, in the direction of the first objective."""
        same = self.names[0] == "quality" or not self.higher_is_better
        return quality if same else -quality

    def better(self, a: Sequence[float], b: Sequence[float]) -> bool:
        """`a` is at least as good as `b` in everything, and better in something."""
        signs = [1 if direction == "minimize" else -1 for direction in self.directions]
        gaps = [sign * (y - x) for sign, x, y in zip(signs, a, b, strict=True)]
        return all(gap >= 0 for gap in gaps) and any(gap > 0 for gap in gaps)


@dataclass(frozen=True)
class Metrics:
    """One run; nan for what is not known. bytes_sent, seconds: to the target if there is one and
    it was reached, else of the whole run."""

    quality: float
    bytes_sent: float
    seconds: float
    wire_factor: float
    reached: bool


def measure(objective: Objective, digest: Digest, ends: Sequence[float]) -> Metrics:
    """The metrics of a finished run. ends: when each step ended, seconds."""
    sent, seconds = digest.bytes_sent, ends[-1] if ends else nan
    reached = objective.target is None
    if objective.target is not None:
        goal = objective.target, digest.evaluations
        higher = objective.higher_is_better
        bytes_to = seconds_to(*goal, digest.sent, higher)
        spent = seconds_to(*goal, ends, higher)
        if bytes_to is not None and spent is not None:
            sent, seconds, reached = bytes_to, spent, True
    return Metrics(digest.quality, sent, seconds, digest.wire_factor, reached)


def values(objective: Objective, runs: Sequence[Metrics]) -> list[float]:
    """The objectives' values: means over the seeds; nan where one is not known."""
    found = {
        "quality": fmean(run.quality for run in runs),
        "bytes": fmean(run.bytes_sent for run in runs),
        "seconds": fmean(run.seconds for run in runs),
    }
    return [found[name] for name in objective.names]
