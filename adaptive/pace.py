"""How fast a run's steps were, and how fast dense steps would have been in their place.

Seconds a step, steps a second and the speed-up are defined here. The summary, the end of `train`,
`compare`, the report and the dashboard all take them from a `Pace`.

A dense step is compared with steps of the same stretch of time only, because a machine or a network
may grow slower while a run lasts. Where dense steps were run beside the others, `Contrast` compares
the two; where they were not, a dense step is modelled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import combinations
from math import exp, isfinite, log, nan, sqrt
from statistics import median

from adaptive.exchange.link import LinkCost, LinkSpec, StepClock
from policies.base import DENSE, StepReport
from policies.state import Stateful, require, saved
from policies.step_time import StepTime

ALIKE = 0.05
"""Step times that differ by no more than this share are called the same."""

BACKWARD = 2 / 3
"""The part of a step without network that backward takes, at most: so much of a dense exchange can
be hidden behind it. The modelled dense step assumes that all of this is, so that it is too short
rather than too long."""

WINDOW = 64
"""Steps of one stretch of time: so many in a row."""

LARGEST = 100.0
"""No step takes so many times as long as another, or as a second: its log."""

LEAST = 5
"""Steps at each of two CFs, in one stretch of time, that a comparison of the two needs."""


@dataclass(frozen=True)
class DenseStep:
    """Seconds of a dense step; nan if they are not known. measured: dense steps were run in the
    same stretch of time; else it is modelled. doubt: seconds by which this may be too long or too
    short, as far as the steps themselves show."""

    seconds: float = nan
    measured: bool = False
    doubt: float = 0.0


NOT_TIMED = DenseStep()

_SAVED = {"saved": True}


@dataclass
class Pace(Stateful):
    """How fast the timed steps of a run were, in totals.

    steps: how many steps of the optimizer. seconds: what they took. Each counts as the median of
    the last steps at its CF (`StepReport.median_seconds`), so that an evaluation or a checkpoint
    between two steps does not count. untimed: steps beside them whose time is not known, such as
    the first.
    compared: seconds of those steps for which a dense step is known. dense: seconds of as many
    dense steps in their place. measured: the part of `dense` that was measured; the rest is
    modelled. doubt: seconds by which `dense` may be wrong.
    """

    steps: int = field(default=0, metadata=_SAVED)
    untimed: int = field(default=0, metadata=_SAVED)
    seconds: float = field(default=0.0, metadata=_SAVED)
    compared: float = field(default=0.0, metadata=_SAVED)
    dense: float = field(default=0.0, metadata=_SAVED)
    measured: float = field(default=0.0, metadata=_SAVED)
    doubt: float = field(default=0.0, metadata=_SAVED)

    def add(self, seconds: float, steps: int = 1, dense: DenseStep = NOT_TIMED) -> None:
        """Take in so many steps and their seconds (nan: not known), and a dense step in place of
        each."""
        if not isfinite(seconds):
            self.untimed += steps
            return
        self.seconds += seconds
        self.steps += steps
        if isfinite(dense.seconds):
            self.compared += seconds
            self.dense += steps * dense.seconds
            self.measured += steps * dense.seconds * dense.measured
            self.doubt += steps * dense.doubt

    @property
    def step_seconds(self) -> float:
        """Seconds a step; nan if none was timed."""
        return self.seconds / self.steps if self.steps else nan

    @property
    def steps_per_second(self) -> float:
        """Steps of the optimizer in a second; nan if none was timed."""
        return self.steps / self.seconds if self.seconds > 0 else nan

    @property
    def all_seconds(self) -> float:
        """Seconds of all steps, where each that was not timed counts as the mean of the others."""
        return self.seconds + self.untimed * self.step_seconds if self.steps else 0.0

    @property
    def speedup(self) -> float:
        """Seconds of dense steps over seconds of the steps in whose place they are; nan if it is
        not known."""
        return self.dense / self.compared if self.compared > 0 else nan

    @property
    def dense_seconds(self) -> float:
        """Seconds of a dense step, beside `step_seconds`; nan if they are not known."""
        return self.speedup * self.step_seconds

    @property
    def is_measured(self) -> bool:
        """At least half of what is said of dense was measured."""
        return 2 * self.measured >= self.dense

    @property
    def is_faster(self) -> bool:
        """The steps were faster than dense ones, beyond doubt."""
        return self.dense - self.doubt > (1 + ALIKE) * self.compared

    @property
    def is_slower(self) -> bool:
        """The steps were slower than dense ones, beyond doubt."""
        return self.dense + self.doubt < (1 - ALIKE) * self.compared

    def _check_loaded(self) -> None:
        require(min(vars(self).values()) >= 0, "'pace' must have no negative number")

    def since(self, before: Pace) -> Pace:
        """Of the steps that came after those of `before`."""
        return Pace(**{name: now - getattr(before, name) for name, now in vars(self).items()})


@dataclass(eq=False)
class Contrast(Stateful):
    """What a dense step takes, in steps at another CF that were run beside it.

    The median of the dense steps among the last `WINDOW` is compared with the median of the steps
    at the other CF among them. A drift shows within each of the two as well: what it explains of
    the difference, and what single steps vary, is doubt. A CF that was not run beside dense is
    compared by way of a third that was.
    """

    _last: list[tuple[float, float]] = saved([])  # CF, log of seconds
    # By CF: log of (dense step / step at the CF), doubt, and at which step that was measured.
    _ratios: dict[float, tuple[float, float, int]] = saved({})
    _steps: int = saved(0)

    def observe(self, cf: float, seconds: float) -> None:
        """Take in a step at `cf`."""
        self._last = [*self._last, (cf, log(seconds))][-WINDOW:]
        self._steps += 1
        if self._steps % LEAST == 0 and len({each for each, _ in self._last}) > 1:
            self._compare()

    def _compare(self) -> None:
        """Compare all CFs that were run long enough in this stretch of time."""
        times: dict[float, list[tuple[int, float]]] = {}
        for place, (each, value) in enumerate(self._last):
            times.setdefault(each, []).append((place, value))
        times = {each: values for each, values in times.items() if len(values) >= LEAST}
        for a, b in combinations(sorted(times), 2):  # dense first
            ratio, doubt = _compared(times[a], times[b])
            self._learn(b, a, ratio, doubt)
            self._learn(a, b, -ratio, doubt)

    def step(self, cf: float, seconds: float) -> DenseStep:
        """A dense step in place of one at `cf` that took so many seconds."""
        if cf == DENSE:
            return DenseStep(seconds, measured=True)
        if cf not in self._ratios:
            return NOT_TIMED
        ratio, doubt, _ = self._ratios[cf]
        dense = seconds * exp(ratio)
        return DenseStep(dense, measured=True, doubt=dense * (1 - exp(-doubt)))

    def pause(self) -> None:
        """What comes now is of another stretch of time."""
        self._last = []

    def forget(self) -> None:
        """The network is another one."""
        self._last, self._ratios = [], {}

    def _check_loaded(self) -> None:
        logs = [value for _, value in self._last]
        logs += [ratio for ratio, _, _ in self._ratios.values()]
        fits = all(abs(value) < LARGEST for value in logs)
        fits = fits and all(doubt >= 0 for _, doubt, _ in self._ratios.values())
        require(fits, "'contrast' must be logs of seconds, and doubts that are not negative")

    def _learn(self, cf: float, other: float, ratio: float, doubt: float) -> None:
        """A step at `cf` is shorter than one at `other` by `ratio`: that tells of `cf` if `other`
        is dense or known. The surer of two comparisons of one stretch of time stands."""
        by_dense = other == DENSE
        if cf == DENSE or not (by_dense or other in self._ratios):
            return
        if not by_dense:
            ratio, doubt = ratio + self._ratios[other][0], doubt + self._ratios[other][1]
        known = self._ratios.get(cf)
        old = known is None or (by_dense and self._steps - known[2] >= WINDOW)
        if known is None or old or doubt < known[1]:
            self._ratios[cf] = ratio, doubt, self._steps


def _compared(a: list[tuple[int, float]], b: list[tuple[int, float]]) -> tuple[float, float]:
    """By how much the values of `a` are larger, and by how much that may be wrong. a, b: place and
    value, in order of their places."""
    distance = abs(median(place for place, _ in a) - median(place for place, _ in b))
    drift = max(_slope(a), _slope(b)) * distance
    middle_a, middle_b = (median(value for _, value in each) for each in (a, b))
    noise = 2 * sqrt(_variance(a, middle_a) + _variance(b, middle_b))
    return middle_a - middle_b, drift + noise


def _slope(values: list[tuple[int, float]]) -> float:
    """How fast values rise or fall with their place: that of the two halves' medians."""
    half = len(values) // 2
    (x, y), (other_x, other_y) = (
        (median(place for place, _ in part), median(value for _, value in part))
        for part in (values[:half], values[-half:])
    )
    return abs(other_y - y) / (other_x - x)


