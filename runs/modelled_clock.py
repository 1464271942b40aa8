"""A clock that only computes: step times are modelled for a link, and nobody waits."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, isfinite, log
from types import MappingProxyType

from adaptive.network.link import LinkSpec, StepClock
from policies import DENSE
from policies.step_time import overlapped


@dataclass(frozen=True)
class ServerSpec:
    """The link of a parameter server: bits a second that arrive there from all `workers` together
    (`up`), and that it sends to them (`down`)."""

    up: LinkSpec
    down: LinkSpec
    workers: int

    @classmethod
    def parse(cls, text: str, workers: int) -> ServerSpec:
        """From "1gbit", or "1gbit/500mbit" for up and down. ValueError for anything else."""
        try:
            rates = [LinkSpec.parse(rate) for rate in re.split(r"/(?!s)", text)]
        except ValueError:
            rates = []
        if len(rates) not in (1, 2) or any(rate.latency for rate in rates):
            raise ValueError(
                f"server must be a rate such as '1gbit', or two as in '1gbit/500mbit', up and "
                f"down, without a latency, got {text!r}"
            )
        return cls(rates[0], rates[-1], workers)

    @property
    def nbytes(self) -> float:
        """Bytes on the server's link, of each that ranks would send which are the server together.
        Each of those keeps what it would send to itself: a part in N of what a worker sends."""
        return self.workers**2 / (self.workers - 1) if self.workers > 1 else 0.0

    def __str__(self) -> str:
        return f"{self.up}" + (f" up, {self.down} down" if self.down != self.up else "")


def imagined_bytes(wire_bytes: float, statistics: float, scale: float) -> float:
    """Bytes of a step if its gradients were `scale` times as many, its statistics as they are."""
    return scale * (wire_bytes - statistics) + statistics


class ModelledClock(StepClock):
    """A clock, for `AdaptiveCompressor(clock=...)`, by which a step takes `compute` seconds, those
    of compression, and what a link takes for the bytes that the step sends. Nothing waits, and what
    a policy decides owes nothing to the machine: the same run always goes the same way.

    compute: seconds of forward, backward and optimizer, > 0; ValueError otherwise.
    link: that bytes go over, a rank's; None: the network takes no time.
    scale: bytes of gradients count so many times, those of statistics once, so that a small model
    can stand for a large one; > 0.
    overlap: the compressor's: so many local steps hide the network's time.
    delay: the compressor's: a round may be under way while all but one of so many steps compute.
    server: that makes the means, instead of the ranks; `link` is then a worker's to the server.
    coded: seconds of compressing and decoding by CF; a CF that is not there takes as long as the
        nearest. Empty: compression is free.
    """

    def __init__(
        self,
        compute: float,
        link: LinkSpec | None = None,
        scale: float = 1.0,
        overlap: int | None = None,
        delay: int = 0,
        server: ServerSpec | None = None,
        coded: Mapping[float, float] = MappingProxyType({}),
    ) -> None:
        if not (isfinite(compute) and compute > 0):
            raise ValueError(f"compute must be a finite number of seconds > 0, got {compute!r}")
        if not (isfinite(scale) and scale > 0):
            raise ValueError(f"scale must be a finite number > 0, got {scale!r}")
        self.compute = compute
        self.link = link
        self.scale = scale
        self.overlap = overlap
        self.delay = delay
        self.server = server
        self.coded = coded
        self.network = "" if link is None else f"modelled {link} link"

    def exchange(
        self, wire_bytes: float, statistics: float = 0.0, down: float = 0.0, hops: int = 1
    ) -> float:
        """Seconds that a step's bytes take; statistics: how many of them are. down: how many bring
        means back. hops: messages that wait for one another."""
        if not wire_bytes:
            return 0.0
        return self.latency(hops) + self.sending(wire_bytes, statistics, down)

    def latency(self, hops: int) -> float:
        """Seconds of so many messages without their bytes. With a server there is one to it in the
        place of a ring's, which would go through all other workers."""
        if self.link is None:
            return 0.0
        ring = 1 if self.server is None else max(1, self.server.workers - 1)
        return self.link.latency * hops / ring

    def sending(self, wire_bytes: float, statistics: float = 0.0, down: float = 0.0) -> float:
        """The part of that in which the links are busy."""
        counted = imagined_bytes(wire_bytes, statistics, self.scale)
        own_rate = inf if self.link is None else self.link.bits_per_second
        if self.server is None:
            return counted * 8 / own_rate
        back = imagined_bytes(down, statistics / 2, self.scale)
        ways = ((counted - back, self.server.up), (back, self.server.down))
        total = [(nbytes * self.server.nbytes, link.bits_per_second) for nbytes, link in ways]
        workers = self.server.workers
        return sum(8 * nbytes * max(1 / rate, 1 / own_rate / workers) for nbytes, rate in total)

    def exposed(
        self,
        wire_bytes: float,
        statistics: float = 0.0,
        down: float = 0.0,
        cf: float = DENSE,
        hops: int = 1,
    ) -> float:
        """What of that policies are told: with a delay what is not hidden, else all of it."""
        if self.delay:
            own = self.compute + self.coding(cf)
            return self.step(wire_bytes, statistics, 1, down, cf, hops) - own
        return self.exchange(wire_bytes, statistics, down, hops)

    def coding(self, cf: float) -> float:
        if cf == DENSE or not self.coded:
            return 0.0
        return self.coded[min(self.coded, key=lambda other: abs(log(other / cf)))]

    def step(
        self,
        wire_bytes: float,
        statistics: float = 0.0,
        steps: int = 1,
        down: float = 0.0,
        cf: float = DENSE,
        hops: int = 1,
    ) -> float:
        """Seconds of so many steps, one of which has sent something. With a delay D those of one of
        many: the link carries one round after the other, and a round that leaves when a step ends
        must be there when the step D - 1 later does."""
        exchange = self.exchange(wire_bytes, statistics, down, hops)
        coding = self.coding(cf)
        if self.delay:
            busy, own = self.sending(wire_bytes, statistics, down), self.compute + coding
            return max(own, busy, (own + exchange) / self.delay)
        hidden = self.compute * overlapped(self.overlap, steps)
        return self.compute * steps + coding + max(0.0, exchange - hidden)
