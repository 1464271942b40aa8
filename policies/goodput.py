"""Goodput: go straight to the CF with the largest compression throughput, without trying others.

The measure is GraVAC's (section 3.1), T_comp = T_sys x gain, with both factors known for every CF
at any time: the step time from its model (step_time.py), the gain from a law. So nothing is sent
only to be measured, and a changed network moves the CF as soon as it shows.

The law is gain = CF^-FALLS, about what runs have shown of the part of the true gradient that gets
through at once. The remaining part is late, not lost, so progress falls more slowly: as the root of
the gain, or for Adam's updates of two ranks, which go without momentum, as the fifth root. So the
CF rises until the network takes an eighth of a step, or a twentieth. Gains that were measured in
every step, in place of the law, made no run better (docs/research/defaults.md).

Progress a second is not all: a run has a schedule, and must end at dense's quality in as many
steps. So no CF is sent that is too large for the steps done so far (lateness.py). `goal="time"`
has a bound twenty times as loose, for a schedule that is made longer.

A run begins at the smallest CF whose exchange takes at most SOON by `Context.link`, but at no
larger CF than the smallest of the ladder; where the link is not known, at that one. Not at dense on
a slow network: a dense step can take as long there as a hundred compressed steps. Nor at a large
CF: the first gradients are the largest. They would wait in the residual until a later, smaller CF
sends them all at once, which sets training back. Where the link is not known, or has changed, the
policy comes down from a large CF in strides, and measures the network anew at each.

A CF that was not sent on this network is measured by its first `opening` steps. Where these turn
out to promise less than another CF, the policy moves on. What was measured stays known until the
network changes, so the same promise is not believed twice.

The assumed gains of int8 and int4 are alike, so the one with fewer bytes wins as soon as the
network counts: CF 8 (int4), before CF 4 (int8). That is right, because 4 bits with error feedback
lose no quality that runs have shown (docs/research/defaults.md). The assumed gain of bf16 is
larger.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import nan
from typing import Literal, get_args

from policies import checks
from policies.base import (
    DENSE,
    Context,
    DeclaredPolicy,
    Plan,
    StepReport,
    counted_steps,
    setting,
)
from policies.lateness import Lateness
from policies.state import require, saved
from policies.step_time import StepTime
from policies.words import bytes_in_words, named, percent, progress, seconds_in_words

SOON = 0.1
"""Seconds that an exchange may take by the link at the CF of the first steps. A few steps there are
over soon, whatever the seconds of a step's work turn out to be."""

FALLS = 0.25
"""The gain of a CF is assumed to be CF^-FALLS: 0.56 at CF 10, 0.32 at CF 100, 0.18 at CF 1000."""

HASTE = 8.0
"""With goal="time", a CF may be as large as this many times the steps done."""

FEWER = 0.1
"""The smallest number of local steps wins whose promise is less than the best by no more than
this."""

DOWN = 0.2
"""The share of the margin that a smaller CF must be better by."""


Goal = Literal["quality", "time"]


