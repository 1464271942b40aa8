"""Goodput: go straight to the CF with the largest compression throughput, without trying others.

The measure is GraVAC's (section 3.1), T_comp = T_sys x gain, with both factors known for the whole
ladder at any time: the gain from the shadow ladder, the step time from its model (step_time.py). So
nothing is sent only to be measured, and a changed network moves the CF as soon as it shows.

Signal gain is the part of the gradient that gets through at once. The rest is late, not lost, so
progress falls more slowly, as the root of it (measured: docs/results.md).

A run begins at the smallest CF of the ladder. Not dense: over a slow network a dense step can take
as long as a hundred compressed ones. Nor at a large CF: the first gradients are the largest, and if
they wait in the residual until a later, smaller CF sends them all at once, training is set back.
From a large CF it comes down in strides, and measures the network anew at each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, nan

from policies import checks
from policies.base import (
    DENSE,
    Context,
    DeclaredPolicy,
    GainKind,
    Plan,
    StepReport,
    change,
    setting,
)
from policies.estimators import Averages
from policies.signal_gain import SignalGain
from policies.state import saved
from policies.step_time import STRIDE_STEPS, StepTime

GAIN_WEIGHT = 0.1
"""Weight of a new step in the average of a gain: gains move slowly, and single ones are noisy."""

FILLED = 8.0
"""With signal gain, only CFs up to so many times the number of steps done are considered: the
shadow residual of a larger CF is still filling, which makes its gain look too large."""

UP = 2.0
"""A larger CF must be better by so many standard errors of its T_comp."""


@dataclass(eq=False, kw_only=True)
class Goodput(DeclaredPolicy):
    """A policy that sends the smallest CF for `opening` steps, then the CF with the largest
    predicted compression throughput. ValueError or TypeError names a setting that is wrong.

    step_size: the candidates are a geometric ladder in cf_range, this factor apart, > 1, and the
        CFs whose gain is assumed (`Context.assumed`).
    opening: steps at the smallest CF before another is considered, >= 1.
    margin: relative margin in (0, 1] by which a larger CF must promise more than the one in use,
        in addition to UP standard errors. A smaller CF need only promise more.
    cooldown: steps between two switches, >= 1 (STRIDE_STEPS on the way to a CF that sends many more
        bytes).
    gain: "signal", or "error_fed" for that gain in steady state.
    power: exponent of signal gain in T_comp, > 0. A larger one prefers smaller CFs, which cost time
        and give more quality in as many steps.
    """

    name = "goodput"
    shadow = True

    step_size: float = setting(2.0, checks.real, above=1)
    opening: int = setting(5, checks.whole, least=1)
    margin: float = setting(0.05, checks.fraction)
    cooldown: int = setting(10, checks.whole, least=1)
    gain: GainKind = setting("signal", checks.one_of, accepted=("error_fed", "signal"))
    power: float = setting(0.5, checks.real, above=0)

    _send: float = saved(DENSE)
    _since: int = saved(0)  # steps at the present CF
    _steps: int = saved(0)  # steps in all
    # On the way in strides to a CF with many more bytes: the CF where that way began.
    _came_from: float | None = saved(None)
    _reason: str = saved("")
    _gains: Averages = saved(Averages(GAIN_WEIGHT))  # error-fed gains in steady state
    _time: StepTime = saved()
    _signal: SignalGain | None = saved()

    def start(self, context: Context) -> None:
        """Raises ValueError if step_size makes too many candidates."""
        self._begin()
        ladder = context.ladder(self.step_size)
        self._assumed = context.assumed
        self._candidates = tuple(sorted({*ladder, *context.assumed}))
        self._time = StepTime(context.wire_bytes)
        self._signal = SignalGain() if self.gain == "signal" else None
        self._send = ladder[0]

    def plan(self) -> Plan:
        return Plan(self._send, reason=self._reason)

    def observe(self, report: StepReport) -> None:
        self._time.observe(report)
        for cf, gain in report.steady.items():
            self._gains.add(cf, gain)
        self._since += 1
        self._steps += 1
        self._reason = "" if self._signal is None else self._signal.observe(report)
        if self._since >= self._wait:
            self._consider()

    @property
    def _wait(self) -> int:
        """Steps at the present CF before another is considered."""
        if self._since == self._steps:  # only the first CF has been sent yet
            return self.opening
        return self.cooldown if self._came_from is None else min(STRIDE_STEPS, self.cooldown)

    def candidates(self) -> tuple[float, ...]:
        return self._candidates

    def t_comp(self) -> dict[float, float]:
        """Predicted compression throughput of dense and the CFs whose gain and step time are known:
        steps a second x gain (signal gain to the power)."""
        promised = {}
        power = 1.0 if self._signal is None else self.power
        largest = inf if self._signal is None else FILLED * self._steps
        for cf in sorted({DENSE, *self._candidates}):
            gain, seconds = self._gain(cf), self._time.seconds(cf)
            if gain and seconds and cf <= largest:
                promised[cf] = gain**power / seconds
        return promised

    def status(self) -> Mapping[str, float]:
        """candidate: the CF with the largest T_comp. t_sys, t_comp (steps/s), gain: of the CF sent.
        exploring: 1 until it first considers leaving the first CF. And `SignalGain.status`."""
        seconds, gain = self._time.seconds(self._send), self._gain(self._send)
        promised = self.t_comp()
        return {
            "candidate": max(promised, key=lambda cf: (promised[cf], -cf), default=nan),
            "t_sys": 1 / seconds if seconds else nan,
            "t_comp": promised.get(self._send, nan),
            "gain": nan if gain is None else gain,
            "exploring": float(self._since == self._steps < self.opening),
            **({} if self._signal is None else self._signal.status()),
        }

    def verdict(self) -> str:
        sends_dense = self._send == DENSE and self._since >= self.cooldown
        return "Goodput sends dense: no CF promises a larger T_comp" if sends_dense else ""

    def next_move(self) -> str:
        promised = self.t_comp()
        needed = {cf: self._needed(cf, promised) for cf in promised if cf != self._send}
        if not needed:
            return "nothing is known of the other CFs yet"
        first = max(needed, key=lambda cf: (promised[cf] - needed[cf], -cf))
        return (
            f"it changes when a CF promises enough more T_comp: CF {first:g} is nearest to that, "
            f"promises {promised[first]:.4g} and needs more than {needed[first]:.4g}"
        )

    def rescale(self) -> None:
        """It stays at its CF for a cooldown and measures the step times anew."""
        self._time = StepTime(self._time.nbytes)
        self._since, self._came_from = 0, None
        if self._signal is not None:
            self._signal.rescale()

    def _gain(self, cf: float) -> float | None:
        if cf == DENSE:
            return 1.0
        if cf in self._assumed:
            return self._assumed[cf]
        if self._signal is not None:
            return self._signal.gain(cf)
        gain = self._gains.value(cf)
        return None if gain is None else min(1.0, max(0.0, gain))

    def _consider(self) -> None:
        """Move to the CF that promises most, if that is enough more than the one in use."""
        promised = self.t_comp()
        here = promised.get(self._send, 0.0)
        if not promised:
            return
        origin, self._came_from = self._came_from, None
        # A CF that promises most and is too uncertain does not stand in the way of another.
        others = [cf for cf in promised if cf != self._send]
        better = [cf for cf in others if promised[cf] > self._needed(cf, promised)]
        if origin is not None and promised.get(origin, 0.0) > here:
            better.append(origin)  # the strides have shown that leaving it was a mistake
        if not better:
            return
        best = max(better, key=lambda cf: (promised[cf], -cf))
        listed = ", ".join(f"{value:.4g} at {cf:g}" for cf, value in promised.items())
        why = f"T_comp {promised[best]:.4g} against {here:.4g} ({listed})"
        goal = self._time.within_reach(best, self._send, (DENSE, *self._candidates))
        if goal != best:
            self._came_from = self._send if origin is None else origin
            why = f"on the way to {best:g}, {why}"
        self._reason = "; ".join(filter(None, (change(self._send, goal, why), self._reason)))
        self._send, self._since = goal, 0

    def _needed(self, cf: float, promised: Mapping[float, float]) -> float:
        """T_comp that another CF must exceed. A larger one may do harm: it must be better by the
        margin and by what may be noise. A smaller one loses only time: it must be better than the
        one in use, and than every larger CF, or it would be left for that."""
        here = promised.get(self._send, 0.0)
        if cf < self._send:
            return max([here, *(n for other, n in promised.items() if other > self._send)])
        if self._signal is None:
            return (1 + self.margin) * here
        # What is assumed is no more in doubt than what dense keeps.
        a, b = (DENSE if each in self._assumed else each for each in (cf, self._send))
        return (1 + self.margin + UP * self.power * self._signal.doubt(a, b)) * here
