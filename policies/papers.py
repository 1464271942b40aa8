"""The policies of two papers as the papers have them, to compare with: GraVAC (Tyagi, Swany, 2023)
and Accordion (Agarwal and others, 2021).

`GraVAC` and `Accordion` are this library's versions, which do more; these two do not. What else
belongs to a faithful run is in `PRESETS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import nan
from typing import Any, get_args

from policies import checks
from policies.accordion import Accordion
from policies.base import (
    DENSE,
    SCALINGS,
    Context,
    DeclaredPolicy,
    GainKind,
    Plan,
    StepReport,
    change,
    counted_steps,
    setting,
)
from policies.exploration import CandidateStatistics
from policies.gravac import choose, loses_no_gain
from policies.state import saved, together

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "gravac-paper": {"base": "dgc+fp32", "granularity": "layer", "memory": "residual"},
    "accordion-paper": {"base": "topk+fp32", "granularity": "layer", "memory": "residual"},
}
"""The arguments of `AdaptiveCompressor` that go with each: compression tensor by tensor, values in
32 bits, plain error feedback. memory="momentum" is DGC's own memory (Lin and others, 2018)."""


@dataclass(eq=False, kw_only=True)
class GraVACPaper(DeclaredPolicy):
    """A policy that is GraVAC as in its paper (sections 3.1 and 3.2, Algorithm 1).

    The first window sends the smallest CF, whatever its gain. Then every CF of the ladder is the
    candidate for one window: each step sends the candidate if its gain is at least epsilon, else
    the floor (at first the smallest CF) if its gain is, else dense. At the end of a window the
    floor moves up to the candidate if that loses no more gain than omega, and stays there. When
    all have been candidates, the CF at which the compression throughput saturates is kept, under
    the same rule. There is no dense measurement, hysteresis, cooldown or second exploration.

    epsilon: smallest gain worth sending, in (0, 1]. The paper has 0.7 and 0.9; the released code
        compares it with a ratio of norms, of which such gains are about the square.
    omega: relative change that counts as none, of gains and of compression throughputs, in (0, 1].
    window: steps that each CF is the candidate for, >= 1, whatever is sent in them.
    scaling, step_size: how the candidates grow (`make_ladder`); step_size > 1.
    gain: "error_fed" (the paper's) or "raw" (its released code's), or another definition.
    ValueError or TypeError names the setting that is wrong.
    """

    name = "gravac-paper"

    epsilon: float = setting(0.7, checks.fraction)
    omega: float = setting(0.01, checks.fraction)
    window: int = setting(500, checks.whole, least=1)
    scaling: str = setting("exponential", checks.one_of, accepted=SCALINGS)
    step_size: float = setting(2.0, checks.real, above=1)
    gain: GainKind = setting("error_fed", checks.one_of, accepted=get_args(GainKind))

    _ladder: tuple[float, ...] = field(init=False, repr=False, default=())
    _rung: int = saved(0)  # of the candidate; 0: the first window; past the last: it has settled
    _window_step: int = saved(0)
    _floor: float = saved(DENSE)
    _chosen: float | None = saved(None)
    _reason: str = saved("")
    _statistics: CandidateStatistics = saved()

    def start(self, context: Context) -> None:
        """Raises ValueError if step_size makes too many candidates."""
        self._begin()
        self._ladder = context.ladder(self.step_size, self.scaling)
        self._floor = self._ladder[0]
        self._statistics = CandidateStatistics(
            self.gain,
            min(0.5, context.world_size / 100),  # "the number of workers / 100" of section 3.1
            1,
            context.wire_bytes,
            context.assumed,
            context.overlap,
        )

    @property
    def _candidate(self) -> float | None:
        if self._rung < len(self._ladder):
            return self._ladder[self._rung] if self._rung else None
        return self._chosen

    @property
    def _send(self) -> float:
        if not self._rung:
            return self._floor
        for cf in (self._candidate, self._floor):
            gain = self._statistics.gain(cf)
            if cf is not None and gain is not None and gain >= self.epsilon:
                return cf
        return DENSE

    def plan(self) -> Plan:
        wanted = {self._candidate, self._floor} - {None, DENSE, self._send}
        probe = () if self.shadow else tuple(sorted(cf for cf in wanted if cf is not None))
        return Plan(self._send, probe, self._reason)

    def observe(self, report: StepReport) -> None:
        plan = self.plan()
        self._statistics.observe(report, {plan.send, *plan.probe})
        self._window_step += 1
        explores = self._rung < len(self._ladder)
        why = self._end_window() if explores and self._window_step >= self.window else ""
        self._reason = change(plan.send, self._send, why or self._why_sent())
        if self._send == plan.send and not why:
            self._reason = ""

    def _why_sent(self) -> str:
        floor, candidate = map(self._statistics.gain, (self._floor, self._candidate))
        told = ", ".join(
            f"{'not known' if gain is None else f'{gain:.4g}'} at CF {cf:g}"
            for cf, gain in ((self._floor, floor), (self._candidate, candidate))
            if cf is not None
        )
        return f"gain {told}; epsilon {self.epsilon:g}"

    def _end_window(self) -> str:
        """Go on with the next candidate, or settle; returns why."""
        candidate, why = self._candidate, "the first window is over"
        self._statistics.judge(self._floor)
        self._statistics.judge(candidate)
        if candidate is not None:
            known = self._statistics.gain(self._floor), self._statistics.gain(candidate)
            rises, why = loses_no_gain(*known, self.omega)
            if rises:
                why = f"{why}, floor {self._floor:g} -> {candidate:g}"
                self._floor = candidate
        self._rung, self._window_step = self._rung + 1, 0
        if self._rung < len(self._ladder):
            return f"{why}, next candidate {self._ladder[self._rung]:g}"
        t_comp = self._statistics.t_comp(0.0)
        if not t_comp:
            return f"{why}, no CF was sent: the floor stays {self._floor:g}"
        self._chosen, found = choose(t_comp, None, self.omega)
        found += self._statistics.times_of(self._chosen, self._ladder[0])
        return f"settled, {found}"

    def candidates(self) -> tuple[float, ...]:
        return self._ladder

    def status(self) -> Mapping[str, float]:
        """t_sys, t_comp: throughputs of the CF sent (steps/s). exploring: 1 until it settles."""
        gain, t_sys = self._statistics.gain(self._send), self._statistics.t_sys(self._send)
        numbers = {
            "candidate": self._candidate,
            "floor": self._floor,
            "gain_floor": self._statistics.gain(self._floor),
            "gain_candidate": self._statistics.gain(self._candidate),
            "t_sys": t_sys,
            "t_comp": None if gain is None or t_sys is None else gain * t_sys,
            "epsilon": self.epsilon,
            "exploring": float(self._rung < len(self._ladder)),
        }
        return {name: nan if value is None else value for name, value in numbers.items()}

    def gain_at(self, cf: float) -> float | None:
        return self._statistics.gain(cf)

    def next_move(self) -> str:
        if self._rung >= len(self._ladder):
            return "nothing but epsilon changes it any more"
        left = counted_steps(self.window - self._window_step)
        return f"CF {self._ladder[self._rung]:g} is judged for another {left}"

    def rescale(self) -> None:
        """The paper has one number of workers: step times measured with another are forgotten."""
        self._statistics.forget_times(None)

    def _check_loaded(self) -> None:
        explores = 0 <= self._rung < len(self._ladder)
        together(explores or self._rung == len(self._ladder), "'rung' is not of the ladder")
        together(not explores or self._chosen is None, "'chosen' and 'rung' contradict")


