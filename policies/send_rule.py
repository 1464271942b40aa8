"""GraVAC's send rule: the choice between dense, floor and candidate in a step, by their gains."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from policies.state import Stateful, saved

MAX_DOUBLINGS = 6
"""The cooldown grows to at most 2^6 = 64 times the first one."""

SOON = 4
"""A move up that is undone within this many cooldowns was a mistake."""


class Level(IntEnum):
    """A choice of the send rule. Larger levels compress more."""

    DENSE = 0
    FLOOR = 1
    CANDIDATE = 2


@dataclass(eq=False)
class SendRule(Stateful):
    """A rule that sends the candidate if its gain reaches epsilon, else the floor if its gain does,
    else dense (GraVAC, Algorithm 1), with hysteresis and a cooldown around epsilon.

    With the error-fed gain the bare rule switches all the time: a dense step empties the residual,
    and the gain is large until compressed steps have filled it again. So moving down is easy and
    moving up is hard.
    """

    epsilon: float  # gain below which the present level is left at once
    hysteresis: float  # moving up needs epsilon x (1 + hysteresis), at most 1
    cooldown: int  # steps between a move and a move up. They double with each mistake in a row.
    # Algorithm 1 as published, without hysteresis and cooldown. An unknown gain is too small.
    bare: bool = False

    level: Level = saved(Level.DENSE)
    _wait: int = saved(0)  # the present cooldown
    _since_move: int | None = saved(None)  # number of steps
    _on_trial: bool = saved(False)  # the last move was a move up after a cooldown

    def __post_init__(self) -> None:
        self._wait = self.cooldown

    @property
    def up_at(self) -> float:
        """The gain that moving up needs."""
        return min(1.0, self.epsilon * (1 + self.hysteresis))

    def enter(self, level: Level) -> None:
        """Set the level for a reason outside this rule. The next move up needs no cooldown."""
        self.level, self._since_move, self._on_trial = level, None, False

    def step(self, floor: float | None, candidate: float | None) -> str:
        """Apply the rule in one step. Returns why the level has changed, "" if it has not.

        floor, candidate: averaged gains. None: not known, or a candidate that must not be sent.
        """
        if self.bare:
            return self._step_bare(floor, candidate)
        waited = self._since_move = None if self._since_move is None else self._since_move + 1
        gains = {Level.DENSE: 1.0, Level.FLOOR: floor, Level.CANDIDATE: candidate}
        here = gains[self.level]
        if here is not None and here < self.epsilon:
            if self._on_trial and waited is not None:
                doubled = min(2 * self._wait, self.cooldown * 2**MAX_DOUBLINGS)
                self._wait = doubled if waited <= SOON * self._wait else self.cooldown
            # A floor of unknown gain is sent, so that its gain is measured.
            floor_serves = floor is None or floor >= self.epsilon
            self.level = Level.FLOOR if floor_serves else Level.DENSE
            self._since_move, self._on_trial = 0, False
            return f"gain {here:.4g} < epsilon {self.epsilon:g}"
        if waited is not None and waited < self._wait:
            return ""
        for level, gain in gains.items():
            if level > self.level and gain is not None and gain >= self.up_at:
                self.level, self._since_move, self._on_trial = level, 0, waited is not None
                return f"gain {gain:.4g} >= {self.up_at:.4g} (epsilon {self.epsilon:g}, hysteresis)"
        return ""

    def _step_bare(self, floor: float | None, candidate: float | None) -> str:
        """`step` of the bare rule."""
        before, self.level = self.level, Level.DENSE
        for level, gain in ((Level.CANDIDATE, candidate), (Level.FLOOR, floor)):
            if gain is not None and gain >= self.epsilon:
                self.level = level
                break
        if self.level == before:
            return ""
        gains = ["not known" if gain is None else f"{gain:.4g}" for gain in (floor, candidate)]
        numbers = f"gains {gains[0]} of the floor, {gains[1]} of the candidate"
        return f"{numbers}; epsilon {self.epsilon:g}"
