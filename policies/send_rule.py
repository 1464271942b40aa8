"""GraVAC's three-way send rule (its Algorithm 1), with hysteresis and a cooldown around epsilon.

The bare rule flaps with the error-fed gain: a dense step empties the residual, the gain looks good
again, the next compressed steps fill the residual, and so on. Down is therefore easy, up is hard.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any

from policies import saved

MIN_OBSERVATIONS = 5
"""Steps that a gain must have been measured in before anyone believes it."""

SOON = 4
"""An up-move that lasted no longer than this many cooldowns was a mistake."""

MAX_DOUBLINGS = 6
"""After so many mistakes in a row the cooldown grows no more (64 times the first)."""


class Level(IntEnum):
    """What is sent, from no compression up."""

    DENSE = 0
    FLOOR = 1
    CANDIDATE = 2


class SendRule:
    """Candidate if its gain is good enough, else the floor if its is, else dense.

    epsilon: gain below which the present level is left at once.
    hysteresis: a level is moved up to only at a gain of epsilon x (1 + hysteresis), at most 1.
    cooldown: steps between a move and the next one up; doubles (MAX_DOUBLINGS times at most) each
        time that an up-move is undone soon after, and is itself again after one that lasted.
    """

    def __init__(self, epsilon: float, hysteresis: float, cooldown: int) -> None:
        self.epsilon = epsilon
        self.up_at = min(1.0, epsilon * (1 + hysteresis))
        self.level = Level.DENSE
        self._first_cooldown = cooldown
        self._cooldown = cooldown
        self._since_move: int | None = None  # None: nothing to wait for
        self._since_up: int | None = None  # None: no up-move that could prove a mistake

    def enter(self, level: Level) -> None:
        """Put at a level from outside (a new candidate, a choice): not a move, no cooldown."""
        self.level = level
        self._since_move = self._since_up = None

    def step(self, floor: float | None, candidate: float | None) -> str:
        """One step on; returns why the level changed, "" if it did not.

        floor, candidate: averaged gains; None: not known, or a candidate that must not be sent.
        """
        if self._since_move is not None:
            self._since_move += 1
        if self._since_up is not None:
            self._since_up += 1
        gains = {Level.DENSE: 1.0, Level.FLOOR: floor, Level.CANDIDATE: candidate}
        here = gains[self.level]
        if here is not None and here < self.epsilon:
            # A floor that was not measured of late is sent: that is how it gets measured.
            floor_serves = floor is None or floor >= self.epsilon
            below = Level.FLOOR if floor_serves else Level.DENSE
            return self._down(below, here)
        may_move = self._since_move is None or self._since_move >= self._cooldown
        if may_move and self.level < Level.CANDIDATE:
            for level in Level:
                gain = gains[level]
                if level > self.level and gain is not None and gain >= self.up_at:
                    return self._up(level, gain)
        return ""

    def _down(self, level: Level, gain: float) -> str:
        if self._since_up is not None:
            longest = self._first_cooldown * 2**MAX_DOUBLINGS
            undone_soon = self._since_up <= SOON * self._cooldown
            doubled = min(2 * self._cooldown, longest)
            self._cooldown = doubled if undone_soon else self._first_cooldown
        self.level, self._since_move, self._since_up = level, 0, None
        return f"gain {gain:.4g} < epsilon {self.epsilon:g}"

    def _up(self, level: Level, gain: float) -> str:
        why = f"gain {gain:.4g} >= {self.up_at:.4g} (epsilon {self.epsilon:g} and hysteresis)"
        if self._since_move is not None:
            why += f", {self._since_move} steps after the last move"
        # The first move after enter() is free, so it is no up-move to be punished for.
        self._since_up = None if self._since_move is None else 0
        self.level, self._since_move = level, 0
        return why

    def state_dict(self) -> dict[str, Any]:
        """Everything, in JSON-like values."""
        return {
            "level": int(self.level),
            "cooldown": self._cooldown,
            "since_move": self._since_move,
            "since_up": self._since_up,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict()`."""
        self.level = Level(saved.count(state, "level"))
        self._cooldown = saved.count(state, "cooldown", least=1)
        self._since_move = saved.maybe_count(state, "since_move")
        self._since_up = saved.maybe_count(state, "since_up")
