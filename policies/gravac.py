"""GraVAC (Tyagi, Swany, 2023): choose the CF by gain and compression throughput.

A run explores the ladder, then settles on the CF where compression throughput saturates, or stays
dense if no CF beats that. Beyond the paper, it explores again when something has drifted
(drift.py). The rest stays known: if only step times have changed, a few steps a candidate do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, nan
from typing import get_args

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
    setting,
)
from policies.drift import Drift, DriftMonitor
from policies.exploration import CandidateStatistics, Level, SendRule
from policies.state import saved, together
from policies.words import named, percent, progress

MIN_OBSERVATIONS = 5
"""Steps in which a gain must have been measured before it is believed."""

TIMED_STEPS = 3
"""Steps that the shortest window leaves for a candidate's step time, after those for its gain."""

DENSE_WINDOW, FLOOR_WINDOW = 0, 1
"""The first windows of an exploration; those of the candidates follow."""


@dataclass(eq=False, kw_only=True)
class GraVAC(DeclaredPolicy):
    """A policy that tries larger and larger CFs, and keeps the one with the largest compression
    throughput whose gain is large enough.

    epsilon: smallest gain worth sending, in (0, 1].
    omega: relative change that counts as none, of gains (where the floor moves up) and of T_comp
        (in the choice), in (0, 1].
    window: steps that a candidate is judged on, >= 1, without those sent dense because of epsilon.
    scaling, step_size: how the candidates grow (`make_ladder`); step_size > 1.
    gain: the definition of gain that decides: "gradient", "error_fed" (the paper), "raw" (its
        released code) or "signal" (policies/signal_gain.py; it needs a shadow ladder, so a base
        compressor that keeps the largest elements).
    allow_dense: measure dense first, and keep it if no CF beats it. Else it is sent only while no
        gain reaches epsilon.
    dense_window: steps of that measurement; 0: dense is not measured.
    hysteresis, cooldown (steps): around epsilon, see `SendRule`; a choice stands for a cooldown.
    drift: relative change (0.3: 1.3 times as much, or 1 / 1.3 of it) of the step time or gain of
        the CF in use that opens the exploration again if it lasts; None: none does.
    patience: short windows that a drift must last: of a fifth of `window`, but enough steps to
        measure a gain and a step time.
    retry: windows after which gains that were too small are measured again (twice as many each time
        that this changes nothing); None: they never are.
    ValueError or TypeError names the setting that is wrong.
    """

    name = "gravac"

    epsilon: float = setting(0.3, checks.fraction)
    omega: float = setting(0.1, checks.fraction)
    window: int = setting(40, checks.whole, least=1)
    scaling: str = setting("exponential", checks.one_of, accepted=SCALINGS)
    step_size: float = setting(2.0, checks.real, above=1)
    gain: GainKind = setting("gradient", checks.one_of, accepted=get_args(GainKind))
    allow_dense: bool = setting(True, checks.flag)
    dense_window: int = setting(10, checks.whole, least=0)
    hysteresis: float = setting(0.1, checks.real, least=0)
    cooldown: int = setting(40, checks.whole, least=1)
    drift: float | None = setting(0.3, checks.real, or_none=True, above=0)
    patience: int = setting(2, checks.whole, least=1)
    retry: int | None = setting(10, checks.whole, or_none=True, least=1)

    _ladder: tuple[float, ...] = field(init=False, repr=False, default=())
    _judging: int = saved(DENSE_WINDOW)  # the window of an exploration
    _window_step: int = saved(0)
    _quick: bool = saved(False)  # it explores with short windows
    _floor: float = saved(DENSE)
    _chosen: float | None = saved(None)
    _reason: str = saved("")
    _verdict: str = saved("")
    _statistics: CandidateStatistics = saved()
    _rule: SendRule = saved()
    _monitor: DriftMonitor = saved()

    def start(self, context: Context) -> None:
        """Raises ValueError if step_size makes too many candidates, or one of unknown gain."""
        self._begin()
        low, high = context.cf_range
        others = (cf for cf in context.assumed if low <= cf <= high)
        self._ladder = tuple(sorted({*context.ladder(self.step_size, self.scaling), *others}))
        nameless = context.unknown.intersection(self._ladder)
        if nameless:
            raise ValueError(
                f"hooks: CF {min(nameless):g} is a candidate of GraVAC too, which needs to know "
                f"its gain; give HookRung(hook, gain=...) or another CF"
            )
        # A short window must still leave steps to send the candidate in.
        believed_after = min(MIN_OBSERVATIONS, max(1, self.window // 4))
        self._short_window = min(self.window, max(self.window // 5, believed_after + TIMED_STEPS))
        self._statistics = CandidateStatistics(
            self.gain,
            min(0.5, context.world_size / 100),  # the paper's weight, which lets the past count too
            believed_after,
            context.wire_bytes,
            context.assumed,
            context.overlap,
        )
        self._rule = SendRule(self.epsilon, self.hysteresis, self.cooldown)
        self._monitor = DriftMonitor(
            self._statistics,
            self._rule,
            omega=self.omega,
            drift=self.drift,
            patience=self.patience,
            steps=self._short_window,
            retry=None if self.retry is None else self.retry * self.window,
            cooldown=self.cooldown,
        )
        self._explore(quick=False)

    def plan(self) -> Plan:
        return Plan(self._send, self._probe, self._reason)

    @property
    def _candidate(self) -> float | None:
        """The CF above the floor that the send rule may send: while it explores, the one that is
        judged now or next; then the chosen one."""
        if self._chosen is not None:
            return None if self._chosen in (DENSE, self._floor) else self._chosen
        rung = max(self._judging, FLOOR_WINDOW + 1) - FLOOR_WINDOW
        return self._ladder[rung] if rung < len(self._ladder) else None

    @property
    def _send(self) -> float:
        if self._rule.level == Level.CANDIDATE and self._candidate is not None:
            return self._candidate
        return self._floor if self._rule.level == Level.FLOOR else DENSE

    @property
    def _probe(self) -> tuple[float, ...]:
        """The CFs whose gains are needed and not shown by what is sent."""
        if self.shadow:  # the gains of the whole ladder are known
            return ()
        if self._send == self._chosen:
            return self._monitor.probed
        wanted = (self._floor, self._candidate)
        return tuple(cf for cf in wanted if cf is not None and cf not in (DENSE, self._send))

    def observe(self, report: StepReport) -> None:
        sent, probed = self._send, self._probe
        basis = self._statistics.observe(report, {sent, *probed})
        explores = self._chosen is None
        why = self._step_exploration() if explores else self._step_choice(report)
        chooses = explores and self._chosen is not None  # and has told of its step time
        switches = self._send != sent and not chooses
        costs = self._statistics.costs_of(self._send, sent) if switches else ""
        if not why and self._probe != probed:
            listed = ", ".join(f"{cf:g}" for cf in self._probe or probed)
            why = f"looks {'again' if self._probe else 'no longer'} at the gains of CF {listed}"
        self._reason = change(sent, self._send, "; ".join(filter(None, (why, costs, basis))))

    # Exploring: a window of steps for dense, for the floor, and for each candidate

    def _explore(self, quick: bool) -> None:
        """Begin to explore from the smallest CF up. quick: with short windows."""
        self._chosen = None
        self._verdict = ""
        self._quick = quick
        self._floor = self._ladder[0]
        self._window_step = 0
        known = self._statistics.t_sys(DENSE) is not None or DENSE in self._ladder
        measures_dense = self.allow_dense and self.dense_window > 0 and not known
        self._judging = DENSE_WINDOW if measures_dense else FLOOR_WINDOW
        self._rule.enter(Level.DENSE if measures_dense else Level.FLOOR)

    def _step_exploration(self) -> str:
        """Returns why the plan changes, "" if it does not."""
        judges_dense = self._judging == DENSE_WINDOW
        window = self.dense_window if judges_dense else self.window
        if self._quick:
            window = min(window, self._short_window)
        if judges_dense or self._rule.level != Level.DENSE:
            self._window_step += 1
            if self._window_step >= window:
                return self._end_window()
        return "" if judges_dense else self._follow_rule()

    def _end_window(self) -> str:
        """Go on with the next window, or choose; returns why."""
        judged = (DENSE, *self._ladder)[self._judging]
        self._judging, self._window_step = self._judging + 1, 0
        if self._judging == FLOOR_WINDOW:
            gain = self._statistics.gain(self._floor)
            if gain is not None and gain < self.epsilon:  # the send rule stays at dense
                return f"gain {gain:.4g} at CF {self._floor:g} < epsilon {self.epsilon:g}"
            self._rule.enter(Level.FLOOR)
            known = "not known yet" if gain is None else f"{gain:.4g}"
            return f"dense is measured, gain at CF {self._floor:g} {known}"
        self._statistics.judge(self._floor)
        self._statistics.judge(judged)
        why = ""
        if judged != self._ladder[0]:
            if self.allow_dense and (why := self._statistics.why_dense_wins()):
                return self._choose(DENSE, why)
            why = self._promote(judged)
        if self._candidate is None:
            return self._choose(*self._best())
        self._rule.enter(Level.FLOOR)  # the rule moves up once the candidate's gain is believed
        return why and f"{why}, next candidate {self._candidate:g}"

    def _promote(self, candidate: float) -> str:
        """Move the floor up to the candidate if that loses no gain and it can be sent (section
        3.2); returns why or why not."""
        floor, gain = self._statistics.gain(self._floor), self._statistics.gain(candidate)
        stays = f"floor stays {self._floor:g}"
        rises, why = loses_no_gain(floor, gain, self.omega)
        if not rises:
            return f"{why}, {stays}"
        if gain is not None and gain < self.epsilon:
            return f"{why} but gain < epsilon {self.epsilon:g}, {stays}"
        moves = f"floor {self._floor:g} -> {candidate:g}"
        self._floor = candidate
        return f"{why}, {moves}"

    def _follow_rule(self) -> str:
        """Move between dense, floor and candidate by their gains; returns why, "" if not moved."""
        candidate = None if self._judging == FLOOR_WINDOW else self._candidate
        return self._rule.step(self._statistics.gain(self._floor), self._statistics.gain(candidate))

    # The choice

    def _best(self) -> tuple[float, str]:
        """The CF to choose when all candidates were judged, and why."""
        t_comp = self._statistics.t_comp(self.epsilon)
        if not t_comp:
            return self._floor, f"no CF has both gain >= epsilon {self.epsilon:g} and a step time"
        dense = self._statistics.t_sys(DENSE) if self.allow_dense else None
        chosen, why = choose(t_comp, dense, self.omega)
        return chosen, f"{why}{self._statistics.times_of(chosen, max(t_comp))}"

    def _choose(self, chosen: float, why: str) -> str:
        """Send this CF, as far as the send rule allows, or dense; returns why."""
        tried = self._ladder[: self._judging - FLOOR_WINDOW]
        self._chosen, self._floor = chosen, self._ladder[0]
        self._monitor.begin(chosen, tuple(cf for cf in tried if cf not in (DENSE, chosen)))
        if chosen == DENSE:
            self._rule.enter(Level.DENSE)
            self._verdict = f"GraVAC stays dense: {why}"
            return why
        self._rule.enter(Level.FLOOR if self._candidate is None else Level.CANDIDATE)
        self._verdict = f"GraVAC settled on CF {chosen:g}: {why}"
        return f"settled, {why}"

    def _step_choice(self, report: StepReport) -> str:
        """Returns why the plan changes, "" if it does not."""
        if found := self._monitor.observe(report):
            return self._explore_again(*found)
        return "" if self._chosen == DENSE else self._follow_rule()

    def _explore_again(self, drift: Drift, why: str) -> str:
        """Explore again, and forget what has drifted; returns why."""
        quick = drift == Drift.TIMES and self._chosen is not None
        if drift == Drift.TIMES:
            self._statistics.forget_times(self._chosen)
        else:
            self._statistics.forget_gains()
        self._explore(quick)
        return f"explores again, {why}"

    def rescale(self) -> None:
        """It explores again, as after a change of the network."""
        if self._statistics.signal is not None:
            self._statistics.signal.rescale()
        sent = self._send
        why = self._explore_again(Drift.TIMES, "the number of ranks has changed")
        self._reason = change(sent, self._send, why)

    # What it says of itself

    def candidates(self) -> tuple[float, ...]:
        return self._ladder

    def status(self) -> Mapping[str, float]:
        """t_sys, t_comp: throughputs of the CF sent (steps/s). exploring: 1 until a choice is made.
        With gain="signal" also the numbers of `SignalGain.status`."""
        gain, t_sys = self._statistics.gain(self._send), self._statistics.t_sys(self._send)
        numbers = {
            "candidate": self._candidate,
            "floor": self._floor,
            "gain_floor": self._statistics.gain(self._floor),
            "gain_candidate": self._statistics.gain(self._candidate),
            "t_sys": t_sys,
            "t_comp": None if gain is None or t_sys is None else gain * t_sys,
            "epsilon": self.epsilon,
            "exploring": float(self._chosen is None),
        }
        signal = {} if self._statistics.signal is None else self._statistics.signal.status()
        return {k: nan if value is None else value for k, value in numbers.items()} | signal

    def gain_at(self, cf: float) -> float | None:
        return self._statistics.gain(cf)

    def verdict(self) -> str:
        judging_cfs = self._chosen is None and self._judging != DENSE_WINDOW
        if judging_cfs and self._rule.level == Level.DENSE:
            return f"GraVAC sends dense: no gain reaches epsilon {self.epsilon:g}"
        return self._verdict

    def next_move(self) -> str:
        if self._chosen is not None:
            move = self._monitor.described() or "nothing but epsilon changes it any more"
        else:
            cf = (DENSE, *self._ladder)[self._judging]
            what = "dense" if self._judging == DENSE_WINDOW else f"CF {cf:g}"
            move = f"{what} is judged, {self._window_step} steps of its window so far"
        signal = self._statistics.signal
        if signal is None or signal.clear:
            return move
        return f"{move} (no signal gain now: noise hides it, and gains stay what they were)"

    def details(self) -> str:
        """Gain and T_comp of each CF, as far as they are known, and what the gains rest on."""
        told, statistics = [], self._statistics
        for cf in (DENSE, *self._ladder):
            gain, t_sys = statistics.gain(cf), statistics.t_sys(cf)
            if gain is not None and t_sys is not None:
                told.append(f"{gain * t_sys:.4g} at CF {cf:g} (gain {gain:.4g})")
        listed = ", ".join(told) or "not known"
        rule = f"epsilon {self.epsilon:g}, omega {self.omega:g}"
        basis = [] if statistics.signal is None else [statistics.signal.described()]
        return "; ".join([f"T_comp, gain x steps/s: {listed}", rule, *basis])

    def _check_loaded(self) -> None:
        explores = self._judging <= len(self._ladder)
        together(explores or self._chosen is not None, "'chosen' and 'judging' contradict")


def loses_no_gain(floor: float | None, gain: float | None, omega: float) -> tuple[bool, str]:
    """Whether a candidate's gain is that of the floor but for omega, relative to it, and the
    numbers (section 3.2)."""
    if floor is None or gain is None:
        return False, "gains not known"
    lost = abs(floor - gain) / floor if floor > 0 else inf
    rises, sign = lost <= omega, "no more" if lost <= omega else "more"
    moves = "falls" if gain < floor else "rises"
    told = f"gain {moves} by {percent(lost)} ({floor:.4g} to {gain:.4g}), {sign} than omega"
    return rises, f"{told} {percent(omega)}"


def choose(t_comp: Mapping[float, float], dense: float | None, omega: float) -> tuple[float, str]:
    """The CF to keep, and why: dense (1) if no CF beats it, else the CF where T_comp saturates: of
    each CF, from the smallest up, and the next, the smaller is kept where their T_comp differ by no
    more than omega, relative to it; else the one with the larger T_comp.

    t_comp: compression throughput (steps/s x gain) by CF, at least one.
    dense: dense's T_comp, its gain being 1; None: dense is not a choice.
    """
    if dense is not None:
        best = max(t_comp, key=lambda cf: t_comp[cf])
        if t_comp[best] <= dense:
            return DENSE, f"CF {best:g}, the best, makes {progress(t_comp[best] / dense, 'dense')}"
        t_comp = {cf: value for cf, value in t_comp.items() if value > dense}
    kept, *larger = sorted(t_comp)
    found = f"CF {kept:g} makes the most progress a second"
    for cf in larger:
        lost = abs(t_comp[cf] - t_comp[kept]) / t_comp[kept]
        if lost <= omega:
            found = f"CF {cf:g} makes {progress(t_comp[cf] / t_comp[kept], named(kept))}"
            found += f", and up to {percent(omega)} (omega) counts as none"
        elif t_comp[cf] > t_comp[kept]:
            kept, found = cf, f"CF {cf:g} makes the most progress a second"
    return kept, found
