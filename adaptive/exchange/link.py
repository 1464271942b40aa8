"""The network between the ranks: what a message costs on it; and for experiments on one machine,
whose loopback is faster than any network, an emulated slow one, and a clock that only computes."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from math import inf, isfinite
from statistics import median
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.futures import Future

from policies.step_time import overlapped

if TYPE_CHECKING:
    from adaptive.exchange.collectives import Arriving, Exchange

PROBE_BYTES = 1 << 18
PROBES = 5

_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_NUMBER = r"(\d+\.?\d*|\.\d+)\s*"
_LINK = re.compile(
    _NUMBER + r"([kmg]?)(?:bit(?:/s|ps)?|bps)(?:\s*,\s*" + _NUMBER + "(us|ms|s))?", re.IGNORECASE
)


@dataclass(frozen=True)
class LinkCost:
    """What sending costs, agreed by all ranks: `alpha` seconds a message, and a second for `beta`
    bytes."""

    alpha: float = 0.0
    beta: float = inf

    def gathered(self, nbytes: float, n: int) -> float:
        """Seconds to all-gather `nbytes` a rank among `n` ranks."""
        return (n - 1) * (self.alpha + nbytes / self.beta)

    def sharded(self, nbytes: float, n: int) -> float:
        """Seconds of an all-to-all and an all-gather of 1/n of `nbytes` each."""
        return 2 * (n - 1) * (self.alpha + nbytes / n / self.beta)


def measure_link(exchange: Exchange, clock: Callable[[], float], device: torch.device) -> LinkCost:
    """Time a few small and larger all-gathers. A collective; the result is alike on all ranks."""

    def seconds(nbytes: int) -> float:
        payload = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        times = []
        for _ in range(PROBES):
            began = clock()
            exchange.all_gather(payload).wait()
            if device.type == "cuda":  # until here only its stream waits
                torch.cuda.synchronize(device)
            times.append(clock() - began)
        return median(times)

    seconds(8)  # the first one sets connections up
    measured = torch.tensor([seconds(8), seconds(PROBE_BYTES)], dtype=torch.float64, device=device)
    small, large = (exchange.sum_later(measured).wait() / exchange.ranks).tolist()
    exchange.take_traffic()  # not part of any step
    hops = max(1, exchange.world_size - 1)
    slope = (large - small) / (hops * PROBE_BYTES)
    return LinkCost(max(0.0, small / hops), 1 / slope if slope > 0 else inf)


@dataclass(frozen=True)
class LinkSpec:
    """How fast a rank's emulated link is in each direction; latency: seconds a collective."""

    bits_per_second: float
    latency: float = 0.0

    def __post_init__(self) -> None:
        rate, latency = self.bits_per_second, self.latency
        if isinstance(rate, str) or not 0 < rate < inf:
            told = f"bits_per_second must be a positive, finite number, got {rate!r}"
            raise ValueError(f"{told}; LinkSpec.parse reads text")
        if not 0 <= latency < inf:
            raise ValueError(f"latency must be >= 0 seconds and finite, got {latency!r}")

    @classmethod
    def parse(cls, text: str) -> LinkSpec:
        """From "100mbit" or "1gbit,5ms". ValueError for anything else."""
        found = _LINK.fullmatch(text.strip())
        if found is None or not float(found[1]):
            raise ValueError(
                f"link must be a rate such as '100mbit' or '1gbit', optionally followed by a "
                f"latency as in '100mbit,5ms', got {text!r}"
            )
        rate, prefix, latency, unit = found.groups()
        seconds = float(latency) * _SECONDS[unit.lower()] if latency else 0.0
        return cls(float(rate) * _PREFIXES[prefix.lower()], seconds)

    def __str__(self) -> str:
        rate, prefix = self.bits_per_second, ""
        for factor, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
            if rate >= factor:
                rate, prefix = rate / factor, name
                break
        latency = f", {self.latency * 1e3:g} ms" if self.latency else ""
        return f"{rate:g} {prefix}bit/s{latency}"


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


def new_future(device: torch.device) -> Future[Tensor]:
    """A future of a tensor on `device`, for somebody to complete."""
    return Future(devices=[device]) if device.type == "cuda" else Future()


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
    overlap: the compressor's: so many local steps hide the network's time.
    delay: the compressor's: a round may be under way while all but one of so many steps compute.
    server: that makes the means, instead of the ranks; `link` is then a worker's to the server.
    """

    def __init__(
        self,
        compute: float,
        link: LinkSpec | None = None,
        scale: float = 1.0,
        overlap: int | None = None,
        delay: int = 0,
        server: ServerSpec | None = None,
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
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def exchange(self, wire_bytes: float, statistics: float = 0.0, down: float = 0.0) -> float:
        """Seconds that a step's bytes take; statistics: how many of them are. down: how many bring
        means back."""
        if not wire_bytes:
            return 0.0
        return self.latency + self.sending(wire_bytes, statistics, down)

    @property
    def latency(self) -> float:
        """Of a step's exchange."""
        return 0.0 if self.link is None else self.link.latency

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

    def exposed(self, wire_bytes: float, statistics: float = 0.0, down: float = 0.0) -> float:
        """What of that policies are told: with a delay what is not hidden, else all of it."""
        if self.delay:
            return self.step(wire_bytes, statistics, 1, down) - self.compute
        return self.exchange(wire_bytes, statistics, down)

    def step(
        self, wire_bytes: float, statistics: float = 0.0, steps: int = 1, down: float = 0.0
    ) -> float:
        """Seconds of so many steps, one of which has sent something. With a delay D those of one of
        many: the link carries one round after the other, and a round that leaves when a step ends
        must be there when the step D - 1 later does."""
        exchange = self.exchange(wire_bytes, statistics, down)
        if self.delay:
            busy = self.sending(wire_bytes, statistics, down)
            return max(self.compute, busy, (self.compute + exchange) / self.delay)
        hidden = self.compute * overlapped(self.overlap, steps)
        return self.compute * steps + max(0.0, exchange - hidden)


class EmulatedLink:
    """Holds back finished collectives until a link of `spec` could have carried their bytes, one
    after the other. A thread waits for each, so that backward goes on."""

    def __init__(self, spec: LinkSpec) -> None:
        self.spec = spec
        self._free_at = 0.0

    def hold(
        self, done: Future[Tensor] | Arriving, wire_bytes: float, device: torch.device
    ) -> Future[Tensor]:
        """A future that completes with `done`'s value, which is on `device`, but no sooner than the
        link allows."""
        start = max(time.monotonic(), self._free_at)
        self._free_at = start + wire_bytes * 8 / self.spec.bits_per_second
        due, held = self._free_at + self.spec.latency, new_future(device)

        def carry() -> None:
            time.sleep(max(0.0, due - time.monotonic()))
            # Not backward's stream, which would wait for the collective.
            own = torch.cuda.Stream(device) if device.type == "cuda" else None
            try:
                with torch.cuda.stream(own) if own is not None else nullcontext():
                    held.set_result(done.wait())
            except Exception as error:  # the waiter must see it, whatever it is
                held.set_exception(error)  # type: ignore[arg-type]  # torch's stub is wrong

        threading.Thread(target=carry, name="emulated-link", daemon=True).start()
        return held
