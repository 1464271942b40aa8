"""Runs exchanges of one or several collectives, in the same order on every rank.

A collective may only be issued in the body of a hook call, never in a future's callback (callbacks
run in an order that differs between ranks). So an exchange with a second round waits for its first
in the body of a later hook call, and the last bucket's call drains what is left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.futures import Future

from adaptive.exchange.collectives import drain
from adaptive.exchange.strategies import Received, Rounds
from adaptive.statistics.timing import Span, Timestamp

Decode = Callable[[Received], Tensor]
"""Turns what has arrived into the mean, on a thread of the process group."""


@dataclass
class _Running:
    """An exchange of which so many collectives are `left` to be issued, and the one before them."""

    rounds: Rounds
    left: int
    decode: Decode
    done: Future[Tensor]
    issued: Future[Tensor]


class Pipeline:
    """The exchanges of the buckets that wait for a further round.

    timestamps: takes one, to tell when hook calls have waited for earlier rounds, and when the
    threads of the process group were decoding.
    """

    def __init__(self, timestamps: Callable[[], Timestamp]) -> None:
        self._timestamps = timestamps
        self._queue: deque[_Running] = deque()
        self._waits: deque[Span] = deque()
        self._decoded: deque[Span] = deque()

    def run(
        self, rounds: Rounds, collectives: int, decode: Decode, device: torch.device, last: bool
    ) -> Future[Tensor]:
        """Start an exchange of so many `collectives`; a future of what `decode` returns.

        Then let the exchanges of earlier buckets take their next round; if this bucket is the
        `last`, all of them, and this one too."""
        done: Future[Tensor] = Future(devices=[device]) if device.type == "cuda" else Future()
        running = _Running(rounds, collectives - 1, decode, done, next(rounds))
        earlier = list(self._queue)
        self._queue.append(running)
        self._finish_after_last(running)
        for each in earlier:
            self._advance(each)
        while last and self._queue:
            self._advance(self._queue[0])
        return done

    def take_waits(self) -> list[Span]:
        """When hook calls have waited since the last time that was asked."""
        return drain(self._waits)

    def take_decoded(self) -> list[Span]:
        """When exchanges were decoded since the last call; from any thread."""
        return drain(self._decoded)

    def _advance(self, running: _Running) -> None:
        began = self._timestamps()
        value = running.issued.wait()
        self._waits.append((began, self._timestamps()))
        running.issued = running.rounds.send(value)
        running.left -= 1
        self._finish_after_last(running)

    def _finish_after_last(self, running: _Running) -> None:
        """Decode what arrives, if all collectives are issued."""
        if running.left == 0:
            self._queue.remove(running)
            running.issued.then(lambda future: self._finish(running, future))

    def _finish(self, running: _Running, future: Future[Tensor]) -> None:
        try:
            value, began = future.value(), self._timestamps()
            try:
                running.rounds.send(value)
            except StopIteration as stop:
                mean = running.decode(stop.value)
            else:
                raise RuntimeError("the exchange issued more collectives than it announced")
            self._decoded.append((began, self._timestamps()))
            running.done.set_result(mean)
        except Exception as error:  # whoever waits for the bucket must see it, whatever it is
            running.done.set_exception(error)  # type: ignore[arg-type]  # torch's stub is wrong
