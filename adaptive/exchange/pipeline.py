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

from adaptive.exchange.strategies import Received, Rounds
from adaptive.statistics.timing import Span, Timestamp

Finish = Callable[[Received], Tensor]
"""Turns what has arrived into the mean, on a thread of the process group."""


@dataclass
class _Waiting:
    rounds: Rounds
    left: int
    issued: Future[Tensor]
    done: Future[Tensor]
    finish: Finish


class Pipeline:
    """The exchanges of the buckets that wait for a further round.

    timestamps: takes one, to tell when hook calls have waited for earlier rounds, and when the
    threads of the process group were decoding.
    """

    def __init__(self, timestamps: Callable[[], Timestamp]) -> None:
        self._waits: list[Span] = []
        self._timestamps = timestamps
        self._queue: deque[_Waiting] = deque()
        self._decoded: deque[Span] = deque()

    def run(
        self, rounds: Rounds, collectives: int, finish: Finish, device: torch.device, last: bool
    ) -> Future[Tensor]:
        """Start an exchange of so many `collectives`; a future of what `finish` returns.

        Then let the exchanges of earlier buckets take their next round; if this bucket is the
        `last`, all of them, and this one too."""
        issued = next(rounds)
        earlier = list(self._queue)
        if collectives == 1:
            done = issued.then(lambda future: self._finish(rounds, future.value(), finish))
        else:
            done = Future(devices=[device]) if device.type == "cuda" else Future()
            self._queue.append(_Waiting(rounds, collectives - 1, issued, done, finish))
        for waiting in earlier:
            self._advance(waiting)
        while last and self._queue:
            self._advance(self._queue[0])
        return done

    def take_waits(self) -> list[Span]:
        """When hook calls have waited since the last time that was asked."""
        waits, self._waits = self._waits, []
        return waits

    def take_decoded(self) -> list[Span]:
        """When exchanges were finished (decoded) since the last call; from any thread."""
        taken = []
        while True:
            try:
                taken.append(self._decoded.popleft())
            except IndexError:
                return taken

    def _advance(self, waiting: _Waiting) -> None:
        began = self._timestamps()
        value = waiting.issued.wait()
        self._waits.append((began, self._timestamps()))
        waiting.issued = waiting.rounds.send(value)
        waiting.left -= 1
        if waiting.left == 0:
            self._queue.remove(waiting)
            waiting.issued.then(lambda future: self._complete(waiting, future))

    def _finish(self, rounds: Rounds, value: Tensor, finish: Finish) -> Tensor:
        began = self._timestamps()
        try:
            rounds.send(value)
        except StopIteration as stop:
            mean = finish(stop.value)
            self._decoded.append((began, self._timestamps()))
            return mean
        raise RuntimeError("the exchange issued more collectives than it announced")

    def _complete(self, waiting: _Waiting, future: Future[Tensor]) -> None:
        try:
            value = future.value()
            waiting.done.set_result(self._finish(waiting.rounds, value, waiting.finish))
        except Exception as error:  # whoever waits for the bucket must see it, whatever it is
            waiting.done.set_exception(error)  # type: ignore[arg-type]  # torch's stub is wrong
