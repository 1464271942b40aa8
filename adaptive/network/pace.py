"""How fast a run's steps were, and how fast dense steps would have been in their place.

Seconds a step, steps a second and the speed-up are defined here once. The summary, the end of
`train`, `compare`, the report and the dashboard all take them from a `Pace`.

A machine or a network may become slower during a run. So a dense step is compared only with steps
of the same stretch of time: by `Contrast` where dense steps were run, else by a model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import combinations
from math import exp, inf, isfinite, log, nan, sqrt
from statistics import median

from adaptive.network.link import LinkCost, LinkSpec, StepClock
from policies.base import DENSE, StepReport
from policies.state import Stateful, require, saved

EQUALLY_FAST = 0.05
"""Step times that differ by no more than this share are called the same."""

BACKWARD = 2 / 3
"""The largest share of backward in a step without network. The modelled dense step hides its
exchange behind all of backward, so its time is too short rather than too long."""

WINDOW = 64
"""Steps in a row that are one stretch of time."""

LARGEST_LOG = 100.0
"""Largest log of seconds, or of a ratio of seconds, that a saved state may hold."""

OTHER_NETWORK = 1.5
"""If step times at one CF differ by more than this factor, the network or the machine has changed.
"""

LEAST_STEPS = 5
"""Steps at each of two CFs, in one stretch of time, that a comparison needs."""


@dataclass(frozen=True)
class DenseStep:
    """Seconds of a dense step; nan if unknown. measured: dense steps of the same stretch of time
    were compared; False: the seconds are modelled. doubt: seconds by which the result may be wrong,
    as far as the steps show."""

    seconds: float = nan
    measured: bool = False
    doubt: float = 0.0


NOT_TIMED = DenseStep()

SAVED = {"saved": True}
"""Marks a field as part of the saved state. Unlike a field of `policies.state.saved` it is also an
argument of the constructor."""


@dataclass
class Pace(Stateful):
    """How fast the timed steps of a run were, in totals.

    steps: timed steps of the optimizer. seconds: their time. Each step counts as the median of the
    last steps at its CF (`StepReport.median_seconds`), so evaluations and checkpoints between two
    steps do not count. untimed: other steps, such as the first.
    compared: seconds of the steps whose dense step is known. dense: seconds of as many dense steps.
    measured: the measured part of `dense`; the rest is modelled. doubt: seconds by which `dense`
    may be wrong.
    """

    steps: int = field(default=0, metadata=SAVED)
    untimed: int = field(default=0, metadata=SAVED)
    seconds: float = field(default=0.0, metadata=SAVED)
    compared: float = field(default=0.0, metadata=SAVED)
    dense: float = field(default=0.0, metadata=SAVED)
    measured: float = field(default=0.0, metadata=SAVED)
    doubt: float = field(default=0.0, metadata=SAVED)

    def add(self, seconds: float, steps: int = 1, dense: DenseStep = NOT_TIMED) -> None:
        """Count `steps` steps that took `seconds` together (nan: unknown), and a dense step in
        place of each."""
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
        """Seconds of all steps; an untimed one counts as the mean of the others."""
        return self.seconds + self.untimed * self.step_seconds if self.steps else 0.0

    @property
    def speedup(self) -> float:
        """Seconds of dense steps / seconds of the steps in their place; nan if unknown."""
        return self.dense / self.compared if self.compared > 0 else nan

    @property
    def dense_seconds(self) -> float:
        """Seconds of a dense step, beside `step_seconds`; nan if unknown."""
        return self.speedup * self.step_seconds

    @property
    def is_measured(self) -> bool:
        """At least half of `dense` was measured."""
        return 2 * self.measured >= self.dense

    @property
    def is_faster(self) -> bool:
        """The steps were faster than dense ones, beyond doubt."""
        return self.dense - self.doubt > (1 + EQUALLY_FAST) * self.compared

    @property
    def is_slower(self) -> bool:
        """The steps were slower than dense ones, beyond doubt."""
        return self.dense + self.doubt < (1 - EQUALLY_FAST) * self.compared

    def _check_loaded(self) -> None:
        require(min(vars(self).values()) >= 0, "'pace' must have no negative number")
        known = (self.dense > 0) == (self.compared > 0) and (self.steps > 0 or not self.seconds)
        require(known, "the seconds and the steps of 'pace' contradict each other")

    def since(self, before: Pace) -> Pace:
        """The pace of the steps after those of `before`."""
        return Pace(**{name: now - getattr(before, name) for name, now in vars(self).items()})


@dataclass(eq=False)
class Contrast(Stateful):
    """Seconds of a dense step / seconds of a step at another CF, measured in one stretch of time.

    Of the last `WINDOW` steps, those at one CF are compared by their median with those at another
    CF. Doubt is the difference that drift inside each of the two could explain, and the noise of
    the medians. A CF that was never in one stretch of time with dense steps is compared with a
    third CF that was. A comparison does not count while steps at the CF are slower or faster, by
    more than the factor `OTHER_NETWORK`, than they were when it was made.
    """

    _last: list[tuple[float, float]] = saved([])  # (CF, log of seconds) of the last steps
    # By CF: log of (dense step / step at the CF), doubt of the log, the step that measured it, and
    # the log of the seconds of a step at the CF then.
    _ratios: dict[float, tuple[float, float, int, float]] = saved({})
    _steps: int = saved(0)

    def observe(self, cf: float, seconds: float) -> None:
        """Observe the time of a step at `cf`."""
        self._last = [*self._last, (cf, log(seconds))][-WINDOW:]
        self._steps += 1
        if self._steps % LEAST_STEPS:
            return
        times: dict[float, list[tuple[int, float]]] = {}
        for place, (each, value) in enumerate(self._last):
            times.setdefault(each, []).append((place, value))
        often = sorted(each for each, values in times.items() if len(values) >= LEAST_STEPS)
        for a, b in combinations(often, 2):  # dense first
            ratio, doubt = _compared(times[a], times[b])
            of_a, of_b = (median(value for _, value in times[each]) for each in (a, b))
            self._learn(b, a, ratio, doubt, of_b)
            self._learn(a, b, -ratio, doubt, of_a)

    def step(self, cf: float, seconds: float) -> DenseStep:
        """The dense step in place of a step at `cf` that took `seconds`. Without a comparison that
        counts, NOT_TIMED."""
        if cf == DENSE:
            return DenseStep(seconds, measured=True)
        ratio, doubt, _, then = self._ratios.get(cf, (nan, nan, 0, inf))
        if abs(log(seconds) - then) > log(OTHER_NETWORK):
            return NOT_TIMED
        dense = seconds * exp(ratio)
        return DenseStep(dense, measured=True, doubt=dense * (1 - exp(-doubt)))

    def pause(self) -> None:
        """Begin another stretch of time."""
        self._last = []

    def _check_loaded(self) -> None:
        logs = [value for _, value in self._last]
        logs += [value for ratio, _, _, then in self._ratios.values() for value in (ratio, then)]
        fits = all(abs(value) < LARGEST_LOG for value in logs)
        fits = fits and all(doubt >= 0 for _, doubt, _, _ in self._ratios.values())
        require(fits, "'contrast' must be logs of seconds, and doubts that are not negative")

    def _learn(self, cf: float, other: float, ratio: float, doubt: float, now: float) -> None:
        """Learn from log(step at `other` / step at `cf`) = ratio, if `other` is dense or known. The
        comparison with the least doubt is kept; after a stretch of time a new comparison with dense
        replaces it. now: log of the seconds of a step at `cf`."""
        by_dense = other == DENSE
        if cf == DENSE or not (by_dense or other in self._ratios):
            return
        if not by_dense:
            ratio, doubt = ratio + self._ratios[other][0], doubt + self._ratios[other][1]
        known = self._ratios.get(cf)
        old = known is None or (by_dense and self._steps - known[2] >= WINDOW)
        if known is None or old or doubt < known[1]:
            self._ratios[cf] = ratio, doubt, self._steps, now


def _compared(a: list[tuple[int, float]], b: list[tuple[int, float]]) -> tuple[float, float]:
    """(median of a - median of b, doubt). a, b: (place, value) in the order of places."""
    distance = abs(median(place for place, _ in a) - median(place for place, _ in b))
    drift = max(_slope(a), _slope(b)) * distance
    middle_a, middle_b = (median(value for _, value in each) for each in (a, b))
    noise = 2 * sqrt(_variance(a, middle_a) + _variance(b, middle_b))
    return middle_a - middle_b, drift + noise


def _slope(values: list[tuple[int, float]]) -> float:
    """Absolute slope of the values over their places, from the medians of the two halves."""
    half = len(values) // 2
    (x, y), (other_x, other_y) = (
        (median(place for place, _ in part), median(value for _, value in part))
        for part in (values[:half], values[-half:])
    )
    return abs(other_y - y) / (other_x - x)


def _variance(values: list[tuple[int, float]], middle: float) -> float:
    """Variance of the median, by the median absolute deviation of normal values."""
    deviation = 1.4826 * median(abs(value - middle) for _, value in values)
    return (1.2533 * deviation) ** 2 / len(values)


@dataclass(eq=False)
class DenseTimer(Stateful):
    """Seconds of a dense step at any time of a run, even if no dense step was run.

    With a modelled clock they are exact. They are measured if dense steps were run in the same
    stretch of time (`Contrast`). Else they are modelled: the work of a step, and the link's time
    for the bytes, at the emulated rate or at the rate measured before training.

    nbytes(cf): bytes on the wire at a CF. world_size: number of ranks that exchange. clock: the
    compressor's. spec: the emulated link. cost: returns the measured cost of the link, if any.
    """

    nbytes: Callable[[float], float]
    world_size: int
    clock: Callable[[], float]
    spec: LinkSpec | None
    cost: Callable[[], LinkCost | None]

    contrast: Contrast = saved(Contrast())

    def observe(self, report: StepReport) -> DenseStep:
        """Observe one report. Returns the dense step in place of each of its optimizer steps."""
        cf, steps, seconds = report.timed_cf, report.timed_steps, report.median_seconds
        if steps == 1 and report.seconds > 0 and isfinite(cf):
            self.contrast.observe(cf, report.seconds)
        if not (isfinite(cf) and seconds > 0):
            return NOT_TIMED
        if isinstance(self.clock, StepClock):
            nbytes = self.nbytes(DENSE)  # half of them bring means back
            statistics = report.statistics_bytes
            hops = report.dense_hops
            return DenseStep(self.clock.step(nbytes, statistics, 1, nbytes / 2, hops=hops))
        known = self.contrast.step(cf, seconds) if steps == 1 else NOT_TIMED
        return known if isfinite(known.seconds) else self._modelled(report)

    def _modelled(self, report: StepReport) -> DenseStep:
        """The dense step by the model: the work of a step, and the time of a dense exchange that
        backward does not hide."""
        wait, cf = report.wait_seconds, report.timed_cf
        of_dense, of_step = self._link_seconds(DENSE), self._link_seconds(cf)
        if of_dense is None or of_step is None or not isfinite(wait + report.coding_seconds):
            return NOT_TIMED
        round_seconds = report.median_seconds - wait - report.coding_seconds
        work = max(0.0, round_seconds) / report.timed_steps
        hidden = BACKWARD * work
        if self.spec is None and wait < of_step - hidden:
            return NOT_TIMED  # the network is faster than it was measured
        return DenseStep(work + max(0.0, of_dense - hidden))

    def _link_seconds(self, cf: float) -> float | None:
        """Seconds of an exchange at a CF on the link; None if unknown."""
        nbytes = self.nbytes(cf)
        if self.spec is not None:
            return self.spec.latency + 8 * nbytes / self.spec.bits_per_second
        cost = self.cost()
        if cost is None or not isfinite(cost.beta):
            return None
        return 2 * (self.world_size - 1) * cost.alpha + nbytes / cost.beta


def network_in_words(clock: Callable[[], float], spec: LinkSpec | None) -> str:
    """An emulated or modelled link in words; "" for the real network."""
    if isinstance(clock, StepClock):
        return clock.network
    return f"emulated {spec} link" if spec else ""
