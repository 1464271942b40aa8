"""Accordion (Agarwal and others, 2021): little compression in critical regimes, else much."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import nan
from typing import Any

from policies import checks, saved
from policies.base import DENSE, Context, Plan, Policy, StepReport
from policies.fixed import Fixed
from policies.intervals import Intervals
from policies.mixture import mixture
from policies.reasons import change, counted_steps
from policies.regime import Regime

PAPER_EPOCHS = 10
"""The paper's detection interval."""

NAMED = 3
"""Layers named in a reason; of more, how many."""


class Accordion(Policy):
    """`low` while training is in a critical regime, else `high`.

    At the end of each interval (Algorithm 1) the regime is critical if the norm of the gradient,
    summed over the interval, changed by a ratio of eta or more:
    | ||G_old|| - ||G_new|| | / ||G_old|| >= eta. Until there are two sums to compare it is
    critical. A learning rate that drops makes it critical at once, for the rest of that interval
    and the next.

    low, high: CFs, 1 (dense) or inside cf_range; None: the ends of cf_range. Or policies, each of
        which sees the reports of the steps that it has planned.
    eta: > 0. interval: steps between detections.
    per_layer: a regime, and so a CF, for each layer, as in the paper. low and high are CFs then.
    lr_drop: a learning rate that falls to this part of itself or less, in one step, has dropped
        (a cosine schedule has not).
    steps_per_epoch, interval_epochs: the interval in the paper's terms (10 epochs if only
        steps_per_epoch is given), instead of `interval`.
    """

    name = "accordion"

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
        self._sides: tuple[Policy, Policy] | None = None

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
        pair = [side if isinstance(side, Policy) else Fixed(side) for side in (low, high)]
        for side in pair:
            side.start(context)
        self._sides = pair[0], pair[1]
        self._numels = dict(context.layers)
        self._regimes = {
            name: Regime(self.eta) for name in (context.layers if self.per_layer else ("",))
        }
        self._intervals = Intervals(self.interval, self.lr_drop)
        self._reason = ""
        self._mixed = self._mix()

    @property
    def _in_charge(self) -> Policy:
        """The side whose plan is sent, where all layers are alike."""
        assert self._sides is not None
        low, high = self._sides
        return low if any(regime.critical for regime in self._regimes.values()) else high

    def _mix(self) -> Plan | None:
        """Of low and high by layer; None if all layers are alike."""
        assert self._sides is not None
        critical = {name: regime.critical for name, regime in self._regimes.items()}
        low, high = (side.plan().send for side in self._sides)
        if len(set(critical.values())) == 1 or low == high:
            return None
        cfs = {name: low if is_so else high for name, is_so in critical.items()}
        return mixture(cfs, self._numels)

    def plan(self) -> Plan:
        if self._sides is None:
            raise RuntimeError("Accordion needs start(context) before plan()")
        plan = self._in_charge.plan() if self._mixed is None else self._mixed
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
        if self._mixed is None:
            self._in_charge.observe(report)
        dropped = self._watch_learning_rate(report.lr)
        # Both, always: a sum that comes with a drop is still the next one's yardstick.
        detected = self._detect(report)
        why = dropped or detected
        if why:
            self._mixed = self._mix()
        self._reason = ""
        self._intervals.step += 1
        if why:
            self._reason = change(before, self.plan().send, why)

    def _watch_learning_rate(self, lr: float) -> str:
        """Critical at once where the rate has dropped; returns why if anything changes."""
        ratio = self._intervals.dropped(lr)
        if not ratio:
            return ""
        quiet = [regime for regime in self._regimes.values() if not regime.critical]
        for regime in quiet:
            regime.critical = True
        return f"critical regime, learning rate dropped, {ratio}" if quiet else ""

    def _detect(self, report: StepReport) -> str:
        """Compare two intervals, if one has just ended; returns why if anything changes."""
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
        """critical: the share of regimes that are (of one: 1 or 0); sum_norm: of the last interval
        of the whole model that had one, else nan; and what the policy in charge has to say."""
        if self._sides is None:
            return {}
        regimes = self._regimes.values()
        whole = None if self.per_layer else self._regimes[""].norm
        return {
            **(self._in_charge.status() if self._mixed is None else {}),
            "critical": sum(regime.critical for regime in regimes) / len(regimes),
            "sum_norm": nan if whole is None else whole,
        }

    def verdict(self) -> str:
        if self._sides is None or self._mixed is not None:
            return ""
        return self._in_charge.verdict()

    def outlook(self) -> str:
        if self._sides is None:
            return ""
        low, high = map(_named, self._sides)
        if low == high and isinstance(self._in_charge, Fixed):
            return f"nothing would change it: low and high are both {low}"
        regimes = self._regimes.values()
        kinds = (which for which in (True, False) if any(r.critical == which for r in regimes))
        told = [self._foreseen(which) for which in kinds]
        if self._mixed is None and not isinstance(self._in_charge, Fixed):
            inner = self._in_charge.outlook()
            told.append(f"until then {self._in_charge.name} decides" + (inner and f": {inner}"))
        return "; ".join(told)

    def _foreseen(self, critical: bool) -> str:
        """When and if the critical regimes end, or the others begin to be critical."""
        assert self._sides is not None
        low, high = self._sides
        regimes = [r for r in self._regimes.values() if r.critical == critical]
        left, why, old = self._compared(regimes)
        many = f"{len(regimes)} of {len(self._regimes)} layers may go"
        who, each, whose = (many, ", each ", "its") if self.per_layer else ("it goes", " ", "the")
        return (
            f"{who} to {_named(high if critical else low)} in {counted_steps(left)}"
            f"{why}{each}if the norm of {whose} accumulated gradient has then changed by "
            f"{'less than' if critical else 'at least'} eta {self.eta:g}{old}{self._rate(critical)}"
        )

    def _compared(self, regimes: list[Regime]) -> tuple[int, str, str]:
        """Steps until their next two sums that count are compared, why that is not at the end of
        this interval, and, where it is known, of what the change is a part."""
        known = any(regime.norm is not None for regime in regimes)
        left, later = self._intervals.left(known)
        if not known:
            return left, " (nothing to compare with yet)", ""
        if later:
            return left, " (the learning rate has dropped)", ""
        norm = None if self.per_layer else regimes[0].norm
        return left, "", f" of {norm:.4g}" if norm else ""

    def _rate(self, critical: bool) -> str:
        """What the learning rate can do to that."""
        if self._intervals.lr is None and self._intervals.step:  # nobody reports it
            return ""
        drops = f"the learning rate drops to {self.lr_drop:g} of itself"
        if not critical:
            return f", or {'all of them ' if self.per_layer else ''}at once if {drops}"
        return f", unless {drops} before" if self._mixed is None else ""

    def rescale(self) -> None:
        """The regimes stay what they are until two sums of the new number of ranks can be compared:
        the norm of a mean over more ranks has less noise in it."""
        for side in self._sides or ():
            side.rescale()
        for regime in self._regimes.values():
            regime.norm = None
        self._intervals.restart()

    def candidates(self) -> tuple[float, ...]:
        sent = {side.plan().send for side in self._sides or ()}
        return tuple(sorted(sent.union(self._known())))

    def _known(self) -> list[float]:
        return sorted({cf for side in self._sides or () for cf in side.candidates()})

    def state_dict(self) -> dict[str, Any]:
        return {
            "settings": {**self._settings, "cfs": self._known()},
            **self._intervals.state_dict(),
            "reason": self._reason,
            "regimes": {name: regime.state_dict() for name, regime in self._regimes.items()},
            "sides": [[side.name, side.state_dict()] for side in self._sides or ()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """After start(). Raises ValueError if the state is of other settings or another range."""
        if self._sides is None:
            raise RuntimeError("Accordion needs start(context) before load_state_dict()")
        names = [side.name for side in self._sides]
        sides, regimes = saved.entries(state, "sides", 2), saved.part(state, "regimes")
        checks.same(
            self.name,
            {**self._settings, "cfs": self._known(), "sides": names},
            {**saved.part(state, "settings"), "sides": [name for name, _ in sides]},
        )
        layers = list(self._regimes)
        checks.same(self.name, {"layers": layers}, {"layers": list(regimes)})
        for side, (_, inner) in zip(self._sides, sides, strict=True):
            side.load_state_dict(inner)
        for name, regime in self._regimes.items():
            regime.load_state_dict(saved.part(regimes, name))
        self._intervals.load_state_dict(state)
        self._reason = saved.text(state, "reason")
        self._mixed = self._mix()


def _named(side: Policy) -> str:
    """Where a change of the regime leads."""
    send = side.plan().send
    cf = "dense" if send == DENSE else f"CF {send:g}"
    return cf if isinstance(side, Fixed) else f"{side.name}, {cf},"


def _listed(told: list[str]) -> str:
    more = f" and {len(told) - NAMED} more" if len(told) > NAMED else ""
    return ", " + ", ".join(told[:NAMED]) + more
