"""Goodput: go straight to the CF with the largest compression throughput, without trying others.

The measure is GraVAC's (section 3.1), T_comp = T_sys x gain. Both factors are known for every CF at
any time: the step time from a model (step_time.py), the gain from a law. So no CF is sent only to
be measured, and the CF follows a change of the network at once.

The law is gain = CF^-FALLS: about the share of the true gradient that runs have sent without delay.
The rest is delayed, not lost, so progress falls more slowly than the gain: as its square root, or
as its fifth root for Adam's updates of two ranks, which have no momentum. So the CF rises until the
network takes an eighth of a step (or a twentieth). Gains measured in every step, used instead of
the law, made no run better (docs/research/defaults.md).

Progress a second is not the only goal: a run has a schedule, and must reach dense's quality in the
same number of steps. So the steps done so far bound the CF (lateness.py), and among many ranks
`Context.proven` does: where it is 1, only CFs with an assumed gain are sent, int4 as a rule. CFs
up to `Context.early` are allowed from the first step on, while the learning rate is high. With
`goal="time"` the bound by the steps is twenty times as loose, for a longer schedule, whatever the
ranks.

A run begins at the smallest CF whose exchange is short by `Context.link` (SOON, SOON_A_BYTE), but
not above the smallest CF of the ladder. If no exchange is short, a run begins at the CF whose
exchange is shortest. If the link is not known, a run begins at the smallest CF of the ladder. It
does not begin at dense on a slow network, where a dense step can take as long as a hundred
compressed steps. It does not begin at a large CF, because the first gradients are the largest. They
would stay in the residual until a smaller CF sends them all at once, which sets training back. CFs
up to `Context.early` do not set training back: where the link is known and the smallest CF of the
ladder would be first, a run begins at the largest of these. If the link is not known, or has
changed, the policy goes from a large CF to a smaller one in strides, and measures the network after
each stride.

A CF that was not sent on this network is measured in its first `opening` steps. If it then promises
less than another CF, the policy moves on. Measurements stay valid until the network changes, so the
policy does not return to a CF because of the same wrong prediction.

The assumed gains of int8 and int4 are equal, so int4 (CF 8), with fewer bytes, wins against int8
(CF 4) as soon as the network counts. That is right, because no run has shown a loss of quality by
4 bits with error feedback (docs/research/defaults.md). The assumed gain of bf16 is larger.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, inf, nan
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
from policies.lateness import SHARE, Lateness
from policies.state import require, saved
from policies.step_time import StepTime
from policies.words import bytes_in_words, named, percent, progress, seconds_in_words

SOON = 0.1
"""The largest number of seconds of an exchange, by the link, at the CF of the first steps: the
first few steps are over soon, however long a step's work takes."""

SOON_A_BYTE = 1.25e-9
"""As SOON, but in seconds for each byte that a rank sends in a dense step (4 bytes a parameter on
two ranks, up to 8 on many). The larger of the two bounds counts. A step of a large model takes
longer, and a sparse CF in its first steps costs more quality (docs/research/defaults.md)."""

FALLS = 0.25
"""The gain of a CF is assumed to be CF^-FALLS: 0.56 at CF 10, 0.32 at CF 100, 0.18 at CF 1000."""

HASTE = 8.0
"""With goal="time", the largest CF is this many times the steps done."""

FEWER = 0.1
"""The policy takes the smallest number of local steps whose promise is at most this much below the
best."""

DOWN = 0.2
"""The share of the margin by which a smaller CF must be better."""


Goal = Literal["quality", "time"]


