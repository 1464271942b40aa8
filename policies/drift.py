"""Has what a choice rests on changed since? Windows of steps are compared with how it was then.

Noise must not look like drift: a window counts by its median or mean, a change must be large, go
the same way and last for several windows, and a conclusion that has just been reached is left
alone for a while.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, isfinite
from typing import Any, Literal, NamedTuple

from policies import saved
from policies.average import Average
from policies.base import GainKind, StepReport
from policies.step_times import median, without_compression

SOON = 4
"""A conclusion that was given up within this many cooldowns did not last."""

MAX_DOUBLINGS = 4
"""The cooldown grows to 16 times the first and no further: a network may really change."""

EXCHANGE_CHANGE = 1.0
"""The time spent waiting for the network must double or halve to count. It says more than the step
time, of which it may be a small part while much is compressed, but it is noisier."""

EXCHANGE_SHARE = 0.05
"""... and the difference must be this part of the step time, or it is of no consequence."""

REFERENCE_WINDOWS = 5
"""A reference is the mean of that many windows, of those near it, so that its own noise is small;
later ones do not count, or a slow drift would take it along."""


class Drift(NamedTuple):
    """What has drifted ("time" or "gain"), and the numbers that show it."""

    what: Literal["time", "gain"]
    why: str


def apart(now: float, before: float) -> float:
    """Relative change, the same both ways: 0.3 is 1.3 times as much or 1 / 1.3 of it."""
    if now == before:
        return 0.0
    if now <= 0 or before <= 0:
        return inf
    return max(now / before, before / now) - 1


class Signal:
    """Counts the windows in a row in which a number was far from its reference, on one side.

    threshold: `apart` from here on counts; below half of it the count starts again, and between
    the two it stands (hysteresis). patience: windows that make it a drift.
    """

    def __init__(self, threshold: float, patience: int) -> None:
        self.threshold, self.patience = threshold, patience
        self.strikes = 0  # negative: below the reference

    def judge(self, now: float, reference: float, least: float = 0.0) -> bool:
        """One more window; whether it has drifted. least: smallest difference that counts."""
        distance = apart(now, reference)
        side = 1 if now > reference else -1
        if distance >= self.threshold and abs(now - reference) >= least:
            self.strikes = self.strikes + side if self.strikes * side > 0 else side
        elif distance < self.threshold / 2 or abs(now - reference) < least:
            self.strikes = 0
        return abs(self.strikes) >= self.patience


class Watch:
    """Watches the CF in use: its step time without compression, what of that was waiting for the
    network, and the gain of the CF that was chosen.

    drift: relative change that counts (see `apart`). patience: windows it must last.
    steps: of a window. kind: which gain.
    """

    def __init__(self, drift: float, patience: int, steps: int, kind: GainKind) -> None:
        self.drift, self.patience, self.steps = drift, patience, steps
        self._kind = kind
        self._cf: float | None = None
        self._signals = {
            "seconds": Signal(drift, patience),
            "exchange": Signal(EXCHANGE_CHANGE, patience),
            "gain": Signal(drift, patience),
        }
        self.begin(None, {})

    def begin(self, chosen: float | None, seconds: Mapping[float, float]) -> None:
        """A choice was made; the step times by CF that it rests on.

        Of the rest the first windows are the reference: exchange times were not compared, and the
        error-fed gain of a CF is another one once that CF is in use.
        """
        self._chosen = chosen
        # By signal and CF: the mean so far, and of how many windows.
        self._references: dict[str, dict[float, tuple[float, int]]] = {
            "seconds": {cf: (time, 1) for cf, time in seconds.items()},
            "exchange": {},
            "gain": {},
        }
        self._start_window(None)

    def _start_window(self, cf: float | None) -> None:
        """Of the CF that is in use now; another one than before leaves no strikes behind."""
        if cf is None or cf != self._cf:
            for signal in self._signals.values():
                signal.strikes = 0
        self._cf = cf
        self._count = 0
        self._times: list[float] = []
        self._waits: list[float] = []
        self._window_gain = Average(1 / self.steps)

    def observe(self, report: StepReport, gain: float | None = None) -> Drift | None:
        """One step on; the drift, if a window ends that proves one.

        gain: of the chosen CF, where a window is too short to measure it ("signal")."""
        if report.cf != self._cf:
            self._start_window(report.cf)
        if report.timed_cf == report.cf:
            seconds = without_compression(report)
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
        """The window is over: compare what it shows."""
        if self._times:
            now = median(self._times)
            why = self._compare("seconds", cf, now)
            if why:
                return Drift("time", f"a step at CF {cf:g} without compression {why}")
            if self._waits:
                why = self._compare("exchange", cf, median(self._waits), EXCHANGE_SHARE * now)
                if why:
                    return Drift("time", f"the wait for the network at CF {cf:g} {why}")
        if cf == self._chosen and isfinite(gain):
            why = self._compare("gain", cf, min(1.0, gain))
            if why:
                return Drift("gain", f"the gain of CF {cf:g} {why}")
        return None

    def _compare(self, name: str, cf: float, now: float, least: float = 0.0) -> str:
        """How far a window's number has drifted, if it has; without a reference it becomes one."""
        signal, references = self._signals[name], self._references[name]
        before, windows = references.setdefault(cf, (now, 1))
        if signal.judge(now, before, least):
            unit = "" if name == "gain" else " s"
            return (
                f"went from {before:.4g} to {now:.4g}{unit}, a change of {apart(now, before):.2f} "
                f">= {signal.threshold:g} for {signal.patience} x {self.steps} steps"
            )
        if windows < REFERENCE_WINDOWS and not signal.strikes:
            references[cf] = before + (now - before) / (windows + 1), windows + 1
        return ""

    def state_dict(self) -> dict[str, Any]:
        """Everything, in JSON-like values: pairs, since JSON has no float keys."""
        return {
            "chosen": self._chosen,
            "references": {
                name: [[cf, *reference] for cf, reference in by_cf.items()]
                for name, by_cf in self._references.items()
            },
            "cf": self._cf,
            "count": self._count,
            "times": list(self._times),
            "waits": list(self._waits),
            "window_gain": self._window_gain.state_dict(),
            "strikes": {name: signal.strikes for name, signal in self._signals.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict()`."""
        self._chosen, self._cf = saved.maybe_cf(state, "chosen"), saved.maybe_cf(state, "cf")
        references, strikes = saved.part(state, "references"), saved.part(state, "strikes")
        self._references = {name: _references(references, name) for name in self._signals}
        self._count = saved.count(state, "count")
        self._times = saved.numbers(state, "times", least=0)
        self._waits = saved.numbers(state, "waits", least=0)
        self._window_gain.load_state_dict(saved.part(state, "window_gain"))
        for name, signal in self._signals.items():
            signal.strikes = int(saved.whole(strikes, name))


def _references(state: Mapping[str, Any], name: str) -> dict[float, tuple[float, int]]:
    """A mean and its number of windows by CF, saved as triples."""
    found = {}
    for cf, mean, windows in saved.entries(state, name, 3):
        row = {"cf": cf, "mean": mean, "windows": windows}
        found[saved.number(row, "cf", least=1)] = (
            saved.number(row, "mean"),
            saved.count(row, "windows", least=1),
        )
    return found


class Cooldown:
    """For how long a new conclusion stands whatever is seen.

    Each time that one is given up soon after, the next stands twice as long (MAX_DOUBLINGS times
    at most): reports so noisy that they look like drift cost less and less. After one that lasted
    it is itself again, so a network that changes now and then is followed at once.
    """

    def __init__(self, steps: int) -> None:
        self._first = self._steps = steps
        self._since: int | None = None  # None: nothing was ever concluded

    def begin(self) -> None:
        """There is a conclusion."""
        if self._since is not None:
            soon = self._since <= SOON * self._steps
            longest = self._first * 2**MAX_DOUBLINGS
            self._steps = min(2 * self._steps, longest) if soon else self._first
        self._since = 0

    def step(self) -> bool:
        """One step on with the conclusion; whether it may be given up."""
        self._since = (self._since or 0) + 1
        return self._since > self._steps

    def state_dict(self) -> dict[str, Any]:
        """Everything, in JSON-like values."""
        return {"steps": self._steps, "since": self._since}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict()`."""
        self._steps = saved.count(state, "steps", least=1)
        self._since = saved.maybe_count(state, "since")
