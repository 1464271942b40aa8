"""The rule that GraVAC's released code calls Accordion (run/accordion.py of its repository)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite, nan
from typing import Any

from policies import Context, GainKind, Plan, StepReport, checks
from policies.base import DeclaredPolicy, setting
from policies.state import require, saved


@dataclass(eq=False)
class NormChange(DeclaredPolicy):
    """A policy that compares, after each step, a moving average of the gradient's norm with the
    same average one step before: it sends `low` where the two differ by `threshold` or more, else
    `high`.

    The norm is the sum of the layers' norms. The average is exponentially weighted, over the last
    `window` steps. Until there are so many it is 0, and `high` is sent. One step of 100 can hardly
    change it by a fifth, so this rule sends `high` nearly always. In the released code each rank
    decides by its own norm; here the mean of the ranks' norms decides for all.

    low, high: CFs, the released script's. threshold: relative change, > 0. window: steps, >= 1.
    weight: of a new step in the average, in (0, 1].
    """

    name = "norm-change"

    low: float = setting(100.0, checks.real, least=1)
    high: float = setting(1000.0, checks.real, least=1)
    threshold: float = setting(0.2, checks.real, above=0)
    window: int = setting(100, checks.whole, least=1)
    weight: float = setting(0.02, checks.fraction)

    gain: GainKind = "raw"  # of this gain's terms one is the sum of the layers' norms

    _norms: list[float] = saved([])  # of the last steps
    _average: float = saved(0.0)
    _send: float = saved(1.0)
    _reason: str = saved("")

    def start(self, context: Context) -> None:
        """Raises ValueError if low or high is outside of cf_range, or low > high."""
        self._begin()
        if self.low > self.high:
            raise ValueError(f"low={self.low:g}: must not exceed high={self.high:g}")
        self._low = context.supported(context.check("low", self.low))
        self._high = context.supported(context.check("high", self.high))
        self._send = self._high

    def plan(self) -> Plan:
        return Plan(self._send, reason=self._reason)

    def observe(self, report: StepReport) -> None:
        measured = report.measurements.get(report.cf)
        norm, sent = nan if measured is None else measured.grad_norms, self._send
        if not isfinite(norm):
            self._reason = ""
            return
        self._norms = [*self._norms, norm][-self.window :]
        before, full = self._average, len(self._norms) == self.window
        self._average = self._weighted() if full else 0.0
        moved = abs(self._average - before) / before if before > 0 else 0.0
        self._send = self._low if moved >= self.threshold else self._high
        why = f"average norm of the gradient {before:.4g} to {self._average:.4g}"
        self._reason = "" if self._send == sent else why

    def _weighted(self) -> float:
        weights = [(1 - self.weight) ** age for age in reversed(range(len(self._norms)))]
        total = sum(w * norm for w, norm in zip(weights, self._norms, strict=True))
        return total / sum(weights)

    def candidates(self) -> tuple[float, ...]:
        return self._low, self._high

    def status(self) -> Mapping[str, float]:
        return {"average_norm": self._average}

    @property
    def compression(self) -> Mapping[str, Any]:
        """As the released script runs it: random-k, layer by layer, plain error feedback."""
        own = {"base": "randomk", "cf_range": (self.low, self.high)}
        return {**own, "granularity": "layer", "memory": "residual"}

    def _check_loaded(self) -> None:
        require(len(self._norms) <= self.window, "'norms' has more than a window")
