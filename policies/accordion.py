"""Accordion (Agarwal and others, 2021): little compression in critical regimes, else much."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from math import inf, isfinite, nan
from typing import Any

from policies import checks
from policies.base import (
    Context,
    Plan,
    Policy,
    StepReport,
    WrappingPolicy,
    change,
    counted_steps,
    setting,
)
from policies.baselines import Fixed
from policies.state import Stateful, saved
from policies.words import percent

LR_DROP = 0.5
"""A learning rate that falls in one step to this part of itself or less has dropped. (With a cosine
schedule it does not.)"""

NAMED = 3
"""Layers that a reason names; further ones are only counted."""


@dataclass(eq=False)
class Regime(Stateful):
    """The regime of the whole model or of one layer: critical until the norms of two intervals can
    be compared, then if | ||G_old|| - ||G_new|| | / ||G_old|| >= eta (Algorithm 1)."""

    critical: bool = saved(True)
    norm: float | None = saved(None)  # of the gradient summed over the last interval that had one

    def detect(self, norm: float, eta: float, stays: bool) -> str:
        """Take in the norm of an interval; returns the numbers if the regime changes, else "".
        stays: it must not change now."""
        if not isfinite(norm) or norm < 0:  # not read, or a gradient was not finite
            return ""
        old, self.norm = self.norm, norm
        if old is None or stays:
            return ""
        relative = abs(old - norm) / old if old > 0 else (inf if norm > 0 else 0.0)
        was, self.critical = self.critical, relative >= eta
        if self.critical == was:
            return ""
        sign = "at least" if self.critical else "less than"
        told = f"norm of its accumulated gradient {old:.4g} to {norm:.4g}, a change of"
        return f"{told} {percent(relative)}, {sign} eta {percent(eta)}"


@dataclass(eq=False)
class Accordion(WrappingPolicy):
    """A policy that sends the CF `low` while training is in a critical regime (see `Regime`), else
    `high`.

    A learning rate that drops makes the regime critical at once, for the rest of that interval and
    the next.

    low, high: CFs, 1 (dense) or inside cf_range; None: the ends of cf_range. Or policies, each of
        which sees the reports of the steps that it has planned.
    eta: relative change of the norm that makes a regime critical, > 0.
    interval: steps between detections, >= 1; the paper has 10 epochs.
    per_layer: each layer has a regime, and so a CF, of its own, as in the paper. low and high must
        be CFs then.
    ValueError or TypeError names the setting that is wrong.
    """

    name = "accordion"

    low: float | Policy | None = None
    high: float | Policy | None = None
    _: KW_ONLY
    eta: float = setting(0.5, checks.real, above=0)
    interval: int = setting(100, checks.whole, least=1)
    per_layer: bool = setting(False, checks.flag)

    _step: int = saved(0)  # of the interval
    _dropped: bool = saved(False)  # whether the learning rate has, in this interval
    _lr: float | None = saved(None)
    _reason: str = saved("")
    _regimes: dict[str, Regime] = saved()  # by layer; "" is the whole model
    _sides: dict[str, Policy] = saved()  # "low" and "high"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.layerwise = self.per_layer
        for name, side in (("low", self.low), ("high", self.high)):
            if not isinstance(side, Policy):
                if side is not None:
                    checks.real(name, side, least=1)
            elif self.per_layer or side.layerwise or isinstance(side, Accordion):
                raise ValueError(
                    f"{name}={side.name!r}: must be a CF with per_layer=True, else a CF or a "
                    f"policy for the whole model that is not Accordion"
                )
        nested = [side for side in (self.high, self.low) if isinstance(side, Policy)]
        self.shadow = any(side.shadow for side in nested)
        kinds = [side.gain for side in nested] or [Policy.gain]
        self.gain = "signal" if "signal" in kinds else kinds[0]  # it needs products of its own

    def start(self, context: Context) -> None:
        """Raises ValueError if low or high is neither 1 nor inside cf_range, or low > high, or
        layers are wanted and not known."""
        if self.per_layer and not context.layers:
            raise ValueError("per_layer=True: the layers are not known")
        self._begin()
        low = context.cf_range[0] if self.low is None else self.low
        high = context.cf_range[1] if self.high is None else self.high
        if not isinstance(low, Policy) and not isinstance(high, Policy) and low > high:
            raise ValueError(f"low={low:g}: must not exceed high={high:g}")
        self._sides = {}
        for name, side in (("low", low), ("high", high)):
            policy = side if isinstance(side, Policy) else Fixed(context.check(name, side))
            policy.start(context)
            self._sides[name] = policy
        self._numels = dict(context.layers)
        self._regimes = {name: Regime() for name in (context.layers if self.per_layer else [""])}

    @property
    def _active(self) -> Policy:
        """The side, low or high, whose plan is sent if all layers have the same CF."""
        return self._sides["low" if self.critical else "high"]

    def _layered(self) -> Plan | None:
        """A plan with low and high by layer; None if all layers have the same CF."""
        low, high = (side.plan().send for side in self._sides.values())
        cfs = {name: low if each.critical else high for name, each in self._regimes.items()}
        if len(set(cfs.values())) == 1:
            return None
        # The CF of the plan is that of all layers together: their elements / the elements kept.
        kept = sum(self._numels[name] / cf for name, cf in cfs.items())
        send = sum(self._numels[name] for name in cfs) / kept
        return Plan(send, layers=cfs)

    @property
    def critical(self) -> bool:
        """Whether the model, or a layer of it, is in a critical regime. The same on every rank, so
        that a script may take larger batches where it is not (docs/recipes.md)."""
        return any(regime.critical for regime in self._regimes.values())

    @property
    def _ends(self) -> bool:
        """Whether this step is the last of its interval."""
        return self._step == self.interval - 1

    @property
    def _detects(self) -> bool:
        """Whether the sum is read in this step, and compared with the one before."""
        return self._ends

    @property
    def _left(self) -> int:
        """Steps until then, this one included."""
        return self.interval - self._step

    def plan(self) -> Plan:
        plan = self._layered() or self._active.plan()
        return replace(
            plan,
            reason=self._reason or plan.reason,
            accumulate=True,
            read_sum=self._detects,
        )

    def observe(self, report: StepReport) -> None:
        before = self.plan().send
        if self._layered() is None:
            self._active.observe(report)
        dropped = self._watch_learning_rate(report.lr)
        detected = self._detect(report)  # after a drop, too: the next sum is compared with this one
        why = dropped or detected
        if self._ends:
            self._step, self._dropped = 0, False
        else:
            self._step += 1
        self._reason = change(before, self.plan().send, why) if why else ""

    def _watch_learning_rate(self, lr: float) -> str:
        """Make all regimes critical if the learning rate has dropped; why if one was not."""
        if not isfinite(lr):
            return ""
        before, self._lr = self._lr, lr
        if before is None or before <= 0 or lr / before > LR_DROP:
            return ""
        self._dropped = True
        quiet = [regime for regime in self._regimes.values() if not regime.critical]
        for regime in quiet:
            regime.critical = True
        return f"critical regime, learning rate dropped, {before:.4g} -> {lr:.4g}" if quiet else ""

    def _detect(self, report: StepReport) -> str:
        """Compare two intervals if one has just ended; returns why if a regime changes."""
        begun: list[str] = []
        over: list[str] = []
        for name, regime in self._regimes.items():
            norm = report.layer_norms.get(name, nan) if self.per_layer else report.sum_norm
            if numbers := regime.detect(norm, self.eta, stays=self._dropped):
                told = f"{name}: {numbers}" if self.per_layer else numbers
                (begun if regime.critical else over).append(told)
        changes = {"critical regime": begun, "critical regime over": over}
        return "; ".join(f"{what}, {_listed(which)}" for what, which in changes.items() if which)

    def candidates(self) -> tuple[float, ...]:
        return tuple(sorted({cf for each in self._sides.values() for cf in each.candidates()}))

    def status(self) -> Mapping[str, float]:
        """critical: part of the regimes that are. sum_norm: of the whole model, last interval.
        Also the numbers of the side, low or high, that is active."""
        regimes = self._regimes.values()
        whole = None if self.per_layer else self._regimes[""].norm
        return {
            **super().status(),
            "critical": sum(regime.critical for regime in regimes) / len(regimes),
            "sum_norm": nan if whole is None else whole,
        }

    def next_move(self) -> str:
        low, high = (f"{side.name}, CF {side.plan().send:g}" for side in self._sides.values())
        known = any(regime.norm is not None for regime in self._regimes.values())
        left = self._left if known and not self._dropped else self._left + self.interval
        move = (
            f"in {counted_steps(left)} {'each layer' if self.per_layer else 'it'} goes to low "
            f"({low}) if the norm of its accumulated gradient has changed by {percent(self.eta)} "
            f"(eta) or more, else to high ({high}); to low at once if the learning rate drops to "
            f"{LR_DROP:g} of itself"
        )
        active = self._active
        inner = "" if isinstance(active, Fixed) else active.next_move()
        return f"{move}; until then {active.name} decides: {inner}" if inner else move

    def rescale(self) -> None:
        """Regimes stay until two sums can be compared: means over more ranks have less noise."""
        for side in self._sides.values():
            side.rescale()
        for regime in self._regimes.values():
            regime.norm = None
        self._step = 0

    def _saved_settings(self) -> dict[str, Any]:
        sides = [side.name for side in self._sides.values()]
        return {**super()._saved_settings(), "sides": sides, "layers": list(self._regimes)}


def _listed(told: list[str]) -> str:
    more = f" and {len(told) - NAMED} more" if len(told) > NAMED else ""
    return ", ".join(told[:NAMED]) + more
