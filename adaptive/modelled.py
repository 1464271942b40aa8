"""Step times by a model instead of a measurement."""

from __future__ import annotations

from math import isfinite

from adaptive.link import LinkSpec


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
