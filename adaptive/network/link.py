"""The network between the ranks: the cost of a message; and, for experiments on one machine, an
emulated slow link and the contract of a modelled clock."""

from __future__ import annotations

import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_NUMBER = r"(\d+\.?\d*|\.\d+)\s*"
_LINK = re.compile(
    _NUMBER + r"([kmg]?)(?:bit(?:/s|ps)?|bps)(?:\s*,\s*" + _NUMBER + "(us|ms|s))?", re.IGNORECASE
)


@dataclass(frozen=True)
class LinkCost:
    """The cost of sending, agreed by all ranks: `alpha` seconds for each message, and one second
    for each `beta` bytes."""

    alpha: float = 0.0
    beta: float = inf

    def seconds(self, messages: int, nbytes: float) -> float:
        """Seconds that a rank takes to send `messages` one after the other, `nbytes` in all."""
        return messages * self.alpha + nbytes / self.beta


@dataclass(frozen=True)
class LinkSpec:
    """The speed of a rank's emulated link in each direction. latency: seconds that each collective
    takes in addition to the time of its bytes."""

    bits_per_second: float
    latency: float = 0.0

    def __post_init__(self) -> None:
        rate, latency = self.bits_per_second, self.latency
        if isinstance(rate, str) or not 0 < rate < inf:
            message = f"bits_per_second must be a positive, finite number, got {rate!r}"
            raise ValueError(f"{message}; LinkSpec.parse reads text")
        if not 0 <= latency < inf:
            raise ValueError(f"latency must be >= 0 seconds and finite, got {latency!r}")

    @classmethod
    def parse(cls, text: str) -> LinkSpec:
        """The link described by a text such as "100mbit" or "1gbit,5ms". ValueError for a text of
        another form."""
        found = _LINK.fullmatch(text.strip()) if isinstance(text, str) else None
        if found is None or not float(found[1]) or "Bps" in text:
            bits = "; a rate is in bits: '100MBps' is '800mbit'" if "B" in str(text) else ""
            raise ValueError(
                f"network must be a rate such as '100mbit' or '1gbit', optionally followed by a "
                f"latency as in '100mbit,5ms'{bits}, got {text!r}"
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


def new_future(device: torch.device) -> Future[Tensor]:
    """A future of a tensor on `device`, for the caller to complete."""
    return Future(devices=[device]) if device.type == "cuda" else Future()


def complete(future: Future[Any], result: Callable[[], Any]) -> None:
    """Complete a future with the value that `result` returns, or with the error that it raises."""
    try:
        value = result()
    except Exception as error:  # the waiter must see every error
        future.set_exception(error)
    else:
        future.set_result(value)


def done_with(value: Tensor) -> Future[Tensor]:
    """A completed future of `value`."""
    done = new_future(value.device)
    done.set_result(value)
    return done


class StepClock(ABC):
    """A modelled clock, for `Network(clock=...)`. The clock does not run: each step moves it by a
    computed time, which depends on the step's CF and on the bytes sent.

    now: seconds. compute: seconds of forward, backward and optimizer in a step. network: the link
        in words, such as "modelled 10 Mbit/s link"; "" if there is no link. delay: number of steps
        after which the mean of a step replaces it.
    Arguments of methods: wire_bytes: bytes that one rank sends in one step. statistics: the part of
        these bytes that no CF changes. down: the part that brings means back. hops: number of
        messages that wait for one another, each of which takes the latency.
    """

    now: float = 0.0
    compute: float
    network: str = ""
    delay: int = 0

    def __call__(self) -> float:
        return self.now

    @abstractmethod
    def step(
        self,
        wire_bytes: float,
        statistics: float = 0.0,
        steps: int = 1,
        down: float = 0.0,
        cf: float = 1.0,
        hops: int = 1,
    ) -> float:
        """Seconds of `steps` local steps with one exchange."""

    def coding(self, cf: float) -> float:
        """Seconds of compressing and decoding at a CF, a part of the seconds of `step`."""
        return 0.0

    def latency(self, hops: int) -> float:
        """Seconds of `hops` messages without their bytes."""
        return 0.0

    @abstractmethod
    def exposed(
        self,
        wire_bytes: float,
        statistics: float = 0.0,
        down: float = 0.0,
        cf: float = 1.0,
        hops: int = 1,
    ) -> float:
        """Seconds of an exchange that policies get in their reports."""


@dataclass(frozen=True)
class Network:
    """The network of an experiment on one machine.

    link: a slow link to emulate, such as "100mbit" or "100mbit,5ms". None: no emulated link.
    clock: returns seconds, monotonic. Tests inject a clock, because policies decide by throughput.

    TypeError or ValueError for a value that is not accepted."""

    link: str | LinkSpec | None = None
    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
        if isinstance(self.link, str):
            object.__setattr__(self, "link", LinkSpec.parse(self.link))
        if not isinstance(self.link, LinkSpec | None):
            raise TypeError(
                f"link must be a rate such as '100mbit', a LinkSpec or None, got {self.link!r}"
            )
        if not callable(self.clock):
            raise TypeError(f"clock must be a function that returns seconds, got {self.clock!r}")

    @property
    def spec(self) -> LinkSpec | None:
        """The specification of the emulated link."""
        assert not isinstance(self.link, str)
        return self.link

    @property
    def is_real(self) -> bool:
        """No link is emulated, and times are measured: the real network can be timed."""
        return self.spec is None and self.clock is time.perf_counter

    def describe(self) -> str:
        """The settings that must be the same on all ranks, in a readable line."""
        measured = self.clock is time.perf_counter
        return f"network={self.spec!r}, step times {'measured' if measured else 'given'}"


def network_from(given: Any) -> Network:
    """The network for the argument `AdaptiveCompressor(network=)`. TypeError or ValueError for a
    value that is not accepted."""
    if isinstance(given, Network):
        return given
    if not isinstance(given, str | LinkSpec | None):
        raise TypeError(
            f"network must be a rate such as '100mbit', a LinkSpec, a Network or None, got "
            f"{given!r}"
        )
    return Network(given)


class EmulatedLink:
    """A slow link, emulated: it delays finished collectives until a link of `spec` could have
    carried their bytes, one after the other. A thread waits for each collective, so that backward
    goes on."""

    def __init__(self, spec: LinkSpec) -> None:
        self.spec = spec
        self._free_at = 0.0

    def hold(
        self, wait: Callable[[], Tensor], wire_bytes: float, device: torch.device
    ) -> Future[Tensor]:
        """A future of the result of a collective on `device`, delayed by the link. wait: waits for
        the collective, and returns its result."""
        start = max(time.monotonic(), self._free_at)
        self._free_at = start + wire_bytes * 8 / self.spec.bits_per_second
        due, held = self._free_at + self.spec.latency, new_future(device)

        def carry() -> None:
            time.sleep(max(0.0, due - time.monotonic()))
            # On a new stream, because backward's stream would wait for the collective.
            on_cuda = device.type == "cuda"
            with torch.cuda.stream(torch.cuda.Stream(device)) if on_cuda else nullcontext():
                complete(held, wait)

        threading.Thread(target=carry, name="emulated-link", daemon=True).start()
        return held
