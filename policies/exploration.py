"""How GraVAC explores: candidate by candidate up the ladder, and which CF is sent meanwhile.

- `SendRule` decides in each step whether the candidate, the floor or dense is sent (Algorithm 1).
- `CandidateStatistics` keeps gains and step times of the CFs (section 3.1).
- `Exploration` gives each candidate a window and moves the floor (section 3.2).

The *floor* is the CF that is sent where the candidate may not be: at first the smallest CF, later
the largest one that loses no gain against it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from enum import IntEnum, StrEnum
from math import inf

from policies.base import DENSE, GainKind, StepReport
from policies.estimators import AVERAGES, Averages, Backoff
from policies.signal_gain import SignalGain
from policies.state import (
    CHILD,
    OPTIONAL_CHILD,
    Stateful,
    by_cf,
    count,
    declare,
    flag,
    maybe_count,
    number,
    saved_as,
    saved_enum,
)
from policies.step_time import StepTime

MIN_OBSERVATIONS = 5
"""Steps in which a gain must have been measured before it is believed."""

MAX_DOUBLINGS = 6
"""The cooldown of the send rule grows to 64 times the first."""


class Level(IntEnum):
    """A choice of the send rule; larger ones compress more."""

    DENSE = 0
    FLOOR = 1
    CANDIDATE = 2


class SendRule(Stateful):
    """A rule that sends the candidate if its gain reaches epsilon, else the floor if its gain does,
    else dense (GraVAC, Algorithm 1), with hysteresis and a cooldown around epsilon.

    The bare rule flaps with the error-fed gain: a dense step empties the residual, the gain looks
    good again, the next compressed steps fill the residual, and so on. So moving down is easy, and
    moving up is hard.

    epsilon: gain below which the present level is left at once.
    hysteresis: moving up needs a gain of epsilon x (1 + hysteresis), at most 1.
    cooldown: steps between a move and the next one up. It doubles each time that a move up is
        undone soon after, and is itself again after one that lasted.
    """

    _fields = declare(
        level=saved_enum(Level),
        _cooldown=CHILD,
        _since_move=maybe_count,
        _since_up=maybe_count,
    )

    def __init__(self, epsilon: float, hysteresis: float, cooldown: int) -> None:
        self.epsilon = epsilon
        self.up_at = min(1.0, epsilon * (1 + hysteresis))
        self.level = Level.DENSE
        self._cooldown = Backoff(cooldown, MAX_DOUBLINGS)
        self._since_move: int | None = None  # None: no move to wait after
        self._since_up: int | None = None  # None: the last move was none up

    def enter(self, level: Level) -> None:
        """Go to a level for another reason (a new candidate, a choice), without a cooldown."""
        self.level = level
        self._since_move = self._since_up = None

    def step(self, floor: float | None, candidate: float | None) -> str:
        """Take one step; returns why the level changed, "" if it did not.

        floor, candidate: averaged gains. None: not known, or a candidate that must not be sent.
        """
        if self._since_move is not None:
            self._since_move += 1
        if self._since_up is not None:
            self._since_up += 1
        gains = {Level.DENSE: 1.0, Level.FLOOR: floor, Level.CANDIDATE: candidate}
        here = gains[self.level]
        if here is not None and here < self.epsilon:
            # A floor whose gain is not known is sent, since that is how it gets measured.
            floor_serves = floor is None or floor >= self.epsilon
            below = Level.FLOOR if floor_serves else Level.DENSE
            return self._down(below, here)
        may_move = self._since_move is None or self._since_move >= self._cooldown.steps
        if may_move and self.level < Level.CANDIDATE:
            for level in Level:
                gain = gains[level]
                if level > self.level and gain is not None and gain >= self.up_at:
                    return self._up(level, gain)
        return ""

    def _down(self, level: Level, gain: float) -> str:
        if self._since_up is not None:
            self._cooldown.judge(self._since_up)
        self.level, self._since_move, self._since_up = level, 0, None
        return f"gain {gain:.4g} < epsilon {self.epsilon:g}"

    def _up(self, level: Level, gain: float) -> str:
        why = f"gain {gain:.4g} >= {self.up_at:.4g} (epsilon {self.epsilon:g} and hysteresis)"
        if self._since_move is not None:
            why += f", {self._since_move} steps after the last move"
        # The first move after enter() had no cooldown, and cannot double it.
        self._since_up = None if self._since_move is None else 0
        self.level, self._since_move = level, 0
        return why


class CandidateStatistics(Stateful):
    """The statistics of the candidates: gain, T_sys and T_comp = T_sys x gain of each CF, as far as
    they are known (section 3.1).

    The gain of a CF is averaged while it is measured, and noted (`judge`) at the end of its window.

    kind: the definition of gain. weight: of a new value in its average. believed_after:
    measurements that an average needs before it counts. nbytes: returns the bytes on the wire at a
    CF. assumed: gains, by CF, of hooks whose gain cannot be measured.

    signal: the signal gains, if `kind` is "signal"; else None.
    """

    _fields = declare(
        _averages=AVERAGES,
        _judged=by_cf,
        _remembered=by_cf,
        _time=CHILD,
        signal=OPTIONAL_CHILD,
    )

    def __init__(
        self,
        kind: GainKind,
        weight: float,
        believed_after: int,
        nbytes: Callable[[float], float],
        assumed: Mapping[float, float] | None = None,
    ) -> None:
        self.kind = kind
        self._weight = weight
        self._believed_after = believed_after
        self._assumed = dict(assumed or {})
        self._averages = Averages(weight)
        self._judged: dict[float, float] = {}
        self._remembered: dict[float, float] = {}  # judged before the step times were forgotten
        self._nbytes = nbytes
        self._time = StepTime(nbytes)
        self.signal = SignalGain() if kind == "signal" else None

    def observe(self, report: StepReport, measured: Collection[float]) -> str:
        """Take in one step: all times, and the gains of the CFs in `measured`. (Signal gains are
        known for the whole ladder.) Returns, in words, whether another estimate of the signal gain
        decides from now on; else ""."""
        self._time.observe(report)
        if self.signal is not None:
            return self.signal.observe(report)
        for cf, measurement in report.measurements.items():
            if cf in measured:
                self._averages.add(cf, *measurement.terms(self.kind))
        return ""

    def keep_only(self, measured: Collection[float]) -> None:
        """Forget the averages of CFs that are not measured any more: they would become stale."""
        self._averages.keep_only(measured)

    def gain(self, cf: float | None) -> float | None:
        """The averaged gain of a CF in [0, 1], once it can be believed; dense has 1.

        Until then, after `forget_times`, it is the gain that was judged before.
        """
        if cf is None:
            return None
        if cf == DENSE:
            return 1.0
        if cf in self._assumed:
            return self._assumed[cf]
        if self.signal is not None:
            return self.signal.gain(cf)
        average = self._averages.get(cf)
        if average is None or average.count < self._believed_after:
            return self._remembered.get(cf)
        return min(1.0, average.value)

    def forget_times(self) -> None:
        """Step times have drifted and gains have not: the CFs are to be judged again, with their
        former gains until new ones can be believed."""
        self._remembered.update(self._judged)
        self._judged = {}
        self._time = StepTime(self._nbytes)

    def forget_gains(self) -> None:
        """Gains have drifted: all are measured anew. The step times stay."""
        self._averages, self._judged, self._remembered = Averages(self._weight), {}, {}

    def judge(self, *cfs: float | None) -> None:
        """A window is over: note the gains of these CFs, where they are known."""
        for cf in cfs:
            gain = self.gain(cf)
            if cf is not None and cf != DENSE and gain is not None:
                self._judged[cf] = gain

    def t_sys(self, cf: float) -> float | None:
        """Steps a second at a CF; None if it was never run."""
        seconds = self._time.measured(cf)
        return 1 / seconds if seconds else None

    def step_times(self) -> dict[float, float]:
        """Seconds of a step without compression, by CF."""
        return self._time.without_compression()

    def t_comp(self, epsilon: float) -> dict[float, float]:
        """T_comp of the judged CFs that were sent and whose gain is at least epsilon."""
        return {
            cf: gain * t_sys
            for cf, gain in self._judged.items()
            if gain >= epsilon and (t_sys := self.t_sys(cf)) is not None
        }

    def promising(
        self, cfs: Collection[float], chosen: float, t_sys: float | None, up_at: float, omega: float
    ) -> str:
        """Why one of these CFs may be better than the chosen one, by the gains of now; else "".

        A CF that was sent must promise more T_comp by omega. One that was never sent, for want of
        gain, must have a gain of at least `up_at` now.

        t_sys: of the chosen CF, while no other is probed, which takes time; None: not known.
        """
        gain = self.gain(chosen)
        kept = None if gain is None or t_sys is None else gain * t_sys
        for cf in sorted(cfs):
            gain, t_sys = self.gain(cf), self.t_sys(cf)
            if gain is None or gain < up_at:
                continue
            if t_sys is None:
                return f"CF {cf:g} has not been sent and has gain {gain:.4g} >= {up_at:.4g} now"
            if kept is not None and gain * t_sys > (1 + omega) * kept:
                return (
                    f"CF {cf:g} has gain {gain:.4g} now, T_comp {gain * t_sys:.4g} > "
                    f"{1 + omega:.4g} x {kept:.4g} of CF {chosen:g}"
                )
        return ""

    def why_dense_wins(self) -> str:
        """Why no CF can beat dense, as soon as two CFs that were sent show it; else "".

        The bound is a step with nothing on the wire, the fastest compression and the best gain.
        """
        dense = self.t_sys(DENSE)
        sent = {cf: t_sys for cf in self._judged if (t_sys := self.t_sys(cf)) is not None}
        if dense is None or len(sent) < 2:
            return ""
        gain = max(self._judged.values())
        seconds = self._time.bound()
        # If a step was faster than the model's bound, the model is wrong.
        if not seconds or gain > dense * seconds or gain * max(sent.values()) > dense:
            return ""
        return (
            f"even with nothing on the wire a step would take {seconds:.4g} s and T_comp be "
            f"{gain / seconds:.4g} at the best gain, {gain:.4g}, <= {dense:.4g} of dense"
        )


def nothing_lost(
    floor_gain: float | None, gain: float | None, omega: float, epsilon: float
) -> tuple[bool, str]:
    """Whether the floor may move up to a candidate, and why or why not (section 3.2).

    It may if |d_floor - d_candidate| / d_floor <= omega and the candidate's gain is at least
    epsilon, without which it could not be sent as a floor.
    """
    if floor_gain is None or gain is None:
        return False, "gains not known"
    lost = abs(floor_gain - gain) / floor_gain if floor_gain > 0 else inf
    why = f"|{floor_gain:.4g} - {gain:.4g}| / {floor_gain:.4g} = {lost:.3f}"
    if lost > omega:
        return False, f"{why} > omega {omega:g}"
    why += f" <= omega {omega:g}"
    if gain < epsilon:
        return False, f"{why} but gain < epsilon {epsilon:g}"
    return True, why


class Phase(StrEnum):
    """A phase of a GraVAC run."""

    MEASURE = "measure"
    """Dense is sent for a few steps, for dense's own step time; gains are probed meanwhile."""
    FLOOR = "floor"
    """One window at the smallest CF, for its step time."""
    EXPLORE = "explore"
    """One window for each candidate of the ladder; the floor moves up where nothing is lost."""
    SETTLED = "settled"
    """A CF was chosen; it is sent as far as the send rule allows."""
    STAY_DENSE = "stay dense"
    """No CF beats dense, and dense is sent."""

    @property
    def explores(self) -> bool:
        """Whether no choice was made yet."""
        return self not in (Phase.SETTLED, Phase.STAY_DENSE)


