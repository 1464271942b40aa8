"""The statistics of GraVAC's candidates, and the conclusions from their gains and throughputs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from math import inf, isfinite, nan

from policies.base import DENSE, GainKind, StepReport
from policies.state import Stateful, saved
from policies.step_time import StepTime
from policies.words import costs, named, percent, progress, seconds_in_words


@dataclass(eq=False)
class Averages(Stateful):
    """Exponentially weighted ratios of means by CF, E[top] / E[bottom]. With bottom 1: plain means.

    Both means start from zero and need the same bias correction, 1 / (1 - (1 - weight)^n). The
    correction cancels in the ratio, so the first values count fully.

    weight: weight of a new value, in (0, 1].
    """

    weight: float
    _means: dict[float, tuple[int, float, float]] = saved({})  # steps, top, bottom

    def add(self, cf: float, top: float, bottom: float = 1.0) -> None:
        """Add one step. A step that is not finite, or has bottom <= 0, is skipped."""
        known = isfinite(top) and isfinite(bottom)
        if not known or self.weight * bottom <= 0:
            return
        steps, mean_top, mean_bottom = self._means.get(cf, (0, 0.0, 0.0))
        mean_top = (1 - self.weight) * mean_top + self.weight * top
        mean_bottom = (1 - self.weight) * mean_bottom + self.weight * bottom
        self._means[cf] = steps + 1, mean_top, mean_bottom

    def steps(self, cf: float) -> int:
        """The number of steps that were added for a CF."""
        return self._means[cf][0] if cf in self._means else 0

    def __getitem__(self, cf: float) -> float:
        """The average of a CF that has one."""
        _, top, bottom = self._means[cf]
        return top / bottom

    def keep_only(self, cfs: Collection[float]) -> None:
        """Forget the averages of all other CFs."""
        self._means = {cf: means for cf, means in self._means.items() if cf in cfs}


@dataclass(eq=False)
class CandidateStatistics(Stateful):
    """The candidates' statistics: gain, T_sys (steps/s) and T_comp = T_sys x gain of each CF, where
    they are known (GraVAC, section 3.1)."""

    kind: GainKind
    weight: float  # of a new value in the average of a gain
    believed_after: int  # number of measurements that an average needs before it counts
    nbytes: Callable[[float], float]  # bytes on the wire at a CF
    assumed: Mapping[float, float]  # gains, by CF, of hooks and rungs, which are not measured
    overlap: int | None = 0  # see `Context`

    _averages: Averages = saved()
    time: StepTime = saved()

    def __post_init__(self) -> None:
        self._averages = Averages(self.weight)
        self.time = StepTime(self.nbytes, self.overlap, rungs=self.assumed.keys())

    def observe(self, report: StepReport) -> None:
        """Add the times and gains of one step."""
        self.time.observe(report)
        for cf, measurement in report.measurements.items():
            self._averages.add(cf, *measurement.terms(self.kind))

    def gain(self, cf: float | None) -> float | None:
        """The gain of a CF, in [0, 1]; 1 for dense. None: not known."""
        if cf is None:
            return None
        if cf == DENSE:
            return 1.0
        if cf in self.assumed:
            return self.assumed[cf]
        if self._averages.steps(cf) < self.believed_after:
            return None
        return min(1.0, self._averages[cf])

    def keep_only(self, cfs: Collection[float]) -> None:
        """Forget the averages of other CFs."""
        self._averages.keep_only(cfs)

    def forget_times(self) -> None:
        """Forget all step times, and keep the gains."""
        self.time = StepTime(self.nbytes, self.overlap, rungs=self.assumed.keys())

    def t_sys(self, cf: float) -> float | None:
        """Steps a second at a CF. None: the CF was never sent."""
        seconds = self.time.measured(cf)
        return 1 / seconds if seconds else None

    def t_comp(self, cfs: Iterable[float], epsilon: float) -> dict[float, float]:
        """T_comp of the CFs that were sent and whose gain is known and at least epsilon."""
        known = {cf: (self.gain(cf), self.t_sys(cf)) for cf in cfs}
        return {
            cf: gain * t_sys
            for cf, (gain, t_sys) in known.items()
            if gain is not None and gain >= epsilon and t_sys is not None
        }

    def times_of(self, chosen: float, other: float) -> str:
        """The step times of the chosen CF and of dense, in words; if dense was chosen, of dense and
        `other`. "": not known."""
        compared = DENSE if chosen != DENSE else other
        now, then = self.time.measured(chosen), self.time.measured(compared)
        if now is None:
            return ""
        text = f"{seconds_in_words(now)} a step"
        return text if then is None else f"{text}, {named(compared)} {seconds_in_words(then)}"

    def costs_of(self, cf: float, here: float) -> str:
        """The effect of a switch from `here` to a CF, in words: on the bytes, and on the step time
        if both CFs were sent."""
        saved = 1 - self.nbytes(cf) / (self.nbytes(here) or nan)
        return costs(self.time.measured(cf), self.time.measured(here), saved)

    def why_dense_wins(self, cfs: Iterable[float]) -> str:
        """Why none of the CFs can beat dense, in words. "": some CF may, or too little is known.

        The bound for all CFs is a step with nothing on the wire, the fastest compression and the
        best gain. It needs the step times of dense and of two CFs."""
        dense = self.t_sys(DENSE)
        gains = {cf: gain for cf in cfs if (gain := self.gain(cf)) is not None}
        sent = [t_sys for cf in gains if (t_sys := self.t_sys(cf)) is not None]
        seconds = self.time.bound()
        if dense is None or len(sent) < 2 or not seconds:
            return ""
        gain = max(gains.values())
        # If a step was faster than the model's bound, the model is wrong.
        if gain > dense * seconds or gain * max(sent) > dense:
            return ""
        return (
            f"even with nothing on the wire no CF makes more progress a second\n"
            f"a step would take {seconds_in_words(seconds)}, at a gain of {gain:.4g}: "
            f"{progress(gain / seconds / dense, 'dense')}, {seconds_in_words(1 / dense)} a step"
        )


def loses_no_gain(floor: float | None, gain: float | None, omega: float) -> tuple[bool, str]:
    """(yes or no, the numbers in words): whether a candidate's gain is within omega of the floor's
    gain, relative to the floor's gain (section 3.2)."""
    if floor is None or gain is None:
        return False, "gains not known"
    lost = abs(floor - gain) / floor if floor > 0 else inf
    rises, sign = lost <= omega, "no more" if lost <= omega else "more"
    moves = "falls" if gain < floor else "rises"
    change = f"gain {moves} by {percent(lost)} ({floor:.4g} to {gain:.4g})"
    return rises, f"{change}, {sign} than omega {percent(omega)}"


