"""What GraVAC watches after it has chosen, to notice that the choice may no longer be right.

The paper explores once. `DriftMonitor` finds reasons to explore again:

1. A drift: the step time or the gain of the CF in use has changed (`DriftDetector`).
2. The chosen CF could not be sent for long, because its gain is below epsilon: a CF between it and
   the floor may serve.
3. A probe, now and then, of the CFs that were passed over shows one that promises more
   (`PeriodicProbe`).

Noise must not look like drift. So windows of steps are compared, each by its median or mean; a
change must be large, go the same way and last for several windows; and a new choice stands for a
while whatever is observed (`ChoiceCooldown`).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any, Literal, NamedTuple

from policies.base import DENSE, GainKind, StepReport
from policies.estimators import Average, Backoff, median, relative_change
from policies.exploration import CandidateStatistics
from policies.state import (
    CHILD,
    OPTIONAL_CHILD,
    Field,
    Stateful,
    count,
    declare,
    entries,
    maybe_cf,
    maybe_count,
    number,
    numbers,
    saved_as,
    whole,
)
from policies.step_time import seconds_without_compression

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


class Drift(NamedTuple):
    """A change that calls for a new exploration: what has changed, and the numbers that show it."""

    what: Literal["time", "gain"]
    why: str


def _load_references(state: Any, key: str, _: Any) -> dict[float, tuple[float, int]]:
    found = {}
    for cf, mean, windows in entries(state, key, 3):
        row = {"cf": cf, "mean": mean, "windows": windows}
        mean, windows = number(row, "mean"), count(row, "windows", least=1)
        found[number(row, "cf", least=1)] = (mean, windows)
    return found


_REFERENCES = Field(
    _load_references,
    lambda references: [[cf, *reference] for cf, reference in references.items()],
)


class ChangeTest(Stateful):
    """A test of whether a quantity has changed for good, by its values in window after window.

    threshold: `relative_change` that counts. Below half of it the count of windows starts again;
    between the two it stays (hysteresis).
    patience: windows in a row, all above or all below the reference, that make a change.

    references: by CF, the mean that windows are compared with, and the number of windows in it.
    """

    _fields = declare(references=_REFERENCES, _windows_off=saved_as(whole))

    def __init__(self, threshold: float, patience: int) -> None:
        self.threshold, self.patience = threshold, patience
        self.references: dict[float, tuple[float, int]] = {}
        self._windows_off = 0  # in a row; negative if below the reference

    def begin_count(self) -> None:
        """Forget the windows that were off the reference."""
        self._windows_off = 0

    def changed_from(self, cf: float, now: float, least: float = 0.0) -> float | None:
        """Take in the value of one window at a CF. Returns the reference if the quantity has
        changed from it, else None; without a reference the value becomes one.

        least: smallest difference that counts.
        """
        before, windows = self.references.setdefault(cf, (now, 1))
        if self._is_off(now, before, least):
            return before
        if windows < REFERENCE_WINDOWS and not self._windows_off:
            self.references[cf] = before + (now - before) / (windows + 1), windows + 1
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

    drift: `relative_change` of the step time or gain that counts. patience: windows that it must
    last. steps: of a window. kind: the definition of gain.
    """

    _fields = declare(
        _chosen=saved_as(maybe_cf),
        _cf=saved_as(maybe_cf),
        _seconds=CHILD,
        _exchange=CHILD,
        _gain=CHILD,
        _count=saved_as(count),
        _times=saved_as(numbers, least=0),
        _waits=saved_as(numbers, least=0),
        _window_gain=CHILD,
    )

    def __init__(self, drift: float, patience: int, steps: int, kind: GainKind) -> None:
        self.drift, self.patience, self.steps = drift, patience, steps
        self._kind = kind
        self._cf: float | None = None  # in use
        self._seconds = ChangeTest(drift, patience)
        self._exchange = ChangeTest(EXCHANGE_CHANGE, patience)
        self._gain = ChangeTest(drift, patience)
        self.begin(None, {})

    def begin(self, chosen: float | None, seconds: Mapping[float, float]) -> None:
        """A choice was made, on these step times by CF, which become references.

        The references of the other quantities are the first windows after the choice. Exchange
        times were not compared for the choice, and the error-fed gain of a CF changes once that CF
        is sent.
        """
        self._chosen = chosen
        self._seconds.references = {cf: (time, 1) for cf, time in seconds.items()}
        self._exchange.references, self._gain.references = {}, {}
        self._start_window(None)

    def _start_window(self, cf: float | None) -> None:
        """Start a window of the CF that is in use now. After another CF, counts start again."""
        if cf is None or cf != self._cf:
            for test in (self._seconds, self._exchange, self._gain):
                test.begin_count()
        self._cf = cf
        self._count = 0
        self._times: list[float] = []
        self._waits: list[float] = []
        self._window_gain = Average(1 / self.steps)

    def observe(self, report: StepReport, gain: float | None = None) -> Drift | None:
        """Take in one step; returns the drift if a window ends that proves one.

        gain: of the chosen CF, for the definition "signal", for which a window is too short.
        """
        if report.cf != self._cf:
            self._start_window(report.cf)
        if report.timed_cf == report.cf:
            seconds = seconds_without_compression(report)
            if seconds is not None:
                self._times.append(seconds)
            if isfinite(report.wait_seconds) and report.wait_seconds >= 0:
                self._waits.append(report.wait_seconds)
        if report.cf == self._chosen and report.cf in report.measurements:
            self._window_gain.add(*report.measurements[report.cf].terms(self._kind))
        self._count += 1
        if self._count < self.steps:
            return None
        drift = self._judge(report.cf, self._window_gain.value if gain is None else gain)
        self._start_window(report.cf)
        return drift

    def _judge(self, cf: float, gain: float) -> Drift | None:
        """The window is over: compare its numbers with the references."""
        if self._times:
            now = median(self._times)
            before = self._seconds.changed_from(cf, now)
            if before is not None:
                told = self._described(self._seconds, before, now, " s")
                return Drift("time", f"a step at CF {cf:g} without compression {told}")
            if self._waits:
                wait = median(self._waits)
                before = self._exchange.changed_from(cf, wait, EXCHANGE_SHARE * now)
                if before is not None:
                    told = self._described(self._exchange, before, wait, " s")
                    return Drift("time", f"the wait for the network at CF {cf:g} {told}")
        if cf == self._chosen and isfinite(gain):
            gain = min(1.0, gain)
            before = self._gain.changed_from(cf, gain)
            if before is not None:
                told = self._described(self._gain, before, gain, "")
                return Drift("gain", f"the gain of CF {cf:g} {told}")
        return None

    def _described(self, test: ChangeTest, before: float, now: float, unit: str) -> str:
        return (
            f"went from {before:.4g} to {now:.4g}{unit}, a change of "
            f"{relative_change(now, before):.2f} >= {test.threshold:g} for {test.patience} x "
            f"{self.steps} steps"
        )


