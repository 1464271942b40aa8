"""Goodput: straight to the CF with the largest compression throughput, without trying the others.

GraVAC's measure (section 3.1), T_comp = T_sys x gain, with both factors known for the whole ladder
at any time: the gain in steady state from the shadow ladder (`adaptive.shadow`), or its signal gain
(policies/signal.py); the step time from a cost model. Nothing is sent just to look, and a changed
network moves the CF as soon as it shows.

Signal gain s is what gets through at once. What does not is late, not lost, and velocities with
less lag of their own make up for a part of that (adaptive/momentum.py): progress falls more slowly
than s, which counts to the `power` of 0.5 (measured: docs/results.md). More costs time, and gives
quality in as many steps.

A dense step over a slow network can take as long as a hundred compressed ones, so not even the
first is dense. Nor is it sent at a large CF: the first gradients are the largest, and a residual of
them that a later, smaller CF lets go all at once sets training back. A run begins at the smallest
CF, and as long as signal gain has nothing to say the root of the steady-state error-fed gain takes
its place; it never moves to a CF whose shadow residual is still filling. From a large CF it comes
down by strides, the network measured anew with each.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, isfinite, nan
from typing import Any

from policies import checks, saved
from policies.average import Average, averages_by_cf
from policies.base import DENSE, Context, GainKind, Plan, Policy, StepReport
from policies.forecast import Forecast
from policies.ladder import SCALINGS, make_ladder
from policies.reasons import change
from policies.signal import SignalGain

GAIN_WEIGHT = 0.1
"""Of a new step: gains move slowly, and one step's is noisy."""

ARRIVING = 5
"""Steps at each CF on the way to one that sends many more bytes."""

FILLING = 8.0
"""With signal gain, CFs up to so many times the steps done are considered: the shadow residual of a
larger one is still filling, and its gain too large."""

STRIDE = 8.0
"""A step may send so many times the bytes of the largest that this network has carried yet."""

UP = 2.0
"""Standard errors of T_comp (power x those of the gain) that a larger CF must be better by."""

_STATE = ("send", "since", "steps", "left", "reason")


