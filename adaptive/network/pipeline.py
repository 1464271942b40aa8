"""Runs exchanges of one or several collectives, in the same order on every rank.

A collective may only be issued in the body of a hook call, never in a future's callback (callbacks
run in an order that differs between ranks). So an exchange with a second round waits for its first
in the body of a later hook call, and after the last bucket `finish` drains what is left.

On a CUDA device there are three kinds of streams: backward's, that of the hook's work
(`HookStream`), and those on which torch runs the callbacks of NCCL's futures, a new one each time.
An event orders each after what it needs of another. The caching allocator knows nothing of that: it
gives memory back to the stream that it was allocated on as soon as the last Python reference is
gone, perhaps before the kernels of a callback have read it. So what a callback uses is kept.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import GeneratorType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.futures import Future

from adaptive.network.link import new_future
from adaptive.network.timing import Span, Timestamp
from compressors.kernels import kernels_for

R = TypeVar("R")


@dataclass(eq=False)
class _Running:
    """An exchange of which so many collectives are `left` to be issued, after the one `issued`."""

    rounds: Generator[Future[Tensor], Any, Any]
    left: int
    decode: Callable[[Any], Tensor]
    done: Future[Tensor]
    life: object
    issued: Future[Tensor] = field(init=False)


def done_with(value: Tensor) -> Future[Tensor]:
    """A future of what is there already."""
    done = new_future(value.device)
    done.set_result(value)
    return done


class HookStream:
    """The CUDA stream of the hook's work, so that backward's kernels run beside it, and what must
    stay in memory until a callback's kernels have run. For other devices it does nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            # Torch draws callbacks' streams from the 32 of the usual priority, in turn. One of
            # these would soon be a callback's, too, and the hook would wait for the network.
            self._stream = torch.cuda.Stream(device, priority=-1)
        # By what the callback was for, the oldest first.
        self._kept: dict[object, tuple[torch.cuda.Event, tuple[object, ...]]] = {}

    @contextmanager
    def hook_call(self, last: bool) -> Iterator[None]:
        """What is done inside goes to the stream, after what backward has done until now; backward
        goes on without it, and after the `last` call waits for all of it: then nothing that the
        hook has only borrowed from backward's stream can be overwritten too early."""
        if self._stream is None:
            yield
            return
        self._let_go()
        backward = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(backward)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            if last:
                backward.wait_stream(self._stream)

    def keep(self, *used: object, of: object = None) -> None:
        """Called at the end of a callback: keep all that it `used`, and that was made in a hook's
        body, until the device has come so far, `waited_for` the future that it is `of`, or
        `backward_waited`."""
        if self._stream is not None:
            passed = torch.cuda.Event()
            passed.record(torch.cuda.current_stream(self._device))
            self._kept[object() if of is None else of] = passed, used

    def waited_for(self, done: object) -> None:
        """The hook's stream is behind the callback that has completed this future."""
        self._kept.pop(done, None)

    def backward_waited(self) -> None:
        """The stream of backward is behind all callbacks, and the hook's goes on behind it: what
        was kept can go before the next that needs the memory, the optimizer or a forward."""
        self._kept.clear()

    def _let_go(self) -> None:
        for of, (passed, _) in list(self._kept.items()):
            if not passed.query():
                break
            self.waited_for(of)


class Pipeline:
    """The exchanges of the buckets that wait for a further round.

    timestamps: takes one. stream: of the hook's work. waits: when hook calls have waited for
    earlier rounds. decoded: when the threads of the process group were decoding. Both are for
    somebody to take out. life: another object after each `abandon`.
    """

    def __init__(self, timestamps: Callable[[], Timestamp], stream: HookStream) -> None:
        self._timestamps = timestamps
        self.stream = stream
        self._queue: deque[_Running] = deque()
        self.waits: deque[Span] = deque()
        self.decoded: deque[Span] = deque()
        self.life = object()
        self._at_work = threading.Condition()
        self._decoding = 0  # callbacks

    def abandon(self) -> None:
        """Forget all exchanges that are under way: nothing more of them is issued, decoded, or
        taken off a memory, once this returns. Waits for no other rank."""
        with self._at_work:
            self.life = object()
            self._at_work.wait_for(lambda: not self._decoding)
        self._queue.clear()
        self.waits.clear()
        self.decoded.clear()

    @contextmanager
    def callback_of(self, life: object) -> Iterator[None]:
        """A callback does its work inside. RuntimeError if its exchange was abandoned."""
        with self._at_work:
            if life is not self.life:
                raise RuntimeError("this exchange was abandoned")
            self._decoding += 1
        try:
            yield
        finally:
            with self._at_work:
                self._decoding -= 1
                self._at_work.notify_all()

    def run(
        self,
        rounds: Generator[Future[Tensor], Any, R],
        collectives: int,
        decode: Callable[[R], Tensor],
        device: torch.device,
    ) -> Future[Tensor]:
        """Start an exchange of so many `collectives`; a future of what `decode`, on a thread of the
        process group, makes of what has arrived.

        Then let the exchanges of earlier buckets take their next round."""
        done = new_future(device)
        earlier = list(self._queue)
        self._queue.append(_Running(rounds, collectives, decode, done, self.life))
        self._issue(self._queue[-1], None)
        for running in earlier:
            self._advance(running)
        return done

    def finish(self) -> None:
        """Let all exchanges issue what they have left: no bucket that is compressed comes any more
        in this step."""
        while self._queue:
            self._advance(self._queue[0])

    def _advance(self, running: _Running) -> None:
        began = self._timestamps()
        value = running.issued.wait()
        self.waits.append((began, self._timestamps()))
        self._issue(running, value)

    def _issue(self, running: _Running, before: Tensor | None) -> None:
        """Issue the next collective, given what the one `before` has brought; decode what the last
        one brings."""
        try:
            running.issued = running.rounds.send(before)
        except StopIteration:
            raise RuntimeError("the exchange issued fewer collectives than announced") from None
        running.left -= 1
        if running.left == 0:
            self._queue.remove(running)
            running.issued.then(lambda future: self._finish(running, future))

    def _finish(self, running: _Running, future: Future[Tensor]) -> None:
        try:
            with self.callback_of(running.life):
                value, began = future.value(), self._timestamps()
                used = () if kernels_for(value).may_read else _locals_of(running.rounds)
                try:
                    running.rounds.send(value)
                except StopIteration as stop:
                    mean = running.decode(stop.value)
                    self.stream.keep(running, stop.value, used, of=running.done)
                else:
                    raise RuntimeError("the exchange issued more collectives than it announced")
                self.decoded.append((began, self._timestamps()))
                running.done.set_result(mean)
        except BaseException as error:  # whoever waits for the bucket must see it, whatever it is
            told = error if isinstance(error, Exception) else RuntimeError(repr(error))
            running.done.set_exception(told)  # type: ignore[arg-type]  # torch's stub is wrong


def _locals_of(suspended: Any) -> list[object]:
    """What the local variables of a suspended generator, and of those that it drives, stand for."""
    frame = suspended.gi_frame
    found = [] if frame is None else list(frame.f_locals.values())
    inner = [each for each in found if isinstance(each, GeneratorType)]
    return found + [_locals_of(each) for each in inner]