class ChoiceCooldown(Stateful):
    """The number of steps for which a new choice stands, whatever is observed.

    It doubles each time that a choice is given up soon after, so that reports so noisy that they
    look like drift cost less and less. After a choice that lasted it is itself again, so that a
    network that changes now and then is followed at once.
    """

    _fields = declare(_wait=CHILD, _since=saved_as(maybe_count))

    def __init__(self, steps: int) -> None:
        self._wait = Backoff(steps, MAX_COOLDOWN_DOUBLINGS)
        self._since: int | None = None  # steps with the choice; None: none was ever made

    def begin(self) -> None:
        """A choice was made."""
        if self._since is not None:
            self._wait.judge(self._since)
        self._since = 0

    def step(self) -> bool:
        """Take one step with the choice; returns whether it may be given up."""
        self._since = (self._since or 0) + 1
        return self._since > self._wait.steps


class PeriodicProbe(Stateful):
    """A timer for measuring again the gains of the CFs that were passed over: a wait, then a probe
    of a few steps, then the wait again.

    The wait doubles after a probe that changed nothing, because gains change slowly late in
    training.

    wait: steps before the first probe. steps: of a probe.
    """

    _fields = declare(_wait=CHILD, _since=saved_as(count))

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


class Finding(NamedTuple):
    """What the drift monitor has found in a step, and the numbers that show it.

    what: "time" or "gain" call for a new exploration, "probe" only means that other CFs are
    measured from now on.
    """

    what: Literal["time", "gain", "probe"]
    why: str


