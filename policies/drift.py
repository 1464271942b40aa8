"""What GraVAC watches after it has chosen, to notice that the choice may no longer be right.

The paper explores once. `DriftMonitor` finds reasons to explore again:

1. A drift: the step time or the gain of the CF in use has changed (`DriftDetector`).
2. The chosen CF could not be sent for long, because its gain is below epsilon: a CF between it and
   the floor may serve.
3. A probe, now and then, of the CFs that were passed over shows one that promises more
   (`PeriodicProbe`).

Noise must not look like drift. So windows of steps are compared, each by its median or mean; a
change must be large, go the same way and last for several windows; and a new choice stands for a
while whatever is observed.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from math import isfinite, nan
from typing import NamedTuple

from policies.base import DENSE, StepReport
from policies.estimators import Average, Backoff, median, relative_change
from policies.exploration import CandidateStatistics, SendRule
from policies.state import (
    CHILD,
    OPTIONAL_CHILD,
    Field,
    Stateful,
    by_cf,
    count,
    declare,
    maybe_cf,
    maybe_count,
    maybe_number,
    numbers,
    saved_as,
    whole,
)

MAX_COOLDOWN_DOUBLINGS = 4
"""The cooldown of a choice grows to 16 times the first and no further: a network may really
change."""

MAX_PROBE_DOUBLINGS = 6
"""The wait between probes grows to 64 times the first."""

EXCHANGE_CHANGE = 1.0
"""The time spent waiting for the network must double or halve to count. It shows a change earlier
than the step time, of which it may be a small part at a large CF, but it is noisier."""

EXCHANGE_SHARE = 0.05
"""The difference must also be this part of the step time, or it has no consequence."""

REFERENCE_WINDOWS = 5
"""A reference is the mean of the first so many windows that are near it, so that it has little
noise. Later windows do not count, or the reference would follow a slow drift."""


class Cause(Enum):
    """A kind of finding of the drift monitor."""

    TIMES = "times"
    """Step times have changed: explore again."""
    GAINS = "gains"
    """Gains have changed: explore again."""
    PROBE = "probe"
    """A probe begins or ends: other CFs are measured from now on, or no longer."""


class Finding(NamedTuple):
    """A finding of the drift monitor in one step, with the numbers that show it."""

    cause: Cause
    why: str


class ChangeTest(Stateful):
    """A test of whether a quantity has changed for good, by its values in window after window.

    threshold: `relative_change` that counts. Below half of it the count of windows starts again;
    between the two it stays (hysteresis).
    patience: windows in a row, all above or all below the reference, that make a change.

    references: by CF, the mean that windows are compared with.
    """

    _fields = declare(references=by_cf, _windows=by_cf, _windows_off=whole)

    def __init__(self, threshold: float, patience: int) -> None:
        self.threshold, self.patience = threshold, patience
        self.references: dict[float, float] = {}
        self._windows: dict[float, float] = {}  # in the mean, by CF
        self._windows_off = 0  # in a row; negative if below the reference

    def begin(self, references: Mapping[float, float]) -> None:
        """Compare with these values, by CF, from now on."""
        self.references, self._windows = dict(references), dict.fromkeys(references, 1.0)

    def begin_count(self) -> None:
        """Forget the windows that were off the reference."""
        self._windows_off = 0

    def changed_from(self, cf: float, now: float, least: float = 0.0) -> float | None:
        """Take in the value of one window at a CF. Returns the reference if the quantity has
        changed from it, else None; without a reference the value becomes one.

        least: smallest difference that counts.
        """
        before = self.references.setdefault(cf, now)
        windows = self._windows.setdefault(cf, 1.0)
        if self._is_off(now, before, least):
            return before
        if windows < REFERENCE_WINDOWS and not self._windows_off:
            self.references[cf] = before + (now - before) / (windows + 1)
            self._windows[cf] = windows + 1
        return None

    def _is_off(self, now: float, reference: float, least: float) -> bool:
        """Count the window; whether enough of them in a row were off the reference."""
        distance = relative_change(now, reference)
        side = 1 if now > reference else -1
        if distance >= self.threshold and abs(now - reference) >= least:
            off = self._windows_off
            self._windows_off = off + side if off * side > 0 else side
        elif distance < self.threshold / 2 or abs(now - reference) < least:
            self._windows_off = 0
        return abs(self._windows_off) >= self.patience


class DriftDetector(Stateful):
    """A detector of lasting changes at the CF in use: of its step time without compression, of the
    time that it waits for the network, and of its gain if it is the chosen CF.

    statistics: of the candidates, for their definition of gain. drift: `relative_change` of the
    step time or gain that counts. patience: windows that it must last. steps: of a window.
    """

    _fields = declare(
        _cf=maybe_cf,
        _seconds=CHILD,
        _exchange=CHILD,
        _gain=CHILD,
        _count=count,
        _times=saved_as(numbers, least=0),
        _waits=saved_as(numbers, least=0),
        _window_gain=CHILD,
    )

    def __init__(
        self, statistics: CandidateStatistics, drift: float, patience: int, steps: int
    ) -> None:
        self._statistics = statistics
        self.drift, self.patience, self.steps = drift, patience, steps
        self._seconds = ChangeTest(drift, patience)
        self._exchange = ChangeTest(EXCHANGE_CHANGE, patience)
        self._gain = ChangeTest(drift, patience)
        self._cf: float | None = None  # in use
        self._start_window(None)

    def begin(self) -> None:
        """A choice was made. The step times that it rests on become references.

        The references of the other quantities are the first windows after the choice. Exchange
        times were not compared for the choice, and the error-fed gain of a CF changes once that CF
        is sent.
        """
        self._seconds.begin(self._statistics.step_times())
        self._exchange.begin({})
        self._gain.begin({})
        self._start_window(None)

    def _start_window(self, cf: float | None) -> None:
        """Start a window of the CF that is in use now. After another CF, counts start again."""
        if cf is None or cf != self._cf:
            for test in (self._seconds, self._exchange, self._gain):
                test.begin_count()
        self._cf = cf
        self._count = 0
        self._times: list[float] = []  # without compression
        self._waits: list[float] = []
        self._window_gain = Average(1 / self.steps)

    def observe(self, report: StepReport, chosen: float | None) -> Finding | None:
        """Take in one step; returns the drift if a window ends that proves one.

        chosen: the CF whose gain is watched, too.
        """
        if report.cf != self._cf:
            self._start_window(report.cf)
        seconds, wait = report.seconds - report.coding_seconds, report.wait_seconds
        timed = report.timed_cf == report.cf and isfinite(seconds) and isfinite(wait)
        if timed and seconds > 0 and wait >= 0:
            self._times.append(seconds)
            self._waits.append(wait)
        if report.cf == chosen and report.cf in report.measurements:
            self._window_gain.add(*report.measurements[report.cf].terms(self._statistics.kind))
        self._count += 1
        if self._count < self.steps:
            return None
        drift = self._drift(report.cf, chosen)
        self._start_window(report.cf)
        return drift

    def _drift(self, cf: float, chosen: float | None) -> Finding | None:
        """The window is over: compare its numbers with the references."""
        if self._times:
            seconds, wait = median(self._times), median(self._waits)
            what = f"a step at CF {cf:g} without compression"
            if why := self._changed(self._seconds, cf, seconds, what, " s"):
                return Finding(Cause.TIMES, why)
            what, least = f"the wait for the network at CF {cf:g}", EXCHANGE_SHARE * seconds
            if why := self._changed(self._exchange, cf, wait, what, " s", least):
                return Finding(Cause.TIMES, why)
        gain = self._window_gain.value
        if self._statistics.signal is not None:  # for which a window is too short
            known = self._statistics.gain(chosen)
            gain = nan if known is None else known
        if cf == chosen and isfinite(gain):
            what = f"the gain of CF {cf:g}"
            if why := self._changed(self._gain, cf, min(1.0, gain), what):
                return Finding(Cause.GAINS, why)
        return None

    def _changed(
        self, test: ChangeTest, cf: float, now: float, what: str, unit: str = "", least: float = 0.0
    ) -> str:
        """What has changed from which value, in words; "" if it has not."""
        before = test.changed_from(cf, now, least)
        if before is None:
            return ""
        return (
            f"{what} went from {before:.4g} to {now:.4g}{unit}, a change of "
            f"{relative_change(now, before):.2f} >= {test.threshold:g} for {test.patience} x "
            f"{self.steps} steps"
        )


class PeriodicProbe(Stateful):
    """A timer for measuring again the gains of the CFs that were passed over: a wait, then a probe
    of a few steps, then the wait again.

    The wait doubles after a probe that changed nothing, because gains change slowly late in
    training.

    wait: steps before the first probe. steps: of a probe.
    """

    _fields = declare(_wait=CHILD, _since=count)

    def __init__(self, wait: int, steps: int) -> None:
        self._wait = Backoff(wait, MAX_PROBE_DOUBLINGS)
        self._steps = steps
        self._since = 0  # steps since the wait began

    @property
    def active(self) -> bool:
        """Whether this step is part of a probe."""
        return self._since >= self._wait.steps

    def step(self) -> bool:
        """Take one step; returns whether a probe has just ended."""
        self._since += 1
        return self._since >= self._wait.steps + self._steps

    def begin(self, changed: bool) -> None:
        """Wait again. changed: another CF was chosen since the last probe."""
        self._since = 0
        if changed:
            self._wait.reset()
        else:
            self._wait.fail()

    def pause(self) -> None:
        """The chosen CF is not in use: a probe that had begun starts again when it is."""
        self._since = min(self._since, self._wait.steps)


class DriftMonitor(Stateful):
    """A monitor that says when a choice of GraVAC's may no longer be right, and why.

    A choice stands for `cooldown` steps, whatever is observed. That number doubles each time that a
    choice is given up soon after, so that reports so noisy that they look like drift cost less and
    less, and is itself again after a choice that lasted.

    statistics: of the candidates. rule: says below which gain a CF is not sent, and from which on
        it is sent again.
    omega: relative difference of T_comp that counts as none.
    drift: `relative_change` of step time or gain that counts; None: drift is not looked for.
    patience: windows that a drift must last. steps: of a window, and of a probe.
    retry: steps before the first probe, and steps for which the chosen CF may be kept from being
        sent by its gain; None: there are no probes, and it may be so for ever.
    """

    _fields = declare(
        _chosen=maybe_cf,
        _others=Field(lambda state, key, _: tuple(numbers(state, key, least=1)), list),
        _steps_below=count,
        _since=maybe_count,
        _detector=OPTIONAL_CHILD,
        _cooldown=CHILD,
        _probe=OPTIONAL_CHILD,
        _t_sys=saved_as(maybe_number, above=0),
    )

    def __init__(
        self,
        statistics: CandidateStatistics,
        rule: SendRule,
        *,
        omega: float,
        drift: float | None,
        patience: int,
        steps: int,
        retry: int | None,
        cooldown: int,
    ) -> None:
        self._statistics, self._rule, self._omega = statistics, rule, omega
        self._retry = retry
        self._detector = (
            None if drift is None else DriftDetector(statistics, drift, patience, steps)
        )
        self._cooldown = Backoff(cooldown, MAX_COOLDOWN_DOUBLINGS)
        self._probe = None if retry is None else PeriodicProbe(retry, steps)
        self._chosen: float | None = None
        self._others: tuple[float, ...] = ()  # tried and passed over
        self._steps_below = 0  # in a row, with the chosen CF's gain below epsilon
        self._since: int | None = None  # steps with the choice; None: none was ever made
        self._t_sys: float | None = None  # of the chosen CF, before the last probe began

    def begin(self, chosen: float, tried: tuple[float, ...]) -> None:
        """A choice was made among the CFs that were tried and dense."""
        changed, self._chosen = chosen != self._chosen, chosen
        self._others = tuple(cf for cf in tried if cf not in (DENSE, chosen))
        self._steps_below = 0
        if self._since is not None:
            self._cooldown.judge(self._since)
        self._since = 0
        if self._detector is not None:
            self._detector.begin()
        if self._probe is not None:
            self._probe.begin(changed)

    def probe(self, send: float) -> tuple[float, ...]:
        """The CFs to measure while `send` is sent: none, except during a probe."""
        active = self._probe is not None and self._probe.active
        return self._others if active and send == self._chosen else ()

    def observe(self, report: StepReport) -> Finding | None:
        """Take in one step with the choice; returns what was found, if anything."""
        self._since = (self._since or 0) + 1
        drift = None if self._detector is None else self._detector.observe(report, self._chosen)
        drift = drift or self._out_of_use(report.cf)
        may_leave = self._since > self._cooldown.steps
        return drift if drift and may_leave else self._observe_probe(report.cf, may_leave)

    def _out_of_use(self, sent: float) -> Finding | None:
        """A drift if its gain has kept the chosen CF from being sent for too long, and smaller CFs
        were tried."""
        chosen, epsilon = self._chosen, self._rule.epsilon
        gain = self._statistics.gain(chosen)
        below = sent != chosen and gain is not None and gain < epsilon
        self._steps_below = self._steps_below + 1 if below else 0
        if self._retry is None or self._steps_below < self._retry:
            return None
        if chosen is None or chosen <= min(self._others, default=chosen):
            return None
        numbers = f"{gain:.4g} < epsilon {epsilon:g} for {self._steps_below} steps"
        return Finding(Cause.GAINS, f"the gain of CF {chosen:g} is {numbers}")

    def _observe_probe(self, sent: float, may_leave: bool) -> Finding | None:
        """Begin or end a probe of the other CFs when it is time to, while the chosen CF is sent."""
        if self._probe is None:
            return None
        if not self._others or sent != self._chosen:
            self._probe.pause()
            return None
        was_active = self._probe.active
        if self._probe.step():
            why = self._statistics.promising(
                self._others, sent, self._t_sys, self._rule.up_at, self._omega
            )
            if why and may_leave:
                return Finding(Cause.GAINS, why)
            self._probe.begin(changed=False)
            listed = self._listed()
            return Finding(Cause.PROBE, f"looked again at CF {listed}: none is better by omega")
        if self._probe.active and not was_active:
            self._t_sys = self._statistics.t_sys(sent)
            return Finding(Cause.PROBE, f"looks again at the gains of CF {self._listed()}")
        return None

    def described(self) -> str:
        """What would make it explore again, in words; "" if nothing will."""
        causes = []
        if self._detector is not None:
            causes.append(
                f"its step time or gain changes by {self._detector.drift:g} of itself for "
                f"{self._detector.patience} x {self._detector.steps} steps"
            )
        if self._retry is not None and self._others:
            causes.append(
                f"in a look now and then CF {self._listed()} shows a gain that promises more"
            )
        return f"it explores again when {', or when '.join(causes)}" if causes else ""

    def _listed(self) -> str:
        return ", ".join(f"{cf:g}" for cf in self._others)
