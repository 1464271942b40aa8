"""One run as its files tell it, and the numbers and series that tables and pictures are made of."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from math import inf, isfinite, nan
from pathlib import Path

from adaptive import Header, LinkSpec, StepRecord
from adaptive.network.pace import Pace
from policies import DENSE
from runs.config import TrainConfig
from runs.expression import PLAIN
from runs.logbook import emulated
from runs.netlab.lab import real_links
from runs.options import HOOK_OPTIONS
from runs.parser import shown
from runs.records import (
    Recorded,
    Stretch,
    bytes_by_step,
    seconds_by_step,
    stretches,
)
from runs.result import is_dense, title
from runs.tasks import quality_of
from runs.times import one_worker_seconds, scaling_efficiency, step_seconds

_IN_TITLE = ("base", "network", "exchange", "sync")


@dataclass(frozen=True)
class Slice:
    """A slice is a turn that a run had in a comparison: steps first..last-1. pace: of these; the
    first, in which a new process warms up, is not timed. interface_bytes: that a worker's interface
    has sent, where links are real."""

    first: int
    last: int
    pace: Pace
    interface_bytes: int = 0


@dataclass(frozen=True)
class Ending:
    """How a run ended, from result.json; nan for what is not known of it, or for a run without.
    bytes_sent, dense_bytes: a worker's. floats_sent: elements that it sent, indices not counted.
    test: the quality on test data, nan for a task that has none. best_step: with early stopping,
    the steps after which the model was that of `quality`; else 0. beside: what was measured beside
    the quality. diverged: why it ended early, if it did."""

    steps: int = 0
    quality: float = nan
    bytes_sent: float = nan
    dense_bytes: float = nan
    pace: Pace = field(default_factory=Pace)
    floats_sent: float = nan
    test: float = nan
    best_step: int = 0
    beside: Mapping[str, float] = field(default_factory=dict)
    diverged: str = ""


@dataclass(frozen=True)
class Run:
    """A run, as its files tell it.

    name: unique among those beside it. config: None if only the timeline is there. trained: steps
    done, as far as the files tell. evaluations: (steps done, quality) in order, nan for what was
    not finite. slices: its turns in a comparison. damage: what was left out of its files, in
    sentences.

    What it is compared by: modelled: when each step would have ended, by network (empty without
    records). goal: the quality to be reached, nan if there is none.
    """

    name: str
    folder: Path
    config: TrainConfig | None
    recorded: Recorded
    trained: int
    evaluations: tuple[tuple[int, float], ...]
    slices: tuple[Slice, ...] = ()
    ending: Ending = Ending()
    damage: tuple[str, ...] = ()
    modelled: Mapping[LinkSpec, Sequence[float]] = field(default_factory=dict)
    goal: float = nan

    # -- what it is ------------------------------------------------------------------------------

    @property
    def title(self) -> str:
        """The run in one line, with the settings that were given."""
        if self.config is None:
            return _title_of(self.recorded.header)
        values = {n: getattr(self.config, n) for n in HOOK_OPTIONS if n not in _IN_TITLE}
        told = [f"{n} {shown(v)}" for n, v in values.items() if v is not None]
        return ", ".join([title(self.config), *told])

    @property
    def link(self) -> str:
        """What is to be said of a link that is emulated, or of real ones; "" without."""
        if self.config is None:
            return ""
        netlab = self.config.netlab
        return f"network of {real_links(netlab)}" if netlab else emulated(self.config)

    @property
    def workers(self) -> int:
        """0 if it is not known."""
        header = self.recorded.header
        if self.config is not None:
            return self.config.workers
        return 0 if header is None else header.world_size

    @property
    def task(self) -> str:
        """Runs of one task have comparable quality; "" if it is not known."""
        if self.config is not None and self.config.script:
            return Path(self.config.script[0]).name
        return self.config.task if self.config is not None else ""

    @property
    def seed(self) -> int:
        return self.config.seed if self.config is not None else 0

    @property
    def quality_name(self) -> str:
        return "quality" if self.config is None else quality_of(self.config)[0]

    @property
    def higher_is_better(self) -> bool:
        return self.config is not None and quality_of(self.config)[1]

    @property
    def is_dense(self) -> bool:
        """It sent everything uncompressed, all along and on purpose."""
        header = self.recorded.header
        if self.config is None:
            return header is not None and header.settings.get("send") == DENSE
        # A script that stays as it is may have a compressor of its own, which keeps a record.
        own = self.config.script and self.config.policy == PLAIN
        return not self.records if own else is_dense(self.config)

    @property
    def finished(self) -> bool:
        """It made all of its steps; also if nothing tells how many those are."""
        early = self.ending.best_step > 0
        if self.config is not None and self.config.script:
            return self.ending.steps > 0
        return self.config is None or early or self.trained >= self.config.steps

    # -- quality ---------------------------------------------------------------------------------

    @property
    def quality(self) -> float:
        """On held-out data, the last there is, with early stopping the best; nan if there is none,
        and if the run has diverged."""
        if self.ending.best_step or self.ending.diverged:
            return self.ending.quality
        return self.evaluations[-1][1] if self.evaluations else nan

    @property
    def ends_unknown(self) -> bool:
        """Its last evaluation was not finite, as where a script goes on after its loss is nan."""
        return not self.ending.diverged and bool(self.evaluations) and not isfinite(self.quality)

    @property
    def beside(self) -> dict[str, float]:
        """What was measured beside the quality in the end, and the quality on test data."""
        test = {f"test {self.quality_name}": self.ending.test}
        return {**self.ending.beside, **(test if isfinite(self.ending.test) else {})}

    def quality_after(self, steps: int) -> float:
        """Of the last evaluation by then that was finite; nan if there was none yet."""
        known = [q for done, q in self.evaluations if done <= steps and isfinite(q)]
        return known[-1] if known else nan

    def steps_to(self, quality: float) -> float:
        """Steps done at the first evaluation that is at least as good; inf if there was none, nan
        if nothing was evaluated or no quality is asked for."""
        if not (self.evaluations and isfinite(quality)):
            return nan
        for done, reached in self.evaluations:
            if reached >= quality if self.higher_is_better else reached <= quality:
                return done
        return inf

    @cached_property
    def steps_to_goal(self) -> float:
        return self.steps_to(self.goal)

    # -- bytes -----------------------------------------------------------------------------------

    @property
    def records(self) -> list[StepRecord]:
        return self.recorded.steps

    @cached_property
    def history(self) -> list[Stretch]:
        """Consecutive steps at one CF; plain DDP, which keeps no timeline, was dense."""
        if not self.records and self.is_dense and self.trained:
            return [Stretch(0, self.trained - 1, DENSE, "")]
        return stretches(self.recorded)

    @cached_property
    def shares(self) -> dict[float, float]:
        """Share of steps at each CF, ascending."""
        steps: Counter[float] = Counter()
        for part in self.history:
            steps[part.cf] += part.last - part.first + 1
        return {cf: count / steps.total() for cf, count in sorted(steps.items())}

    @property
    def bytes_sent(self) -> float:
        """A worker's, in all; nan if it is not known."""
        return self.recorded.bytes_sent if self.records else self.ending.bytes_sent

    @property
    def wire_factor(self) -> float:
        """Bytes of a dense all-reduce / bytes sent; nan if it is not known."""
        if self.records:
            return self.recorded.wire_factor
        sent = self.ending.bytes_sent
        return self.ending.dense_bytes / sent if sent else 1.0

    @property
    def sent_by_node(self) -> bool:
        """What it sent is a node's, whose workers exchange with each other besides: `TwoLevel`."""
        return bool(self.records) and self.records[-1].inside > 0

    @property
    def interface_bytes(self) -> float:
        """That a worker's interface has sent; nan where links are not real."""
        if self.config is None or not self.config.netlab or not self.slices:
            return nan
        return sum(part.interface_bytes for part in self.slices)

    def sent_by(self, done: int) -> float:
        """Bytes that a worker had sent after so many steps; nan if it is not known."""
        if self.records:
            return self.at(self._sent, done)
        return self.bytes_sent * done / self.trained if self.trained else nan

    # -- seconds ---------------------------------------------------------------------------------

    @cached_property
    def step_seconds(self) -> list[float]:
        """Of each recorded step; see `runs.times.step_seconds`."""
        return step_seconds(self.records)

    @cached_property
    def pace(self) -> Pace:
        """How fast its steps were: by its records; a run that keeps none has told at its end."""
        return self.records[-1].pace if self.records else self.ending.pace

    @property
    def steps_per_second(self) -> float:
        """See `Pace`; nan if no step was timed."""
        return self.pace.steps_per_second

    @property
    def scaling_efficiency(self) -> float:
        """Of what as many lone workers would do; nan without the time of one."""
        alone = None if self.config is None else one_worker_seconds(self.config)
        efficiency = scaling_efficiency(alone, self.steps_per_second)
        return nan if efficiency is None else efficiency

    def seconds_by(self, done: int) -> float:
        """Seconds that so many steps took; nan if it is not known."""
        if self.records:
            return self.at(self._seconds, done)
        rate = self.steps_per_second
        return done / rate if rate > 0 else nan

    def modelled_by(self, done: int, network: LinkSpec) -> float:
        """Seconds that so many steps would have taken on a network; nan if it is not known."""
        return self.at(self.modelled.get(network, ()), done)

    def modelled_in_all(self, network: LinkSpec) -> float:
        """Seconds that all steps would have taken; nan if it is not known."""
        ends = self.modelled.get(network, ())
        return ends[-1] if ends else nan

    def at(self, series: Sequence[float], done: int) -> float:
        """Of a series with a value for each step on record, the one after so many steps; nan if
        that step is not on record."""
        count = bisect_right(self._steps, done - 1) if series else 0
        reached = count and self._steps[count - 1] == done - 1
        return series[count - 1] if reached else nan

    @cached_property
    def _steps(self) -> list[int]:
        # A record may lack steps; of one with local steps the numbers would not be known then.
        if any(record.local_steps > 1 for record in self.records):
            return list(range(len(self._sent)))
        return [record.report.step for record in self.records]

    @cached_property
    def _sent(self) -> list[float]:
        return bytes_by_step(self.records)

    @cached_property
    def _seconds(self) -> list[float]:
        return seconds_by_step(self.records, list(accumulate(self.step_seconds)))

    # -- what to know of it ----------------------------------------------------------------------

    @property
    def notes(self) -> list[str]:
        """What a reader should know of its data."""
        notes, config = list(self.damage), self.config
        if self.ending.diverged:
            notes.append(f"has diverged: {self.ending.diverged}")
        if config is None:
            return [*notes, "no config.json: its command and quality are not known"]
        if not self.finished:
            of = "" if config.script else f" of {config.steps}"
            notes.append(f"not finished: {self.trained}{of} steps")
        if config.policy == PLAIN and not self.records:
            notes.append("plain DDP: bytes and seconds are spread evenly over the steps")
        elif not self.records:
            notes.append("no timeline: CFs, gains and step times are not known")
        if config.fixed_clock is not None:
            notes.append("its step times are modelled, not measured")
        if not self.evaluations:
            notes.append("never evaluated: quality is not known")
        elif self.ends_unknown:
            notes.append("its last evaluation was not finite")
        return notes


def _title_of(header: Header | None) -> str:
    """Of a run whose record is all there is."""
    if header is None:
        return "settings not known"
    cfs = "CF {:g} to {:g}".format(*header.cf_range)
    made = header.expression or header.policy
    return f"{header.base}, {cfs}, {header.world_size} workers, {made}"
