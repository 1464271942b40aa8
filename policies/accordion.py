"""Accordion (Agarwal and others, 2021): little compression in critical regimes, else much."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf, isfinite, nan
from typing import Any

from policies import checks
from policies.base import (
    DENSE,
    Context,
    DeclaredPolicy,
    Plan,
    Policy,
    StepReport,
    change,
    counted_steps,
    layered_plan,
)
from policies.baselines import Fixed
from policies.state import CHILD, Stateful, declare

PAPER_EPOCHS = 10
"""The paper's detection interval."""

NAMED = 3
"""Layers that a reason names; further ones are only counted."""


class Accordion(DeclaredPolicy):
    """A policy that sends the CF `low` while training is in a critical regime, else `high`.

    At the end of each interval (Algorithm 1) the regime is critical if the norm of the gradient,
    summed over the interval, changed by a ratio of eta or more:
    | ||G_old|| - ||G_new|| | / ||G_old|| >= eta. Until there are two sums to compare it is
    critical. A learning rate that drops makes it critical at once, for the rest of that interval
    and the next.

    low, high: CFs, 1 (dense) or inside cf_range; None: the ends of cf_range. Or policies, each of
        which sees the reports of the steps that it has planned.
    eta: relative change of the norm that makes a regime critical, > 0.
    interval: steps between detections, >= 1.
    per_layer: each layer has a regime, and so a CF, of its own, as in the paper. low and high must
        be CFs then.
    lr_drop: a learning rate that falls in one step to this part of itself or less has dropped, in
        (0, 1). (With a cosine schedule it does not.)
    steps_per_epoch, interval_epochs: the interval in the paper's terms (10 epochs if only
        steps_per_epoch is given), instead of `interval`.
    ValueError or TypeError names the setting that is wrong.
    """

    name = "accordion"
    _fields = declare(_intervals=CHILD, _reason=str, _regimes=CHILD, _sides=CHILD)

    def __init__(
        self,
        low: float | Policy | None = None,
        high: float | Policy | None = None,
        *,
        eta: float = 0.5,
        interval: int = 100,
        per_layer: bool = False,
        lr_drop: float = 0.5,
        steps_per_epoch: int | None = None,
        interval_epochs: float | None = None,
    ) -> None:
        self.layerwise = self.per_layer = checks.flag("per_layer", per_layer)
        self.low, self.high = self._side("low", low), self._side("high", high)
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
        nested = [side for side in (self.high, self.low) if isinstance(side, Policy)]
        self.shadow = any(side.shadow for side in nested)
        kinds = [side.gain for side in nested] or [Policy.gain]
        self.gain = "signal" if "signal" in kinds else kinds[0]  # it needs products of its own
        names = ("eta", "interval", "per_layer", "lr_drop")
        self._settings = {name: getattr(self, name) for name in names}

    def _side(self, name: str, given: float | Policy | None) -> float | Policy | None:
        """A CF or policy of the user's, checked."""
        if isinstance(given, Policy):
            if self.per_layer or given.layerwise or isinstance(given, Accordion):
                raise ValueError(
                    f"{name}={given.name!r}: must be a CF with per_layer=True, else a CF or a "
                    f"policy for the whole model that is not Accordion"
                )
            return given
        return None if given is None else checks.real(name, given, least=1)

    def start(self, context: Context) -> None:
        """Raises ValueError if low or high is neither 1 nor inside cf_range, or low > high, or if
        a regime for each layer is wanted and the layers are not known."""
        allowed = checks.cf_range(context.cf_range)
        low = allowed[0] if self.low is None else self.low
        high = allowed[1] if self.high is None else self.high
        for name, side in (("low", low), ("high", high)):
            if not isinstance(side, Policy):
                checks.cf_within(name, side, allowed)
        if not isinstance(low, Policy) and not isinstance(high, Policy) and low > high:
            raise ValueError(f"low={low:g}: must not exceed high={high:g}")
        if self.per_layer and not context.layers:
            raise ValueError("per_layer=True: the layers are not known")
        pair = {"low": low, "high": high}
        self._sides: dict[str, Policy] = {
            name: side if isinstance(side, Policy) else Fixed(side) for name, side in pair.items()
        }
        for side in self._sides.values():
            side.start(context)
        self._numels = dict(context.layers)
        self._regimes = {
            name: Regime(self.eta) for name in (context.layers if self.per_layer else ("",))
        }
        self._intervals = Intervals(self.interval, self.lr_drop)
        self._reason = ""
        self._layered = self._plan_layers()
        self._started = True

    @property
    def _active(self) -> Policy:
        """The side, low or high, whose plan is sent if all layers have the same regime."""
        critical = any(regime.critical for regime in self._regimes.values())
        return self._sides["low" if critical else "high"]

    def _plan_layers(self) -> Plan | None:
        """A plan with low and high by layer; None if all layers have the same CF."""
        critical = {name: regime.critical for name, regime in self._regimes.items()}
        low, high = (side.plan().send for side in self._sides.values())
        if len(set(critical.values())) == 1 or low == high:
            return None
        cfs = {name: low if is_so else high for name, is_so in critical.items()}
        return layered_plan(cfs, self._numels)

    def plan(self) -> Plan:
        self._check_started("plan")
        plan = self._active.plan() if self._layered is None else self._layered
        ends = self._intervals.ends
        return replace(
            plan,
            reason=self._reason or plan.reason,
            accumulate=True,
            read_sum=ends,
            read_layers=ends and self.per_layer,
        )

    def observe(self, report: StepReport) -> None:
        before = self.plan().send
        if self._layered is None:
            self._active.observe(report)
        dropped = self._watch_learning_rate(report.lr)
        # After a drop as well: the next sum is compared with this one.
        detected = self._detect(report)
        why = dropped or detected
        if why:
            self._layered = self._plan_layers()
        self._reason = ""
        self._intervals.step += 1
        if why:
            self._reason = change(before, self.plan().send, why)

    def _watch_learning_rate(self, lr: float) -> str:
        """Make all regimes critical if the learning rate has dropped; why if one was not."""
        ratio = self._intervals.dropped(lr)
        if not ratio:
            return ""
        quiet = [regime for regime in self._regimes.values() if not regime.critical]
        for regime in quiet:
            regime.critical = True
        return f"critical regime, learning rate dropped, {ratio}" if quiet else ""

    def _detect(self, report: StepReport) -> str:
        """Compare two intervals if one has just ended; returns why if a regime changes."""
        begun: list[str] = []
        over: list[str] = []
        for name, regime in self._regimes.items():
            layer = report.layers.get(name)
            of_layer = nan if layer is None else layer.sum_norm
            numbers = regime.detect(
                of_layer if self.per_layer else report.sum_norm, self._intervals.protected
            )
            if numbers:
                told = f"{name}: {numbers}" if self.per_layer else numbers
                (begun if regime.critical else over).append(told)
        return "; ".join(
            f"{what}{_listed(which)}"
            for what, which in (("critical regime", begun), ("critical regime over", over))
            if which
        )

    def status(self) -> Mapping[str, float]:
        """Numbers for the timeline by name.

        critical: part of the regimes that are critical (1 or 0 if there is one). sum_norm: of the
        whole model in the last interval, nan if there is none. Also the numbers of the side, low or
        high, that is active.
        """
        regimes = self._regimes.values()
        whole = None if self.per_layer else self._regimes[""].norm
        return {
            **(self._active.status() if self._layered is None else {}),
            "critical": sum(regime.critical for regime in regimes) / len(regimes),
            "sum_norm": nan if whole is None else whole,
        }

    def verdict(self) -> str:
        if self._layered is not None:
            return ""
        return self._active.verdict()

    def next_move(self) -> str:
        low, high = map(_named, self._sides.values())
        if low == high and isinstance(self._active, Fixed):
            return f"nothing would change it: low and high are both {low}"
        regimes = self._regimes.values()
        kinds = (which for which in (True, False) if any(r.critical == which for r in regimes))
        told = [self._foreseen(which) for which in kinds]
        if self._layered is None and not isinstance(self._active, Fixed):
            inner = self._active.next_move()
            told.append(f"until then {self._active.name} decides" + (inner and f": {inner}"))
        return "; ".join(told)

    def _foreseen(self, critical: bool) -> str:
        """When and on what condition the critical regimes end, or the others become critical."""
        other = self._sides["high" if critical else "low"]
        regimes = [r for r in self._regimes.values() if r.critical == critical]
        left, why, old = self._compared(regimes)
        many = f"{len(regimes)} of {len(self._regimes)} layers may go"
        who, each, whose = (many, ", each ", "its") if self.per_layer else ("it goes", " ", "the")
        return (
            f"{who} to {_named(other)} in {counted_steps(left)}"
            f"{why}{each}if the norm of {whose} accumulated gradient has then changed by "
            f"{'less than' if critical else 'at least'} eta {self.eta:g}{old}{self._rate(critical)}"
        )

    def _compared(self, regimes: list[Regime]) -> tuple[int, str, str]:
        """Steps until the next comparison of two sums that may change these regimes; why that is
        later than the end of this interval, in words; and the norm to compare with, in words."""
        known = any(regime.norm is not None for regime in regimes)
        left, later = self._intervals.left(known)
        if not known:
            return left, " (nothing to compare with yet)", ""
        if later:
            return left, " (the learning rate has dropped)", ""
        norm = None if self.per_layer else regimes[0].norm
        return left, "", f" of {norm:.4g}" if norm else ""

    def _rate(self, critical: bool) -> str:
        """How a drop of the learning rate would change that, in words."""
        if self._intervals.lr is None and self._intervals.step:  # nobody reports it
            return ""
        drops = f"the learning rate drops to {self.lr_drop:g} of itself"
        if not critical:
            return f", or {'all of them ' if self.per_layer else ''}at once if {drops}"
        return f", unless {drops} before" if self._layered is None else ""

    def rescale(self) -> None:
        """The regimes stay what they are until two sums of the new number of ranks can be compared:
        the norm of a mean over more ranks has less noise."""
        for side in self._sides.values():
            side.rescale()
        for regime in self._regimes.values():
            regime.norm = None
        self._intervals.restart()

    def candidates(self) -> tuple[float, ...]:
        return tuple(sorted({*(side.plan().send for side in self._sides.values()), *self._known()}))

    def _known(self) -> list[float]:
        return sorted({cf for side in self._sides.values() for cf in side.candidates()})

    def _saved_settings(self) -> dict[str, Any]:
        names = [side.name for side in self._sides.values()]
        layers = list(self._regimes)
        return {**self._settings, "cfs": self._known(), "sides": names, "layers": layers}

    def _check_loaded(self) -> None:
        self._layered = self._plan_layers()