def _variance(values: list[tuple[int, float]], middle: float) -> float:
    """Of the median of values that vary as these do."""
    deviation = 1.4826 * median(abs(value - middle) for _, value in values)
    return (1.2533 * deviation) ** 2 / len(values)


@dataclass(eq=False)
class DenseTimer(Stateful):
    """A timer of dense steps, also of those that were not run.

    A dense step is exact by a modelled clock. It is measured where dense steps were run beside the
    others (`Contrast`). Else it is modelled: the work of a step, and what the link takes for the
    bytes, at the rate that is emulated, or that a measurement has found when training began.

    nbytes: bytes on the wire at a CF. world_size: ranks that exchange. overlap: see `StepTime`.
    clock: the compressor's. spec: the emulated link. cost: the link as measured, if it was.
    """

    nbytes: Callable[[float], float]
    world_size: int
    overlap: int | None
    clock: Callable[[], float]
    spec: LinkSpec | None
    cost: Callable[[], LinkCost | None]

    time: StepTime = saved()
    contrast: Contrast = saved()

    def __post_init__(self) -> None:
        self.rescale()

    def rescale(self) -> None:
        """Another number of ranks goes on: nothing is known of their steps yet."""
        self.time, self.contrast = StepTime(self.nbytes, self.overlap), Contrast()

    @property
    def network(self) -> str:
        """See `network_in_words`."""
        return network_in_words(self.clock, self.spec)

    def observe(self, report: StepReport) -> DenseStep:
        """Take in one step; returns what a dense step would have taken then in place of each of
        its steps of the optimizer."""
        changes = self.time.changes
        self.time.observe(report)
        if self.time.changes > changes and self.spec is None:
            self.contrast.forget()
        cf, steps, seconds = report.timed_cf, report.timed_steps, report.median_seconds
        if steps == 1 and report.seconds > 0 and isfinite(cf):
            self.contrast.observe(cf, report.seconds)
        if not (isfinite(cf) and seconds > 0):
            return NOT_TIMED
        if isinstance(self.clock, StepClock):
            nbytes = self.nbytes(DENSE)  # half of them bring means back
            statistics = report.statistics_bytes
            return DenseStep(self.clock.step(nbytes, statistics, 1, nbytes / 2))
        known = self.contrast.step(cf, seconds) if steps == 1 else NOT_TIMED
        return known if isfinite(known.seconds) else self._modelled(cf, steps, seconds)

    def _modelled(self, cf: float, steps: int, seconds: float) -> DenseStep:
        """In the model of step times, a dense step is so much longer than one at `cf`."""
        here, work, link = self.time.seconds(cf, steps), self.time.work, self._link_seconds()
        if here is None or work is None:
            return NOT_TIMED
        by_steps, here = self.time.seconds(DENSE, 1) or nan, here / steps
        if steps > 1 and DENSE in self.time.timed():
            modelled = by_steps
        elif link is None:
            return NOT_TIMED
        else:
            modelled = work + max(0.0, link - BACKWARD * work)
            if self.spec is None and len(self.time.timed()) > 1:
                # The network may have changed since it was measured, which shows in step times.
                # If these say otherwise of what is faster, nobody knows; else the shorter time is
                # safe.
                if (by_steps > here) != (modelled > here):
                    return NOT_TIMED
                modelled = min(modelled, by_steps)
        dense = seconds / steps + modelled - here
        return DenseStep(dense) if dense > 0 else NOT_TIMED

    def _link_seconds(self) -> float | None:
        """What the link takes for a dense exchange; None if it is not known."""
        nbytes = self.nbytes(DENSE)
        if self.spec is not None:
            return self.spec.latency + 8 * nbytes / self.spec.bits_per_second
        cost = self.cost()
        if cost is None or not isfinite(cost.beta):
            return None
        return 2 * (self.world_size - 1) * cost.alpha + nbytes / cost.beta


def network_in_words(clock: Callable[[], float], spec: LinkSpec | None) -> str:
    """An emulated or modelled link; "" for the real network."""
    if isinstance(clock, StepClock):
        return clock.network
    return f"emulated {spec} link" if spec else ""
