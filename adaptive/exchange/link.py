"""An emulated slow link: collectives finish no sooner than their bytes would have taken.

For demonstrations and experiments on one machine, whose loopback is faster than any network.
"""

from __future__ import annotations

import heapq
import itertools
import re
import threading
import time
from dataclasses import dataclass

from torch import Tensor
from torch.futures import Future

IDLE = 1.0
"""Seconds without a transfer after which the thread that waits for them ends."""

_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
_RATE = re.compile(r"([0-9.]+)\s*([kmg]?)(?:bit(?:/s|ps)?|bps)", re.IGNORECASE)
_TIME = re.compile(r"([0-9.]+)\s*(us|ms|s)", re.IGNORECASE)
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class LinkSpec:
    """How fast an emulated link is.

    bits_per_second: rate of a rank's link in each direction. latency: seconds a collective.
    """

    bits_per_second: float
    latency: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.bits_per_second, str) or not 0 < self.bits_per_second < float("inf"):
            raise ValueError(
                f"bits_per_second must be a positive, finite number, got {self.bits_per_second!r}"
                f"; LinkSpec.parse reads text"
            )
        if not 0 <= self.latency < float("inf"):
            raise ValueError(f"latency must be >= 0 seconds and finite, got {self.latency!r}")

    @classmethod
    def parse(cls, text: str) -> LinkSpec:
        """From "100mbit" or "1gbit,5ms". ValueError for anything else."""
        rate_text, _, latency_text = text.partition(",")
        rate = _RATE.fullmatch(rate_text.strip())
        latency = _TIME.fullmatch(latency_text.strip()) if latency_text else None
        try:
            if rate is None or (latency_text and latency is None):
                raise ValueError
            seconds = float(latency[1]) * _SECONDS[latency[2].lower()] if latency else 0.0
            return cls(float(rate[1]) * _UNITS[rate[2].lower()], seconds)
        except ValueError:
            raise ValueError(
                f"link must be a rate such as '100mbit' or '1gbit', optionally followed by a "
                f"latency as in '100mbit,5ms', got {text!r}"
            ) from None

    def __str__(self) -> str:
        rate = self.bits_per_second
        for unit, name in ((1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s")):
            if rate >= unit:
                text = f"{rate / unit:g} {name}"
                break
        else:
            text = f"{rate:g} bit/s"
        return text + (f", {self.latency * 1e3:g} ms" if self.latency else "")


class EmulatedLink:
    """Holds back finished collectives until a link of `spec` could have carried their bytes.

    Transfers queue behind one another as on a real link; waiting is done by a thread of its own,
    so that backward goes on meanwhile. With nothing to hold for IDLE seconds the thread ends, so
    that none is left behind by a compressor that was detached, closed or thrown away.
    """

    def __init__(self, spec: LinkSpec) -> None:
        self.spec = spec
        self._free_at = 0.0
        self._queue: list[tuple[float, int, Future[Tensor], Future[Tensor]]] = []
        self._count = itertools.count()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def hold(self, done: Future[Tensor], wire_bytes: float) -> Future[Tensor]:
        """A future that completes with `done`'s value, but no sooner than the link allows."""
        now = time.monotonic()
        start = max(now, self._free_at)
        self._free_at = start + wire_bytes * 8 / self.spec.bits_per_second
        held: Future[Tensor] = Future()
        due = self._free_at + self.spec.latency
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="emulated-link", daemon=True)
                self._thread.start()
            heapq.heappush(self._queue, (due, next(self._count), done, held))
            self._changed.notify()
        return held

    def _run(self) -> None:
        while (next_one := self._take()) is not None:
            done, held = next_one
            try:
                held.set_result(done.wait())
            except Exception as error:  # the waiter must see it, whatever it is
                held.set_exception(error)  # type: ignore[arg-type]  # torch's stub is wrong
            del next_one, done, held  # nothing is kept alive by a thread that waits

    def _take(self) -> tuple[Future[Tensor], Future[Tensor]] | None:
        """The next transfer, once it is due; None, and the thread is over, if none has come for
        IDLE seconds."""
        with self._changed:
            while not self._queue or (wait := self._queue[0][0] - time.monotonic()) > 0:
                if not self._changed.wait(wait if self._queue else IDLE) and not self._queue:
                    self._thread = None
                    return None
            _, _, done, held = heapq.heappop(self._queue)
            return done, held
