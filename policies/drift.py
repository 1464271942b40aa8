"""What GraVAC watches after it has chosen, to notice that the choice may no longer be right.

The paper explores once. `DriftMonitor` finds three reasons to explore again:

1. The step time, the wait for the network or the gain of the CF in use has changed (`ChangeTest`).
2. The chosen CF could not be sent for long, because its gain is below epsilon: a CF between it and
   the floor may serve.
3. A probe, now and then, of the CFs that were passed over shows one that promises more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from math import inf, isfinite, nan
from statistics import fmean, median_low

from policies.base import StepReport
from policies.estimators import Backoff, relative_change
from policies.exploration import CandidateStatistics, SendRule
from policies.state import Stateful, saved
from policies.words import named, percent, progress, seconds_in_words

MAX_COOLDOWN_DOUBLINGS, MAX_PROBE_DOUBLINGS = 4, 6
"""The cooldown of a choice grows to 16 times the first and no further, for a network may really
change; the wait between probes to 64 times."""

WAIT_CHANGE, WAIT_SHARE = 1.0, 0.05
"""The time spent waiting for the network must double or halve to count, and change by this part of
the step time. It shows a change earlier than the step time, but it is noisier."""

REFERENCE_WINDOWS = 5
"""A reference is the mean of the first so many windows that are near it, so that it has little
noise. Later windows do not count, or the reference would follow a slow drift."""


class Drift(Enum):
    """What has changed where GraVAC should explore again."""

    TIMES = "times"
    GAINS = "gains"


@dataclass(eq=False)
class ChangeTest(Stateful):
    """A test of whether a quantity has changed, and not only by noise: the medians of several
    windows in a row must be far from the reference, on the same side."""

    what: str  # the quantity, in words
    threshold: float  # `relative_change` that counts; below half of it windows are counted anew
    patience: int  # windows
    unit: str = ""

    _first: dict[float, list[float]] = saved({})  # the first windows of each CF
    _window: list[float] = saved([])
    _windows_off: int = saved(0)  # in a row; negative if below

    def begin(self, references: Mapping[float, float]) -> None:
        """Compare with these values, by CF, or else with the first window."""
        self._first = {cf: [reference] for cf, reference in references.items()}
        self.use_other_cf()

    def use_other_cf(self) -> None:
        """Another CF is in use: windows start again."""
        self._window, self._windows_off = [], 0

    def add(self, value: float) -> None:
        """Take in the value of one step, if it is known."""
        if isfinite(value) and value >= 0:
            self._window.append(value)

    def end_window(self, cf: float, least: float = 0.0) -> str:
        """Returns, in words, that the quantity has changed at `cf`; else "". least: smallest
        difference that counts."""
        if not self._window:
            return ""
        now, self._window = median_low(self._window), []
        first = self._first.setdefault(cf, [])
        before = fmean(first) if first else now
        distance = relative_change(now, before) if abs(now - before) >= least else 0.0
        if distance >= self.threshold:
            side, off = (1 if now > before else -1), self._windows_off
            self._windows_off = off + side if off * side > 0 else side
        elif distance < self.threshold / 2:
            self._windows_off = 0
        if abs(self._windows_off) >= self.patience:
            return (
                f"{self.what} at {named(cf)} went from {before:.3g}{self.unit} to {now:.3g}"
                f"{self.unit}, a change of {percent(distance)} ({percent(self.threshold)} counts), "
                f"{self.patience} windows in a row"
            )
        if len(first) < REFERENCE_WINDOWS and not self._windows_off:
            first.append(now)
        return ""


@dataclass(eq=False)
class DriftMonitor(Stateful):
    """A monitor that says when a choice of GraVAC's may no longer be right, and why.

    A choice stands for `cooldown` steps, twice as long each time that one is given up soon after:
    noise that looks like drift costs less and less. The wait between probes doubles after each that
    changed nothing: gains change slowly late in training.
    """

    statistics: CandidateStatistics
    rule: SendRule  # with the gains below which a CF is not sent, and from which on it is again
    omega: float  # relative difference of T_comp that counts as none
    drift: float | None  # `relative_change` of step time or gain that counts; None: none does
    patience: int  # windows that a drift must last
    steps: int  # of a window, and of a probe
    retry: int | None  # steps before the first probe, or with the chosen CF's gain below epsilon
    cooldown: int

    _chosen: float | None = saved(None)  # the last choice, if there was one
    _others: list[float] = saved([])  # tried and passed over
    _cooldown: Backoff = saved()
    _since_choice: int = saved(0)  # steps
    _steps_below: int = saved(0)  # in a row, with the chosen CF's gain below epsilon
    _wait: Backoff | None = saved()  # before the next probe
    _since_probe: int = saved(0)  # steps of the wait for the next probe, and of that probe
    _t_sys: float | None = saved(None)  # of the chosen CF, before that probe
    _cf: float | None = saved(None)  # in use
    _window_step: int = saved(0)
    _seconds: ChangeTest = saved()
    _waits: ChangeTest = saved()
    _gain: ChangeTest = saved()

    def __post_init__(self) -> None:
        self._cooldown = Backoff(self.cooldown, MAX_COOLDOWN_DOUBLINGS)
        self._wait = None if self.retry is None else Backoff(self.retry, MAX_PROBE_DOUBLINGS)
        changes, patience = self.drift or inf, self.patience
        self._seconds = ChangeTest("step time without compression", changes, patience, " s")
        self._waits = ChangeTest("wait for the network", WAIT_CHANGE, patience, " s")
        self._gain = ChangeTest("gain", changes, patience)

    def begin(self, chosen: float, others: tuple[float, ...]) -> None:
        """A choice was made, and these other CFs were tried. The step times that it rests on become
        references, but no gain or wait: they change once a CF is sent."""
        if self._chosen is not None:
            self._cooldown.judge(self._since_choice)
        if self._wait is not None and chosen != self._chosen:
            self._wait.reset()
        self._chosen, self._others, self._cf = chosen, list(others), None
        self._since_choice = self._steps_below = self._since_probe = 0
        self._seconds.begin(self.statistics.time.without_compression())
        self._waits.begin({})
        self._gain.begin({})

    @property
    def probed(self) -> tuple[float, ...]:
        """The CFs to measure while the chosen one is sent: none, except during a probe."""
        active = self._wait is not None and self._since_probe >= self._wait.steps
        return tuple(self._others) if active else ()

    def observe(self, report: StepReport) -> tuple[Drift, str] | None:
        """Take in one step with the choice; returns what has changed, if anything, and why."""
        self._since_choice += 1
        stands = self._since_choice <= self._cooldown.steps
        found = self._watch(report) if self.drift is not None else None
        found = found or self._watch_epsilon(report.cf)
        if found and not stands:
            return found
        better = self._step_probe(report.cf)
        return (Drift.GAINS, better) if better and not stands else None

    def _watch(self, report: StepReport) -> tuple[Drift, str] | None:
        """Take in the times and the gain of the CF in use, and compare when a window ends."""
        cf = report.cf
        if cf != self._cf:
            self._cf, self._window_step = cf, 0
            for test in (self._seconds, self._waits, self._gain):
                test.use_other_cf()
        if report.timed_cf == cf:
            self._seconds.add(report.seconds - report.coding_seconds)
            self._waits.add(report.wait_seconds)
        if cf == self._chosen:
            # The signal gain of a single step would be noise: there the average is what counts.
            of_step = report.gain(cf, self.statistics.kind)
            gain = of_step if self.statistics.signal is None else self.statistics.gain(cf)
            self._gain.add(nan if gain is None else gain)
        self._window_step += 1
        if self._window_step < self.steps:
            return None
        self._window_step = 0
        seconds = self._seconds.end_window(cf)
        waits = self._waits.end_window(cf, WAIT_SHARE / (self.statistics.t_sys(cf) or inf))
        gains = self._gain.end_window(cf)
        if times := seconds or waits:
            return Drift.TIMES, times
        return (Drift.GAINS, gains) if gains else None

    def _watch_epsilon(self, sent: float) -> tuple[Drift, str] | None:
        """A drift if the chosen CF had too little gain for too long, and smaller CFs were tried."""
        gain, epsilon = self.statistics.gain(self._chosen), self.rule.epsilon
        below = sent != self._chosen and gain is not None and gain < epsilon
        self._steps_below = self._steps_below + 1 if below else 0
        smaller = [cf for cf in self._others if self._chosen is not None and cf < self._chosen]
        if self.retry is None or self._steps_below < self.retry or not smaller:
            return None
        numbers = f"{gain:.4g} < epsilon {epsilon:g} for {self._steps_below} steps"
        return Drift.GAINS, f"the gain of CF {self._chosen:g} is {numbers}"

    def _step_probe(self, sent: float) -> str:
        """Begin or end a probe when it is time to; returns what has shown to be better, or ""."""
        if self._wait is None or not self._others:
            return ""
        if sent != self._chosen:
            # A probe that had begun starts again when the chosen CF is back in use.
            self._since_probe = min(self._since_probe, self._wait.steps)
            return ""
        self._since_probe += 1
        if self._since_probe == self._wait.steps:
            self._t_sys = self.statistics.t_sys(sent)  # probing takes time
        if self._since_probe < self._wait.steps + self.steps:
            return ""
        self._since_probe = 0
        self._wait.fail()
        return self._promising(sent)

    def _promising(self, chosen: float) -> str:
        """Why another CF may be better than the chosen one; else "". One that was sent must promise
        more T_comp by omega, one that never was must have a gain with which it would be."""
        here, least = self.statistics.gain(chosen), self.rule.up_at
        needed = (1 + self.omega) * (here or nan) * (self._t_sys or nan)
        for cf in self._others:
            gain, t_sys = self.statistics.gain(cf), self.statistics.t_sys(cf)
            if gain is None or gain < least:
                continue
            if t_sys is None:
                return f"CF {cf:g} has not been sent and has gain {gain:.4g} >= {least:.4g}"
            if gain * t_sys > needed:
                ratio = (1 + self.omega) * gain * t_sys / needed
                took = f"{seconds_in_words(1 / t_sys)} a step, gain {gain:.4g}"
                return f"CF {cf:g} promises {progress(ratio, named(chosen))} ({took})"
        return ""

    def described(self) -> str:
        """What would make GraVAC explore again, in words; "" if nothing will."""
        causes = []
        if self.drift is not None:
            causes.append(f"its step time or gain changes by {percent(self.drift)}")
        if self._wait is not None and self._others:
            causes.append("a probe of CFs that are not sent promises more")
        return f"it explores again when {', or '.join(causes)}" if causes else ""
