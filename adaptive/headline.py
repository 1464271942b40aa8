"""Whether compression was worth it here: one sentence, and the dense step that it compares with.

Everything that says how a run went begins with this sentence: the summary, `explain()`, the end of
`train`, `compare`, the report and the dashboard.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite, nan

from adaptive.exchange.link import LinkCost, LinkSpec, StepClock
from policies.base import DENSE, StepReport
from policies.state import Stateful, saved
from policies.step_time import StepTime
from policies.words import bytes_in_words, seconds_in_words

ALIKE = 0.05
"""Step times that differ by no more than this share are called the same."""

BACKWARD = 2 / 3
"""The part of a step without network that backward takes, at most: so much of a dense exchange can
be hidden behind it. The modelled dense step assumes that all of this is, so that it is too short
rather than too long."""


@dataclass(frozen=True)
class DenseStep:
    """Seconds of a dense step on this network; nan if they are not known. measured: dense steps
    were run on it; else they are modelled."""

    seconds: float = nan
    measured: bool = False


NOT_TIMED = DenseStep()


@dataclass(eq=False)
class DenseTimer(Stateful):
    """A timer of dense steps, also of those that were not run.

    A step is measured where dense steps were run on the network as it is now (an emulated one does
    not change); it is exact by a modelled clock. Else it is modelled: the work of a step, and what
    the link takes for the bytes, at the rate that is emulated, or that a measurement has found when
    training began. If that is not known either, dense steps on the network as it was must do.

    nbytes: bytes on the wire at a CF. world_size: ranks that exchange. overlap: see `StepTime`.
    clock: the compressor's. spec: the emulated link. cost: the link as measured, if it was.
    """

    nbytes: Callable[[float], float]
    world_size: int
    overlap: int | None
    clock: Callable[[], float]
    spec: LinkSpec | None
    cost: Callable[[], LinkCost | None]

    time: StepTime = saved()
    _statistics: float = saved(0.0)  # bytes of a step that no CF changes

    def __post_init__(self) -> None:
        self.time = StepTime(self.nbytes, self.overlap)

    def observe(self, report: StepReport) -> None:
        """Take in one step."""
        self.time.observe(report)
        self._statistics = report.statistics_bytes

    @property
    def network(self) -> str:
        """See `network_in_words`."""
        return network_in_words(self.clock, self.spec)

    def step(self, cf: float) -> DenseStep:
        """A dense step, beside steps at the CF in use."""
        if isinstance(self.clock, StepClock):
            nbytes = self.nbytes(DENSE)  # half of them bring means back
            return DenseStep(self.clock.step(nbytes, self._statistics, 1, nbytes / 2))
        if DENSE in self.time.timed():
            return DenseStep(self.time.seconds(DENSE, 1) or nan, measured=True)
        earlier = self.time.measured(DENSE)
        before = NOT_TIMED if earlier is None else DenseStep(earlier, measured=True)
        work, link = self.time.work, self._link_seconds()
        if work is None or link is None or (self.spec is not None and earlier is not None):
            return before
        modelled = work + max(0.0, link - BACKWARD * work)
        if self.spec is None and len(self.time.timed()) > 1:
            # The network may have changed since it was measured, which shows in step times. If
            # these say otherwise of what is faster, nobody knows; else the shorter time is safe.
            by_steps, here = self.time.seconds(DENSE, 1) or nan, self.time.seconds(cf) or nan
            if (by_steps > here) != (modelled > here):
                return before
            modelled = min(modelled, by_steps)
        return DenseStep(modelled)

    def _link_seconds(self) -> float | None:
        """What the link takes for a dense exchange; None if it is not known."""
        nbytes = self.nbytes(DENSE)
        if self.spec is not None:
            return self.spec.latency + 8 * nbytes / self.spec.bits_per_second
        cost = self.cost()
        if cost is None or not isfinite(cost.beta):
            return None
        return 2 * (self.world_size - 1) * cost.alpha + nbytes / cost.beta


def network_in_words(clock: Callable[[], float], spec: LinkSpec | None) -> str:
    """An emulated or modelled link; "" for the real network."""
    if isinstance(clock, StepClock):
        return clock.network
    return f"emulated {spec} link" if spec else ""


def headline(
    seconds: float,
    dense: DenseStep,
    saved_share: float,
    *,
    dense_share: float = 0.0,
    network: str = "",
    quality: str = "",
    gossip: bool = False,
) -> str:
    """Whether compression was worth it, in one sentence without the field's words.

    seconds: of a step, the mean over the run; nan if not known. dense: a dense step on the same
    network. saved_share: of the bytes of a dense run, what was not sent; negative if more were
    sent. dense_share: of the steps, those that were sent dense. network: "emulated 10 Mbit/s link";
    "": the real one. quality: how it compares with a dense run's, where that is known. gossip: no
    mean of the gradients is made, and what that does to quality does not show in steps.
    """
    where = f"on this {network or 'network'}"
    sent, than_dense = bytes_in_words(saved_share), bytes_in_words(saved_share, "dense")
    how, took = "measured" if dense.measured else "modelled", seconds_in_words(dense.seconds)
    here = seconds_in_words(seconds)
    if gossip and not quality:
        told = f"gossip: {bytes_in_words(saved_share, 'a dense all-reduce')}"
        told += f", {here} a step {where}" if isfinite(seconds) else ""
    elif dense_share == 1:
        told = "dense all along" + (f": {here} a step {where}" if isfinite(seconds) else "")
    elif not isfinite(seconds):
        told = f"{than_dense}; no step was timed"
    elif not isfinite(dense.seconds):
        told = f"{than_dense}, {here} a step; dense was not timed {where}"
    elif dense.seconds > (1 + ALIKE) * seconds:
        times = dense.seconds / seconds
        factor = f"{times:.1f}" if times < 9.95 else f"{times:.0f}"
        told = f"{factor}x faster than dense {where} ({here} a step instead of a {how} {took})"
        told += f", {sent}"
    elif not dense.measured and dense_share <= 0.5:  # what is modelled is the least it can be
        told = f"dense may be as fast {where} ({here} a step, dense a modelled {took} or more)"
        told += f", {sent}"
    elif dense.seconds < (1 - ALIKE) * seconds or dense_share > 0.5:
        told = f"dense is right {where}: {took} a step ({how}), {here} in the mean of this run"
        told += f", which sent {dense_share:.0%} of its steps dense" if dense_share else ""
        told += f"; {sent}"
    else:
        told = f"as fast as dense {where} ({here} a step, dense a {how} {took}), {sent}"
    return f"{told}, {quality}" if quality else told
