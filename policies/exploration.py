"""What GraVAC explores with: the rule that says which CF is sent, and what is known of each CF.

The *floor* is the CF that is sent where the candidate may not be: at first the smallest CF, later
the largest one that loses no gain against it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import InitVar, dataclass
from enum import IntEnum
from math import nan

from policies.base import DENSE, GainKind, StepReport
from policies.estimators import Averages, Backoff
from policies.signal_gain import SignalGain
from policies.state import Stateful, saved
from policies.step_time import StepTime
from policies.words import costs, named, progress, seconds_in_words

MAX_DOUBLINGS = 6
"""The cooldown of the send rule grows to 64 times the first."""


class Level(IntEnum):
    """A choice of the send rule; larger ones compress more."""

    DENSE = 0
    FLOOR = 1
    CANDIDATE = 2


@dataclass(eq=False)
class SendRule(Stateful):
    """A rule that sends the candidate if its gain reaches epsilon, else the floor if its gain does,
    else dense (GraVAC, Algorithm 1), with hysteresis and a cooldown around epsilon.

    The bare rule flaps with the error-fed gain: a dense step empties the residual, and the gain
    looks good until compressed steps have filled it. So moving down is easy and moving up is hard.
    """

    epsilon: float  # gain below which the present level is left at once
    hysteresis: float  # moving up needs epsilon x (1 + hysteresis), at most 1
    cooldown: InitVar[int]  # steps between a move and one up, more after a move up soon undone

    level: Level = saved(Level.DENSE)
    _cooldown: Backoff = saved()
    _since_move: int | None = saved(None)  # steps
    _on_trial: bool = saved(False)  # whether the last move was one up after a cooldown

    def __post_init__(self, cooldown: int) -> None:
        self._cooldown = Backoff(cooldown, MAX_DOUBLINGS)

    @property
    def up_at(self) -> float:
        """The gain that moving up needs."""
        return min(1.0, self.epsilon * (1 + self.hysteresis))

    def enter(self, level: Level) -> None:
        """Go to a level for another reason, after which moving up needs no cooldown."""
        self.level, self._since_move, self._on_trial = level, None, False

    def step(self, floor: float | None, candidate: float | None) -> str:
        """Take one step; returns why the level changed, "" if it did not.

        floor, candidate: averaged gains. None: not known, or a candidate that must not be sent.
        """
        waited = self._since_move = None if self._since_move is None else self._since_move + 1
        gains = {Level.DENSE: 1.0, Level.FLOOR: floor, Level.CANDIDATE: candidate}
        here = gains[self.level]
        if here is not None and here < self.epsilon:
            if self._on_trial and waited is not None:
                self._cooldown.judge(waited)
            # A floor whose gain is not known is sent, since that is how it gets measured.
            floor_serves = floor is None or floor >= self.epsilon
            self.level = Level.FLOOR if floor_serves else Level.DENSE
            self._since_move, self._on_trial = 0, False
            return f"gain {here:.4g} < epsilon {self.epsilon:g}"
        if waited is not None and waited < self._cooldown.steps:
            return ""
        for level, gain in gains.items():
            if level > self.level and gain is not None and gain >= self.up_at:
                self.level, self._since_move, self._on_trial = level, 0, waited is not None
                return f"gain {gain:.4g} >= {self.up_at:.4g} (epsilon {self.epsilon:g}, hysteresis)"
        return ""


@dataclass(eq=False)
class CandidateStatistics(Stateful):
    """The statistics of the candidates: gain, T_sys and T_comp = T_sys x gain of each CF, as far as
    they are known (GraVAC, section 3.1). A gain is averaged while it is measured, and noted at the
    end of a CF's window."""

    kind: GainKind
    weight: float  # of a new value in the average of a gain
    believed_after: int  # measurements that an average needs before it counts
    nbytes: Callable[[float], float]  # bytes on the wire at a CF
    assumed: Mapping[float, float]  # gains, by CF, of hooks whose gain cannot be measured
    overlap: int | None = 0  # see `Context`

    _averages: Averages = saved()
    _judged: dict[float, float] = saved({})
    time: StepTime = saved()
    signal: SignalGain | None = saved()  # only if `kind` is "signal"

    def __post_init__(self) -> None:
        self._averages = Averages(self.weight)
        self.time = StepTime(self.nbytes, self.overlap)
        self.signal = SignalGain() if self.kind == "signal" else None

    def observe(self, report: StepReport, measured: Collection[float]) -> str:
        """Take in one step, in which the gains of these CFs were measured; averages of others would
        become stale. Returns, in words, whether another estimate of the signal gain decides."""
        self.time.observe(report)
        if self.signal is not None:
            return self.signal.observe(report)
        self._averages.keep_only(measured)
        for cf, measurement in report.measurements.items():
            self._averages.add(cf, *measurement.terms(self.kind))
        return ""

    def gain(self, cf: float | None) -> float | None:
        """The gain of a CF in [0, 1], as far as it is known; dense has 1."""
        if cf is None:
            return None
        if cf == DENSE:
            return 1.0
        if cf in self.assumed:
            return self.assumed[cf]
        if self.signal is not None:
            return self.signal.gain(cf)
        if self._averages.steps(cf) < self.believed_after:
            return self._judged.get(cf)
        return min(1.0, self._averages[cf])

    def judge(self, cf: float | None) -> None:
        """A window of this CF is over: note its gain, if that is known."""
        gain = self.gain(cf)
        if cf is not None and cf != DENSE and gain is not None:
            self._judged[cf] = gain

    def forget_times(self, chosen: float | None) -> None:
        """Step times have changed, gains have not: that of the CF in use is noted."""
        self.judge(chosen)
        self.time = StepTime(self.nbytes, self.overlap)

    def forget_gains(self) -> None:
        """Gains have changed, step times have not."""
        self._averages = Averages(self.weight)
        self._judged.clear()

    def t_sys(self, cf: float) -> float | None:
        """Steps a second at a CF; None if it was never run."""
        seconds = self.time.measured(cf)
        return 1 / seconds if seconds else None

    def t_comp(self, epsilon: float) -> dict[float, float]:
        """T_comp of the judged CFs that were sent and whose gain is at least epsilon."""
        return {
            cf: gain * t_sys
            for cf, gain in self._judged.items()
            if gain >= epsilon and (t_sys := self.t_sys(cf)) is not None
        }

    def times_of(self, chosen: float, other: float) -> str:
        """The step time of a choice, in words, beside that of dense (of another CF, where dense is
        the choice); "" where it is not known."""
        beside = DENSE if chosen != DENSE else other
        now, then = self.time.measured(chosen), self.time.measured(beside)
        if now is None:
            return ""
        told = f"; {seconds_in_words(now)} a step"
        return told if then is None else f"{told}, {named(beside)} {seconds_in_words(then)}"

    def costs_of(self, cf: float, here: float) -> str:
        """What a switch to a CF from another changes, in words: the step time, where both were
        run, and the bytes."""
        saved = 1 - self.nbytes(cf) / (self.nbytes(here) or nan)
        return costs(self.time.measured(cf), self.time.measured(here), saved)

    def why_dense_wins(self) -> str:
        """Why no CF can beat dense, not even with nothing on the wire, the fastest compression and
        the best gain, as soon as two CFs that were sent show it; else ""."""
        dense = self.t_sys(DENSE)
        sent = [t_sys for cf in self._judged if (t_sys := self.t_sys(cf)) is not None]
        seconds = self.time.bound()
        if dense is None or len(sent) < 2 or not seconds:
            return ""
        gain = max(self._judged.values())
        # If a step was faster than the model's bound, the model is wrong.
        if gain > dense * seconds or gain * max(sent) > dense:
            return ""
        return (
            f"even with nothing on the wire a step would take {seconds_in_words(seconds)}, at a "
            f"gain of {gain:.4g}: {progress(gain / seconds / dense, 'dense')}, "
            f"{seconds_in_words(1 / dense)} a step"
        )
