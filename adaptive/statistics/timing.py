"""Where the time of a step goes, from its first hook call to that of the next step.

compute: forward and backward, from the first forward after the exchange (so with all micro-batches
of an accumulation) to the last hook call. compress: in hook calls. Then backward waits: for the
network (exchange, exposed), and for what was received to be decoded on the process group's threads
(decode). The rest is the optimizer, and waiting for input. On a device all this is what its stream
did.

Timestamps are taken by the host's clock, or on an accelerator, whose stream the host runs ahead of,
by events that it passes; or step times follow from a model instead. Nothing waits for the device.
An event can be read once the device has passed it, and what the ranks agreed on in a step has been
read at the next step's start: by then the device has passed whatever came before the first hook
call of the step that was agreed on. So a step on a device is told of one step later than a step on
the host.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import isfinite, nan
from statistics import median
from typing import Any, NamedTuple, Protocol

import torch

from adaptive.exchange.collectives import Traffic
from adaptive.exchange.link import LinkSpec
from adaptive.statistics.vector import Tally
from policies import state as saved
from policies.step_time import LAST

Timestamp = Any
"""A number by the host's clock; an event on a device."""

Span = tuple[Timestamp, Timestamp]
"""From when to when."""


class Event(Protocol):
    """As `torch.Event`."""

    def record(self) -> None: ...
    def query(self) -> bool: ...
    def elapsed_time(self, other: Any) -> float: ...


class HostInstants:
    """Readings of a clock. delay: steps after which the timestamps of a step can be read."""

    delay = 0

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock

    def __call__(self) -> Timestamp:
        return self.clock()

    def since(self, start: Timestamp, timestamp: Timestamp) -> float:
        """Seconds from one to the other."""
        return float(timestamp - start)


class DeviceInstants(HostInstants):
    """Events on the stream in use. clock: for whoever wants to know what time it is.

    event: makes one that is not recorded yet."""

    delay = 1

    def __init__(self, clock: Callable[[], float], event: Callable[[], Event]) -> None:
        super().__init__(clock)
        self._event = event

    def __call__(self) -> Timestamp:
        event = self._event()
        event.record()
        return event

    def since(self, start: Timestamp, timestamp: Timestamp) -> float:
        """nan if the device has not come by yet: then no rank knows the step's time, since times
        are averaged over the ranks."""
        if not (start.query() and timestamp.query()):
            return nan
        return float(start.elapsed_time(timestamp)) / 1000


def make_timestamps(clock: Callable[[], float], device: torch.device) -> HostInstants:
    """For gradients on `device`; a clock that somebody has injected is believed everywhere."""
    if device.type == "cpu" or clock is not time.perf_counter:
        return HostInstants(clock)
    return DeviceInstants(clock, lambda: torch.Event(device, enable_timing=True))


Since = Callable[[Timestamp, Timestamp], float]
"""Seconds from one timestamp to another."""


class Parts(NamedTuple):
    """Seconds of one step; what they leave of `seconds` is the rest."""

    seconds: float
    compute: float
    compress: float
    decode: float
    exchange: float


@dataclass
class StepTiming(saved.Stateful):
    """The timestamps of one step, of which a state is saved on the host, where they are numbers.

    began: the first hook call. cf, wire, statistics: what was sent. calls: of the hook. waits:
    for the network, within these. exchanged: when the last mean was there. decoded: when a thread
    of the process group was decoding. ended: the next step's first hook call. forward: when its
    forward began, if known.
    """

    _fields = saved.declare(
        began=float,
        cf=float,
        wire=float,
        statistics=float,
        calls=list[tuple[float, float]],
        waits=list[tuple[float, float]],
        exchanged=float | None,
        decoded=list[tuple[float, float]],
        ended=float | None,
        forward=float | None,
    )

    began: Timestamp
    cf: float
    wire: float = 0.0
    statistics: float = 0.0
    calls: list[Span] = field(default_factory=list)
    waits: list[Span] = field(default_factory=list)
    exchanged: Timestamp = None
    decoded: list[Span] = field(default_factory=list)
    ended: Timestamp = None
    forward: Timestamp = None

    def split(self, since: Since) -> Parts:
        """Once it has ended. since: seconds between two timestamps."""

        def at(timestamp: Timestamp) -> float:
            return since(self.began, timestamp)

        def seconds(spans: Iterable[Span]) -> float:
            return sum(since(start, stop) for start, stop in spans)

        left = at(self.calls[-1][1]) if self.calls else 0.0
        exchanged = 0.0 if self.exchanged is None else at(self.exchanged)
        waited = seconds(self.waits)
        compress = seconds(self.calls) - waited
        decode = covered([(at(start), at(stop)) for start, stop in self.decoded], left, exchanged)
        backward = max(0.0, left - compress - waited)
        next_forward = nan if self.forward is None else since(self.forward, self.ended)
        return Parts(
            seconds=at(self.ended),
            compute=backward + next_forward,
            compress=compress,
            decode=decode,
            exchange=waited + max(0.0, exchanged - left - decode),
        )


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
    """A forward pre-hook: notes when a step's forward began.

    Forwards without gradients (an evaluation between two steps) do not count, and a compiled one
    cannot be seen. timestamps: None for the copy that a copied or pickled model takes along.
    """

    def __init__(self, timestamps: Callable[[], Timestamp] | None = None) -> None:
        self._timestamps = timestamps
        self._began: Timestamp = None

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        seen = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if seen and self._timestamps is not None and self._began is None:
            self._began = self._timestamps()

    def take(self) -> Timestamp:
        """When the first forward since the last call began; None if there was none to see."""
        began, self._began = self._began, None
        return began

    def __reduce__(self) -> tuple[type[ForwardMark], tuple[()]]:
        return ForwardMark, ()