class Goodput(Policy):
    """Sends the smallest CF for `opening` steps, then whichever CF promises most.

    scaling, step_size: of the ladder, as in GraVAC ("geometric": each step_size times the last).
    margin: how much more than the CF in use a larger one must promise, in (0, 1], beside what
    T_comp is uncertain by (UP); a smaller one more than any. cooldown: steps between switches
    (fewer on the way to a CF that sends many more bytes: ARRIVING). epsilon: smallest gain worth
    sending, once gains are known, in [0, 1). gain: "signal" or "error_fed" (in steady state).
    power: of signal gain in what a CF promises, > 0; a larger one for smaller CFs, and more quality
    in as many steps.
    ValueError or TypeError names what is wrong.
    """

    name = "goodput"
    gain: GainKind = "signal"
    shadow = True

    def __init__(
        self,
        *,
        scaling: str = "geometric",
        step_size: float = 2.0,
        opening: int = 5,
        margin: float = 0.05,
        cooldown: int = 10,
        epsilon: float = 0.0,
        gain: GainKind = "signal",
        power: float = 0.5,
    ) -> None:
        self.scaling = checks.one_of("scaling", scaling, SCALINGS)
        self.step_size = checks.real("step_size", step_size, above=1)
        self.opening = checks.whole("opening", opening, least=1)
        self.margin = checks.fraction("margin", margin)
        self.cooldown = checks.whole("cooldown", cooldown, least=1)
        self.epsilon = checks.real("epsilon", epsilon, least=0)
        if self.epsilon >= 1:
            raise ValueError(f"epsilon={epsilon!r}: must be in [0, 1)")
        checks.one_of("gain", gain, ("error_fed", "signal"))
        self.gain = gain
        self.power = checks.real("power", power, above=0)
        self._settings = dict(vars(self))
        self._ladder: tuple[float, ...] = ()

    def start(self, context: Context) -> None:
        """Raises ValueError if cf_range is not a range or step_size makes too many candidates."""
        rungs = make_ladder(checks.cf_range(context.cf_range), self.scaling, self.step_size)
        self._ladder = tuple(sorted({context.supported(cf) for cf in rungs}))
        self._bytes = context.wire_bytes
        self._time = Forecast(context.wire_bytes)
        self._gains = {cf: Average(GAIN_WEIGHT) for cf in self._ladder if cf != DENSE}
        self._signal = SignalGain() if self.gain == "signal" else None
        self._send = self._ladder[0]
        self._since = 0  # steps at the present CF
        self._steps = 0  # in all
        self._left: float | None = None  # on the way from here to a CF that is out of reach yet
        self._reason = ""

    def plan(self) -> Plan:
        if not self._ladder:
            raise RuntimeError("Goodput needs start(context) before plan()")
        return Plan(self._send, reason=self._reason)

    def observe(self, report: StepReport) -> None:
        self._time.observe(report)
        for cf, average in self._gains.items():
            average.add(report.steady.get(cf, nan))
        self._since += 1
        self._steps += 1
        self._reason = "" if self._signal is None else self._signal.observe(report)
        if self._since >= self._wait:
            self._consider()

    @property
    def _opens(self) -> bool:
        """Nothing but the first CF was sent yet."""
        return self._since == self._steps

    @property
    def _wait(self) -> int:
        if self._opens:
            return self.opening
        return self.cooldown if self._left is None else min(ARRIVING, self.cooldown)

    def candidates(self) -> tuple[float, ...]:
        return self._ladder

    def t_comp(self) -> dict[float, float]:
        """Steps a second x gain (signal gain to the power) that each CF promises; dense and those
        of which enough is known."""
        promised = {}
        power = 1.0 if self._signal is None else self.power
        largest = inf if self._signal is None else FILLING * self._steps
        for cf in (DENSE, *self._gains):
            gain, seconds = self._gain(cf), self._time.seconds(cf)
            if gain is None or not seconds or cf > largest:
                continue
            if cf == DENSE or gain > self.epsilon:
                promised[cf] = gain**power / seconds
        return promised

    def status(self) -> Mapping[str, float]:
        """By name, nan where there is none; gain and throughputs (steps/s) are of the CF sent.
        exploring: 1 until it first considers to leave the first CF, then 0."""
        seconds, promised = self._time.seconds(self._send), self.t_comp()
        best = max(promised, key=lambda cf: (promised[cf], -cf)) if promised else nan
        numbers = {
            "candidate": best,
            "t_sys": 1 / seconds if seconds else nan,
            "t_comp": promised.get(self._send, nan),
            "gain": nan if (gain := self._gain(self._send)) is None else gain,
            "exploring": float(self._opens and self._since < self._wait),
        }
        return numbers if self._signal is None else {**numbers, **self._signal.status()}

    def verdict(self) -> str:
        sends_dense = self._send == DENSE and self._since >= self.cooldown
        return "Goodput sends dense: no CF promises a larger T_comp" if sends_dense else ""

    def outlook(self) -> str:
        promised = self.t_comp()
        others = {cf: value for cf, value in promised.items() if cf != self._send}
        if not others:
            return "nothing is known of the other CFs yet"
        first = max(others, key=lambda cf: (others[cf] - self._needed(cf, promised), -cf))
        return (
            f"it changes when a CF promises enough more T_comp: CF {first:g} is nearest to that, "
            f"promises {others[first]:.4g} and needs more than {self._needed(first, promised):.4g}"
        )

    def rescale(self) -> None:
        """It stays at its CF for a cooldown, in which the step times are measured anew."""
        self._time = Forecast(self._bytes)
        self._since, self._left = 0, None
        if self._signal is not None:
            self._signal.rescale()

    def state_dict(self) -> dict[str, Any]:
        return {
            "settings": {**self._settings, "ladder": list(self._ladder)},
            **{name: getattr(self, f"_{name}") for name in _STATE},
            "gains": [[cf, average.state_dict()] for cf, average in self._gains.items()],
            "time": self._time.state_dict(),
            "signal": None if self._signal is None else self._signal.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """After start(). Raises ValueError if the state is of other settings or another range."""
        if not self._ladder:
            raise RuntimeError("Goodput needs start(context) before load_state_dict()")
        settings = saved.part(state, "settings")
        checks.same(self.name, {**self._settings, "ladder": list(self._ladder)}, settings)
        self._send = saved.number(state, "send", least=1)
        self._since, self._steps = saved.count(state, "since"), saved.count(state, "steps")
        self._left = saved.maybe_cf(state, "left")
        self._reason = saved.text(state, "reason")
        gains = averages_by_cf(state, "gains", GAIN_WEIGHT)
        saved.together(gains.keys() == self._gains.keys(), "'gains' are of other CFs")
        self._gains = gains
        self._time.load_state_dict(saved.part(state, "time"))
        saved.load_if_there(state, "signal", self._signal)

    def _gain(self, cf: float) -> float | None:
        if cf == DENSE:
            return 1.0
        if self._signal is not None:
            return self._signal.gain(cf)
        average = self._gains[cf]
        return min(1.0, max(0.0, average.value)) if average.count else None

    def _consider(self) -> None:
        """Move to the CF that promises most, if it promises enough more than the one in use."""
        promised = self.t_comp()
        here = promised.get(self._send, 0.0)
        if not promised:
            return
        left, self._left = self._left, None
        # A larger CF may promise most, and be too uncertain to hinder one that is not.
        others = [cf for cf in promised if cf != self._send]
        better = [cf for cf in others if promised[cf] > self._needed(cf, promised)]
        if left is not None and promised.get(left, 0.0) > here:
            better.append(left)  # what led away from there was not so
        if not better:
            return
        best = max(better, key=lambda cf: (promised[cf], -cf))
        told = ", ".join(f"{value:.4g} at {cf:g}" for cf, value in sorted(promised.items()))
        why = f"T_comp {promised[best]:.4g} against {here:.4g} ({told})"
        goal = self._within_reach(best)
        if goal != best:
            self._left = self._send if left is None else left
            why = f"on the way to {best:g}, {why}"
        self._reason = "; ".join(filter(None, (change(self._send, goal, why), self._reason)))
        self._send, self._since = goal, 0

    def _needed(self, cf: float, promised: Mapping[float, float]) -> float:
        """T_comp that another CF must promise. Only a larger one must be better by a margin, and
        by what noise may have made: it may do harm, where a smaller one, or dense, which loses
        nothing, can only take time. But a smaller one does not lead where one larger than here
        promises more: it would be left again for that one."""
        here = promised.get(self._send, 0.0)
        if cf < self._send:
            return max([here, *(n for other, n in promised.items() if other > self._send)])
        doubt = 0.0 if self._signal is None else self.power * self._signal.doubt(cf, self._send)
        return (1 + self.margin + UP * doubt) * here

    def _within_reach(self, best: float) -> float:
        """The CF itself, or on the way there the one with the most bytes that may be tried."""
        between = [cf for cf in (DENSE, *self._ladder) if best <= cf < self._send]
        if not between:
            return best
        most = min(self._send, *self._time.timed())
        return next((cf for cf in between if self._times(cf, most) <= STRIDE), between[-1])

    def _times(self, cf: float, most: float) -> float:
        """Bytes at a CF in those at another."""
        times = self._bytes(cf) / (self._bytes(most) or nan)
        return times if isfinite(times) else most / cf
