"""GraVAC's exploration: window by window up the ladder, and the floor follows (GraVAC section 3.2).

1. "measure": dense for a few steps, for dense's own step time; gains are probed meanwhile.
2. "floor": one window at the smallest CF, for its step time.
3. "explore": one window for each candidate of the ladder; the floor follows where nothing is lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from policies import checks, saved
from policies.base import DENSE
from policies.choice import nothing_lost
from policies.evidence import Evidence
from policies.send_rule import Level, SendRule

PHASES = ("measure", "floor", "explore", "settled", "stay dense")
"""The last two: whoever explored has chosen."""

_STATE = ("phase", "floor", "rung", "window_step", "quick")


class Exploration:
    """phase: one of the above, or what whoever has chosen calls the time after. floor: what is sent
    where the candidate may not be.

    window, short_window, dense_window: steps; of the last, 0 for no measurement. omega: change of
    gain that counts as none. may_stop: at the first sign that no CF can beat dense.
    """

    def __init__(
        self,
        ladder: tuple[float, ...],
        seen: Evidence,
        rule: SendRule,
        *,
        window: int,
        short_window: int,
        dense_window: int,
        omega: float,
        may_stop: bool,
    ) -> None:
        self._ladder, self._seen, self._rule = ladder, seen, rule
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
        known = self._seen.t_sys(DENSE) is not None
        measures = self._dense_window > 0 and not known and self.floor != DENSE
        self.phase = "measure" if measures else "floor"
        self._rule.enter(Level.DENSE if measures else Level.FLOOR)

    def close(self, phase: str) -> None:
        """A choice is made; the floor is the smallest CF again where something is compressed."""
        self.phase = phase
        if phase == "settled":
            self.floor = self._ladder[0]

    @property
    def candidate(self) -> float | None:
        """The CF above the floor that is explored; None: the ladder is used up."""
        return self._ladder[self.rung] if self.rung < len(self._ladder) else None

    @property
    def tried(self) -> tuple[float, ...]:
        """The ladder, as far as it was explored."""
        return self._ladder[: self.rung + 1]

    def step(self) -> tuple[bool, str]:
        """One step on: whether nothing is left to explore, and why the plan changes, "" if it does
        not; at the end, why no CF can beat dense, "" if one may."""
        if self._window_ends():
            steps, self.window_step = self.window_step, 0
            return self._end_window(steps)
        return False, "" if self.phase == "measure" else self.follow_rule(self.candidate)

    def follow_rule(self, candidate: float | None) -> str:
        """Up or down by the gains of floor and candidate; why, "" if nothing moves."""
        above = None if self.phase == "floor" else candidate
        return self._rule.step(self._seen.gain(self.floor), self._seen.gain(above))

    def _window_ends(self) -> bool:
        window = self._short_window if self.quick else self._window
        if self.phase == "measure":
            window = min(self._dense_window, window) if self.quick else self._dense_window
        elif self._rule.level == Level.DENSE:
            return False
        self.window_step += 1
        return self.window_step >= window

    def _end_window(self, steps: int) -> tuple[bool, str]:
        if self.phase == "measure":
            return False, self._end_measurement(steps)
        self._seen.judge(self.floor)
        why, candidate = "", self.candidate
        if self.phase == "floor":
            self.phase = "explore"
        elif candidate is not None:
            self._seen.judge(candidate)
            if self._may_stop and (hopeless := self._seen.hopeless()):
                return True, hopeless
            why = self._promote(candidate)
            self.rung += 1
        if self.candidate is None:
            return True, ""
        self._rule.enter(Level.FLOOR)  # free to move up once the candidate's gain is believed
        return False, why and f"{why}, next candidate {self.candidate:g}"

    def _end_measurement(self, steps: int) -> str:
        self.phase = "floor"
        gain = self._seen.gain(self.floor)
        if gain is not None and gain < self._rule.epsilon:
            # Dense goes on, from now on for want of gain.
            return f"gain {gain:.4g} at CF {self.floor:g} < epsilon {self._rule.epsilon:g}"
        self._rule.enter(Level.FLOOR)
        known = "not known yet" if gain is None else f"{gain:.4g}"
        return f"{steps} dense steps done, gain {known}"

    def _promote(self, candidate: float) -> str:
        """Move the floor up to the candidate if that loses nothing; returns why (not)."""
        gains = self._seen.gain(self.floor), self._seen.gain(candidate)
        may, why = nothing_lost(*gains, omega=self._omega, epsilon=self._rule.epsilon)
        if not may:
            return f"{why}, floor stays {self.floor:g}"
        why += f", floor {self.floor:g} -> {candidate:g}"
        self.floor = candidate
        return why

    def outlook(self) -> str:
        """What it is about, and how far it has got."""
        if self.phase == "measure":
            return f"dense is measured, {self.window_step} steps so far; then CF {self.floor:g}"
        what = f"CF {self.floor if self.candidate is None else self.candidate:g}"
        return f"{what} is judged, {self.window_step} steps of its window so far"

    def state_dict(self) -> dict[str, Any]:
        """Everything, in JSON-like values."""
        return {name: getattr(self, name) for name in _STATE}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict()`."""
        self.phase = checks.one_of("phase", saved.text(state, "phase"), PHASES)
        self.floor = saved.number(state, "floor", least=1)
        self.rung = saved.count(state, "rung", least=1)
        self.window_step = saved.count(state, "window_step")
        self.quick = saved.flag(state, "quick")