@dataclass(eq=False, kw_only=True)
class Goodput(DeclaredPolicy):
    """A policy that sends a small CF for `opening` steps, then the CF with the largest predicted
    compression throughput. ValueError or TypeError names a setting that is wrong.

    goal: "quality" keeps dense's quality in the same number of steps: the steps done so far bound
        the CF, and among more than 8 ranks so does what was tried (`Context.proven`). "time" has a
        far looser bound: the most progress a second, for a longer schedule.
    step_size: factor between neighbouring candidates, > 1. The candidates are a geometric ladder in
        cf_range, and the CFs with an assumed gain (`Context.assumed`).
    opening: steps at the first CF before another is considered, >= 1; also at each CF that was not
        sent before on this network.
    margin: relative margin in (0, 1] by which a larger CF must promise more than the CF in use. A
        smaller CF needs a fifth of it.
    cooldown: steps between two switches, >= 1, except after an `opening`.
    power: exponent of the gain in T_comp, > 0. A larger one prefers smaller CFs, which cost time
        and give more quality in the same number of steps. None: the exponent for the tensors that
        are sent (`Context.power`): 0.2 for Adam's updates of two ranks, 1 with an optimizer that
        keeps its momentum, else 0.5.
    """

    name = "goodput"
    gain = "error_fed"  # only recorded: no decision depends on it
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
    _least: float = saved(DENSE)  # the smallest CF to consider: where local steps began
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
        """The CF of the first steps."""
        latency, seconds_a_byte = self._context.link()
        small = {DENSE, *self._assumed, self._smallest}
        seconds = {
            cf: latency + self._context.wire_bytes(cf) * seconds_a_byte
            for cf in sorted(small, reverse=True)
            if cf <= self._smallest and self._keeps_quality(cf)
        }
        most = max(SOON, SOON_A_BYTE * self._context.wire_bytes(DENSE))
        soon = [cf for cf, each in seconds.items() if 0 < each <= most]
        first = min(soon) if soon else min(seconds, key=lambda cf: seconds[cf])
        if first == self._smallest and seconds_a_byte:
            return max(cf for cf in self._candidates if cf <= max(first, self._context.early))
        return first

    def _allowed(self, cf: float, steps: int) -> bool:
        """Whether elements wait in the residual short enough at a CF, with `steps` local steps."""
        if self.goal == "time":
            return cf <= self._longest_wait
        if not self._keeps_quality(cf):
            return False
        wait = steps if cf in self._assumed else cf * steps  # an assumed CF sends every element
        return wait <= self._longest_wait

    def allowed_from(self, cf: float) -> float:
        """The first step, counted from 1, in which goal="quality" allows a CF, if the learning rate
        is constant; inf: none."""
        if not self._keeps_quality(cf):
            return inf
        early = max(self._smallest, self._context.early)
        return 1 if cf in self._assumed or cf <= early else ceil(cf / SHARE)

    def _keeps_quality(self, cf: float) -> bool:
        """Whether a CF may be sent among so many ranks, however long a run is.

        If sparse CFs are proven there, int4 and int8 are left out: a change between these and
        sparse CFs cost quality (docs/research/defaults.md)."""
        if self._proven == inf:
            return True
        if self._proven == DENSE:
            return cf in (DENSE, *self._assumed)
        coded = self._assumed.keys() - self._context.uncoded
        return cf <= self._proven and cf not in coded

    @property
    def _proven(self) -> float:
        """`Context.proven`; inf if there is no CF with an assumed gain to send instead."""
        return self._context.proven if self.goal == "quality" and self._assumed else inf

    @property
    def _longest_wait(self) -> float:
        """The largest number of steps that an element may wait in the residual."""
        early = self._context.early if self._lateness.rate_is_high else DENSE
        most = HASTE * self._steps if self.goal == "time" else self._lateness.largest
        return max(self._smallest, early, most)

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
        """The gain of local steps: the progress of `steps` local steps and one exchange / that of
        `steps` exchanged steps. One step in `steps` averages the noise of all ranks. In the other
        steps a rank follows its local gradient alone, with 1 / sqrt(ranks) of the progress
        (measured: docs/research/defaults.md)."""
        alone = self._ranks**-0.5
        return alone + (1 - alone) / steps

    def status(self) -> Mapping[str, float]:
        """candidate: the CF with the largest T_comp. more: the share by which it promises more than
        the CF sent. asked: the share that it needs to be sent. t_sys, t_comp: of the CF sent, in
        steps/s. allowed: the largest CF that the steps done so far allow. exploring: 1 until
        another CF is first considered. local_steps: their number, if the policy chooses it."""
        seconds, promised = self._time.seconds(self._send), self._promised()
        wait = self._longest_wait / self._local_steps
        best = max(promised, key=lambda cf: (promised[cf], -cf), default=self._send)
        here = self.t_comp().get(self._send) or nan
        return {
            "candidate": best if promised else nan,
            "more": promised.get(best, nan) / here - 1,
            "asked": 0.0 if best == self._send else self._needed(best, promised) / here - 1,
            "t_sys": 1 / seconds if seconds else nan,
            "t_comp": here,
            "allowed": max(self._assumed) if self._proven == DENSE else min(wait, self._proven),
            "exploring": float(self._since == self._steps < self.opening),
            **({"local_steps": self._local_steps} if len(self._numbers) > 1 else {}),
        }

    def _choose_local_steps(self) -> None:
        """Move to a better number of local steps, if there is one at the CF in use.

        A larger CF is considered before local steps, because it costs less quality than the first
        local steps. Seconds of compressing do not count here: local steps save the network's time,
        and against slow compression a smaller CF helps."""
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
        # More local steps may do harm, so they must be better; fewer need only be about as good.
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
        """The promise of another CF compared with the CF in use, in words. Further lines: the
        numbers in T_comp, the bytes, and the share by which it had to promise more."""
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
        """Why the CF in use is no longer allowed, in words."""
        if not self._keeps_quality(self._send):
            return f"among {self._ranks} ranks {self._named(self._send)} may cost quality"
        alike = counted_steps(self._lateness.alike)
        late = f"what {self._named(self._send)} does not send would wait too long"
        return f"{late} beside {alike} at about this learning rate"

    def _check_loaded(self) -> None:
        known = self._local_steps in self._numbers
        require(known, f"'local_steps' must be one of {self._numbers}, got {self._local_steps}")

    def rescale(self) -> None:
        """Stay at the CF in use for a cooldown, and measure step times again."""
        self._time, self._since, self._new = self._new_time(), 0, False

    def _new_time(self) -> StepTime:
        known = self._context
        rungs = known.assumed.keys()
        return StepTime(known.wire_bytes, known.overlap, rungs, known.uncoded, known.link)

    def progress(self, cf: float) -> float:
        """The assumed progress of a step at a CF / the progress of a dense step."""
        return (self._assumed.get(cf) or cf**-FALLS) ** (self.power or self._context.power)

    def _consider(self) -> None:
        """Move to the CF that promises most, among those that promise enough more than the CF in
        use. If there is none, consider other numbers of local steps."""
        promised = self._promised()
        # The best CF may promise too little more (a larger CF needs more), and another CF enough.
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
        """The T_comp that another CF must exceed. A larger CF may do harm, so it must be better by
        the whole margin. A smaller CF costs only time, so a part of the margin is enough."""
        asked = 1 + self.margin * (DOWN if cf < self._send else 1.0)
        return asked * promised.get(self._send, 0.0)