def imagined_bytes(wire_bytes: float, statistics: float, scale: float) -> float:
    """Bytes of a step if its gradients were `scale` times as many, its statistics as they are."""
    return scale * (wire_bytes - statistics) + statistics


class ModelledClock:
    """A clock, for `AdaptiveCompressor(clock=...)`, by which a step takes `compute` seconds and
    what a link takes for the bytes that the step sends. Nothing waits, compression is free, and
    what a policy decides owes nothing to the machine: the same run always goes the same way.

    compute: seconds of forward, backward and optimizer, > 0; ValueError otherwise.
    link: that bytes go over, a rank's; None: the network takes no time.
    scale: bytes of gradients count so many times, those of statistics once, so that a small model
    can stand for a large one; > 0.
    """

    def __init__(self, compute: float, link: LinkSpec | None = None, scale: float = 1.0) -> None:
        if not (isfinite(compute) and compute > 0):
            raise ValueError(f"compute must be a finite number of seconds > 0, got {compute!r}")
        if not (isfinite(scale) and scale > 0):
            raise ValueError(f"scale must be a finite number > 0, got {scale!r}")
        self.compute = compute
        self.link = link
        self.scale = scale
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def exchange(self, wire_bytes: float, statistics: float = 0.0) -> float:
        """Seconds that a step's bytes take; statistics: how many of them are."""
        if self.link is None or not wire_bytes:
            return 0.0
        counted = imagined_bytes(wire_bytes, statistics, self.scale)
        return self.link.latency + counted * 8 / self.link.bits_per_second

    def end_step(self, wire_bytes: float, statistics: float = 0.0) -> None:
        """A step that sent so much is over."""
        self.now += self.compute + self.exchange(wire_bytes, statistics)


class Stopwatch:
    """Times the steps of one rank: the last one part by part, and medians at each CF.

    timestamps: how moments are taken. forward: a hook for the model, that sees when its forward
    begins.

    A step lasts from its first hook call to that of the next.
    """

    def __init__(self, timestamps: HostInstants) -> None:
        self.timestamps = timestamps
        self.clock = timestamps.clock
        self.forward = ForwardMark(timestamps)
        self._times: dict[float, deque[float]] = {}
        self._running: StepTiming | None = None
        self._over: deque[StepTiming | None] = deque()  # cannot be read yet
        self._timed: StepTiming | None = None
        self._now: Timestamp = nan

    def stop(self, counts: bool) -> float:
        """The last step is over; returns the time. counts: not the first step of all, which builds
        DDP's buckets."""
        running = self._running
        if isinstance(self.clock, ModelledClock) and running is not None:
            self.clock.end_step(running.wire, running.statistics)
        self._now, forward = self.timestamps(), self.forward.take()
        if running is not None:
            running.ended, running.forward = self._now, forward
        self._over.append(running if counts else None)
        self._timed = self._over.popleft() if len(self._over) > self.timestamps.delay else None
        return self.clock() if self.timestamps.delay else float(self._now)

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
            tally.known["compress_seconds"] = nan
            return
        parts = timed.split(self.timestamps.since)
        if isinstance(self.clock, ModelledClock):
            exchange = self.clock.exchange(timed.wire, timed.statistics)
            parts = parts._replace(compute=self.clock.compute, exchange=exchange)
        times = self._times.setdefault(timed.cf, deque(maxlen=LAST))
        if isfinite(parts.seconds):
            times.append(parts.seconds)
        tally.known |= {
            "seconds": parts.seconds,
            "median_seconds": median(times) if times else nan,
            "compress_seconds": parts.compress,
            "exchange_seconds": parts.exchange,
            "decode_seconds": parts.decode,
            "compute_seconds": parts.compute,
        }

    @property
    def timed(self) -> tuple[float, float]:
        """CF and wire bytes of the step that was told of; nan if there was none."""
        return (self._timed.cf, self._timed.wire) if self._timed else (nan, nan)

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

    def state_dict(self) -> dict[str, Any]:
        kept = None if self.timestamps.delay else self._running
        return {
            "times": [(cf, list(times)) for cf, times in self._times.items()],
            "timing": None if kept is None else kept.state_dict(),
            "saved_at": self.clock(),
        }

    def load_state_dict(self, state: Mapping[str, Any], same_clock: bool) -> float:
        """same_clock: the clock goes on from where it stood when the state was taken; otherwise
        the interval between is a pause and is not timed. Returns the seconds of that pause."""
        saved_at = saved.read(state, "saved_at", float)
        if isinstance(self.clock, ModelledClock):
            self.clock.now = saved_at
        times = saved.read(state, "times", dict[float, list[float]])
        self._times = {cf: deque(of_one, maxlen=LAST) for cf, of_one in times.items()}
        timing = saved.read(state, "timing", Mapping | None)
        running = None if timing is None else StepTiming(began=nan, cf=nan)
        if running is not None:
            running.load_state_dict(timing)
        self._running = running if same_clock else None
        self._over = deque()
        self.forward.take()  # of a step that was not part of the run
        return 0.0 if same_clock else self.clock() - saved_at
