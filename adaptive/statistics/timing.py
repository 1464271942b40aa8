"""Where the time of a step goes, from its first hook call to that of the next step.

compute: forward and backward, from the first forward after the exchange (so with all micro-batches
of an accumulation) to the last hook call. compress: in hook calls. exchange: backward then waits
for the network (what is not hidden behind backward). decode: it waits for what was received to be
decoded on the process group's threads. The rest is the optimizer, and waiting for input.

A timestamp is a reading of the host's clock, or on a device, whose stream the host runs ahead of,
an event on that stream. Nothing waits for the device: a step is told of one step later than on the
host, when the device has surely passed it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import isfinite, nan
from statistics import median
from typing import Any

import torch

from adaptive.exchange.collectives import Traffic
from adaptive.exchange.link import StepClock
from policies import state as saved
from policies.step_time import LAST

Timestamp = Any
"""A number by the host's clock; an event on a device."""

Span = tuple[Timestamp, Timestamp]
"""From when to when."""


@dataclass(frozen=True)
class Timestamps:
    """Takes timestamps, when called, and compares them.

    clock: seconds. event: makes an event that is not recorded yet (`torch.Event`); None: timestamps
    are readings of the clock.
    """

    clock: Callable[[], float]
    event: Callable[[], Any] | None = None

    @classmethod
    def of(cls, clock: Callable[[], float], device: torch.device) -> Timestamps:
        """For gradients on `device`; a clock that somebody has injected is believed everywhere."""
        if device.type == "cpu" or clock is not time.perf_counter:
            return cls(clock)
        return cls(clock, lambda: torch.Event(device, enable_timing=True))

    def __call__(self) -> Timestamp:
        if self.event is None:
            return self.clock()
        event = self.event()
        event.record()
        return event

    def between(self, start: Timestamp, stop: Timestamp) -> float:
        """Seconds; nan if the device has not come by yet: then no rank knows the step's time, since
        times are averaged over the ranks."""
        if self.event is None:
            return float(stop - start)
        if not (start.query() and stop.query()):
            return nan
        return float(start.elapsed_time(stop)) / 1000


@dataclass
class StepTiming(saved.Stateful):
    """The timestamps of one step; on the host, where they are numbers, those of a step that has
    not ended are saved.

    began: the first hook call. cf, wire, statistics, down: what was sent. steps: that the rank
    takes until the next exchange, more than one with local steps. calls: of the hook. waits: for
    the network, within these. exchanged: when the last mean was there. decoded: when a thread of
    the process group was decoding. ended: the next step's first hook call. forward: when its
    forward began, if known.
    """

    _fields = saved.declare(
        **dict.fromkeys(("began", "cf", "wire", "statistics", "down"), float),
        **dict.fromkeys(("calls", "waits", "decoded"), list[tuple[float, float]]),
        exchanged=float | None,
        steps=int,
    )

    began: Timestamp
    cf: float
    steps: int = 1
    wire: float = 0.0
    statistics: float = 0.0
    down: float = 0.0
    calls: list[Span] = field(default_factory=list)
    waits: list[Span] = field(default_factory=list)
    exchanged: Timestamp = None
    decoded: list[Span] = field(default_factory=list)
    ended: Timestamp = None
    forward: Timestamp = None

    def split(self, between: Callable[[Timestamp, Timestamp], float]) -> dict[str, float]:
        """The seconds of a step that has ended, by the names that `Statistics` has for them.
        between: seconds from one timestamp to another."""

        def at(timestamp: Timestamp) -> float:
            return between(self.began, timestamp)

        left = at(self.calls[-1][1]) if self.calls else 0.0
        exchanged = 0.0 if self.exchanged is None else at(self.exchanged)
        waited = sum(between(*span) for span in self.waits)
        compress = sum(between(*span) for span in self.calls) - waited
        decode = covered([(at(start), at(stop)) for start, stop in self.decoded], left, exchanged)
        backward = max(0.0, left - compress - waited)
        next_forward = nan if self.forward is None else between(self.forward, self.ended)
        return {
            "seconds": at(self.ended),
            "compress_seconds": compress,
            "exchange_seconds": waited + max(0.0, exchanged - left - decode),
            "decode_seconds": decode,
            "compute_seconds": backward + next_forward,
        }


def covered(spans: Iterable[tuple[float, float]], start: float, stop: float) -> float:
    """Seconds of [start, stop] in which at least one span lies."""
    total, reached = 0.0, start
    for began, ended in sorted(spans):
        began, ended = max(began, reached), min(ended, stop)
        if ended > began:
            total += ended - began
            reached = ended
    return total


class ForwardMark:
    """A forward pre-hook that notes when a step's forward began; one without gradients (an
    evaluation between two steps) does not count, and a compiled one cannot be seen.

    timestamps: None for the copy that a copied or pickled model takes along. begins: called before
    a forward with gradients.
    """

    def __init__(self, timestamps: Callable[[], Timestamp] | None = None) -> None:
        self._timestamps = timestamps
        self._began: Timestamp = None
        self.begins: Callable[[], Callable[[], None] | None] = lambda: None  # a weak reference

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        seen = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        begins = self.begins() if seen else None
        if begins is not None:
            begins()
        if seen and self._timestamps is not None and self._began is None:
            self._began = self._timestamps()

    def take(self) -> Timestamp:
        """When the first forward since the last call began; None if there was none to see."""
        began, self._began = self._began, None
        return began

    def __reduce__(self) -> tuple[type[ForwardMark], tuple[()]]:
        return ForwardMark, ()