@dataclass(eq=False, kw_only=True)
class Goodput(DeclaredPolicy):
    """A policy that sends a small CF for `opening` steps, then the CF with the largest predicted
    compression throughput. ValueError or TypeError names a setting that is wrong.

    goal: "quality" keeps dense's quality in as many steps: the steps done so far bound the CF.
        "time" has next to no such bound: the most progress a second, for a schedule made longer.
    step_size: the candidates are a geometric ladder in cf_range, this factor apart, > 1, and the
        CFs whose gain is assumed (`Context.assumed`).
    opening: steps at the first CF before another is considered, >= 1. So are those at any CF that
        was not sent before on this network.
    margin: relative margin in (0, 1] by which a larger CF must promise more than the one in use. A
        smaller CF must by a fifth of it.
    cooldown: steps between two switches, >= 1, but for `opening`.
    power: exponent of the gain in T_comp, > 0. A larger one prefers smaller CFs, which cost time
        and give more quality in as many steps. None: what suits what is sent (`Context.power`),
        0.2 for Adam's updates of two ranks, 1 beside an optimizer that keeps its momentum, else
        0.5.
    """

    name = "goodput"
    gain = "error_fed"  # is recorded, and decides nothing
    needs_sparsifier = True
    chooses_local_steps = True

    goal: Goal = setting("quality", checks.one_of, accepted=get_args(Goal))
    step_size: float = setting(2.0, checks.real, above=1)
    opening: int = setting(5, checks.whole, least=1)
    margin: float = setting(0.05, checks.fraction)
    cooldown: int = setting(10, checks.whole, least=1)
    power: float | None = setting(None, checks.real, or_none=True, above=0)

    _send: float = saved(DENSE)
    _local_steps: int = saved(1)
    _since: int = saved(0)  # steps at the present CF
    _steps: int = saved(0)  # steps in all
    _least: float = saved(DENSE)  # CF, with local steps: that at which they began
    _new: bool = saved(True)  # the CF in use was not sent before on this network
    _reason: str = saved("")
    _time: StepTime = saved()
    _lateness: Lateness = saved(Lateness())

    def start(self, context: Context) -> None:
        """Raises ValueError if step_size makes too many candidates."""
        self._begin()
        ladder = context.ladder(self.step_size)
        self._assumed = context.assumed
        self._candidates = tuple(sorted({*ladder, *context.assumed}))
        self._context = context
        self._time = self._new_time()
        self._send = self._smallest = ladder[0]
        self._numbers, self._ranks = context.local_steps, context.world_size
        self._local_steps = self._numbers[0]

    def plan(self) -> Plan:
        if not self._steps:
            self._send = self._first()
        chosen = self._local_steps if len(self._numbers) > 1 else 0
        return Plan(self._send, reason=self._reason, local_steps=chosen, skip_gains=True)

    def observe(self, report: StepReport) -> None:
        self._time.observe(report)
        self._lateness.observe(report.lr, self._local_steps)
        self._since += 1
        self._steps += 1
        self._reason = ""
        if self._since >= self._wait:
            self._consider()

    def _first(self) -> float:
        """The CF to begin with."""
        latency, seconds_a_byte = self._context.link()
        small = sorted({DENSE, *self._assumed})
        seconds = (latency + self._context.wire_bytes(cf) * seconds_a_byte for cf in small)
        soon = (cf for cf, each in zip(small, seconds, strict=True) if 0 < each <= SOON)
        return min(self._smallest, next(soon, self._smallest))

    def _allowed(self, cf: float, steps: int) -> bool:
        """Whether what is not sent waits short enough at a CF, with so many local steps."""
        if self.goal == "time":
            return cf <= self._longest_wait
        wait = steps if cf in self._assumed else cf * steps  # those send every element
        return wait <= self._longest_wait

    @property
    def _longest_wait(self) -> float:
        """Steps that an element may wait."""
        quality = self.goal == "quality"
        return max(self._smallest, self._lateness.largest if quality else HASTE * self._steps)

    @property
    def _wait(self) -> int:
        """Steps at the present CF before another is considered."""
        return self.opening if self._new else self.cooldown

    def candidates(self) -> tuple[float, ...]:
        return self._candidates

    def t_comp(self) -> dict[float, float]:
        """Predicted compression throughput of dense and the CFs whose step time is known: steps a
        second x gain (to the power). With local steps, rounds a second, and the gain of local steps
        as well."""
        promised = {}
        steps, worth = None, 1.0
        if self._local_steps > 1 and len(self._numbers) > 1:
            steps, worth = self._local_steps, self._worth(self._local_steps)
        for cf in sorted({DENSE, *self._candidates}):
            seconds = self._time.seconds(cf, steps)
            if seconds and self._least <= cf:
                promised[cf] = worth * self.progress(cf) / seconds
        return promised

    def _promised(self) -> dict[float, float]:
        """T_comp of the CFs that may be sent now."""
        promised = self.t_comp().items()
        return {cf: value for cf, value in promised if self._allowed(cf, self._local_steps)}

    def _worth(self, steps: int) -> float:
        """The gain of local steps: the worth of so many steps between two exchanges, beside as many
        exchanged steps. One step in `steps` averages the noise of all ranks. The other steps, in
        which a rank follows its local gradient alone, are worth 1 / sqrt(ranks) of that (measured:
        docs/research/defaults.md)."""
        alone = self._ranks**-0.5
        return alone + (1 - alone) / steps

    def status(self) -> Mapping[str, float]:
        """candidate: the CF with the largest T_comp. more, asked: by which share it promises more
        than the CF sent, and by which it must, to be sent. t_sys, t_comp: of the CF sent, in
        steps/s. allowed: the largest CF that the steps done so far allow. exploring: 1 until
        another CF is first considered. local_steps: where the policy chooses them."""
        seconds, promised = self._time.seconds(self._send), self._promised()
        best = max(promised, key=lambda cf: (promised[cf], -cf), default=self._send)
        here = self.t_comp().get(self._send) or nan
        return {
            "candidate": best if promised else nan,
            "more": promised.get(best, nan) / here - 1,
            "asked": 0.0 if best == self._send else self._needed(best, promised) / here - 1,
            "t_sys": 1 / seconds if seconds else nan,
            "t_comp": here,
            "allowed": self._longest_wait / self._local_steps,
            "exploring": float(self._since == self._steps < self.opening),
            **({"local_steps": self._local_steps} if len(self._numbers) > 1 else {}),
        }

    def _choose_local_steps(self) -> None:
        """Move to a better number of local steps, if there is one at the CF in use.

        The next larger CF is considered first, because it costs less quality than the first local
        steps. Seconds of compressing do not count here. Local steps save the network's time, and a
        smaller CF is the remedy for slow compression."""
        if len(self._numbers) == 1 or self._since < self.cooldown:
            return
        here = self._local_steps
        promised = {
            steps: steps * self._worth(steps) / seconds
            for steps in self._numbers
            if (seconds := self._time.without_coding(self._send, steps))
            and (steps == self._numbers[0] or self._allowed(self._send, steps))
        }
        late = not self._allowed(self._send, here)
        if not promised or not (late or here in promised):
            return
        enough = max(promised.values()) / (1 + FEWER)
        goal = next(steps for steps, value in promised.items() if value >= enough)
        # More of them may do harm; fewer need only be about as good.
        enough = promised.get(here, 0.0) * (1 + self.margin) ** (1 if goal > here else -1)
        if goal == here or promised[goal] <= enough:
            return
        why = f"local steps {here} -> {goal}: "
        if here in promised:
            often = counted_steps(here) if here > 1 else "step"
            why += progress(promised[goal] / promised[here], f"an exchange every {often}")
        else:
            why += self._too_late()
        self._reason = why
        self._least = self._send if here == 1 else DENSE if goal == 1 else self._least
        self._local_steps, self._since, self._new = goal, 0, False

    @property
    def promise(self) -> str:  # type: ignore[override]
        kept = "aiming at dense's quality in equal steps"
        return kept if self.goal == "quality" else super().promise

    def verdict(self) -> str:
        sends_dense = self._send == DENSE and self._since >= self.cooldown
        return "dense is right: no CF promises more progress a second" if sends_dense else ""

    def _beside(self, cf: float, promised: Mapping[float, float]) -> str:
        """What another CF promises beside the CF in use, in words; then the numbers that make up
        T_comp, the bytes, and by how much more it had to promise."""
        here, steps = self._send, self._local_steps if len(self._numbers) > 1 else None
        now, then = self._time.seconds(here, steps), self._time.seconds(cf, steps)
        if here not in promised or now is None or then is None:
            return "promises progress, where nothing is known of " + self._named(here)
        told = progress(promised[cf] / promised[here], self._named(here))
        unit = "a round" if self._local_steps > 1 else "a step"
        sent = bytes_in_words(1 - self._time.nbytes(cf) / (self._time.nbytes(here) or nan))
        asked = self._needed(cf, promised) / promised[here] - 1
        seconds = f"{seconds_in_words(then, 3)} {unit} instead of {seconds_in_words(now, 3)}"
        rule = f"{percent(asked)} more was asked"
        worth = f"{self.progress(cf):.3f} instead of {self.progress(here):.3f} of dense's progress"
        return f"{told}\n{seconds}, {sent}, {worth}; {rule}"

    def _named(self, cf: float) -> str:
        return named(cf, self._context.rungs)

    def _too_late(self) -> str:
        """Why the CF in use may be sent no longer, in words."""
        alike = counted_steps(self._lateness.alike)
        late = f"what {self._named(self._send)} does not send would wait too long"
        return f"{late} beside {alike} at about this learning rate"

    def _check_loaded(self) -> None:
        known = self._local_steps in self._numbers
        require(known, f"'local_steps' must be one of {self._numbers}, got {self._local_steps}")

    def rescale(self) -> None:
        """Stay at the CF in use for a cooldown, and measure the step times anew."""
        self._time, self._since, self._new = self._new_time(), 0, False

    def _new_time(self) -> StepTime:
        known = self._context
        rungs = known.assumed.keys()
        return StepTime(known.wire_bytes, known.overlap, rungs, known.uncoded, known.link)

    def progress(self, cf: float) -> float:
        """What is assumed of a step at a CF: its progress, of a dense step's."""
        return (self._assumed.get(cf) or cf**-FALLS) ** (self.power or self._context.power)

    def _consider(self) -> None:
        """Move to the CF that promises most, if that is enough more than the CF in use. Else
        consider other numbers of local steps."""
        promised = self._promised()
        # A CF that promises most, and too little more, does not stand in the way of another.
        others = (cf for cf in promised if cf != self._send)
        better = [cf for cf in others if promised[cf] > self._needed(cf, promised)]
        if not better:
            self._choose_local_steps()
            return
        best = max(better, key=lambda cf: (promised[cf], -cf))
        late = not self._allowed(self._send, self._local_steps)
        why = self._too_late() if late else self._beside(best, promised)
        goal = self._time.within_reach(best, self._send, (DENSE, *self._candidates))
        if goal != best:
            why = f"on the way to {self._named(best)}: {why}"
        self._reason = why
        self._new = goal not in self._time.timed()
        self._send, self._since = goal, 0

    def _needed(self, cf: float, promised: Mapping[float, float]) -> float:
        """T_comp that another CF must exceed. A larger CF may do harm: it must be better by the
        margin. A smaller one costs only time: it must be better by a part of the margin."""
        asked = 1 + self.margin * (DOWN if cf < self._send else 1.0)
        return asked * promised.get(self._send, 0.0)
