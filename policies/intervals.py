"""When Accordion compares two sums: at the end of each interval, not soon after a rate's drop."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

from policies import saved


class Intervals:
    """length: of an interval, in steps. lr_drop: a learning rate that falls to this part of itself
    or less, in one step, has dropped: critical for the rest of that interval and the next."""

    def __init__(self, length: int, lr_drop: float) -> None:
        self._length, self._lr_drop = length, lr_drop
        self.step = 0
        self.lr: float | None = None
        self._protected_until = 0  # reports before this one cannot end a critical regime

    @property
    def ends(self) -> bool:
        """The step is the last one of its interval."""
        return self.step % self._length == self._length - 1

    @property
    def protected(self) -> bool:
        """A critical regime must not end in this step."""
        return self.step < self._protected_until

    def dropped(self, lr: float) -> str:
        """Take in the learning rate; returns the numbers if it has dropped, else ""."""
        if not isfinite(lr):
            return ""
        before, self.lr = self.lr, lr
        if before is None or before <= 0 or lr / before > self._lr_drop:
            return ""
        following = self.step // self._length + 1
        self._protected_until = (following + 1) * self._length - 1  # its last step decides again
        return f"{lr:.4g} / {before:.4g} = {lr / before:.3g} <= lr_drop {self._lr_drop:g}"

    def left(self, known: bool) -> tuple[int, bool]:
        """Steps until two sums that count are compared, and whether that is later than at the end
        of this interval. known: there is one to compare with."""
        ends = self.step - self.step % self._length + self._length - 1
        decides = max(ends if known else ends + self._length, self._protected_until)
        return decides - self.step + 1, decides > ends

    def restart(self) -> None:
        """The interval begins anew, and with it what is protected."""
        left = -self.step % self._length
        self.step, self._protected_until = self.step + left, self._protected_until + left

    def state_dict(self) -> dict[str, Any]:
        """Everything, in JSON-like values."""
        return {"step": self.step, "protected_until": self._protected_until, "lr": self.lr}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict()`, which may hold more."""
        self.step = saved.count(state, "step")
        self._protected_until = saved.count(state, "protected_until")
        self.lr = saved.maybe_number(state, "lr")
