"""What a step takes at any CF, whether that CF was run or not: the one model of the step time.

    seconds = work + compressing and decoding + exposed time that no local step hides

Work is forward, backward, the optimizer and waiting for slower ranks, and is done once for each
local step. A CF that was run has its own: an exchange takes the processor's time from backward. The
exposed time is the network wait of the rank that waits least, if nothing hid it. It grows with the
bytes sent. A report gives all three, so one CF that was run is enough to predict the others.

A prediction promises no more than the link allows: a step cannot send its bytes faster than the
link can, and backward hides at most its own time of that. What was measured at a CF replaces every
prediction, until the network has changed. A change shows at the CF in use. Then the exposed times
of the other CFs are forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from math import inf, isfinite, nan
from statistics import median_low

from policies.averages import Averages
from policies.base import DENSE, StepReport
from policies.state import Stateful, require, saved

LAST = 32
"""`StepReport.median_seconds` is the median over at most this many last steps sent at a CF."""

WEIGHT = 0.2
"""Weight of a new step in the averages of compressing and decoding."""

WORKS = 9
"""The work at a CF is the median of so many last steps."""

PAUSE = 3.0
"""A step of more than this many medians is a pause (evaluation, checkpoint) and does not count.
A second such step in a row counts, because the median lags behind a network that became slow."""

SLOWER = 4.0
"""From one CF alone, more bytes are predicted to take no longer than on a link so many times slower
than it is at best. A small payload waits for latency rather than for its bytes."""

BACKWARD = 2 / 3
"""Backward's share of a step's work, at most. It hides no more than that of an exchange."""

NOISE_SHARE = 0.1
"""Differences of exposed times below this share of the work are noise of the machine."""

STRIDE = 8.0
"""On the way to a CF, each stride may send at most this many times the bytes already carried."""

STRIDE_STEPS = 5
"""Steps at each CF on the way to one that sends many more bytes."""

RECENT = 5
"""The network has changed if this many steps in a row all waited longer, or all shorter, than
before. A single step is noisy on a busy machine."""

MANY, EXCEPTIONS = 20, 7
"""The network has also changed if all but EXCEPTIONS of the last MANY steps say so."""

CHANGED = 1.25
"""An exposed time is longer, or shorter, than before if it differs by this factor."""


def overlapped(overlap: int | None, steps: int) -> int:
    """How many of `steps` local steps pass while an exchange is under way: `overlap` (None: half of
    them), at most all but one."""
    return min(steps // 2 if overlap is None else overlap, steps - 1)


@dataclass(eq=False)
class StepTime(Stateful):
    """A model of the step time at any CF.

    nbytes: bytes on the wire at a CF. overlap: see `overlapped`. watched: the share of steps in
    which gains are measured, once dense is sent for good, or what is `uncoded`. rungs: CFs whose
    coding says nothing of other CFs. uncoded, link: see `Context`."""

    nbytes: Callable[[float], float]
    overlap: int | None = 0
    watched: float = 0.0
    rungs: Collection[float] = ()
    uncoded: Collection[float] = ()
    link: Callable[[], tuple[float, float]] = lambda: (0.0, 0.0)

    changes: int = saved(0)  # how often the network has become another one
    _faster: bool = saved(False)  # one of these changes made it faster: `link` is no bound
    _work: dict[float, float] = saved({})  # by CF that was run, as it would be now
    _stay: list[float] = saved([])  # work of the last steps at the CF in use, since it is in use
    _left: float | None = saved(None)  # the CF in use before
    _compress: Averages = saved(Averages(WEIGHT))
    _decode: Averages = saved(Averages(WEIGHT))
    _pauses: int = saved(0)  # steps in a row that took far longer than their median
    # Exposed times by CF, of the CFs that were run:
    _last: dict[float, float] = saved({})  # the median, on whatever network that was
    _typical: dict[float, float] = saved({})  # the median, on the network as it is now
    _network: dict[float, float] = saved({})  # what the network alone takes
    _recent: list[float] = saved([])  # exposed times of the last steps, at the CF in use
    _same: int = saved(0)  # steps at the CF in use on the network as it is now
    _doubted: bool = saved(False)  # whether the other CFs were already forgotten on this network
    _cf: float | None = saved(None)  # in use
    # Exposed time and work of the CF in use, when it was in use before.
    _before: float | None = saved(None)
    _work_before: float | None = saved(None)
    _steps: int = saved(1)  # of each rank, for each exchange

    def observe(self, report: StepReport) -> None:
        """Take in the times of one step; a report without all of them is skipped."""
        cf, seconds, exposed = report.timed_cf, report.seconds, report.wait_seconds
        compress, coding = report.compress_seconds, report.coding_seconds
        if not all(map(isfinite, (cf, seconds, exposed, compress, coding))):
            return
        if seconds <= 0 or exposed < 0 or not 0 <= compress <= coding:
            return
        self._pauses = self._pauses + 1 if seconds > PAUSE * report.median_seconds else 0
        if self._pauses == 1:
            return
        self._steps = report.timed_steps
        if cf != self._cf:
            self._left, self._cf = self._cf, cf
            self._before, self._work_before = self._typical.get(cf), self._work.get(cf)
            self._recent, self._same, self._stay = [], 0, []
        self._observe_work(cf, self._work_of_one(seconds, exposed, coding))
        self._observe_coding(cf, compress, coding - compress)
        self._observe_exposed(cf, exposed)

    def seconds(self, cf: float, steps: int | None = None) -> float | None:
        """Seconds of a step at `cf`. With local steps: of `steps` of them (None: as many as in the
        last report) and one exchange. None before the first report."""
        return self._step(cf, self.exposed(cf), self.coding(cf), steps) if self._work else None

    @property
    def work(self) -> float | None:
        """Seconds of a step at the CF in use without network and compression; None before the first
        step."""
        return None if self._cf is None else self._work[self._cf]

    def without_coding(self, cf: float, steps: int) -> float:
        """Seconds of so many steps and one exchange, but for compressing and decoding; 0 before the
        first step."""
        return self._step(cf, self.exposed(cf), steps=steps) if self._work else 0.0

    def measured(self, cf: float) -> float | None:
        """As `seconds`, with the exposed time measured when `cf` was last run, even if the network
        has changed since. None: never run."""
        exposed = self._last.get(cf)
        return None if exposed is None else self._step(cf, exposed, self.coding(cf))

    def bound(self) -> float | None:
        """Seconds of a compressed step with nothing on the wire and the fastest compression seen;
        None before the first step."""
        if not self._work:
            return None
        coded = filter(self._codes, self._compress.cfs())
        fastest = min(map(self.coding, coded), default=0.0)
        return self._step(inf, self._latency(), fastest)

    def coding(self, cf: float) -> float:
        """Seconds of compressing, decoding and measuring gains at `cf`; of dense and of what is
        `uncoded` only the last, in the share of steps that is `watched`.

        A CF that was not run takes as long as the nearest that was, and decodes in proportion to
        the bytes. Fewer bytes than those of two CFs are on the line through both."""
        run = self._compress.cfs()
        if cf in run:
            share = 1.0 if self._codes(cf) else self.watched
            return share * (self._compress[cf] + self._decode[cf])
        coded = {other: self._compress[other] + self._decode[other] for other in run}
        coded = {other: time for other, time in coded.items() if self._codes(other)}
        alike = {other: time for other, time in coded.items() if other not in self.rungs}
        if not (coded and self._codes(cf)):
            return 0.0
        wanted = self.nbytes(cf)
        if cf not in self.rungs and alike:
            if len(alike) > 1 and wanted < min(map(self.nbytes, alike)):
                return self._predicted(alike, wanted)
            coded = alike
        near = self._nearest(coded, wanted)[0]
        return self._compress[near] + self._predicted({near: self._decode[near]}, wanted)

    def _codes(self, cf: float) -> bool:
        return cf != DENSE and cf not in self.uncoded

    def exposed(self, cf: float) -> float:
        """Seconds that a step at `cf` waits for the network, 0 before the first step. A CF that was
        not run is predicted from the network's time alone, because delays of a busy machine do not
        grow with bytes, and never below what the link allows."""
        known = self._typical.get(cf)
        if known is not None or not self._work:
            return known or 0.0
        wanted = self.nbytes(cf)
        predicted = self._predicted(self._network, wanted)
        # Seconds that the link needed for so many bytes when the run began; 0 if unknown.
        latency, seconds_a_byte = self.link()
        needed = latency + wanted * seconds_a_byte
        if self._faster or not 0 < needed < inf:
            return predicted
        if len(self._network) == 1 and not self.changes:
            [(only, time)] = self._network.items()
            more = max(0.0, wanted - self.nbytes(only))
            predicted = min(predicted, time + SLOWER * seconds_a_byte * more)
        # Steps that were faster than the link is said to be show a faster one.
        hidden, shown = BACKWARD * self._work_at(cf), 1.0
        for other, time in self._network.items():
            its = latency + self.nbytes(other) * seconds_a_byte
            shown = min(shown, (time + hidden) / (its or inf) or 1.0)
        return max(predicted, shown * needed - hidden)

    def timed(self) -> tuple[float, ...]:
        """The CFs that were run on the network as it is now."""
        return tuple(self._typical)

    def within_reach(self, goal: float, here: float, cfs: Iterable[float]) -> float:
        """The CF to send next on the way down from `here` to `goal`.

        It is the smallest of the ascending `cfs` that is no more than a stride away. It is `goal`
        where no other CF lies between."""
        between = [cf for cf in cfs if goal <= cf < here]
        if not between:
            return goal
        most = min((here, *self.timed()))

        def times(cf: float) -> float:
            ratio = self.nbytes(cf) / (self.nbytes(most) or nan)
            return ratio if isfinite(ratio) else most / cf

        return next((cf for cf in between if times(cf) <= STRIDE), between[-1])

    def _step(
        self, cf: float, exposed: float, coding: float = 0.0, steps: int | None = None
    ) -> float:
        """Seconds of `steps` local steps (None: as many as in the last report) and one exchange."""
        work, steps = self._work_at(cf), self._steps if steps is None else steps
        return work * steps + coding + max(0.0, exposed - work * overlapped(self.overlap, steps))

    def _work_at(self, cf: float) -> float:
        """Seconds of one local step's work: of the CF, or of the nearest that was run."""
        wanted = 0.0 if cf == inf else self.nbytes(cf)
        return self._work[cf if cf in self._work else self._nearest(self._work, wanted)[0]]

    def _observe_work(self, cf: float, work: float) -> None:
        """Take in the work of a step. What changes while a CF is in use changes at all CFs. Between
        two stays at a CF it changes in even steps, so half of that was there at the CF between."""
        self._stay = [*self._stay, work][-WORKS:]
        now, steps, returned = median_low(self._stay), len(self._stay), self._returned
        if returned and steps < RECENT:
            return  # too few to tell what has changed meanwhile
        moved = now - self._work.get(cf, now)
        for other in self._work if returned or steps > RECENT else ():
            half = 0.5 if steps == RECENT and other == self._left else 1.0
            self._work[other] = max(0.0, self._work[other] + half * moved)
        self._work[cf] = now

    def _observe_coding(self, cf: float, compress: float, decode: float) -> None:
        """Take in a step's coding. The first one of a stay counts only until there is another: what
        a CF needs is made in it."""
        steps = len(self._stay)
        for part, seconds in ((self._compress, compress), (self._decode, decode)):
            if steps == 2 and not self._returned:
                part.keep_only({*part.cfs()} - {cf})
            if steps > 1 or not self._returned:
                part.add(cf, seconds)

    @property
    def _returned(self) -> bool:
        """Whether the CF in use was in use before."""
        return self._work_before is not None

    def _work_of_one(self, seconds: float, exposed: float, coding: float) -> float:
        """Seconds of one local step's work, from the times of a report."""
        hiding, work = overlapped(self.overlap, self._steps), (seconds - coding) / self._steps
        if not hiding or exposed > hiding * work:
            work = (seconds - exposed - coding) / (self._steps - hiding)
        return max(0.0, work)

    def _latency(self) -> float:
        """The exposed time of a step that sends nothing; 0 until two CFs show it."""
        return self._predicted(self._network, 0.0) if len(self._network) > 1 else 0.0

    def _nearest(self, cfs: Iterable[float], wanted: float) -> list[float]:
        """The one or two CFs whose bytes are nearest to `wanted`, nearest first."""
        return sorted(cfs, key=lambda cf: (abs(self.nbytes(cf) - wanted), cf))[:2]

    def _predicted(self, known: Mapping[float, float], wanted: float) -> float:
        """Seconds at `wanted` bytes: on the line through the two CFs with the nearest bytes, which
        never falls; with one CF in proportion to its bytes, without any 0."""
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
            # One or two of the last steps may still have been delayed by the network as it was.
            self._typical, self._network, self._same = {}, {}, RECENT - 2
            self._doubted, self._before = False, None
            self._faster = self._faster or moved < 0
            self.changes += 1
        elif not self._doubted and self._is_doubtful(cf):
            self._typical, self._network = {}, {}
            self._doubted = True
        if self._same > MANY:
            return  # the times stay what they are, so that a slow change shows as well
        # Of more than RECENT times the last do not count yet: they may be of another network.
        times = self._recent[-self._same :]
        times = sorted(times[: max(RECENT, len(times) - RECENT)])
        self._typical[cf] = self._last[cf] = median_low(times)
        # Single steps may have waited for nothing: the second fastest of a few, the third of more.
        self._network[cf] = times[min(1 if self._same <= RECENT else 2, len(times) - 1)]

    def _moved(self, cf: float) -> int:
        """Whether the last steps at the CF in use show a slower network (1), a faster one (-1), or
        the same (0).

        The first RECENT steps are compared with the last stay at this CF, and with other CFs: more
        bytes do not take less time. Later steps are compared with earlier steps of this stay."""
        if self._same < RECENT:
            return 0
        if self._same == RECENT:
            nbytes, before = self.nbytes(cf), [] if self._before is None else [self._before]
            fewer = [t for other, t in self._typical.items() if self.nbytes(other) < nbytes]
            more = [t for other, t in self._network.items() if self.nbytes(other) > nbytes]
            low, high = max(before + fewer, default=0.0), min(before + more, default=inf)
            return self._beyond(RECENT, 0, low, high)
        old = self._typical[cf]
        long = self._beyond(MANY, EXCEPTIONS, old, old) if self._same >= MANY else 0
        return long or self._beyond(RECENT, 0, old, old)

    def _is_doubtful(self, cf: float) -> bool:
        """Whether the CF in use, which was not run before, waits less than the other CFs predict.
        Then the network was slow for a few steps when those were run, or backward hides this
        exchange."""
        others = {other: time for other, time in self._typical.items() if other != cf}
        if not others or self._same != 2 * RECENT or self._before is not None:
            return False
        return self._beyond(RECENT, 0, self._predicted(others, self.nbytes(cf)), inf) != 0

    def _beyond(self, steps: int, exceptions: int, low: float, high: float) -> int:
        """1 if the last steps, but for some exceptions, all waited clearly longer than `high`, -1
        if all clearly less than `low`, else 0."""
        assert self._cf is not None
        times, least = sorted(self._recent[-steps:]), NOISE_SHARE * self._work[self._cf]
        slower = times[exceptions] + least > CHANGED * (high + least)
        faster = times[-1 - exceptions] + least < (low + least) / CHANGED
        return 1 if slower else -1 if faster else 0

    def _check_loaded(self) -> None:
        alike = self._typical.keys() == self._network.keys()
        alike = alike and self._compress.cfs() == self._decode.cfs()
        in_use = self._cf is None or (self._cf in self._typical and self._cf in self._work)
        enough = len(self._recent) >= min(self._same, MANY)
        timed = self._last.keys() | self._typical.keys() <= self._work.keys()
        whole = alike and in_use and enough and timed and self._steps >= 1
        require(whole, "the times of steps contradict each other")
