"""Accordion (Agarwal and others, 2021): little compression in critical regimes, else much."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, isfinite, nan
from typing import Any

from policies import checks
from policies.base import Context, Plan, Policy, StepReport
from policies.reasons import change

PAPER_EPOCHS = 10
"""The paper's detection interval."""

_STATE = ("critical", "step", "protected_until", "old_norm", "lr", "reason")


class Accordion(Policy):
    """Two CFs for the whole model: `low` while training is in a critical regime, else `high`.

    At the end of each interval (Algorithm 1) the regime is critical if the norm of the gradient,
    summed over the interval, changed by a ratio of eta or more:
    | ||G_old|| - ||G_new|| | / ||G_old|| >= eta. Until there are two sums to compare it is
    critical. A learning rate that drops makes it critical at once, for the rest of that interval
    and the next.

    low, high: CFs, 1 (dense) or inside cf_range; None: the ends of cf_range.
    eta: > 0. interval: steps between detections.
    lr_drop: a learning rate that falls to this part of itself or less, in one step, has dropped
        (a cosine schedule has not).
    steps_per_epoch, interval_epochs: the interval in the paper's terms (10 epochs if only
        steps_per_epoch is given), instead of `interval`.
    """

    name = "accordion"

    def __init__(
        self,
        low: float | None = None,
        high: float | None = None,
        *,
        eta: float = 0.5,
        interval: int = 100,
        lr_drop: float = 0.5,
        steps_per_epoch: int | None = None,
        interval_epochs: float | None = None,
    ) -> None:
        self.low = None if low is None else checks.real("low", low, least=1)
        self.high = None if high is None else checks.real("high", high, least=1)
        self.eta = checks.real("eta", eta, above=0)
        self.interval = checks.whole("interval", interval, least=1)
        self.lr_drop = checks.fraction("lr_drop", lr_drop)
        if self.lr_drop == 1:
            raise ValueError("lr_drop=1: must be below 1, or a constant rate counts as dropping")
        if steps_per_epoch is not None:
            steps = checks.whole("steps_per_epoch", steps_per_epoch, least=1)
            epochs = PAPER_EPOCHS if interval_epochs is None else interval_epochs
            epochs = checks.real("interval_epochs", epochs, above=0)
            self.interval = max(1, round(steps * epochs))
        elif interval_epochs is not None:
            raise ValueError(f"interval_epochs={interval_epochs!r}: needs steps_per_epoch too")
        self._settings = dict(vars(self))
        self._cfs: tuple[float, float] | None = None

    def start(self, context: Context) -> None:
        """Raises ValueError if low or high is neither 1 nor inside cf_range, or low > high."""
        allowed = checks.cf_range(context.cf_range)
        low = allowed[0] if self.low is None else checks.cf_within("low", self.low, allowed)
        high = allowed[1] if self.high is None else checks.cf_within("high", self.high, allowed)
        if low > high:
            raise ValueError(f"low={low:g}: must not exceed high={high:g}")
        self._cfs = context.supported(low), context.supported(high)
        self._critical = True
        self._step = 0
        self._protected_until = 0  # reports before this one cannot end a critical regime
        self._old_norm: float | None = None
        self._lr: float | None = None
        self._reason = ""

    @property
    def _send(self) -> float:
        if self._cfs is None:
            raise RuntimeError("Accordion needs start(context) before plan()")
        low, high = self._cfs
        return low if self._critical else high

    def plan(self) -> Plan:
        send = self._send
        ends = self._step % self.interval == self.interval - 1
        return Plan(send, reason=self._reason, accumulate=True, read_sum=ends)

    def observe(self, report: StepReport) -> None:
        dropped = self._watch_learning_rate(report.lr)
        # Both, always: a sum that comes with a drop is still the next one's yardstick.
        detected = self._detect(report.sum_norm)
        self._reason = dropped or detected
        self._step += 1

    def _watch_learning_rate(self, lr: float) -> str:
        """Critical at once where the rate has dropped; returns the reason if the CF changes."""
        if not isfinite(lr):
            return ""
        before, self._lr = self._lr, lr
        if before is None or before <= 0 or lr / before > self.lr_drop:
            return ""
        following = self._step // self.interval + 1
        self._protected_until = (following + 1) * self.interval - 1  # its last step decides again
        ratio = f"{lr:.4g} / {before:.4g} = {lr / before:.3g} <= lr_drop {self.lr_drop:g}"
        return self._become(True, f"learning rate dropped, {ratio}")

    def _detect(self, norm: float) -> str:
        """Compare two intervals, if one has just ended; returns the reason if the CF changes."""
        if not isfinite(norm):  # not read now, or the interval had a non-finite gradient
            return ""
        old, self._old_norm = self._old_norm, norm
        if old is None or self._step < self._protected_until:
            return ""
        relative = abs(old - norm) / old if old > 0 else (inf if norm > 0 else 0.0)
        critical = relative >= self.eta
        numbers = f"|{old:.4g} - {norm:.4g}| / {old:.4g} = {relative:.3g}"
        return self._become(critical, f"{numbers} {'>=' if critical else '<'} eta {self.eta:g}")

    def _become(self, critical: bool, why: str) -> str:
        sent, was_critical = self._send, self._critical
        self._critical = critical
        if critical == was_critical:
            return ""
        regime = "critical regime" if critical else "critical regime over"
        return change(sent, self._send, f"{regime}, {why}")

    def status(self) -> Mapping[str, float]:
        """critical: 1 or 0; sum_norm: of the last interval that had one, else nan."""
        old = self._old_norm
        return {"critical": float(self._critical), "sum_norm": nan if old is None else old}

    def outlook(self) -> str:
        left = self.interval - self._step % self.interval
        other = "below" if self._critical else "at least"
        return (
            f"it changes in {left} steps if the norm of the accumulated gradient has then changed "
            f"by {other} eta {self.eta:g}" + ("" if self._critical else ", or the rate drops")
        )

    def candidates(self) -> tuple[float, ...]:
        return self._cfs or ()

    def state_dict(self) -> dict[str, Any]:
        return {
            "settings": {**self._settings, "cfs": list(self._cfs or ())},
            **{name: getattr(self, f"_{name}") for name in _STATE},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """After start(). Raises ValueError if the state is of other settings or another range."""
        if self._cfs is None:
            raise RuntimeError("Accordion needs start(context) before load_state_dict()")
        checks.same(self.name, {**self._settings, "cfs": list(self._cfs)}, state["settings"])
        for name in _STATE:
            setattr(self, f"_{name}", state[name])
