"""Times the steps of one rank: what the last one took, part by part, and medians at each CF."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from copy import deepcopy
from math import isfinite, nan
from statistics import median
from typing import Any

from adaptive.exchange import Traffic
from adaptive.instants import HostInstants, Instant, Span
from adaptive.modelled import ModelledClock
from adaptive.tally import Tally
from adaptive.timing import ForwardMark, StepTiming
from policies import state as saved
from policies.step_time import LAST


class Stopwatch:
    """instants: how moments are taken. forward: a hook for the model, that sees when its forward
    begins.

    A step lasts from its first hook call to that of the next.
    """

    def __init__(self, instants: HostInstants) -> None:
        self.instants = instants
        self.clock = instants.clock
        self.forward = ForwardMark(instants)
        self._times: dict[float, deque[float]] = {}
        self._running: StepTiming | None = None
        self._over: deque[StepTiming | None] = deque()  # cannot be read yet
        self._timed: StepTiming | None = None
        self._now: Instant = nan

    def stop(self, counts: bool) -> float:
        """The last step is over; returns the time. counts: not the first step of all, which builds
        DDP's buckets."""
        running = self._running
        if isinstance(self.clock, ModelledClock) and running is not None:
            self.clock.end_step(running.wire, running.statistics)
        self._now, forward = self.instants(), self.forward.take()
        if running is not None:
            running.ended, running.forward = self._now, forward
        self._over.append(running if counts else None)
        self._timed = self._over.popleft() if len(self._over) > self.instants.delay else None
        return self.clock() if self.instants.delay else float(self._now)

    def ends(self) -> float:
        """When the running step is over, for whoever cannot wait for the next: now, or, by a
        modelled clock, when its bytes are there."""
        running = self._running
        if not isinstance(self.clock, ModelledClock) or running is None:
            return self.clock()
        exchange = self.clock.exchange(running.wire, running.statistics)
        return self.clock() + (self.clock.compute + exchange)  # rounded as end_step() does

    def start(self, cf: float) -> None:
        """A step begins, where the last one stopped, that is sent at `cf`."""
        self._running = StepTiming(self._now, cf)

    def tell(self, tally: Tally) -> None:
        """Enter what a step took that was stopped and can be read by now; it is told of with the
        statistics of the one that begins."""
        timed = self._timed
        if timed is None:
            tally.compress_seconds = nan
            return
        parts = timed.split(self.instants.since)
        if isinstance(self.clock, ModelledClock):
            exchange = self.clock.exchange(timed.wire, timed.statistics)
            parts = parts._replace(compute=self.clock.compute, exchange=exchange)
        times = self._times.setdefault(timed.cf, deque(maxlen=LAST))
        if isfinite(parts.seconds):
            times.append(parts.seconds)
        tally.seconds = parts.seconds
        tally.median_seconds = median(times) if times else nan
        tally.compress_seconds = parts.compress
        tally.exchange_seconds = parts.exchange
        tally.decode_seconds = parts.decode
        tally.compute_seconds = parts.compute

    @property
    def timed(self) -> tuple[float, float]:
        """CF and wire bytes of the step that was told of; nan if there was none."""
        return (self._timed.cf, self._timed.wire) if self._timed else (nan, nan)

    def hook_left(self, entered: Instant, waits: Iterable[Span]) -> None:
        """A hook call that began at `entered` is over; when it waited for the network."""
        assert self._running is not None
        self._running.calls.append((entered, self.instants()))
        self._running.waits += waits

    def bucket_done(self, decoded: Iterable[Span]) -> None:
        """A bucket's mean is there; when it was `decoded` (called on a thread of the process
        group)."""
        if self._running is not None:
            self._running.decoded += decoded
            self._running.exchanged = self.instants()

    def sent(self, traffic: Traffic) -> None:
        """What the running step has put on the wire."""
        assert self._running is not None
        self._running.wire, self._running.statistics = traffic.wire, traffic.statistics

    def state_dict(self) -> dict[str, Any]:
        kept = self._running is not None and not self.instants.delay
        return {
            "times": [(cf, list(times)) for cf, times in self._times.items()],
            "timing": deepcopy(vars(self._running)) if kept else None,
            "saved_at": self.clock(),
        }

    def load_state_dict(self, state: Mapping[str, Any], same_clock: bool) -> float:
        """same_clock: the clock goes on from where it stood when the state was taken; otherwise
        the interval between is a pause and is not timed. Returns the seconds of that pause."""
        saved_at = saved.number(state, "saved_at")
        if isinstance(self.clock, ModelledClock):
            self.clock.now = saved_at
        times = saved.lists_by_cf(state, "times")
        self._times = {cf: deque(of_one, maxlen=LAST) for cf, of_one in times.items()}
        running = saved.field(state, "timing") is not None
        timing = StepTiming.from_state(saved.part(state, "timing")) if running else None
        self._running = timing if same_clock else None
        self._over = deque()
        self.forward.take()  # of a step that was not part of the run
        return 0.0 if same_clock else self.clock() - saved_at
