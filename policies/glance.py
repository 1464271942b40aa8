"""When to look again at the CFs that were passed over: measured for a few steps, not sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from policies import saved

MAX_DOUBLINGS = 6
"""After so many looks for nothing the wait grows no more (64 times the first)."""


class Glance:
    """A wait, then a look of a few steps, then the wait again, twice as long after a look that
    changed nothing: gains change slowly late in training.

    wait: steps before the first look; None: never. steps: of a look.
    """

    def __init__(self, wait: int | None, steps: int) -> None:
        self._first = self._wait = wait
        self._steps = steps
        self._since = 0

    @property
    def looking(self) -> bool:
        """Whether this step is one of a look."""
        return self._wait is not None and self._since >= self._wait

    def step(self) -> bool:
        """One step on; whether a look has just ended."""
        self._since += 1
        return self._wait is not None and self._since >= self._wait + self._steps

    def begin(self, changed: bool) -> None:
        """Wait again. changed: there is another conclusion than before the last look."""
        self._since = 0
        if changed:
            self._wait = self._first
        elif self._wait is not None and self._first is not None:
            self._wait = min(2 * self._wait, self._first * 2**MAX_DOUBLINGS)

    def pause(self) -> None:
        """A look that cannot go on starts again, at once; otherwise nothing."""
        if self._wait is not None:
            self._since = min(self._since, self._wait)

    def state_dict(self) -> dict[str, Any]:
        """Everything, in JSON-like values."""
        return {"wait": self._wait, "since": self._since}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict()`."""
        self._wait = saved.maybe_count(state, "wait", least=1)
        self._since = saved.count(state, "since")
        saved.together((self._wait is None) == (self._first is None), "'wait' is of other settings")
