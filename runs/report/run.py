"""One run as its files tell it, and the series that tables and pictures are made of."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from math import isfinite, nan
from pathlib import Path
from typing import Any

from adaptive import Header, StepRecord
from adaptive.timeline.records import headline_of
from policies import DENSE
from policies.base import GainKind
from runs.config import TrainConfig
from runs.densities import Densities
from runs.logbook import emulated, gain_kind
from runs.options import HOOK_OPTIONS
from runs.policy_expression import UntrustedPolicyError
from runs.records import (
    Recorded,
    Stretch,
    bytes_by_step,
    local_steps,
    seconds_by_step,
    stretches,
)
from runs.result import is_dense, title
from runs.scaling import one_worker_seconds, scaling_efficiency
from runs.tasks import TASKS
from runs.times import pauses, step_seconds
from runs.verdict import Ended

_IN_TITLE = ("base", "link", "exchange", "local_steps", "delay")


@dataclass(frozen=True)
class Ending:
    """How a run ended, from result.json. bytes_sent, dense_bytes: a worker's. test: the quality on
    test data, nan for a task that has none. best_step: with early stopping, the steps after which
    the model was that of `quality`; else 0. beside: what was measured beside the quality."""

    steps: int
    quality: float
    bytes_sent: float
    dense_bytes: float
    steps_per_second: float
    test: float = nan
    best_step: int = 0
    beside: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """A run of the report, as its files tell it.

    name: unique in the report. config: None if only the timeline is there. trained: steps done,
    as far as the files tell. evaluations: (steps done, quality) in order,
    nan for what was not finite. rate: steps/s by the
    slices of a comparison; nan otherwise. ending: None if the run has no result yet. damage: what
    was left out of its files, in sentences. densities: of gradients, in order of their steps.
    """

    name: str
    folder: Path
    config: TrainConfig | None
    recorded: Recorded
    trained: int
    evaluations: tuple[tuple[int, float], ...]
    rate: float
    ending: Ending | None
    damage: tuple[str, ...] = ()
    densities: tuple[Densities, ...] = ()

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
        """What is to be said of an emulated link; "" without one."""
        return emulated(self.config) if self.config is not None else ""

    @property
    def task(self) -> str:
        """Runs of one task have comparable quality; "" if it is not known."""
        return self.config.task if self.config is not None else ""

    @property
    def quality_name(self) -> str:
        return TASKS[self.task].quality_name if self.task else "quality"

    @property
    def higher_is_better(self) -> bool:
        return TASKS[self.task].higher_is_better if self.task else False

    @property
    def is_dense(self) -> bool:
        """It sent everything uncompressed, all along and on purpose."""
        header = self.recorded.header
        if self.config is None:
            return header is not None and header.settings.get("send") == DENSE
        return is_dense(self.config)

    @property
    def finished(self) -> bool:
        """It made all of its steps; also if nothing tells how many those are."""
        ended_early = self.ending is not None and self.ending.best_step > 0
        return self.config is None or ended_early or self.trained >= self.config.steps

    @property
    def quality(self) -> float:
        """On held-out data, the last there is, with early stopping the best; nan if there is
        none."""
        if self.ending is not None and self.ending.best_step:
            return self.ending.quality
        return self.evaluations[-1][1] if self.evaluations else nan

    @property
    def beside(self) -> dict[str, float]:
        """What was measured beside the quality in the end, and the quality on test data."""
        if self.ending is None:
            return {}
        test = {f"test {self.quality_name}": self.ending.test}
        return {**self.ending.beside, **(test if isfinite(self.ending.test) else {})}

    @property
    def has_quality(self) -> bool:
        """There is an evaluation to show."""
        return any(isfinite(quality) for _, quality in self.evaluations)

    @cached_property
    def gain_kind(self) -> GainKind:
        """The gain that the policy decides on, as far as that is known."""
        header = self.recorded.header
        if self.config is None and header is not None:
            return header.gain
        if self.config is None or self.unknown_policy:
            return "gradient"
        return gain_kind(self.config)

    @cached_property
    def unknown_policy(self) -> bool:
        """It is a class of the user's own, which a report does not import."""
        try:
            if self.config is not None:
                gain_kind(self.config)
        except UntrustedPolicyError:
            return True
        return False

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
        if self.records:
            return self.recorded.bytes_sent
        return self.ending.bytes_sent if self.ending is not None else nan

    @property
    def wire_factor(self) -> float:
        """Bytes of dense fp32 all-reduce / bytes sent; nan if it is not known."""
        if self.records:
            return self.recorded.wire_factor
        ending = self.ending
        if ending is None:
            return nan
        return ending.dense_bytes / ending.bytes_sent if ending.bytes_sent else 1.0

    @cached_property
    def step_seconds(self) -> list[float]:
        """Of each recorded step, pauses left out; nan throughout if no step was timed."""
        return step_seconds(self.records, self._pauses)

    @property
    def steps_per_second(self) -> float:
        """Of the steps alone; nan if it is not known."""
        seconds = sum(self.step_seconds)
        if self.records and seconds > 0:
            return sum(local_steps(self.records)) / seconds
        if isfinite(self.rate):
            return self.rate
        return self.ending.steps_per_second if self.ending is not None else nan

    @property
    def ended(self) -> Ended:
        """For the headline."""
        clock = self.config.fixed_clock if self.config is not None else None
        rate, dense = self.steps_per_second, self.wire_factor * self.bytes_sent
        return Ended(
            seconds=1 / rate if rate > 0 else nan,
            qualities=(self.quality,),
            sent=self.bytes_sent,
            dense=dense,
            dense_share=self.shares.get(DENSE, 0.0),
            modelled=clock is not None,
            steps=self.trained,
        )

    @property
    def headline(self) -> str:
        """Whether compression was worth it, as its own record tells; "" if that does not."""
        header = self.recorded.header
        network = self.link if header is None else header.network or self.link
        gossip = self.config is not None and self.config.exchange == "gossip"
        gossip = gossip or (header is not None and header.gossip)
        return headline_of(self.records[-1], network, gossip) if self.records else ""

    @property
    def scaling_efficiency(self) -> float:
        """Of what as many lone workers would do; nan without the time of one."""
        alone = None if self.config is None else one_worker_seconds(self.config)
        efficiency = scaling_efficiency(alone, self.steps_per_second)
        return nan if efficiency is None else efficiency

    def sent_by(self, done: int) -> float:
        """Bytes that a worker had sent after so many steps; nan if it is not known."""
        if self.records:
            return self.at(self._sent, done)
        return self.bytes_sent * done / self.trained if self.trained else nan

    def seconds_by(self, done: int) -> float:
        """Seconds that so many steps took; nan if it is not known."""
        if self.records:
            return self.at(self._seconds, done)
        rate = self.steps_per_second
        return done / rate if rate > 0 else nan

    def at(self, series: Sequence[float], done: int) -> float:
        """Of a series with a value for each step on record, the one after so many steps; nan if
        that step is not on record."""
        count = bisect_right(self._steps, done - 1)
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

    @cached_property
    def _pauses(self) -> set[int]:
        every = self.config.checkpoint_every if self.config is not None else 0
        return pauses(self.records, [done for done, _ in self.evaluations], every, self.trained)


def _title_of(header: Header | None) -> str:
    """Of a run whose record is all there is."""
    if header is None:
        return "settings not known"
    cfs = "CF {:g} to {:g}".format(*header.cf_range)
    made = header.expression or header.policy
    return f"{header.base}, {cfs}, {header.world_size} workers, {made}"


def shown(value: Any) -> str:
    """A setting, as people write it."""
    if isinstance(value, tuple):
        return " ".join(map(shown, value))
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)
