"""Rows of a table: runs of the same settings, and what runs are compared by."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite, nan
from statistics import mean, stdev
from typing import Any

from adaptive import LinkSpec
from runs.files import known
from runs.parser import UsageError
from runs.progress import number_text
from runs.report.command import BANDWIDTHS
from runs.report.run import Run
from runs.times import model_bytes, modelled_seconds

UNKNOWN, NEVER = "-", "never"


@dataclass(frozen=True)
class Spread:
    """A spread is a number of each of some runs: nan where it is not known, inf where what it is
    counted to never came. mean, deviation: of those that are finite (sample standard deviation, nan
    for fewer than two)."""

    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        return cls(tuple(values))

    @property
    def _known(self) -> list[float]:
        return [value for value in self.values if isfinite(value)]

    @property
    def mean(self) -> float:
        return mean(self._known) if self._known else nan

    @property
    def deviation(self) -> float:
        return stdev(self._known) if len(self._known) > 1 else nan

    def text(self, digits: int, scale: float = 1.0) -> str:
        """As people read it: mean ± deviation, and how many are never reached."""
        never = self.values.count(inf)
        if not self._known:
            return NEVER if never else UNKNOWN
        text = number_text(scale * self.mean, digits)
        if self.deviation > 0:
            text += f" ± {scale * self.deviation:.2g}"
        return f"{text} ({never} of {len(self.values)} {NEVER})" if never else text

    def as_json(self) -> dict[str, Any]:
        """null for what is not known."""
        values = [NEVER if value == inf else known(value) for value in self.values]
        return {"mean": known(self.mean), "deviation": known(self.deviation), "values": values}


@dataclass(frozen=True)
class Row:
    """A row is runs of the same settings, one for each seed; in a report each run has its own."""

    label: str
    runs: tuple[Run, ...]

    @property
    def run(self) -> Run:
        """The first, for what they have in common."""
        return self.runs[0]

    def of(self, value: Callable[[Run], float]) -> Spread:
        """A number of each run."""
        return Spread.of(map(value, self.runs))


# -- what runs are compared by ---------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """The quality that the runs of a report are compared at. basis: where it comes from."""

    quality: float
    basis: str


def choose_targets(runs: Sequence[Run], wanted: float | None) -> dict[str, Target]:
    """By task; a task whose runs were never evaluated has none.

    UsageError if one value is wanted for qualities of several tasks.
    """
    by_task: dict[str, list[Run]] = {}
    for run in runs:
        if isfinite(run.quality):
            by_task.setdefault(run.task, []).append(run)
    names = sorted({run.quality_name for run in runs if run.task})
    if wanted is None:
        return {task: _choose(of_task) for task, of_task in by_task.items()}
    if len(names) > 1:
        raise UsageError(
            f"--target {wanted:g}: the runs have different qualities ({', '.join(names)}); "
            f"accepted: runs of one task, or no --target"
        )
    return {task: Target(wanted, "as asked for") for task in by_task}


def _choose(runs: list[Run]) -> Target:
    """See the command's help."""
    finished = [run for run in runs if run.finished] or runs
    dense = [run for run in finished if run.is_dense]
    chosen = dense or finished
    pick = min if chosen[0].higher_is_better else max
    worst = pick(chosen, key=lambda run: run.quality)
    if len(chosen) == 1:
        basis = f"the final quality of {worst.name}"
    else:
        basis = f"the worst final quality of the {'dense ' if dense else ''}runs ({worst.name})"
    return Target(worst.quality, basis)


def own_networks(runs: Sequence[Run]) -> tuple[LinkSpec, ...]:
    """Of the modelled seconds: the links that some of the runs had, and others after them. Not one
    that all had: what they took on that is known."""
    links = dict.fromkeys(run.config.link if run.config else None for run in runs)
    parsed = [LinkSpec.parse(link) for link in links if link]
    others = [LinkSpec.parse(link) for link in BANDWIDTHS]
    if len(links) == 1:
        return tuple(link for link in others if link not in parsed)
    return tuple(dict.fromkeys((*parsed, *others)))


def modelled(run: Run, networks: Sequence[LinkSpec], model_mb: float | None = None) -> Run:
    """The run with its seconds on these networks. model_mb: as if its gradients were so large."""
    workers = run.config.workers if run.config is not None else 1
    own = model_bytes(run.records, workers)
    times = 1.0 if model_mb is None or not own else model_mb * 1e6 / own
    config, coded = run.config, times
    if config is not None and config.fixed_clock is not None and config.model_mb and own:
        coded /= config.model_mb * 1e6 / own
    ends = {one: modelled_seconds(run.records, one, times, coded) for one in networks}
    return replace(run, modelled=ends)


def link_notes(runs: Sequence[Run]) -> list[str]:
    """What runs on different links have in common, and what not."""
    links: dict[str, list[str]] = {}
    for run in runs:
        links.setdefault(run.link or "no emulated link", []).append(run.name)
    if len(links) < 2:
        return []
    told = "; ".join(f"{link}: {', '.join(names)}" for link, names in links.items())
    return [
        f"the runs had different links ({told}): their steps/s and measured seconds do not "
        f"compare, the modelled ones do"
    ]
