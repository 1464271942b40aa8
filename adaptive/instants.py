"""Moments of a step, to be measured between later: by the host's clock, or on an accelerator, whose
stream the host runs ahead of, by events that it passes.

Nothing waits for the device. An event can be read once the device has passed it, and what the ranks
agreed on in a step has been read at the next step's start: by then the device has passed whatever
came before the first hook call of the step that was agreed on. So a step on a device is told of one
step later than a step on the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from math import nan
from typing import Any, Protocol

import torch

Instant = Any
"""A number by the host's clock; an event on a device."""

Span = tuple[Instant, Instant]
"""From when to when."""


class Event(Protocol):
    """As `torch.Event`."""

    def record(self) -> None: ...
    def query(self) -> bool: ...
    def elapsed_time(self, other: Any) -> float: ...


class HostInstants:
    """Readings of a clock. delay: steps after which the instants of a step can be read."""

    delay = 0

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock

    def __call__(self) -> Instant:
        return self.clock()

    def since(self, start: Instant, instant: Instant) -> float:
        """Seconds from one to the other."""
        return float(instant - start)


class DeviceInstants(HostInstants):
    """Events on the stream in use. clock: for whoever wants to know what time it is.

    event: makes one that is not recorded yet."""

    delay = 1

    def __init__(self, clock: Callable[[], float], event: Callable[[], Event]) -> None:
        super().__init__(clock)
        self._event = event

    def __call__(self) -> Instant:
        event = self._event()
        event.record()
        return event

    def since(self, start: Instant, instant: Instant) -> float:
        """nan if the device has not come by yet: then no rank knows the step's time, since times
        are averaged over the ranks."""
        if not (start.query() and instant.query()):
            return nan
        return float(start.elapsed_time(instant)) / 1000


def make_instants(clock: Callable[[], float], device: torch.device) -> HostInstants:
    """For gradients on `device`; a clock that somebody has injected is believed everywhere."""
    if device.type == "cpu" or clock is not time.perf_counter:
        return HostInstants(clock)
    return DeviceInstants(clock, lambda: torch.Event(device, enable_timing=True))