def choose(t_comp: Mapping[float, float], dense: float | None, omega: float) -> tuple[float, str]:
    """The CF to keep, and why: dense (1) if no CF beats it, else the CF where T_comp saturates.

    CFs are compared in ascending order, the kept CF with the next one. If their values of T_comp
    are within omega of each other, relative to the smaller CF's, the smaller CF is kept. Else the
    CF with the larger T_comp is kept (section 3.2).

    t_comp: compression throughput (steps/s x gain) by CF, at least one.
    dense: T_comp of dense, whose gain is 1. None: dense is not a choice.
    """
    if dense is not None:
        best = max(t_comp, key=lambda cf: t_comp[cf])
        if t_comp[best] <= dense:
            return DENSE, f"CF {best:g}, the best, makes {progress(t_comp[best] / dense, 'dense')}"
        t_comp = {cf: value for cf, value in t_comp.items() if value > dense}
    kept, *larger = sorted(t_comp)
    found = "the most progress a second"
    for cf in larger:
        lost = abs(t_comp[cf] - t_comp[kept]) / t_comp[kept] if t_comp[kept] > 0 else inf
        if lost <= omega:
            found = f"CF {cf:g} makes {progress(t_comp[cf] / t_comp[kept], named(kept))}"
            found += f", and up to {percent(omega)} (omega) counts as none"
        elif t_comp[cf] > t_comp[kept]:
            kept, found = cf, "the most progress a second"
    return kept, found