def _named(side: Policy) -> str:
    """A side, low or high, in words."""
    send = side.plan().send
    cf = "dense" if send == DENSE else f"CF {send:g}"
    return cf if isinstance(side, Fixed) else f"{side.name}, {cf},"


def _listed(told: list[str]) -> str:
    more = f" and {len(told) - NAMED} more" if len(told) > NAMED else ""
    return ", " + ", ".join(told[:NAMED]) + more


class Regime(Stateful):
    """The regime of the whole model or of one layer: critical or not (Algorithm 1).

    It is critical until the norms of two intervals can be compared, and then as these say.

    eta: relative change of the norm that makes the regime critical.

    critical: whether it is. norm: of the gradient summed over the last interval that had one.
    """

    _fields = declare(critical=bool, norm=float | None)

    def __init__(self, eta: float) -> None:
        self._eta = eta
        self.critical = True
        self.norm: float | None = None

    def detect(self, norm: float, protected: bool) -> str:
        """Take in the norm of the gradient summed over an interval; returns the numbers if the
        regime changes, else "". protected: a critical regime must not end now."""
        if not isfinite(norm) or norm < 0:  # not read, or a gradient was not finite
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


class Intervals(Stateful):
    """The detection intervals: when two sums are compared, and when a critical regime is protected
    because the learning rate has dropped.

    length: steps of an interval. lr_drop: a learning rate that falls in one step to this part of
    itself or less has dropped.
    """

    _fields = declare(step=int, _protected_until=int, lr=float | None)

    def __init__(self, length: int, lr_drop: float) -> None:
        self._length, self._lr_drop = length, lr_drop
        self.step = 0
        self.lr: float | None = None
        self._protected_until = 0  # reports before this one cannot end a critical regime

    @property
    def ends(self) -> bool:
        """Whether this step is the last of its interval."""
        return self.step % self._length == self._length - 1

    @property
    def protected(self) -> bool:
        """Whether a critical regime must not end in this step."""
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
        """Steps until two sums are compared and count, and whether that is later than at the end of
        this interval. known: whether there is a sum to compare with."""
        ends = self.step - self.step % self._length + self._length - 1
        decides = max(ends if known else ends + self._length, self._protected_until)
        return decides - self.step + 1, decides > ends

    def restart(self) -> None:
        """Begin a new interval; a protected regime stays protected as long as it was."""
        left = -self.step % self._length
        self.step, self._protected_until = self.step + left, self._protected_until + left
