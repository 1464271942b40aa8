"""Ranks as threads that take turns: one runs until it has to wait for the others."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class EndedError(Exception):
    """Another rank has failed, so this one can go no further."""


class Turns:
    """So many `ranks`, each in a thread of its own, of which one runs at a time.

    A collective is a meeting: whoever comes lets the next in line go on, and when the last is
    there all may, in order of their ranks. Whoever waits for a message lets the others in line go
    on before. So ranks wait nowhere else, runs go the same way every time, and each rank has a
    state of its own of torch's global random numbers.

    failure: the first rank that failed, and its error.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.failure: tuple[int, BaseException] | None = None
        self._own = threading.local()
        self._lock = threading.Lock()
        self._called = [threading.Condition(self._lock) for _ in range(ranks)]
        self._running: int | None = None
        self._line: deque[int] = deque()
        self._met: dict[int, tuple[str, Any]] = {}
        self._gone: set[int] = set()
        self._sent: Counter[tuple[int, ...]] = Counter()  # by sender, receiver and tag
        self._expected: Counter[tuple[int, ...]] = Counter()
        self._mail: dict[tuple[int, ...], Any] = {}  # by these, and their number
        self._in_vain = 0  # looks for messages in a row since the last was sent
        self._random: list[list[Tensor]] = [random_state()] * ranks

    @property
    def rank(self) -> int:
        """Of the thread that asks; 0 outside of the ranks' threads."""
        return getattr(self._own, "rank", 0)

    def begin(self, rank: int) -> None:
        """This thread is that rank from now on; returns when it is its turn."""
        self._own.rank = rank
        with self._lock:
            self._line.append(rank)
            if self._running is None:
                self._call_next()
            self._wait(rank)

    def end(self) -> None:
        """This rank is done; whoever still waits for it fails."""
        with self._lock:
            self._gone.add(self.rank)
            self._check_gone()
            self._call_next()

    def fail(self, error: BaseException) -> None:
        """This rank has failed with `error`: no other shall wait for it."""
        with self._lock:
            self._fail(self.rank, error)

    def meet(self, what: str, mine: Any, together: Callable[[list[Any]], None]) -> None:
        """Wait for all ranks; the last calls `together` with what they brought, by rank.

        RuntimeError if some rank is here for another reason than `what`; EndedError if one failed.
        """
        rank = self.rank
        with self._lock:
            self._met[rank] = (what, mine)
            if len(self._met) < self.ranks:
                self._random[rank] = random_state()
                self._check_gone()
                self._call_next()
                self._wait(rank)
                return
            met = [self._met[each] for each in range(self.ranks)]
            self._met.clear()
            _check_alike([why for why, _ in met])
            self._in_vain = 0
            together([brought for _, brought in met])
            self._line.extend(each for each in range(self.ranks) if each != rank)

    def send(self, receiver: int, tag: int, message: Any) -> None:
        """Leave a message for a rank; nobody waits."""
        with self._lock:
            way = self.rank, receiver, tag
            self._mail[*way, self._sent[way]] = message
            self._sent[way] += 1
            self._in_vain = 0

    def expect(self, sender: int, tag: int) -> tuple[int, ...]:
        """Which message of a rank is the next with this tag, whenever it is received: messages go
        to those who ask for them in the order in which they ask."""
        way = sender, self.rank, tag
        self._expected[way] += 1
        return (*way, self._expected[way] - 1)

    def receive(self, message: tuple[int, ...]) -> Any:
        """One that was expected, once it is there. RuntimeError if nobody is left who could send
        it; EndedError if a rank has failed."""
        rank = self.rank
        with self._lock:
            while message not in self._mail:
                self._in_vain += 1
                if not self._line or self._in_vain > 2 * self.ranks:
                    raise RuntimeError(
                        f"waits for a message from worker {message[0]}, who sends none"
                    )
                self._random[rank] = random_state()
                self._line.append(rank)
                self._call_next()
                self._wait(rank)
            return self._mail.pop(message)

    def _wait(self, rank: int) -> None:
        while self._running != rank and self.failure is None:
            self._called[rank].wait()
        if self.failure is not None:
            raise EndedError(f"worker {self.failure[0]} has failed")
        for state, load in zip(
            self._random[rank], (torch.set_rng_state, torch.cuda.set_rng_state), strict=False
        ):
            load(state)

    def _call_next(self) -> None:
        self._running = self._line.popleft() if self._line else None
        if self._running is not None:
            self._called[self._running].notify()

    def _check_gone(self) -> None:
        """Nobody is left who could come to the meeting."""
        if self._gone and self._met and len(self._gone) + len(self._met) == self.ranks:
            rank, (what, _) = min(self._met.items())
            gone = f"waits in {what}, to which worker {min(self._gone)} will not come: it is done"
            self._fail(rank, RuntimeError(gone))

    def _fail(self, rank: int, error: BaseException) -> None:
        self.failure = self.failure or (rank, error)
        for called in self._called:
            called.notify()


def random_state() -> list[Tensor]:
    """Of torch's global random numbers on the host, and on the GPU once that is in use."""
    own = torch.get_rng_state()
    return [own, torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [own]


def _check_alike(reasons: list[str]) -> None:
    for rank, why in enumerate(reasons):
        if why != reasons[0]:
            raise RuntimeError(f"worker 0 is in {reasons[0]}, worker {rank} in {why}")
