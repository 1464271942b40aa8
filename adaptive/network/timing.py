"""The times of the parts of a step. A step lasts from its first hook call to the next step's.

compute: forward and backward, from the first forward after the exchange to the last hook call, all
micro-batches of gradient accumulation included. compress: hook calls, without the waits inside.
exchange: waiting for the network, as far as backward does not hide the wait. decode: waiting for
the process group's threads to decode. The rest is the optimizer and waiting for input.

On the host a timestamp is a reading of the clock. On a device, whose stream runs behind the host, a
timestamp is an event on that stream. Nothing waits for the device: the times of a step are read one
step later than on the host, when the device has passed the events.

On the host each hook call delays backward. On a device the hook's work runs on a separate stream.
It delays a step only while backward's stream waits for the hook's stream: from the end of
backward's work to the end of the hook's work (`held_up`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf, isfinite, isnan, nan
from statistics import median
from typing import Any

import torch

from adaptive.network.collectives import Traffic
from adaptive.network.link import StepClock
from policies import state as saved
from policies.step_time import LAST

MOST_CFS = 256
"""The largest number of CFs whose step times are kept. A policy may send another CF in each step.
"""

Timestamp = Any
"""A number by the host's clock; an event on a device."""

Span = tuple[Timestamp, Timestamp]
"""(start, stop)."""


@dataclass(frozen=True)
class Timestamps:
    """Takes a timestamp when called, and compares timestamps.

    clock: seconds. event: makes an unrecorded `torch.Event`; None: timestamps are readings of the
    clock.
    """

    clock: Callable[[], float]
    event: Callable[[], Any] | None = None

    @classmethod
    def of(cls, clock: Callable[[], float], device: torch.device) -> Timestamps:
        """The timestamps for gradients on `device`: events on a device, readings of the clock on
        the host, and with any other clock than `time.perf_counter` (of a test or a model)."""
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
        """Seconds from start to stop; nan if the device has not passed both events yet. One rank's
        nan makes the ranks' mean nan."""
        if self.event is None:
            return float(stop - start)
        if not (start.query() and stop.query()):
            return nan
        return float(start.elapsed_time(stop)) / 1000


@dataclass
class StepTiming(saved.Stateful):
    """The timestamps of one step. A state contains those of a step that has not ended, if they are
    numbers (on the host).

    began: the first hook call. ended: the next step's first hook call. forward: the start of the
    next step's forward; None if unknown. calls: spans of hook calls; on a device, spans in which
    backward's stream waited for a hook call. waits: spans inside hook calls of waiting for the
    network. arrivals: spans inside hook calls of waiting for means, decoding included. exchanged:
    when the last mean had been decoded. decoded: spans in which a thread of the process group
    decoded. cf: the CF sent. wire, statistics, down, hops: see `Traffic`. steps: number of steps
    until the next exchange, more than one with local steps.
    """

    _fields = saved.declare(
        **dict.fromkeys(("began", "cf", "wire", "statistics", "down"), float),
        **dict.fromkeys(("calls", "waits", "arrivals", "decoded"), list[tuple[float, float]]),
        exchanged=float | None,
        steps=int,
        hops=int,
    )

    began: Timestamp
    cf: float
    steps: int = 1
    wire: float = 0.0
    statistics: float = 0.0
    down: float = 0.0
    hops: int = 1
    calls: list[Span] = field(default_factory=list)
    waits: list[Span] = field(default_factory=list)
    arrivals: list[Span] = field(default_factory=list)
    exchanged: Timestamp = None
    decoded: list[Span] = field(default_factory=list)
    ended: Timestamp = None
    forward: Timestamp = None

    def split(self, between: Callable[[Timestamp, Timestamp], float]) -> dict[str, float]:
        """The seconds of each part of a step that has ended, by their names in `Statistics`.
        between: seconds from one timestamp to another."""

        def at(timestamp: Timestamp) -> float:
            return between(self.began, timestamp)

        calls, waits, arrivals, decoded = (
            [(at(start), at(stop)) for start, stop in spans]
            for spans in (self.calls, self.waits, self.arrivals, self.decoded)
        )
        left = calls[-1][1] if calls else 0.0
        exchanged = 0.0 if self.exchanged is None else at(self.exchanged)
        waited = shared([*waits, *arrivals], calls)
        compress = max(0.0, covered(calls) - waited)
        decode_inside = shared(decoded, arrivals)
        decode_after = covered(decoded, left, exchanged)
        network = max(0.0, waited - decode_inside) + max(0.0, exchanged - left - decode_after)
        backward = max(0.0, left - compress - waited)
        next_forward = nan if self.forward is None else between(self.forward, self.ended)
        parts = {
            "seconds": at(self.ended),
            "compress_seconds": compress,
            "exchange_seconds": network,
            "decode_seconds": decode_inside + decode_after,
            "compute_seconds": backward + next_forward,
        }
        unknown = isnan(parts["seconds"])  # the device has not passed all of these events
        return dict.fromkeys(parts, nan) if unknown else parts