class Exploration(Stateful):
    """An exploration of the ladder from its smallest CF up, a window of steps for each candidate
    (GraVAC, section 3.2).

    phase: what is being done. floor: the CF that is sent where the candidate may not be.

    window, short_window, dense_window: steps of a candidate's window, of one where only the step
    time is measured anew, and of the measurement of dense (0: none). omega: relative change of gain
    that counts as none. may_stop: end as soon as two CFs show that none can beat dense.
    """

    _fields = declare(
        phase=saved_enum(Phase),
        floor=saved_as(number, least=1),
        rung=saved_as(count, least=1),
        window_step=count,
        quick=flag,
    )

    def __init__(
        self,
        ladder: tuple[float, ...],
        statistics: CandidateStatistics,
        rule: SendRule,
        *,
        window: int,
        short_window: int,
        dense_window: int,
        omega: float,
        may_stop: bool,
    ) -> None:
        self._ladder, self._statistics, self._rule = ladder, statistics, rule
        self._window, self._short_window = window, short_window
        self._dense_window = dense_window
        self._omega = omega
        self._may_stop = may_stop

    def open(self, quick: bool) -> None:
        """Begin at the bottom of the ladder. quick: each CF gets a short window."""
        self.quick = quick
        self.floor = self._ladder[0]
        self.rung = 1  # of the candidate
        self.window_step = 0
        known = self._statistics.t_sys(DENSE) is not None
        measures = self._dense_window > 0 and not known and self.floor != DENSE
        self.phase = Phase.MEASURE if measures else Phase.FLOOR
        self._rule.enter(Level.DENSE if measures else Level.FLOOR)

    def close(self, phase: Phase) -> None:
        """A choice was made. If a CF was chosen, the floor is the smallest CF again."""
        self.phase = phase
        if phase == Phase.SETTLED:
            self.floor = self._ladder[0]

    @property
    def candidate(self) -> float | None:
        """The CF above the floor that is explored; None at the end of the ladder."""
        return self._ladder[self.rung] if self.rung < len(self._ladder) else None

    @property
    def tried(self) -> tuple[float, ...]:
        """The ladder, as far as it was explored."""
        return self._ladder[: self.rung + 1]

    def step(self) -> tuple[bool, str]:
        """Take one step. Returns whether the exploration is over, and a reason: why the plan
        changes while it goes on, why no CF can beat dense when it is over ("" if there is none)."""
        if self._window_ends():
            steps, self.window_step = self.window_step, 0
            return self._end_window(steps)
        return False, "" if self.phase == Phase.MEASURE else self.follow_rule(self.candidate)

    def follow_rule(self, candidate: float | None) -> str:
        """Move between dense, floor and candidate by their gains; returns why, "" if not moved."""
        above = None if self.phase == Phase.FLOOR else candidate
        return self._rule.step(self._statistics.gain(self.floor), self._statistics.gain(above))

    def _window_ends(self) -> bool:
        window = self._short_window if self.quick else self._window
        if self.phase == Phase.MEASURE:
            window = min(self._dense_window, window) if self.quick else self._dense_window
        elif self._rule.level == Level.DENSE:
            return False
        self.window_step += 1
        return self.window_step >= window

    def _end_window(self, steps: int) -> tuple[bool, str]:
        if self.phase == Phase.MEASURE:
            return False, self._end_measurement(steps)
        self._statistics.judge(self.floor)
        why, candidate = "", self.candidate
        if self.phase == Phase.FLOOR:
            self.phase = Phase.EXPLORE
        elif candidate is not None:
            self._statistics.judge(candidate)
            if self._may_stop and (why := self._statistics.why_dense_wins()):
                return True, why
            why = self._promote(candidate)
            self.rung += 1
        if self.candidate is None:
            return True, ""
        self._rule.enter(Level.FLOOR)  # the rule moves up once the candidate's gain is believed
        return False, why and f"{why}, next candidate {self.candidate:g}"

    def _end_measurement(self, steps: int) -> str:
        self.phase = Phase.FLOOR
        gain = self._statistics.gain(self.floor)
        if gain is not None and gain < self._rule.epsilon:
            # Dense goes on, from now on because the gain is too small.
            return f"gain {gain:.4g} at CF {self.floor:g} < epsilon {self._rule.epsilon:g}"
        self._rule.enter(Level.FLOOR)
        known = "not known yet" if gain is None else f"{gain:.4g}"
        return f"{steps} dense steps done, gain {known}"

    def _promote(self, candidate: float) -> str:
        """Move the floor up to the candidate if that loses nothing; returns why or why not."""
        gains = self._statistics.gain(self.floor), self._statistics.gain(candidate)
        may, why = nothing_lost(*gains, omega=self._omega, epsilon=self._rule.epsilon)
        if not may:
            return f"{why}, floor stays {self.floor:g}"
        why += f", floor {self.floor:g} -> {candidate:g}"
        self.floor = candidate
        return why

    def described(self) -> str:
        """What is being measured, and for how many steps so far."""
        if self.phase == Phase.MEASURE:
            return f"dense is measured, {self.window_step} steps so far; then CF {self.floor:g}"
        what = f"CF {self.floor if self.candidate is None else self.candidate:g}"
        return f"{what} is judged, {self.window_step} steps of its window so far"
