"""GraVAC (Tyagi, Swany, 2023): choose the CF by gain and compression throughput.

A run explores the ladder (policies/exploration.py) and then either settles on the CF where
compression throughput saturates, which is left and taken up again through epsilon, or stays dense,
if no CF beats dense.

Beyond the paper, that lasts until something has drifted (policies/drift.py); then it explores
again. What has not drifted stays known. After a change of the network these are the gains, so that
a few steps for each candidate are enough, for its step time; after a change of gains these are the
step times, dense's too.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import nan
from typing import Any, get_args

from policies import checks
from policies.base import (
    DENSE,
    SCALINGS,
    Context,
    DeclaredPolicy,
    GainKind,
    Plan,
    StepReport,
    change,
    make_ladder,
)
from policies.drift import Cause, DriftMonitor
from policies.estimators import weight_for
from policies.exploration import (
    MIN_OBSERVATIONS,
    CandidateStatistics,
    Exploration,
    Level,
    Phase,
    SendRule,
)
from policies.state import CHILD, declare, maybe_cf, text, together

TIMED_STEPS = 3
"""Steps that the shortest window leaves for a candidate's step time, after those for its gain."""


class GraVAC(DeclaredPolicy):
    """A policy that tries larger and larger CFs and keeps the one with the largest compression
    throughput whose gain is large enough; one CF for the whole model.

    epsilon: smallest gain worth sending, in (0, 1].
    omega: relative change that counts as none, of gains (where the floor moves up) and of T_comp
        (in the choice), in (0, 1].
    window: steps that a candidate is judged on, >= 1. Steps sent dense because no gain reaches
        epsilon do not count.
    scaling, step_size: how the candidates grow (`make_ladder`); step_size > 1.
    gain: the definition of gain that decides: "gradient", "error_fed" (the paper), "raw" (its
        released code) or "signal" (policies/signal_gain.py; it needs a shadow ladder, so a base
        compressor that keeps the largest elements).
    allow_dense: measure dense first, and keep it if no CF beats it. If False, dense is sent only
        while no gain reaches epsilon.
    dense_window: steps of that measurement; 0: dense is not measured.
    hysteresis, cooldown (steps): around epsilon, see `SendRule`. A choice, too, stands for at least
        `cooldown` steps.
    drift: relative change (0.3: 1.3 times as much, or 1 / 1.3 of it) of the step time or gain of
        the CF in use that opens the exploration again if it lasts; None: none does.
    patience: short windows that a drift must last. A short window is a fifth of `window`, but long
        enough to measure a gain and a step time. After a drift of the step time each candidate gets
        one such window.
    retry: windows after which gains that were too small are measured again. The wait doubles each
        time that this changes nothing. None: they never are.
    ValueError or TypeError names the setting that is wrong.
    """

    name = "gravac"
    _fields = declare(
        _chosen=maybe_cf,
        _reason=text,
        _verdict=text,
        _exploration=CHILD,
        _statistics=CHILD,
        _rule=CHILD,
        _monitor=CHILD,
    )

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
        self._statistics = CandidateStatistics(
            self.gain, weight, believed_after, context.wire_bytes, context.assumed
        )
        self._rule = SendRule(self.epsilon, self.hysteresis, self.cooldown)
        short_window = min(self.window, max(self.window // 5, believed_after + TIMED_STEPS))
        self._monitor = DriftMonitor(
            self._statistics,
            self._rule,
            omega=self.omega,
            drift=self.drift,
            patience=self.patience,
            steps=short_window,
            retry=None if self.retry is None else self.retry * self.window,
            cooldown=self.cooldown,
        )
        self._exploration = Exploration(
            self._ladder,
            self._statistics,
            self._rule,
            window=self.window,
            short_window=short_window,
            dense_window=self.dense_window if self.allow_dense else 0,
            omega=self.omega,
            may_stop=self.allow_dense,
        )
        self._reason = ""
        self._open(quick=False)
        self._started = True

    def _open(self, quick: bool) -> None:
        """Begin to explore. quick: with short windows."""
        self._chosen: float | None = None  # until a choice is made
        self._verdict = ""
        self._exploration.open(quick)

    def _open_again(self, cause: Cause, why: str) -> str:
        """Explore again, and forget what has drifted; returns why the plan changes."""
        self._statistics.judge(self._chosen)
        if cause == Cause.TIMES:
            self._statistics.forget_times()
        else:
            self._statistics.forget_gains()
        self._open(quick=cause == Cause.TIMES)
        return f"explores again, {why}"

    def plan(self) -> Plan:
        self._check_started("plan")
        send = self._send
        return Plan(send=send, probe=self._probe(send), reason=self._reason)

    @property
    def _candidate(self) -> float | None:
        """The CF above the floor, if there is one: the explored one, or later the chosen one."""
        if self._exploration.phase == Phase.SETTLED:
            return None if self._chosen == self._exploration.floor else self._chosen
        return self._exploration.candidate

    @property
    def _send(self) -> float:
        if self._rule.level == Level.CANDIDATE and self._candidate is not None:
            return self._candidate
        return self._exploration.floor if self._rule.level == Level.FLOOR else DENSE

    def _probe(self, send: float) -> tuple[float, ...]:
        """The CFs whose gains the send rule needs and sending `send` does not show."""
        if self.shadow:  # the gains of the whole ladder are known
            return ()
        if send == self._chosen:
            return self._monitor.probe(send)
        wanted = (self._exploration.floor, self._candidate)
        return tuple(cf for cf in wanted if cf is not None and cf not in (DENSE, send))

    def observe(self, report: StepReport) -> None:
        sent = self._send
        basis = self._statistics.observe(report, {sent, *self._probe(sent)})
        why = "; ".join(filter(None, (self._advance(report), basis)))
        send = self._send
        self._reason = change(sent, send, why)
        self._statistics.keep_only({send, *self._probe(send)})

    def _advance(self, report: StepReport) -> str:
        """Take one step; returns why the plan changes, "" if it does not."""
        if self._chosen is not None:
            return self._go_on_with_choice(report)
        ended, why = self._exploration.step()
        if not ended:
            return why
        return self._stay_dense(why) if why else self._settle()

    def _go_on_with_choice(self, report: StepReport) -> str:
        found = self._monitor.observe(report)
        if found is not None and found.cause != Cause.PROBE:
            return self._open_again(*found)
        stays_dense = self._exploration.phase == Phase.STAY_DENSE
        moved = "" if stays_dense else self._exploration.follow_rule(self._candidate)
        if found is None or self.shadow:  # with all gains known, nothing more is probed
            return moved
        return moved or found.why

    def _settle(self) -> str:
        """The end of the ladder is reached: choose a CF or dense; returns why."""
        t_comp = self._statistics.t_comp(self.epsilon)
        dense = self._statistics.t_sys(DENSE) if self.allow_dense else None
        if t_comp:
            self._chosen, why = choose(t_comp, dense, self.omega)
        else:
            self._chosen = self._exploration.floor
            why = f"no CF has both gain >= epsilon {self.epsilon:g} and a step time"
        if t_comp and self._chosen == DENSE:
            return self._stay_dense(why)
        self._exploration.close(Phase.SETTLED)
        self._rule.enter(Level.FLOOR if self._candidate is None else Level.CANDIDATE)
        self._verdict = f"GraVAC settled on CF {self._chosen:g}: {why}"
        self._monitor.begin(self._chosen, self._ladder)
        return f"settled, {why}"

    def _stay_dense(self, why: str) -> str:
        """No CF beats dense: send dense, and probe other CFs now and then; returns why."""
        self._exploration.close(Phase.STAY_DENSE)
        self._chosen = DENSE
        self._rule.enter(Level.DENSE)
        self._verdict = f"GraVAC stays dense: {why}"
        self._monitor.begin(DENSE, self._exploration.tried)
        return why

    def rescale(self) -> None:
        """It explores again, as after a change of the network: gains stay known, step times do
        not."""
        sent, why = self._send, "the number of ranks has changed"
        if self._statistics.signal is not None:
            self._statistics.signal.rescale()
        if self._chosen is not None:
            why = self._open_again(Cause.TIMES, why)
        else:
            self._statistics.forget_times()
            self._open(quick=False)
        self._reason = change(sent, self._send, why)

    def candidates(self) -> tuple[float, ...]:
        return self._ladder

    def status(self) -> Mapping[str, float]:
        """Numbers for the timeline by name, nan where there is none.

        t_sys, t_comp: throughputs of the CF sent (steps/s). exploring: 1 until a choice is made,
        then 0. With gain="signal" also the numbers of `SignalGain.status`.
        """
        gain, t_sys = self._statistics.gain(self._send), self._statistics.t_sys(self._send)
        numbers = {
            "candidate": None if self._exploration.phase == Phase.STAY_DENSE else self._candidate,
            "floor": self._exploration.floor,
            "gain_floor": self._statistics.gain(self._exploration.floor),
            "gain_candidate": self._statistics.gain(self._candidate),
            "t_sys": t_sys,
            "t_comp": None if gain is None or t_sys is None else gain * t_sys,
            "epsilon": self.epsilon,
            "exploring": float(self._chosen is None),
        }
        known = {k: nan if number is None else float(number) for k, number in numbers.items()}
        signal = self._statistics.signal
        return known if signal is None else {"signal": 0.0, **known, **signal.status()}

    def verdict(self) -> str:
        explores = self._exploration.phase in (Phase.FLOOR, Phase.EXPLORE)
        if explores and self._rule.level == Level.DENSE:
            return f"GraVAC sends dense: no gain reaches epsilon {self.epsilon:g}"
        return self._verdict

    def next_move(self) -> str:
        if self._statistics.signal is not None and not self._statistics.signal.clear:
            return f"{self._next()} (no signal gain now: {self._statistics.signal.described()})"
        return self._next()

    def _next(self) -> str:
        if self._chosen is not None:
            watched = "nothing but epsilon" if self._chosen != DENSE else "nothing"
            return self._monitor.described() or f"{watched} changes it any more"
        return self._exploration.described()

    def _saved_settings(self) -> dict[str, Any]:
        return {**self._settings, "ladder": list(self._ladder)}

    def _check_loaded(self) -> None:
        exploring = self._exploration.phase.explores
        together(exploring == (self._chosen is None), "'chosen' and 'phase' contradict")


def choose(t_comp: Mapping[float, float], dense: float | None, omega: float) -> tuple[float, str]:
    """The CF to keep, and why: dense (1) if no CF beats it, else where T_comp saturates.

    t_comp: compression throughput (steps/s x gain) by CF, at least one.
    dense: dense's T_comp, its gain being 1; None: dense is not a choice.
    """
    if dense is not None:
        best = max(t_comp, key=lambda cf: t_comp[cf])
        if t_comp[best] <= dense:
            return DENSE, f"best T_comp {t_comp[best]:.4g} (CF {best:g}) <= {dense:.4g} of dense"
        t_comp = {cf: value for cf, value in t_comp.items() if value > dense}
    return saturation(t_comp, omega)


def saturation(t_comp: Mapping[float, float], omega: float) -> tuple[float, str]:
    """The CF at which T_comp saturates, and why.

    Upwards from the smallest CF, of the one kept so far and the next: the smaller where their
    T_comp differ by no more than omega (relative to the one kept), else the one with the larger
    T_comp.
    """
    ascending = sorted(t_comp)
    kept = ascending[0]
    saturated = ""
    for cf in ascending[1:]:
        change = abs(t_comp[cf] - t_comp[kept]) / t_comp[kept]
        if change <= omega:
            saturated = (
                f"saturates at {kept:g}, |{t_comp[cf]:.4g} - {t_comp[kept]:.4g}| / "
                f"{t_comp[kept]:.4g} = {change:.3f} <= omega {omega:g}"
            )
        elif t_comp[cf] > t_comp[kept]:
            kept, saturated = cf, ""
    listed = ", ".join(f"{t_comp[cf]:.4g} at {cf:g}" for cf in ascending)
    return kept, f"T_comp {listed}: {saturated or f'largest at {kept:g}'}"