def covered(spans: Iterable[tuple[float, float]], start: float = -inf, stop: float = inf) -> float:
    """Seconds of [start, stop] inside at least one span."""
    total, reached = 0.0, start
    for began, ended in sorted(spans):
        began, ended = max(began, reached), min(ended, stop)
        if ended > began:
            total += ended - began
            reached = ended
    return total


def shared(spans: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]) -> float:
    """Seconds inside one of `spans` and inside one of `others`."""
    return max(0.0, covered(spans) + covered(others) - covered([*spans, *others]))


class ForwardMark:
    """A forward pre-hook that records when the forward of a step began. A forward without gradients
    (an evaluation) is not recorded. In a compiled model the hook runs outside the graph.

    timestamps: None in a copied or pickled model, whose hook does nothing. begins: a weak reference
    to a callback, which is called before each forward with gradients.
    """

    def __init__(self, timestamps: Callable[[], Timestamp] | None = None) -> None:
        self._timestamps = timestamps
        self._began: Timestamp = None
        self.begins: Callable[[], Callable[[], None] | None] = lambda: None
        self._note = torch.compiler.disable(self._forward_begins)

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        if torch.is_grad_enabled():
            self._note()

    def _forward_begins(self) -> None:
        begins = self.begins()
        if begins is not None:
            begins()
        if self._timestamps is not None and self._began is None:
            self._began = self._timestamps()

    def take(self) -> Timestamp:
        """When the first forward since the last `take` began; None if there was none."""
        began, self._began = self._began, None
        return began

    def __reduce__(self) -> tuple[type[ForwardMark], tuple[()]]:
        return ForwardMark, ()


