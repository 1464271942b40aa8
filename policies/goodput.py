"""Goodput: straight to the CF with the largest compression throughput, without trying the others.

GraVAC's measure (section 3.1), T_comp = T_sys x gain, with both factors known for the whole ladder
at any time: the gain in steady state from the shadow ladder (`adaptive.shadow`), or its signal gain
(policies/signal.py); the step time from a cost model. Nothing is sent just to look, and a changed
network moves the CF as soon as it shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import nan
from typing import Any

from policies import checks
from policies.average import Average
from policies.base import DENSE, Context, GainKind, Plan, Policy, StepReport
from policies.forecast import Forecast
from policies.ladder import SCALINGS, make_ladder
from policies.reasons import change
from policies.signal import SignalGain

GAIN_WEIGHT = 0.1
"""Of a new step: gains move slowly, and one step's is noisy."""


class Goodput(Policy):
    """Sends dense for `dense_window` steps, then whichever CF promises most.

    scaling, step_size: of the ladder, as in GraVAC ("geometric": each step_size times the last).
    margin: how much more than the CF in use another must promise, in (0, 1]. cooldown: steps
    between switches. epsilon: smallest gain worth sending, in [0, 1). gain: "error_fed" (in steady
    state) or "signal".
    ValueError or TypeError names what is wrong.
    """

    name = "goodput"
    gain: GainKind = "error_fed"
    shadow = True

    def __init__(
        self,
        *,
        scaling: str = "geometric",
        step_size: float = 2.0,
        dense_window: int = 10,
        margin: float = 0.05,
        cooldown: int = 10,
        epsilon: float = 0.0,
        gain: GainKind = "error_fed",
    ) -> None:
        self.scaling = checks.one_of("scaling", scaling, SCALINGS)
        self.step_size = checks.real("step_size", step_size, above=1)
        self.dense_window = checks.whole("dense_window", dense_window, least=1)
        self.margin = checks.fraction("margin", margin)
        self.cooldown = checks.whole("cooldown", cooldown, least=1)
        self.epsilon = checks.real("epsilon", epsilon, least=0)
        if self.epsilon >= 1:
            raise ValueError(f"epsilon={epsilon!r}: must be in [0, 1)")
        checks.one_of("gain", gain, ("error_fed", "signal"))
        self.gain = gain
        self._settings = dict(vars(self))
        self._ladder: tuple[float, ...] = ()

    def start(self, context: Context) -> None:
        """Raises ValueError if cf_range is not a range or step_size makes too many candidates."""
        rungs = make_ladder(checks.cf_range(context.cf_range), self.scaling, self.step_size)
        self._ladder = tuple(sorted({context.supported(cf) for cf in rungs}))
        self._time = Forecast(context.wire_bytes)
        self._gains = {cf: Average(GAIN_WEIGHT) for cf in self._ladder if cf != DENSE}
        self._signal = SignalGain() if self.gain == "signal" else None
        self._send = DENSE
        self._since = 0  # steps at the present CF
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
        self._reason = "" if self._signal is None else self._signal.observe(report)
        if self._since >= (self.dense_window if self._opening else self.cooldown):
            self._consider()

    @property
    def _opening(self) -> bool:
        """Dense, and nothing else was ever sent."""
        return self._send == DENSE and not any(map(self._time.runs, self._gains))

    def candidates(self) -> tuple[float, ...]:
        return self._ladder

    def t_comp(self) -> dict[float, float]:
        """Steps a second x gain that each CF promises; dense and those of which enough is known."""
        promised = {}
        for cf in (DENSE, *self._gains):
            gain, seconds = self._gain(cf), self._time.seconds(cf)
            if gain is not None and seconds and (cf == DENSE or gain > self.epsilon):
                promised[cf] = gain / seconds
        return promised

    def status(self) -> Mapping[str, float]:
        """By name, nan where there is none; throughputs (steps/s) are those of the CF sent.
        exploring: 1 until it first considers to leave dense, then 0."""
        seconds, promised = self._time.seconds(self._send), self.t_comp()
        best = max(promised, key=lambda cf: (promised[cf], -cf)) if promised else nan
        numbers = {
            "candidate": best,
            "t_sys": 1 / seconds if seconds else nan,
            "t_comp": promised.get(self._send, nan),
            "exploring": float(self._opening and self._since < self.dense_window),
        }
        return numbers if self._signal is None else {**numbers, **self._signal.status()}

    def outlook(self) -> str:
        promised = self.t_comp()
        others = {cf: value for cf, value in promised.items() if cf != self._send}
        if not others:
            return "nothing is known of the other CFs yet"
        best = max(others, key=lambda cf: (others[cf], -cf))
        here = promised.get(self._send, 0.0)
        return (
            f"it changes when a CF promises a T_comp above {(1 + self.margin) * here:.4g}; the "
            f"best other one, CF {best:g}, promises {others[best]:.4g}"
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "settings": {**self._settings, "ladder": list(self._ladder)},
            "send": self._send,
            "since": self._since,
            "reason": self._reason,
            "gains": [[cf, average.state_dict()] for cf, average in self._gains.items()],
            "time": self._time.state_dict(),
            "signal": None if self._signal is None else self._signal.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """After start(). Raises ValueError if the state is of other settings or another range."""
        if not self._ladder:
            raise RuntimeError("Goodput needs start(context) before load_state_dict()")
        checks.same(self.name, {**self._settings, "ladder": list(self._ladder)}, state["settings"])
        self._send, self._since = float(state["send"]), int(state["since"])
        self._reason = state["reason"]
        for cf, saved in state["gains"]:
            self._gains[float(cf)].load_state_dict(saved)
        self._time.load_state_dict(state["time"])
        if self._signal is not None:
            self._signal.load_state_dict(state["signal"])

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
        best = max(promised, key=lambda cf: (promised[cf], -cf))
        if best == self._send or promised[best] <= (1 + self.margin) * here:
            return
        told = ", ".join(f"{value:.4g} at {cf:g}" for cf, value in sorted(promised.items()))
        why = f"T_comp {promised[best]:.4g} against {here:.4g} ({told})"
        self._reason = "; ".join(filter(None, (change(self._send, best, why), self._reason)))
        self._send, self._since = best, 0
