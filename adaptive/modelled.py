"""Step times by a model instead of a measurement."""

from __future__ import annotations

from math import isfinite

from adaptive.link import LinkSpec


class ModelledClock:
    """A clock, for `AdaptiveCompressor(clock=...)`, by which a step takes `compute` seconds and
    what a link takes for the bytes that the step sends. Nothing waits, compression is free, and
    what a policy decides owes nothing to the machine: the same run always goes the same way.

    compute: seconds of forward, backward and optimizer, > 0; ValueError otherwise.
    link: that bytes go over, a rank's; None: the network takes no time.
    """

    def __init__(self, compute: float, link: LinkSpec | None = None) -> None:
        if not (isfinite(compute) and compute > 0):
            raise ValueError(f"compute must be a finite number of seconds > 0, got {compute!r}")
        self.compute = compute
        self.link = link
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def exchange(self, wire_bytes: float) -> float:
        """Seconds that a step's bytes take."""
        if self.link is None or not wire_bytes:
            return 0.0
        return self.link.latency + wire_bytes * 8 / self.link.bits_per_second

    def end_step(self, wire_bytes: float) -> None:
        """A step that sent so much is over."""
        self.now += self.compute + self.exchange(wire_bytes)
