"""Accordion's test of one gradient: is training in a critical regime? (Algorithm 1)."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, isfinite
from typing import Any

from policies import saved


class Regime:
    """Critical until two intervals can be compared; then as their norms say.

    eta: relative change of the norm from which on the regime is critical.
    """

    def __init__(self, eta: float) -> None:
        self._eta = eta
        self.critical = True
        self.norm: float | None = None  # of the last interval that had one

    def detect(self, norm: float, protected: bool) -> str:
        """Take in the norm of the gradient summed over an interval; returns the numbers if the
        regime changes, else "". protected: it must not end now."""
        if not isfinite(norm):  # not read, or the interval had a non-finite gradient
            return ""
        old, self.norm = self.norm, norm
        if old is None or protected:
            return ""
        relative = abs(old - norm) / old if old > 0 else (inf if norm > 0 else 0.0)
        was, self.critical = self.critical, relative >= self._eta
        if self.critical == was:
            return ""
        sign = ">=" if self.critical else "<"
        return f"|{old:.4g} - {norm:.4g}| / {old:.4g} = {relative:.3g} {sign} eta {self._eta:g}"

    def state_dict(self) -> dict[str, Any]:
        """Everything, in JSON-like values."""
        return {"critical": self.critical, "norm": self.norm}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict()`."""
        self.critical = saved.flag(state, "critical")
        self.norm = saved.maybe_number(state, "norm", least=0)
