"""GraVAC (Tyagi, Swany, 2023): move the CF by gain and compression throughput (DESIGN section 5).

A run goes through phases:
1. "measure": dense for a few steps, for dense's own step time; gains are probed meanwhile.
2. "floor": one window at the smallest CF, for its step time.
3. "explore": one window for each candidate of the ladder; the floor follows where nothing is lost.
4. "settled": the CF where compression throughput saturates, left and found again through epsilon;
   or "stay dense", where no CF beats dense.

The fourth lasts until something has drifted (policies/vigil.py); then it goes through the others
again. What has not drifted stays known: after a change of the network the gains, so that a few
steps a candidate are enough, for its step time; after one of gains the step times, dense's too.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import nan
from typing import Any, get_args

from policies import checks
from policies.average import weight_for
from policies.base import DENSE, Context, GainKind, Plan, Policy, StepReport
from policies.choice import choose, nothing_lost
from policies.evidence import Evidence
from policies.ladder import SCALINGS, make_ladder
from policies.reasons import change
from policies.send_rule import MIN_OBSERVATIONS, Level, SendRule
from policies.vigil import Vigil

TIMED_STEPS = 3
"""Steps, beyond those for its gain, that the shortest window leaves for a candidate's time."""

_STATE = ("phase", "floor", "rung", "chosen", "window_step", "quick", "reason", "verdict")