class Stopwatch:
    """Times the steps of one rank: the parts of the last step, and the median step time at each CF.

    forward: the model's forward pre-hook. timed: (CF, wire bytes, number of steps until the next
    exchange) of the step whose times `start` returned last; nan if it returned none.
    """

    def __init__(self, timestamps: Timestamps) -> None:
        self.timestamps = timestamps
        self.clock = timestamps.clock
        self.forward = ForwardMark(timestamps)
        self._on_device = timestamps.event is not None
        self._times: dict[float, deque[float]] = {}
        self._times_of = 1  # `StepTiming.steps` of all times in `_times`
        self._running: StepTiming | None = None
        # Steps that have ended, the next one to be read first; None: a step that does not count.
        self._ended: deque[StepTiming | None] = deque(maxlen=2 if self._on_device else 1)
        self._now: Timestamp = nan
        self.timed = (nan, nan, 1)

    def stop(self, counts: bool) -> float:
        """End the running step. Returns the clock's time. counts: False for the first step of a
        run, in which DDP rebuilds its buckets."""
        if isinstance(self.clock, StepClock):
            self.clock.now = self.ends()
        self._now, forward = self.timestamps(), self.forward.take()
        if self._running is not None:
            self._running.ended, self._running.forward = self._now, forward
        self._ended.append(self._running if counts else None)
        return self.clock() if self._on_device else float(self._now)

    def ends(self) -> float:
        """The time at which the running step ends: now; with a modelled clock the time at which the
        step's bytes have arrived."""
        clock, running = self.clock, self._running
        if not isinstance(clock, StepClock) or running is None:
            return clock()
        sent = running.wire, running.statistics, running.steps, running.down
        return clock() + clock.step(*sent, running.cf, running.hops)

    def start(self, cf: float, steps: int = 1, delay: int = 0) -> dict[str, float]:
        """Begin a step at `cf` where the last step ended. Returns the seconds of the parts of the
        last readable step, by their names in `Statistics`.

        steps: number of steps until the next exchange. delay: number of further steps until the
        mean of that exchange arrives."""
        self._running = StepTiming(self._now, cf, steps)
        timed = self._ended[0] if len(self._ended) == self._ended.maxlen else None
        self.timed = (timed.cf, timed.wire, timed.steps) if timed else (nan, nan, 1)
        if timed is None:
            return {}
        if timed.steps != self._times_of:
            self._times, self._times_of = {}, timed.steps
        seconds = timed.split(self.timestamps.between)
        if isinstance(self.clock, StepClock):
            self.clock.delay = delay
            seconds["compute_seconds"] = self.clock.compute * timed.steps
            seconds["compress_seconds"] = self.clock.coding(timed.cf)
            seconds["exchange_seconds"] = self.clock.exposed(
                timed.wire, timed.statistics, timed.down, timed.cf, timed.hops
            )
        # The CF in use comes last, so the first one was not in use for the longest time.
        times = self._times[timed.cf] = self._times.pop(timed.cf, deque(maxlen=LAST))
        if len(self._times) > MOST_CFS:
            del self._times[next(iter(self._times))]
        if isfinite(seconds["seconds"]):
            times.append(seconds["seconds"])
        return {**seconds, "median_seconds": median(times) if times else nan}

    def hook_left(
        self, entered: Timestamp, waits: Iterable[Span], arrivals: Iterable[Span] = ()
    ) -> None:
        """Record the end of a hook call that began at `entered`. waits: spans in which the call
        waited for the network. arrivals: spans in which it waited for means."""
        if self._running is not None:  # None after a state was loaded between two exchanges
            if not self._on_device:
                self._running.calls.append((entered, self.timestamps()))
            self._running.waits += waits
            self._running.arrivals += arrivals

    def backward_waited(self) -> None:
        """Record that backward, after the last hook call, has waited for the network until now. On
        a device nothing is recorded, because backward's stream waits, and the host does not."""
        if self._running is not None and not self._on_device:
            span = (self._running.calls[-1][1], self.timestamps())
            self._running.calls.append(span)
            self._running.waits.append(span)

    @contextmanager
    def held_up(self) -> Iterator[None]:
        """The context of a hook call at whose end backward's stream waits for the hook's stream. On
        a device this wait is recorded as the time of the call."""
        before = self.timestamps() if self._on_device else None
        yield
        if self._on_device and self._running is not None:
            self._running.calls.append((before, self.timestamps()))

    def decoded(self, spans: Iterable[Span]) -> None:
        """Record spans in which threads of the process group decoded."""
        if self._running is not None:
            self._running.decoded += spans

    def bucket_done(self, decoded: Iterable[Span]) -> None:
        """Record that a bucket's mean has been decoded, and the spans of decoding. Called on a
        thread of the process group."""
        if self._running is not None:
            self.decoded(decoded)
            self._running.exchanged = self.timestamps()

    def sent(self, traffic: Traffic) -> None:
        """Record the bytes that the running step put on the wire."""
        assert self._running is not None
        self._running.wire, self._running.statistics = traffic.wire, traffic.statistics
        self._running.down, self._running.hops = traffic.down, traffic.hops

    def state_dict(self) -> dict[str, Any]:
        running = None if self._on_device else self._running
        return {
            "times": [(cf, list(times)) for cf, times in self._times.items()],
            "times_of": self._times_of,
            "timing": None if running is None else running.state_dict(),
            "saved_at": self.clock(),
        }

    def load_state_dict(self, state: Mapping[str, Any], same_clock: bool) -> float:
        """Load a `state_dict()`. Returns the seconds since the state was saved, which belong to no
        step. same_clock: the clock goes on from the saved time, so 0 seconds have passed."""
        saved_at = saved.read(state, "saved_at", float)
        times = saved.read(state, "times", dict[float, list[float]])
        times_of = saved.read(state, "times_of", int)
        timing = saved.read(state, "timing", Mapping | None)
        running = None if timing is None else StepTiming(began=nan, cf=nan)
        if running is not None:
            running.load_state_dict(timing)
        self._times = {cf: deque(of_one, maxlen=LAST) for cf, of_one in times.items()}
        self._times_of = times_of
        self._running = running if same_clock else None
        self._ended = deque(maxlen=self._ended.maxlen)
        return 0.0 if same_clock else self.clock() - saved_at

    def go_on(self, saved_at: float) -> None:
        """Let a modelled clock go on from `saved_at`, when the loaded state was saved."""
        if isinstance(self.clock, StepClock):
            self.clock.now = saved_at
        self.forward.take()  # forget a forward before the load