class Stopwatch:
    """Times the steps of one rank: the last one part by part, and medians at each CF.

    A step lasts from its first hook call to that of the next. forward: a hook for the model, that
    sees when its forward begins.
    """

    def __init__(self, timestamps: Timestamps) -> None:
        self.timestamps = timestamps
        self.clock = timestamps.clock
        self.forward = ForwardMark(timestamps)
        self._on_device = timestamps.event is not None
        self._times: dict[float, deque[float]] = {}
        self._times_of = 1  # so many local steps
        self._running: StepTiming | None = None
        # The steps that are over, the one that can be read by now first; None: it does not count.
        self._over: deque[StepTiming | None] = deque(maxlen=2 if self._on_device else 1)
        self._now: Timestamp = nan
        self.timed = (nan, nan, 1)
        """CF, wire bytes and local steps of the step that `start` has told of last; nan if there
        was none."""

    def stop(self, counts: bool) -> float:
        """The last step is over; returns the time. counts: not the first step of all, which builds
        DDP's buckets."""
        if isinstance(self.clock, StepClock):
            self.clock.now = self.ends()
        self._now, forward = self.timestamps(), self.forward.take()
        if self._running is not None:
            self._running.ended, self._running.forward = self._now, forward
        self._over.append(self._running if counts else None)
        return self.clock() if self._on_device else float(self._now)

    def ends(self) -> float:
        """When the running step is over, for whoever cannot wait for the next: now, or, by a
        modelled clock, when its bytes are there."""
        clock, running = self.clock, self._running
        if not isinstance(clock, StepClock) or running is None:
            return clock()
        return clock() + clock.step(running.wire, running.statistics, running.steps, running.down)

    def start(self, cf: float, steps: int = 1) -> dict[str, float]:
        """A step at `cf` begins where the last one stopped, and the next exchange comes after so
        many `steps`. Returns, by the names of `Statistics`, what the last step took that can be
        read by now."""
        self._running = StepTiming(self._now, cf, steps)
        timed = self._over[0] if len(self._over) == self._over.maxlen else None
        self.timed = (timed.cf, timed.wire, timed.steps) if timed else (nan, nan, 1)
        if timed is None:
            return {}
        if timed.steps != self._times_of:
            self._times, self._times_of = {}, timed.steps
        seconds = timed.split(self.timestamps.between)
        if isinstance(self.clock, StepClock):
            seconds["compute_seconds"] = self.clock.compute * timed.steps
            seconds["exchange_seconds"] = self.clock.exposed(
                timed.wire, timed.statistics, timed.down
            )
        times = self._times.setdefault(timed.cf, deque(maxlen=LAST))
        if isfinite(seconds["seconds"]):
            times.append(seconds["seconds"])
        return {**seconds, "median_seconds": median(times) if times else nan}

    def hook_left(self, entered: Timestamp, waits: Iterable[Span]) -> None:
        """A hook call that began at `entered` is over; when it waited for the network."""
        assert self._running is not None
        self._running.calls.append((entered, self.timestamps()))
        self._running.waits += waits

    def bucket_done(self, decoded: Iterable[Span]) -> None:
        """A bucket's mean is there; when it was `decoded` (called on a thread of the process
        group)."""
        if self._running is not None:
            self._running.decoded += decoded
            self._running.exchanged = self.timestamps()

    def sent(self, traffic: Traffic) -> None:
        """What the running step has put on the wire."""
        assert self._running is not None
        self._running.wire, self._running.statistics = traffic.wire, traffic.statistics
        self._running.down = traffic.down

    def state_dict(self) -> dict[str, Any]:
        running = None if self._on_device else self._running
        return {
            "times": [(cf, list(times)) for cf, times in self._times.items()],
            "times_of": self._times_of,
            "timing": None if running is None else running.state_dict(),
            "saved_at": self.clock(),
        }

    def load_state_dict(self, state: Mapping[str, Any], same_clock: bool) -> float:
        """same_clock: the clock goes on from where it stood when the state was taken; otherwise
        the interval between is a pause and is not timed. Returns the seconds of that pause."""
        saved_at = saved.read(state, "saved_at", float)
        times = saved.read(state, "times", dict[float, list[float]])
        times_of = saved.read(state, "times_of", int)
        timing = saved.read(state, "timing", Mapping | None)
        running = None if timing is None else StepTiming(began=nan, cf=nan)
        if running is not None:
            running.load_state_dict(timing)
        if isinstance(self.clock, StepClock):
            self.clock.now = saved_at
        self._times = {cf: deque(of_one, maxlen=LAST) for cf, of_one in times.items()}
        self._times_of = times_of
        self._running = running if same_clock else None
        self._over = deque(maxlen=self._over.maxlen)
        self.forward.take()  # of a step that was not part of the run
        return 0.0 if same_clock else self.clock() - saved_at