class GraVAC(Policy):
    """Gradient-variance-aware choice of one CF for the whole model.

    epsilon: smallest gain worth sending, in (0, 1].
    omega: relative change that counts as none, of gains (floor promotion) and of T_comp (choice).
    window: steps that a candidate is judged on; those sent dense for want of gain do not count.
    scaling, step_size: how the candidates grow (policies/ladder.py); step_size > 1.
    gain: which gain decides: "gradient", "error_fed" (the paper), "raw" (its released code) or
        "signal" (policies/signal.py; needs a shadow ladder, so a base that keeps the largest).
    allow_dense: measure dense first, and keep it if no CF beats it. False: send dense only where
        no gain reaches epsilon.
    dense_window: steps of that measurement; 0: no measurement.
    hysteresis, cooldown (steps): around epsilon, see policies/send_rule.py. A choice, too, stands
        for `cooldown` steps at least.
    drift: relative change (0.3: 1.3 times as much, or 1 / 1.3 of it) of the step time or gain of
        the CF in use that, if it lasts, opens the exploration again; None: never.
    patience: how many short windows it must last: of a fifth of `window`, but enough steps to
        measure a gain and a time in. After a drift of time each candidate gets one such.
    retry: windows after which gains that did not serve are looked at again, the wait doubling with
        each look for nothing; None: never.
    """

    name = "gravac"

    def __init__(
        self,
        *,
        epsilon: float = 0.3,
        omega: float = 0.1,
        window: int = 40,
        scaling: str = "exponential",
        step_size: float = 2.0,
        gain: GainKind = "gradient",
        allow_dense: bool = True,
        dense_window: int = 10,
        hysteresis: float = 0.1,
        cooldown: int = 40,
        drift: float | None = 0.3,
        patience: int = 2,
        retry: int | None = 10,
    ) -> None:
        self.epsilon = checks.fraction("epsilon", epsilon)
        self.omega = checks.fraction("omega", omega)
        self.window = checks.whole("window", window, least=1)
        self.scaling = checks.one_of("scaling", scaling, SCALINGS)
        self.step_size = checks.real("step_size", step_size, above=1)
        checks.one_of("gain", gain, get_args(GainKind))
        self.gain: GainKind = gain
        self.allow_dense = checks.flag("allow_dense", allow_dense)
        self.dense_window = checks.whole("dense_window", dense_window, least=0)
        self.hysteresis = checks.real("hysteresis", hysteresis, least=0)
        self.cooldown = checks.whole("cooldown", cooldown, least=1)
        self.drift = None if drift is None else checks.real("drift", drift, above=0)
        self.patience = checks.whole("patience", patience, least=1)
        self.retry = None if retry is None else checks.whole("retry", retry, least=1)
        self._settings = dict(vars(self))
        self.shadow = self.shadow or gain == "signal"
        self._ladder: tuple[float, ...] = ()

    def start(self, context: Context) -> None:
        """Raises ValueError if cf_range is not a range or step_size makes too many candidates."""
        cf_range = checks.cf_range(context.cf_range)
        rungs = make_ladder(cf_range, self.scaling, self.step_size)
        others = (cf for cf in context.assumed if cf_range[0] <= cf <= cf_range[1])
        self._ladder = tuple(sorted({*map(context.supported, rungs), *others}))
        nameless = context.unknown.intersection(self._ladder)
        if nameless:
            raise ValueError(
                f"hooks: CF {min(nameless):g} is a candidate of GraVAC too, which needs to know "
                f"its gain; give HookRung(hook, gain=...) or another CF"
            )
        # A short window must still leave steps to send the candidate in.
        believed_after = min(MIN_OBSERVATIONS, max(1, self.window // 4))
        weight = weight_for(context.world_size)
        self._seen = Evidence(self.gain, weight, believed_after, context.assumed)
        self._rule = SendRule(self.epsilon, self.hysteresis, self.cooldown)
        self._short_window = min(self.window, max(self.window // 5, believed_after + TIMED_STEPS))
        self._vigil = Vigil(
            self.gain,
            epsilon=self.epsilon,
            up_at=self._rule.up_at,
            omega=self.omega,
            drift=self.drift,
            patience=self.patience,
            steps=self._short_window,
            retry=None if self.retry is None else self.retry * self.window,
            cooldown=self.cooldown,
        )
        self._quick = False  # a time drifted, so that each CF gets a short window
        self._reason = ""
        self._open()

    def _open(self) -> None:
        """Begin to explore, from the bottom of the ladder."""
        self._floor = self._ladder[0]
        self._rung = 1  # of the candidate
        self._chosen: float | None = None  # until settled
        self._window_step = 0
        self._verdict = ""
        known = self._seen.t_sys(DENSE) is not None
        wanted = self.allow_dense and self.dense_window > 0 and not known
        if wanted and self._floor != DENSE:
            self._phase = "measure"
            self._rule.enter(Level.DENSE)
        else:
            self._phase = "floor"
            self._rule.enter(Level.FLOOR)

    def _open_again(self, what: str, why: str) -> str:
        """What has drifted is forgotten and found out anew; returns why the plan changes."""
        self._seen.judge(self._chosen)
        self._quick = what == "time"
        if self._quick:
            self._seen.forget_times()
        else:
            self._seen.forget_gains()
        self._open()
        return f"explores again, {why}"

    def plan(self) -> Plan:
        if not self._ladder:
            raise RuntimeError("GraVAC needs start(context) before plan()")
        return Plan(send=self._send, probe=self._probe, reason=self._reason)

    @property
    def _candidate(self) -> float | None:
        """The CF above the floor: the one explored, or the one chosen."""
        if self._phase == "settled":
            return None if self._chosen == self._floor else self._chosen
        return self._ladder[self._rung] if self._rung < len(self._ladder) else None

    @property
    def _send(self) -> float:
        if self._rule.level == Level.CANDIDATE and self._candidate is not None:
            return self._candidate
        return self._floor if self._rule.level == Level.FLOOR else DENSE

    @property
    def _probe(self) -> tuple[float, ...]:
        """What the send rule must know and sending does not show; nothing once all is well."""
        if self.shadow:  # knows the gains of the whole ladder
            return ()
        send = self._send
        if send == self._chosen:
            return self._vigil.probe(send)
        wanted = (self._floor, self._candidate)
        return tuple(cf for cf in wanted if cf is not None and cf not in (DENSE, send))

    def observe(self, report: StepReport) -> None:
        sent = self._send
        basis = self._seen.observe(report, {sent, *self._probe})
        why = "; ".join(filter(None, (self._advance(report), basis)))
        self._reason = change(sent, self._send, why)
        self._seen.forget_all_but({self._send, *self._probe})

    def _advance(self, report: StepReport) -> str:
        """One step on; returns why the plan changes, "" if it does not."""
        if self._chosen is not None:
            return self._go_on_with_choice(report)
        if self._window_ends():
            steps, self._window_step = self._window_step, 0
            return self._end_window(steps)
        if self._phase == "measure":
            return ""
        return self._follow_rule()

    def _go_on_with_choice(self, report: StepReport) -> str:
        found = self._vigil.observe(report, self._seen)
        if found is not None and found.what != "look":
            return self._open_again(*found)
        moved = "" if self._phase == "stay dense" else self._follow_rule()
        if found is None or self.shadow:  # a look changes no probe where all gains are known
            return moved
        return moved or found.why

    def _follow_rule(self) -> str:
        candidate = None if self._phase == "floor" else self._candidate
        return self._rule.step(self._seen.gain(self._floor), self._seen.gain(candidate))

    def _window_ends(self) -> bool:
        window = self._short_window if self._quick else self.window
        if self._phase == "measure":
            window = min(self.dense_window, window) if self._quick else self.dense_window
        elif self._rule.level == Level.DENSE:
            return False
        self._window_step += 1
        return self._window_step >= window

    def _end_window(self, steps: int) -> str:
        """Go on to the next window or phase; returns why the plan changes."""
        if self._phase == "measure":
            self._phase = "floor"
            gain = self._seen.gain(self._floor)
            if gain is not None and gain < self.epsilon:
                # Dense goes on, from now on for want of gain.
                return f"gain {gain:.4g} at CF {self._floor:g} < epsilon {self.epsilon:g}"
            self._rule.enter(Level.FLOOR)
            known = "not known yet" if gain is None else f"{gain:.4g}"
            return f"{steps} dense steps done, gain {known}"
        self._seen.judge(self._floor)
        why = ""
        if self._phase == "floor":
            self._phase = "explore"
        elif self._candidate is not None:
            self._seen.judge(self._candidate)
            if self.allow_dense and (hopeless := self._seen.hopeless()):
                return self._stay_dense(hopeless)
            why = self._promote(self._candidate)
            self._rung += 1
        if self._candidate is None:
            return self._settle()
        self._rule.enter(Level.FLOOR)  # free to move up once the candidate's gain is believed
        return why and f"{why}, next candidate {self._candidate:g}"

    def _promote(self, candidate: float) -> str:
        """Move the floor up to the candidate if that loses nothing; returns why (not)."""
        gains = self._seen.gain(self._floor), self._seen.gain(candidate)
        may, why = nothing_lost(*gains, omega=self.omega, epsilon=self.epsilon)
        if not may:
            return f"{why}, floor stays {self._floor:g}"
        why += f", floor {self._floor:g} -> {candidate:g}"
        self._floor = candidate
        return why

    def _settle(self) -> str:
        """The ladder is used up: choose; returns why."""
        t_comp = self._seen.t_comp(self.epsilon)
        dense = self._seen.t_sys(DENSE) if self.allow_dense else None
        if t_comp:
            self._chosen, why = choose(t_comp, dense, self.omega)
        else:
            self._chosen = self._floor
            why = f"no CF has both gain >= epsilon {self.epsilon:g} and a step time"
        if t_comp and self._chosen == DENSE:
            return self._stay_dense(why)
        self._phase = "settled"
        self._floor = self._ladder[0]
        self._rule.enter(Level.FLOOR if self._candidate is None else Level.CANDIDATE)
        self._verdict = f"GraVAC settled on CF {self._chosen:g}: {why}"
        self._vigil.begin(self._chosen, self._ladder, self._seen)
        return f"settled, {why}"

    def _stay_dense(self, why: str) -> str:
        """No CF beats dense: nothing is compressed, and probed only in looks; returns why."""
        self._phase = "stay dense"
        self._chosen = DENSE
        self._rule.enter(Level.DENSE)
        self._verdict = f"GraVAC stays dense: {why}"
        self._vigil.begin(DENSE, self._ladder[: self._rung + 1], self._seen)
        return why

    def candidates(self) -> tuple[float, ...]:
        return self._ladder

    def status(self) -> Mapping[str, float]:
        """By name, nan where there is none; throughputs (steps/s) are those of the CF sent.
        exploring: 1 until a choice is made, then 0. With gain="signal" also the numbers of
        policies/signal.py."""
        gain, t_sys = self._seen.gain(self._send), self._seen.t_sys(self._send)
        numbers = {
            "candidate": None if self._phase == "stay dense" else self._candidate,
            "floor": self._floor,
            "gain_floor": self._seen.gain(self._floor),
            "gain_candidate": self._seen.gain(self._candidate),
            "t_sys": t_sys,
            "t_comp": None if gain is None or t_sys is None else gain * t_sys,
            "epsilon": self.epsilon,
            "exploring": float(self._chosen is None),
        }
        known = {k: nan if number is None else float(number) for k, number in numbers.items()}
        signal = self._seen.signal
        return known if signal is None else {"signal": 0.0, **known, **signal.status()}

    def verdict(self) -> str:
        wanting = self._rule.level == Level.DENSE and self._phase in ("floor", "explore")
        if wanting:
            return f"GraVAC sends dense: no gain reaches epsilon {self.epsilon:g}"
        return self._verdict

    def outlook(self) -> str:
        if self._seen.signal is not None and not self._seen.signal.clear:
            return f"{self._next()} (no signal gain now: {self._seen.signal.numbers()})"
        return self._next()

    def _next(self) -> str:
        if self._chosen is not None:
            watched = "nothing but epsilon" if self._chosen != DENSE else "nothing"
            return self._vigil.outlook() or f"{watched} changes it any more"
        if self._phase == "measure":
            return f"dense is measured, {self._window_step} steps so far; then CF {self._floor:g}"
        what = f"CF {self._floor if self._candidate is None else self._candidate:g}"
        return f"{what} is judged, {self._window_step} steps of its window so far"

    def state_dict(self) -> dict[str, Any]:
        return {
            "settings": {**self._settings, "ladder": list(self._ladder)},
            **{name: getattr(self, f"_{name}") for name in _STATE},
            "seen": self._seen.state_dict(),
            "rule": self._rule.state_dict(),
            "vigil": self._vigil.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """After start(). Raises ValueError if the state is of other settings or another range."""
        if not self._ladder:
            raise RuntimeError("GraVAC needs start(context) before load_state_dict()")
        checks.same(self.name, {**self._settings, "ladder": list(self._ladder)}, state["settings"])
        for name in _STATE:
            setattr(self, f"_{name}", state[name])
        self._seen.load_state_dict(state["seen"])
        self._rule.load_state_dict(state["rule"])
        self._vigil.load_state_dict(state["vigil"])
