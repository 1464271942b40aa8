"""The model of the step time at any CF, whether that CF was run or not.

    seconds = work + coding (compressing and decoding) + exposed time that no local step hides

Work is forward, backward, the optimizer and waiting for slower ranks. A step does its work once for
each local step, and the work is the same at every CF. The exposed time is the time that backward
does not hide of an exchange: the network wait of the rank that waits least. It grows with the bytes
sent, and local steps during the exchange may hide a part. A report gives all three times, so one CF
that was run is enough to predict the others.

Work and coding are those of a quiet machine. Other processes come and go, and make both longer, at
any CF. So the work is that of the fastest tenth of many steps, and coding is scaled to it: in a
step whose work took twice as long, coding took twice as long, too.

A prediction respects the link: a step cannot send its bytes faster than the link can, and backward
hides at most its own duration of the exchange. At a CF that was run, the measured time replaces the
prediction, until the network changes. A change is noticed at the CF in use. Then the exposed times
of the other CFs are forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from math import inf, isfinite, nan
from statistics import median_low

from policies.base import DENSE, StepReport
from policies.state import Stateful, require, saved

LAST = 32
"""`StepReport.median_seconds` is the median over at most this many last steps sent at a CF."""

WORKS, QUIET = 128, 0.1
"""The work is the QUIET quantile of the work of the last WORKS steps, at any CF."""

LOADED = 1.5
"""A step whose work takes this many times as long as on a quiet machine is of a loaded machine. Its
longer backward may hide far more of an exchange, so a shorter wait in such a step does not count.
"""

CODINGS = 32
"""Coding is the median of this many last steps of one kind."""

ABOVE = 0.0
"""The key of coding times for all CFs above the rungs. Other processes make these times too noisy
to tell CFs apart by measuring."""

KEPT = 6.0
"""Coding at a CF above the rungs takes in proportion to 1 + KEPT / CF: a kept element takes this
many times as long, to pack and to add up, as any other element takes to be selected from. Measured
from CF 10 to 100 with models of 1, 10 and 121 million parameters on a CPU."""

RUNG_CODING = 0.5
"""Seconds of coding at a rung (int4, int8) / those at a large CF, about (docs/gpu.md)."""

PAUSE = 3.0
"""A step of more than this many medians is a pause (evaluation, checkpoint) and does not count.
A second such step in a row counts, because the median lags behind a network that became slow."""

SLOWER = 4.0
"""The predicted time of additional bytes is at most their time on a link this many times slower
than when the run began. (A small payload waits for latency and a busy machine, not for its bytes.
In proportion to bytes, the prediction for a large payload would be too long.)"""

BACKWARD = 2 / 3
"""The share of backward in a step's work, at most. Backward hides no more of an exchange."""

NOISE_SHARE = 0.1
"""Differences of exposed times below this share of the work are noise of the machine."""

STRIDE = 8.0
"""On the way to a smaller CF, each stride sends at most this many times the most bytes of a CF that
was run on this network."""

RECENT = 5
"""The network has changed if this many steps in a row all waited longer than before, or all less.
(One step is noisy on a busy machine.)"""

MANY = 20
"""The exposed time at a CF is measured in this many first steps only. A slow change of the network
then differs from it at last, and is noticed, too."""

CHANGED = 1.25
"""The smallest factor by which an exposed time counts as longer or shorter than before."""


