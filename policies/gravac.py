"""GraVAC (Tyagi, Swany, 2023): move the CF by gain and compression throughput (DESIGN section 5).

A run explores the ladder (policies/exploration.py), and then is "settled" on the CF where
compression throughput saturates, left and found again through epsilon; or will "stay dense", where
no CF beats dense.

That lasts until something has drifted (policies/vigil.py); then it explores again. What has not
drifted stays known: after a change of the network the gains, so that a few steps a candidate are
enough, for its step time; after one of gains the step times, dense's too.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import nan
from typing import Any, get_args

from policies import checks, saved
from policies.average import weight_for
from policies.base import DENSE, Context, GainKind, Plan, Policy, StepReport
from policies.choice import choose
from policies.evidence import Evidence
from policies.exploration import Exploration
from policies.ladder import SCALINGS, make_ladder
from policies.reasons import change
from policies.send_rule import MIN_OBSERVATIONS, Level, SendRule
from policies.vigil import Vigil

TIMED_STEPS = 3
"""Steps, beyond those for its gain, that the shortest window leaves for a candidate's time."""

_STATE = ("chosen", "reason", "verdict")


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
        short_window = min(self.window, max(self.window // 5, believed_after + TIMED_STEPS))
        self._vigil = Vigil(
            self.gain,
            epsilon=self.epsilon,
            up_at=self._rule.up_at,
            omega=self.omega,
            drift=self.drift,
            patience=self.patience,
            steps=short_window,
            retry=None if self.retry is None else self.retry * self.window,
            cooldown=self.cooldown,
        )
        self._walk = Exploration(
            self._ladder,
            self._seen,
            self._rule,
            window=self.window,
            short_window=short_window,
            dense_window=self.dense_window if self.allow_dense else 0,
            omega=self.omega,
            may_stop=self.allow_dense,
        )
        self._reason = ""
        self._open(quick=False)

    def _open(self, quick: bool) -> None:
        """Begin to explore."""
        self._chosen: float | None = None  # until settled
        self._verdict = ""
        self._walk.open(quick)

    def _open_again(self, what: str, why: str) -> str:
        """What has drifted is forgotten and found out anew; returns why the plan changes."""
        self._seen.judge(self._chosen)
        if what == "time":
            self._seen.forget_times()
        else:
            self._seen.forget_gains()
        self._open(quick=what == "time")
        return f"explores again, {why}"

    def plan(self) -> Plan:
        if not self._ladder:
            raise RuntimeError("GraVAC needs start(context) before plan()")
        send = self._send
        return Plan(send=send, probe=self._probe(send), reason=self._reason)

    @property
    def _candidate(self) -> float | None:
        """The CF above the floor: the one explored, or the one chosen."""
        if self._walk.phase == "settled":
            return None if self._chosen == self._walk.floor else self._chosen
        return self._walk.candidate

    @property
    def _send(self) -> float:
        if self._rule.level == Level.CANDIDATE and self._candidate is not None:
            return self._candidate
        return self._walk.floor if self._rule.level == Level.FLOOR else DENSE

    def _probe(self, send: float) -> tuple[float, ...]:
        """What the send rule must know and sending does not show; nothing once all is well."""
        if self.shadow:  # knows the gains of the whole ladder
            return ()
        if send == self._chosen:
            return self._vigil.probe(send)
        wanted = (self._walk.floor, self._candidate)
        return tuple(cf for cf in wanted if cf is not None and cf not in (DENSE, send))

    def observe(self, report: StepReport) -> None:
        sent = self._send
        basis = self._seen.observe(report, {sent, *self._probe(sent)})
        why = "; ".join(filter(None, (self._advance(report), basis)))
        send = self._send
        self._reason = change(sent, send, why)
        self._seen.forget_all_but({send, *self._probe(send)})

    def _advance(self, report: StepReport) -> str:
        """One step on; returns why the plan changes, "" if it does not."""
        if self._chosen is not None:
            return self._go_on_with_choice(report)
        ended, why = self._walk.step()
        if not ended:
            return why
        return self._stay_dense(why) if why else self._settle()

    def _go_on_with_choice(self, report: StepReport) -> str:
        found = self._vigil.observe(report, self._seen)
        if found is not None and found.what != "look":
            return self._open_again(*found)
        moved = "" if self._walk.phase == "stay dense" else self._walk.follow_rule(self._candidate)
        if found is None or self.shadow:  # a look changes no probe where all gains are known
            return moved
        return moved or found.why

    def _settle(self) -> str:
        """The ladder is used up: choose; returns why."""
        t_comp = self._seen.t_comp(self.epsilon)
        dense = self._seen.t_sys(DENSE) if self.allow_dense else None
        if t_comp:
            self._chosen, why = choose(t_comp, dense, self.omega)
        else:
            self._chosen = self._walk.floor
            why = f"no CF has both gain >= epsilon {self.epsilon:g} and a step time"
        if t_comp and self._chosen == DENSE:
            return self._stay_dense(why)
        self._walk.close("settled")
        self._rule.enter(Level.FLOOR if self._candidate is None else Level.CANDIDATE)
        self._verdict = f"GraVAC settled on CF {self._chosen:g}: {why}"
        self._vigil.begin(self._chosen, self._ladder, self._seen)
        return f"settled, {why}"

    def _stay_dense(self, why: str) -> str:
        """No CF beats dense: nothing is compressed, and probed only in looks; returns why."""
        self._walk.close("stay dense")
        self._chosen = DENSE
        self._rule.enter(Level.DENSE)
        self._verdict = f"GraVAC stays dense: {why}"
        self._vigil.begin(DENSE, self._walk.tried, self._seen)
        return why

    def rescale(self) -> None:
        """The gains stay known, the step times do not: it explores again, as after a change of the
        network."""
        sent, why = self._send, "the number of ranks has changed"
        if self._seen.signal is not None:
            self._seen.signal.rescale()
        if self._chosen is not None:
            why = self._open_again("time", why)
        else:
            self._seen.forget_times()
            self._open(quick=False)
        self._reason = change(sent, self._send, why)

    def candidates(self) -> tuple[float, ...]:
        return self._ladder

    def status(self) -> Mapping[str, float]:
        """By name, nan where there is none; throughputs (steps/s) are those of the CF sent.
        exploring: 1 until a choice is made, then 0. With gain="signal" also the numbers of
        policies/signal.py."""
        gain, t_sys = self._seen.gain(self._send), self._seen.t_sys(self._send)
        numbers = {
            "candidate": None if self._walk.phase == "stay dense" else self._candidate,
            "floor": self._walk.floor,
            "gain_floor": self._seen.gain(self._walk.floor),
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
        wanting = self._rule.level == Level.DENSE and self._walk.phase in ("floor", "explore")
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
        return self._walk.outlook()

    def state_dict(self) -> dict[str, Any]:
        return {
            "settings": {**self._settings, "ladder": list(self._ladder)},
            **{name: getattr(self, f"_{name}") for name in _STATE},
            **self._walk.state_dict(),
            "seen": self._seen.state_dict(),
            "rule": self._rule.state_dict(),
            "vigil": self._vigil.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """After start(). Raises ValueError if the state is of other settings or another range."""
        if not self._ladder:
            raise RuntimeError("GraVAC needs start(context) before load_state_dict()")
        settings = saved.part(state, "settings")
        checks.same(self.name, {**self._settings, "ladder": list(self._ladder)}, settings)
        self._chosen = saved.maybe_cf(state, "chosen")
        self._reason = saved.text(state, "reason")
        self._verdict = saved.text(state, "verdict")
        self._walk.load_state_dict(state)
        exploring = self._walk.phase not in ("settled", "stay dense")
        saved.together(exploring == (self._chosen is None), "'chosen' and 'phase' contradict")
        self._seen.load_state_dict(saved.part(state, "seen"))
        self._rule.load_state_dict(saved.part(state, "rule"))
        self._vigil.load_state_dict(saved.part(state, "vigil"))