@dataclass(eq=False)
class AccordionPaper(Accordion):
    """A policy that is Accordion as in its paper (section 4, Algorithm 1) and its released code.

    Each layer has a regime of its own. What is compared is the norm of the layer's *local,
    uncompressed* gradient, summed over the first epoch of each detection interval, with that of
    the interval before; the regime is decided as soon as that epoch is over. (The released code
    asks rank 0 alone, here it is the mean over the ranks of their norms.) A learning rate that
    drops makes all regimes critical until the next detection.

    low, high, eta, per_layer: as `Accordion` has them.
    interval: steps between detections, >= 2; the paper has 10 epochs.
    epoch: steps of an epoch, >= 1 and fewer than `interval`; None: a tenth of it.
    ValueError or TypeError names the setting that is wrong.
    """

    name = "accordion-paper"

    interval: int = setting(100, checks.whole, least=2)
    per_layer: bool = setting(True, checks.flag)
    epoch: int | None = setting(None, checks.whole, or_none=True, least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.epoch is not None and self.epoch >= self.interval:
            raise ValueError(f"epoch={self.epoch}: must be less than interval={self.interval}")

    @property
    def _summed_steps(self) -> int:
        return self.epoch or max(1, self.interval // 10)

    @property
    def _detects(self) -> bool:
        return self._step == self._summed_steps

    @property
    def _left(self) -> int:
        return (self._summed_steps - self._step) % self.interval + 1

    def plan(self) -> Plan:
        sums = self._step < self._summed_steps
        return replace(super().plan(), accumulate=sums, local_sum=True)

    def observe(self, report: StepReport) -> None:
        super().observe(report)
        self._dropped = False  # the next detection judges as ever
