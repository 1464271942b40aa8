"""GraVAC (Tyagi, Swany, 2023): choose the CF by gain and compression throughput.

A run explores the ladder, then settles on the CF where compression throughput saturates, or stays
dense if no CF beats dense. The *floor* is the CF that is sent when the candidate may not be sent:
at first the smallest CF, later the largest CF that loses no gain compared with the smallest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import nan
from typing import Any, get_args

from policies import checks
from policies.base import (
    DENSE,
    Context,
    DeclaredPolicy,
    GainKind,
    Plan,
    StepReport,
    setting,
)
from policies.candidates import CandidateStatistics, choose, loses_no_gain
from policies.ladder import SCALINGS, ScalingName
from policies.send_rule import Level, SendRule
from policies.state import require, saved
from policies.words import in_short

MIN_OBSERVATIONS = 5
"""Number of steps in which a gain must have been measured before it counts."""

DENSE_WINDOW, FLOOR_WINDOW = 0, 1
"""The first windows of an exploration. The candidates' windows follow."""


@dataclass(eq=False, kw_only=True)
class GraVAC(DeclaredPolicy):
    """A policy that tries larger and larger CFs, and keeps the one with the largest compression
    throughput whose gain is large enough.

    epsilon: smallest gain worth sending, in (0, 1].
    omega: relative change that counts as none, in (0, 1]: of gains, when the floor moves up, and of
        T_comp, in the choice.
    window: steps in which a candidate is judged, >= 1. Steps that are dense because of epsilon do
        not count.
    scaling, step_size: how the candidates grow (`make_ladder`); step_size > 1.
    gain: the definition of gain that decides: "gradient", "error_fed" (the paper) or "raw" (its
        released code).
    allow_dense: measure dense first, and keep dense if no CF beats it. False: dense is sent only
        while no gain reaches epsilon.
    dense_window: steps of that measurement; 0: dense is not measured.
    hysteresis, cooldown (steps): around epsilon, see `SendRule`.
    as_published: exactly the rule of the paper, see `paper`. Then `allow_dense`, `dense_window`,
        `hysteresis` and `cooldown` have no effect.
    ValueError or TypeError names the setting that is wrong.
    """

    name = "gravac"

    epsilon: float = setting(0.3, checks.fraction)
    omega: float = setting(0.1, checks.fraction)
    window: int = setting(40, checks.whole, least=1)
    scaling: ScalingName = setting("exponential", checks.one_of, accepted=SCALINGS)
    step_size: float = setting(2.0, checks.real, above=1)
    gain: GainKind = setting("gradient", checks.one_of, accepted=get_args(GainKind))
    allow_dense: bool = setting(True, checks.flag)
    dense_window: int = setting(10, checks.whole, least=0)
    hysteresis: float = setting(0.1, checks.real, least=0)
    cooldown: int = setting(40, checks.whole, least=1)
    as_published: bool = setting(False, checks.flag)

    _ladder: tuple[float, ...] = field(init=False, repr=False, default=())
    _judging: int = saved(DENSE_WINDOW)  # number of the present window of the exploration
    _window_step: int = saved(0)
    _floor: float = saved(DENSE)
    _chosen: float | None = saved(None)
    _reason: str = saved("")
    _verdict: str = saved("")
    _statistics: CandidateStatistics = saved()
    _rule: SendRule = saved()

    @classmethod
    def paper(cls, **settings: Any) -> GraVAC:
        """GraVAC as in its paper (sections 3.1 and 3.2, Algorithm 1); `settings` are this class's.

        The first window sends the smallest CF, whatever its gain. Then every CF of the ladder is
        the candidate for one window. Each step sends the candidate if its gain is at least epsilon,
        else the floor if its gain is, else dense. At the end of a window the floor moves up to the
        candidate if that loses no more gain than omega, and never moves down. When all CFs have
        been candidates, the CF at which compression throughput saturates is the candidate for good,
        under the same rule. There is no dense measurement, hysteresis or cooldown. The compression
        is that of the paper, too (`compression`). The paper has epsilon 0.7 and 0.9. Its released
        code compares epsilon with a ratio of norms (gain="raw"); the paper's gains are about the
        square of this ratio. The released code measures a candidate on gradients that the floor has
        compressed already; here the candidate is measured on the whole gradient."""
        published = {"epsilon": 0.7, "omega": 0.01, "window": 500, "gain": "error_fed"}
        return cls(**{**published, "as_published": True, **settings})

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
        # A window must still leave steps to send the candidate in.
        enough = 1 if self.as_published else MIN_OBSERVATIONS
        believed_after = min(enough, max(1, self.window // 4))
        self._statistics = CandidateStatistics(
            self.gain,
            min(0.5, context.world_size / 100),  # the paper's weight, at most 0.5
            believed_after,
            context.wire_bytes,
            context.assumed,
            context.overlap,
        )
        bare = self.as_published
        self._rule = SendRule(self.epsilon, self.hysteresis, self.cooldown, bare)
        self._explore()

    @property
    def compression(self) -> Mapping[str, Any]:
        """With `as_published`: top-k by layers, as in the released code, values of 32 bits, plain
        error feedback. (Some tables of the paper use DGC: base="dgc+fp32".)"""
        published = {"base": "topk+fp32", "granularity": "layer", "memory": "residual"}
        return published if self.as_published else {}

    @property
    def _dense_may_win(self) -> bool:
        return self.allow_dense and not self.as_published

    def plan(self) -> Plan:
        return Plan(self._send, self._probe, self._reason)

    @property
    def _candidate(self) -> float | None:
        """The CF above the floor that the send rule may send. While exploring: the CF of this
        window (in the windows of dense and of the floor, the first candidate's). Once settled: the
        chosen CF."""
        if self._chosen is not None:
            return None if self._chosen in (DENSE, self._floor) else self._chosen
        if self.as_published and self._judging == FLOOR_WINDOW:
            return None
        rung = max(self._judging, FLOOR_WINDOW + 1) - FLOOR_WINDOW
        return self._ladder[rung] if rung < len(self._ladder) else None

    @property
    def _send(self) -> float:
        if self._rule.level == Level.CANDIDATE and self._candidate is not None:
            return self._candidate
        return self._floor if self._rule.level == Level.FLOOR else DENSE

    @property
    def _probe(self) -> tuple[float, ...]:
        """The CFs whose gains are needed, except the CF that is sent."""
        if self._send == self._chosen and not self.as_published:
            return ()
        wanted = (self._floor, self._candidate)
        return tuple(cf for cf in wanted if cf is not None and cf not in (DENSE, self._send))

    def observe(self, report: StepReport) -> None:
        sent, probed = self._send, self._probe
        self._statistics.observe(report)
        explores = self._chosen is None
        if not explores:  # the average of a CF that is no longer measured would become stale
            self._statistics.keep_only({sent, *probed})
        why = self._step_exploration() if explores else self._step_choice()
        chooses = explores and self._chosen is not None  # then `why` has the step times already
        switches = self._send != sent and not chooses
        costs = self._statistics.costs_of(self._send, sent) if switches else ""
        if not why and self._probe != probed:
            listed = ", ".join(f"{cf:g}" for cf in self._probe or probed)
            why = f"looks {'again' if self._probe else 'no longer'} at the gains of CF {listed}"
        self._reason = why and f"{why}\n{costs}".rstrip()

    # Exploring: a window of steps for dense, for the floor, and for each candidate

    def _explore(self) -> None:
        """Start an exploration, from the smallest CF on."""
        self._chosen = None
        self._verdict = ""
        self._floor = self._ladder[0]
        self._window_step = 0
        known = self._statistics.t_sys(DENSE) is not None or DENSE in self._ladder
        measures_dense = self._dense_may_win and self.dense_window > 0 and not known
        self._judging = DENSE_WINDOW if measures_dense else FLOOR_WINDOW
        self._rule.enter(Level.DENSE if measures_dense else Level.FLOOR)

    def _step_exploration(self) -> str:
        """One step of the exploration. Returns why the plan changes, "" if it does not."""
        judges_dense = self._judging == DENSE_WINDOW
        if judges_dense or self.as_published or self._rule.level != Level.DENSE:
            self._window_step += 1
        if self._window_step >= (self.dense_window if judges_dense else self.window):
            why = self._end_window()
            followed = self._follow_rule() if self.as_published else ""
            return why or followed
        first = self.as_published and self._judging == FLOOR_WINDOW
        return "" if judges_dense or first else self._follow_rule()

    def _end_window(self) -> str:
        """Start the next window, or choose. Returns why."""
        judged = (DENSE, *self._ladder)[self._judging]
        self._judging, self._window_step = self._judging + 1, 0
        if self._judging == FLOOR_WINDOW:
            gain = self._statistics.gain(self._floor)
            if gain is not None and gain < self.epsilon:  # the send rule stays at dense
                return f"gain {gain:.4g} at CF {self._floor:g} < epsilon {self.epsilon:g}"
            self._rule.enter(Level.FLOOR)
            known = "not known yet" if gain is None else f"{gain:.4g}"
            return f"dense is measured, gain at CF {self._floor:g} {known}"
        why = ""
        if judged != self._ladder[0]:
            if self._dense_may_win and (why := self._statistics.why_dense_wins(self._ladder)):
                return self._choose(DENSE, why)
            why = self._promote(judged)
        if self._candidate is None:
            return self._choose(*self._best())
        self._rule.enter(Level.FLOOR)  # the rule moves up once the candidate's gain counts
        return why and f"{why}, next candidate {self._candidate:g}"

    def _promote(self, candidate: float) -> str:
        """Move the floor up to the candidate if it loses no gain and may be sent (section 3.2).
        Returns why, or why not."""
        floor, gain = self._statistics.gain(self._floor), self._statistics.gain(candidate)
        stays = f"floor stays {self._floor:g}"
        rises, why = loses_no_gain(floor, gain, self.omega)
        if not rises:
            return f"{why}, {stays}"
        if gain is not None and gain < self.epsilon and not self.as_published:
            return f"{why} but gain < epsilon {self.epsilon:g}, {stays}"
        moves = f"floor {self._floor:g} -> {candidate:g}"
        self._floor = candidate
        return f"{why}, {moves}"

    def _follow_rule(self) -> str:
        """Apply the send rule. Returns why it has moved, "" if it has not."""
        candidate = None if self._judging == FLOOR_WINDOW else self._candidate
        return self._rule.step(self._statistics.gain(self._floor), self._statistics.gain(candidate))

    # The choice

    def _best(self) -> tuple[float, str]:
        """(CF to choose when all candidates were judged, why)."""
        epsilon = 0.0 if self.as_published else self.epsilon
        t_comp = self._statistics.t_comp(self._ladder, epsilon)
        if not t_comp:
            return self._floor, f"no CF has both gain >= epsilon {epsilon:g} and a step time"
        dense = self._statistics.t_sys(DENSE) if self._dense_may_win else None
        chosen, why = choose(t_comp, dense, self.omega)
        return chosen, f"{why}\n{self._statistics.times_of(chosen, max(t_comp))}".rstrip()

    def _choose(self, chosen: float, why: str) -> str:
        """End the exploration with this CF, to be sent if the send rule allows it. Returns why."""
        self._chosen = chosen
        if not self.as_published:
            self._floor = self._ladder[0]
        if chosen == DENSE:
            self._rule.enter(Level.DENSE)
            self._verdict = f"GraVAC stays dense: {in_short(why)}"
        else:
            self._rule.enter(Level.FLOOR if self._candidate is None else Level.CANDIDATE)
            self._verdict = f"GraVAC settled on CF {chosen:g}: {in_short(why)}"
        return f"settled; {why}"

    def _step_choice(self) -> str:
        """One step after the exploration. Returns why the plan changes, "" if it does not."""
        return "" if self._chosen == DENSE else self._follow_rule()

    def rescale(self) -> None:
        """Forget the step times, and explore again (with `as_published` only once in a run)."""
        self._statistics.forget_times()
        if self.as_published:
            return
        self._statistics.keep_only(())
        self._explore()
        self._reason = "explores again, the number of ranks has changed"

    # Records

    def candidates(self) -> tuple[float, ...]:
        return self._ladder

    def status(self) -> Mapping[str, float]:
        """t_sys, t_comp: throughputs of the CF sent, in steps/s. exploring: 1 until a CF is
        chosen."""
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
        return {k: nan if value is None else value for k, value in numbers.items()}

    def gain_at(self, cf: float) -> float | None:
        return self._statistics.gain(cf)

    def verdict(self) -> str:
        kept_by_epsilon = self._chosen != DENSE and self._judging != DENSE_WINDOW
        if kept_by_epsilon and self._rule.level == Level.DENSE:
            return f"no gain reaches GraVAC's epsilon {self.epsilon:g}, so it sends dense"
        return self._verdict

    def _check_loaded(self) -> None:
        explores = DENSE_WINDOW <= self._judging <= len(self._ladder)
        over = self._judging > FLOOR_WINDOW and self._chosen is not None
        require(explores or over, "'chosen' and 'judging' contradict")