def overlapped(overlap: int | None, steps: int) -> int:
    """How many of `steps` local steps pass while an exchange is under way: `overlap` (None: half of
    them), at most all but one."""
    return min(steps // 2 if overlap is None else overlap, steps - 1)


@dataclass(eq=False)
class StepTime(Stateful):
    """A model of the step time at any CF.

    nbytes: bytes on the wire at a CF. overlap: see `overlapped`. rungs: CFs of other compressors,
    each with a coding time of its own. uncoded, link: see `Context`."""

    nbytes: Callable[[float], float]
    overlap: int | None = 0
    rungs: Collection[float] = ()
    uncoded: Collection[float] = ()
    link: Callable[[], tuple[float, float]] = lambda: (0.0, 0.0)

    changed: bool = saved(False)  # the network has changed since the run began
    _faster: bool = saved(False)  # the network has become faster, so `link` is no bound
    _works: list[float] = saved([])  # of the last steps
    # Of the last steps of each `_kind`: (coding / `_coding_factor`, work).
    _codings: dict[float, list[tuple[float, float]]] = saved({})
    _pauses: int = saved(0)  # steps in a row that took more than PAUSE medians
    # Exposed times by CF, of the CFs that were run:
    _last: dict[float, float] = saved({})  # the last median, perhaps on an earlier network
    _typical: dict[float, float] = saved({})  # the median on the present network
    _recent: list[float] = saved([])  # exposed times of the last steps, at the CF in use
    _same: int = saved(0)  # steps at the CF in use on the present network
    _doubted: bool = saved(False)  # the other CFs were forgotten once already on this network
    _cf: float | None = saved(None)  # the CF in use
    # The exposed time of the CF in use when it was in use before, on the present network.
    _before: float | None = saved(None)
    _steps: int = saved(1)  # local steps of each rank for each exchange, in the last report

    def __post_init__(self) -> None:
        self._quiet = 0.0  # work on a quiet machine
        # Medians of coding and work, by `_kind`.
        self._coding: dict[float, tuple[float, float]] = {}

    def observe(self, report: StepReport) -> None:
        """Observe the times of one step. A report with an unknown time is skipped."""
        cf, seconds, exposed = report.timed_cf, report.seconds, report.wait_seconds
        coding = report.coding_seconds
        if not all(map(isfinite, (cf, seconds, exposed, coding))):
            return
        if seconds <= 0 or exposed < 0 or coding < 0:
            return
        self._pauses = self._pauses + 1 if seconds > PAUSE * report.median_seconds else 0
        if self._pauses == 1:
            return
        self._steps = report.timed_steps
        if cf != self._cf:
            self._cf, self._before = cf, self._typical.get(cf)
            self._recent, self._same = [], 0
        work = self._work_of_one(seconds, exposed, coding)
        self._observe_own(cf, work, coding)
        if work <= LOADED * self._quiet or exposed >= self._typical.get(cf, 0.0):
            self._observe_exposed(cf, exposed)

    def seconds(self, cf: float, steps: int | None = None) -> float | None:
        """Seconds of a step at `cf`: of `steps` local steps (None: as many as in the last report)
        and one exchange. None before the first report."""
        return self._step(self.exposed(cf), self.coding(cf), steps) if self._works else None

    def without_coding(self, cf: float, steps: int) -> float:
        """Seconds of `steps` steps and one exchange, without compressing and decoding; 0 before the
        first step."""
        return self._step(self.exposed(cf), steps=steps) if self._works else 0.0

    def measured(self, cf: float) -> float | None:
        """As `seconds`, with the exposed time that was measured when `cf` was last run, even if the
        network has changed since. None if `cf` was never run."""
        exposed = self._last.get(cf)
        return None if exposed is None else self._step(exposed, self.coding(cf))

    def bound(self) -> float | None:
        """The least seconds of a compressed step: with nothing on the wire, and the shortest coding
        time of all kinds; None before the first step."""
        if not self._works:
            return None
        fastest = min(map(self.coding, self._coding), default=0.0)
        return self._step(self._latency(), fastest)

    def coding(self, cf: float) -> float:
        """Seconds of compressing, decoding and measuring gains at `cf`; 0 for dense and `uncoded`
        CFs, and before the first compressed step."""
        kind = self._kind(cf)
        if kind is None or not self._coding:
            return 0.0
        factor = self._coding_factor(cf)
        if kind in self._coding:
            return factor * self._quiet_coding(kind)
        alike = [other for other in self._coding if (other == ABOVE) == (kind == ABOVE)]
        ratio = factor if alike or kind == ABOVE else RUNG_CODING
        nearest = min(alike or self._coding, key=lambda other: abs(other - kind))
        return ratio * self._quiet_coding(nearest)

    def _kind(self, cf: float) -> float | None:
        """The key of CFs with equal coding times: a rung by itself; `ABOVE` for all CFs above the
        rungs; None for CFs without coding."""
        if cf == DENSE or cf in self.uncoded:
            return None
        return cf if cf in self.rungs else ABOVE

    def _coding_factor(self, cf: float) -> float:
        """Seconds of coding at `cf` / those that `_coding` keeps for its kind; 1 for a rung."""
        return 1 + KEPT / cf if cf and self._kind(cf) == ABOVE else 1.0

    def _quiet_coding(self, kind: float) -> float:
        """Seconds of coding on a quiet machine. kind: one that was run."""
        coding, work = self._coding[kind]
        return coding * min(1.0, self._quiet / work) if work else coding

    def exposed(self, cf: float) -> float:
        """Seconds that a step at `cf` waits for the network; 0 before the first step. For a CF that
        was not run on this network, a prediction within the bounds of the link."""
        known = self._typical.get(cf)
        if known is not None or not self._works:
            return known or 0.0
        wanted = self.nbytes(cf)
        predicted = self._predicted(self._typical, wanted)
        # Seconds that the link needed for `wanted` bytes when the run began; 0 if unknown.
        latency, seconds_a_byte = self.link()
        needed = latency + wanted * seconds_a_byte
        if self._faster or not 0 < needed < inf:
            return predicted
        predicted = min(predicted, self._by_link(self._typical, wanted))
        # A step that was faster than the link's measured speed allows shows that the link is faster
        # than measured: its time counts as this share (`shown`) of `needed`.
        hidden, shown = BACKWARD * self._quiet, 1.0
        for other, time in self._typical.items():
            its = latency + self.nbytes(other) * seconds_a_byte
            shown = min(shown, (time + hidden) / (its or inf) or 1.0)
        return max(predicted, shown * needed - hidden)

    def _by_link(self, known: Mapping[float, float], wanted: float) -> float:
        """The longest wait of a step with `wanted` bytes, by the waits at the `known` CFs. With
        fewer bytes than at a known CF, the step waits shorter by at least the link's time for the
        difference, because backward hides no less. With more bytes, it waits longer by at most
        SLOWER times the link's time, unless the network has changed. inf if the link is not known
        or has become faster, or if no CF is known."""
        seconds_a_byte = self.link()[1]
        if self._faster or not 0 < seconds_a_byte < inf:
            return inf
        slower = inf if self.changed else SLOWER
        more = [(time, wanted - self.nbytes(cf)) for cf, time in known.items()]
        bounds = (
            time + seconds_a_byte * each * (slower if each > 0 else 1.0)
            for time, each in more
            if each
        )
        return max(0.0, min(bounds, default=inf))

    def timed(self) -> tuple[float, ...]:
        """The CFs that were run on the present network."""
        return tuple(self._typical)

    def within_reach(self, goal: float, here: float, cfs: Iterable[float]) -> float:
        """The CF to send next on the way down from the CF `here` to the CF `goal`.

        This is the smallest of the ascending `cfs` that is no more than a stride away; `goal` if no
        CF is between, or if the link is known and has not changed."""
        between = [cf for cf in cfs if goal <= cf < here]
        if not between or (0 < self.link()[1] < inf and not self.changed):
            return goal
        most = min((here, *self.timed()))

        def times(cf: float) -> float:
            ratio = self.nbytes(cf) / (self.nbytes(most) or nan)
            return ratio if isfinite(ratio) else most / cf

        return next((cf for cf in between if times(cf) <= STRIDE), between[-1])

    def _step(self, exposed: float, coding: float = 0.0, steps: int | None = None) -> float:
        """Seconds of `steps` local steps (None: as many as in the last report) and one exchange."""
        work, steps = self._quiet, self._steps if steps is None else steps
        return work * steps + coding + max(0.0, exposed - work * overlapped(self.overlap, steps))

    def _observe_own(self, cf: float, work: float, coding: float) -> None:
        """Add the work and the coding of a step. Coding in the first step at a CF includes one-time
        work, which the low median leaves out from the second step on."""
        self._works = [*self._works, work][-WORKS:]
        kind = self._kind(cf)
        if kind is not None:
            coding /= self._coding_factor(cf)
            self._codings[kind] = [*self._codings.get(kind, ()), (coding, work)][-CODINGS:]
        self._derive(() if kind is None else (kind,))

    def _derive(self, kinds: Iterable[float]) -> None:
        """Compute, from the last steps, the work on a quiet machine, and for these kinds the
        medians of coding and work."""
        self._quiet = sorted(self._works)[int(QUIET * len(self._works))] if self._works else 0.0
        for kind in kinds:
            codings, works = zip(*self._codings[kind], strict=True)
            self._coding[kind] = median_low(codings), median_low(works)

    def _work_of_one(self, seconds: float, exposed: float, coding: float) -> float:
        """Seconds of one local step's work, from the times of a report."""
        hiding, work = overlapped(self.overlap, self._steps), (seconds - coding) / self._steps
        if not hiding or exposed > hiding * work:
            work = (seconds - exposed - coding) / (self._steps - hiding)
        return max(0.0, work)

    def _latency(self) -> float:
        """The exposed time of a step that sends nothing; 0 until two CFs show it."""
        return self._predicted(self._typical, 0.0) if len(self._typical) > 1 else 0.0

    def _nearest(self, cfs: Iterable[float], wanted: float) -> list[float]:
        """The one or two CFs whose bytes are nearest to `wanted`, nearest first."""
        return sorted(cfs, key=lambda cf: (abs(self.nbytes(cf) - wanted), cf))[:2]

    def _predicted(self, known: Mapping[float, float], wanted: float) -> float:
        """Seconds at `wanted` bytes: on the line through the two CFs with the nearest bytes, with a
        slope of at least 0; with only one CF in proportion to its bytes; without any CF 0."""
        points = [(self.nbytes(cf), known[cf]) for cf in self._nearest(known, wanted)]
        if not points:
            return 0.0
        x, y = points[0]
        if len(points) == 1:
            times = wanted / (x or nan)
            return y * times if isfinite(times) else y
        other_x, other_y = points[1]
        slope = max(0.0, (other_y - y) / (other_x - x)) if other_x != x else 0.0
        predicted = y + slope * (wanted - x)
        return max(0.0, predicted) if isfinite(predicted) else y

    def _observe_exposed(self, cf: float, exposed: float) -> None:
        self._recent = [*self._recent, exposed][-MANY:]
        self._same += 1
        if moved := self._moved(cf):
            # One or two of the last steps may still be of the network before the change.
            self._typical, self._same = {}, RECENT - 2
            self._doubted, self._before = False, None
            self._faster = self._faster or moved < 0
            self.changed = True
        elif not self._doubted and self._is_doubtful(cf):
            self._typical = {}
            self._doubted = True
        if self._same > MANY:
            return
        # The last RECENT times do not count yet, because the network may have changed in these
        # steps. The first RECENT times always count.
        times = self._recent[-self._same :]
        times = sorted(times[: max(RECENT, len(times) - RECENT)])
        self._typical[cf] = self._last[cf] = median_low(times)

    def _moved(self, cf: float) -> int:
        """1 if the last steps at the CF in use show a slower network, -1 if a faster one, 0 if the
        same.

        The first RECENT steps at a CF are compared with its exposed time when it was in use before,
        and with those of other CFs, since more bytes do not take less time. Later steps are
        compared with the earlier ones."""
        if self._same < RECENT:
            return 0
        if self._same == RECENT:
            nbytes, before = self.nbytes(cf), [] if self._before is None else [self._before]
            fewer = [t for other, t in self._typical.items() if self.nbytes(other) < nbytes]
            more = [t for other, t in self._typical.items() if self.nbytes(other) > nbytes]
            low, high = max(before + fewer, default=0.0), min(before + more, default=inf)
            return self._beyond(low, high)
        old = self._typical[cf]
        return self._beyond(old, old)

    def _is_doubtful(self, cf: float) -> bool:
        """Whether the CF in use, which was not run before on this network, waits less than the
        other CFs predict. Then the network was slow for a few steps when the other CFs were run, or
        backward hides the exchange at this CF."""
        others = {other: time for other, time in self._typical.items() if other != cf}
        if not others or self._same != 2 * RECENT or self._before is not None:
            return False
        wanted = self.nbytes(cf)
        least = min(self._predicted(others, wanted), self._by_link(others, wanted))
        return self._beyond(least, inf) != 0

    def _beyond(self, low: float, high: float) -> int:
        """1 if the last RECENT steps all waited clearly longer than `high`, -1 if all waited
        clearly less than `low`, else 0."""
        times, least = self._recent[-RECENT:], NOISE_SHARE * self._quiet
        slower = min(times) + least > CHANGED * (high + least)
        faster = max(times) + least < (low + least) / CHANGED
        return 1 if slower else -1 if faster else 0

    def _check_loaded(self) -> None:
        in_use = self._cf is None or (self._cf in self._typical and bool(self._works))
        enough = len(self._recent) >= min(self._same, MANY)
        timed = self._typical.keys() <= self._last.keys() and all(self._codings.values())
        whole = in_use and enough and timed and self._steps >= 1
        require(whole, "the times of steps contradict each other")
        self._coding = {}
        self._derive(self._codings)
