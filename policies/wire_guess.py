"""Bytes on the wire by CF: as the controller computes or has measured them, else guessed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf, isfinite, log
from typing import Any

from policies import saved
from policies.base import DENSE, StepReport


class WireBytes:
    """Measured where a CF was sent, else computed, else dense / CF corrected by what was measured.

    The correction is that of the nearest CF measured: indices and headers, and what an exchange
    multiplies by the ranks, make a compressed step larger than the first guess by much the same
    factor at neighbouring CFs.

    computed: bytes at a CF, nan where that is not known.
    """

    def __init__(self, computed: Callable[[float], float]) -> None:
        self._computed = computed
        self._measured: dict[float, float] = {}
        self._dense: float | None = None

    def observe(self, report: StepReport) -> None:
        """Take in what the step just reported has sent."""
        if isfinite(report.dense_wire_bytes) and report.dense_wire_bytes > 0:
            if report.dense_wire_bytes != self._dense:
                self._measured = {}  # of a model of another size, or with layers frozen
            self._dense = report.dense_wire_bytes
        if isfinite(report.wire_bytes) and report.wire_bytes >= 0:
            self._measured[report.cf] = report.wire_bytes

    def at(self, cf: float) -> float | None:
        """Bytes of a step at `cf`; None if there is nothing to tell by."""
        if cf in self._measured:
            return self._measured[cf]
        computed = self._computed(cf)
        if isfinite(computed) and computed >= 0:
            return computed
        if self._dense is None:
            return None
        if cf == DENSE:
            return self._dense
        sent = [other for other in self._measured if other != DENSE]
        if not sent:
            return self._dense / cf
        nearest = min(sent, key=lambda other: abs(log(other / cf)))
        guess = self._measured[nearest] * (nearest / cf)
        return guess if guess < inf else None

    def state_dict(self) -> dict[str, Any]:
        """Everything, in JSON-like values: pairs, since JSON has no float keys."""
        return {"measured": [list(it) for it in self._measured.items()], "dense": self._dense}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict()`."""
        self._measured = saved.by_cf(state, "measured", least=0)
        self._dense = saved.maybe_number(state, "dense", above=0)