class DriftMonitor(Stateful):
    """A monitor that says when a choice of GraVAC's may no longer be right, and why.

    epsilon: gain below which a CF is not sent. up_at: gain from which on it is sent again.
    omega: relative difference of T_comp that counts as none.
    drift: `relative_change` of step time or gain that counts; None: drift is not looked for.
    patience: windows that a drift must last. steps: of a window, and of a probe.
    retry: steps before the first probe, and steps for which the chosen CF may be kept from being
        sent by its gain; None: there are no probes, and it may be so for ever.
    cooldown: steps for which a choice stands.
    """

    _fields = declare(
        _chosen=saved_as(maybe_cf),
        _bottom=saved_as(number, least=1),
        _others=Field(lambda state, key, _: tuple(numbers(state, key, least=1)), list),
        _steps_below=saved_as(count),
        _detector=OPTIONAL_CHILD,
        _cooldown=CHILD,
        _probe=OPTIONAL_CHILD,
    )

    def __init__(
        self,
        kind: GainKind,
        *,
        epsilon: float,
        up_at: float,
        omega: float,
        drift: float | None,
        patience: int,
        steps: int,
        retry: int | None,
        cooldown: int,
    ) -> None:
        self._epsilon, self._up_at, self._omega = epsilon, up_at, omega
        self._retry = retry
        self._detector = None if drift is None else DriftDetector(drift, patience, steps, kind)
        self._cooldown = ChoiceCooldown(cooldown)
        self._probe = None if retry is None else PeriodicProbe(retry, steps)
        self._chosen: float | None = None
        self._others: tuple[float, ...] = ()  # tried and passed over
        self._bottom = DENSE  # smallest CF of the ladder
        self._steps_below = 0  # in a row, with the chosen CF's gain below epsilon

    def begin(
        self, chosen: float, tried: tuple[float, ...], statistics: CandidateStatistics
    ) -> None:
        """A choice was made among the CFs that were tried and dense."""
        changed, self._chosen = chosen != self._chosen, chosen
        self._others = tuple(cf for cf in tried if cf not in (DENSE, chosen))
        self._bottom = tried[0]
        self._steps_below = 0
        if self._detector is not None:
            self._detector.begin(chosen, statistics.step_times())
        self._cooldown.begin()
        if self._probe is not None:
            self._probe.begin(changed)

    def probe(self, send: float) -> tuple[float, ...]:
        """The CFs to measure while `send` is sent: none, except during a probe."""
        active = self._probe is not None and self._probe.active
        return self._others if active and send == self._chosen else ()

    def observe(self, report: StepReport, statistics: CandidateStatistics) -> Finding | None:
        """Take in one step with the choice; returns what was found, if anything."""
        gain = None if statistics.signal is None else statistics.gain(self._chosen)
        drift = None if self._detector is None else self._detector.observe(report, gain)
        may_leave = self._cooldown.step()
        drift = drift or self._out_of_use(report.cf, statistics)
        if drift is not None and may_leave:
            return Finding(*drift)
        return self._observe_probe(report.cf, statistics, may_leave)

    def _out_of_use(self, sent: float, statistics: CandidateStatistics) -> Drift | None:
        """A drift if the gain of the chosen CF has kept it from being sent for too long."""
        if self._retry is None or sent == self._chosen or self._chosen == self._bottom:
            self._steps_below = 0
            return None
        gain = statistics.gain(self._chosen)
        below = gain is not None and gain < self._epsilon
        self._steps_below = self._steps_below + 1 if below else 0
        if self._steps_below < self._retry:
            return None
        numbers = f"{gain:.4g} < epsilon {self._epsilon:g} for {self._steps_below} steps"
        return Drift("gain", f"the gain of CF {self._chosen:g} is {numbers}")

    def _observe_probe(
        self, sent: float, statistics: CandidateStatistics, may_leave: bool
    ) -> Finding | None:
        """Begin or end a probe of the other CFs when it is time to, while the chosen CF is sent."""
        if self._probe is None:
            return None
        if not self._others or sent != self._chosen:
            self._probe.pause()
            return None
        was_active = self._probe.active
        if self._probe.step():
            why = statistics.promising(self._others, self._chosen, self._up_at, self._omega)
            if why and may_leave:
                return Finding("gain", why)
            self._probe.begin(changed=False)
            listed = self._listed()
            return Finding("probe", f"looked again at CF {listed}: none is better by omega")
        if self._probe.active and not was_active:
            return Finding("probe", f"looks again at the gains of CF {self._listed()}")
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
