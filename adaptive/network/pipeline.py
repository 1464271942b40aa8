"""The pipeline of exchanges, each of one or several collectives, in the same order on every rank.

A collective may only be issued in the body of a hook call, never in a future's callback: callbacks
run in another order on each rank. So an exchange waits for its first collective in the
body of a later hook call, and issues its second one there. After the last bucket `finish` issues
all remaining collectives.

A CUDA device has three kinds of streams: backward's, the hook's (`HookStream`), and those on which
torch runs the callbacks of NCCL's futures, a new one for each callback. Events order their work.
The caching allocator does not know these events. When the last Python reference to a tensor is
gone, its memory returns to the stream that allocated it, perhaps before a callback's kernels on
another stream have read it. So the pipeline keeps references to all tensors that a callback uses.
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


def read_here(tensor: Tensor) -> None:
    """Keep the memory of a tensor, which another stream has allocated, until the current stream has
    read it, also if the last reference to the tensor goes at once."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


@dataclass(eq=False)
class _Running:
    """One exchange under way. left: number of collectives not issued yet. issued: the future of the
    collective that was issued last. done: the future of the decoded mean. life: `Pipeline.life`."""

    rounds: Generator[Future[Tensor], Any, Any]
    left: int
    decode: Callable[[Any], Tensor]
    done: Future[Tensor]
    life: object
    issued: Future[Tensor] = field(init=False)


class HookStream:
    """The CUDA stream of the hook's work, beside backward's stream. This object also keeps tensors
    alive until the callbacks' kernels that use them have run. On other devices it does nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            # Torch takes callbacks' streams in turn from a pool of 32 of normal priority. A stream
            # of that pool would also run callbacks, and the hook would wait for the network.
            self._stream = torch.cuda.Stream(device, priority=-1)
        # What callbacks have used, by the future that the callback completes, the oldest first:
        # (event at the callback's end, references).
        self._kept: dict[object, tuple[torch.cuda.Event, tuple[object, ...]]] = {}

    @contextmanager
    def hook_call(self, last: bool) -> Iterator[None]:
        """A context whose work runs on this stream, after backward's work until now. Backward's
        stream does not wait for the hook's work, except after the `last` call, when it waits for
        all of it. So nothing overwrites memory of backward's stream that the hook still uses."""
        if self._stream is None:
            yield
            return
        self._drop_passed()
        backward = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(backward)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            if last:
                backward.wait_stream(self._stream)

    def keep(self, *used: object, of: object = None) -> None:
        """Called at the end of a callback. Keeps the tensors that the callback `used` until the
        device has passed this point, or until `waited_for(of)` or `backward_waited` is called. of:
        the future that the callback completes."""
        if self._stream is not None:
            passed = torch.cuda.Event()
            passed.record(torch.cuda.current_stream(self._device))
            self._kept[object() if of is None else of] = passed, used

    def waited_for(self, done: object) -> None:
        """The hook's stream has waited for this future: drop what its callback used."""
        self._kept.pop(done, None)

    def backward_waited(self) -> None:
        """Backward's stream has waited for all callbacks, and the hook's stream will wait for
        backward's stream: drop all references, so that the optimizer and the forward get the
        memory."""
        self._kept.clear()

    def _drop_passed(self) -> None:
        # A separate method: the loop's variables would keep the tensors through the hook call.
        for of, (passed, _) in list(self._kept.items()):
            if not passed.query():
                break
            self.waited_for(of)


class Pipeline:
    """The exchanges whose collectives have not all been issued.

    timestamps: takes a timestamp. stream: the hook's. waits: spans in which hook calls waited for
    collectives. decoded: spans in which threads of the process group decoded. The caller drains
    `waits` and `decoded`. life: an object that identifies the exchanges since the last `abandon`.
    """

    def __init__(self, timestamps: Callable[[], Timestamp], stream: HookStream) -> None:
        self._timestamps = timestamps
        self.stream = stream
        self._queue: deque[_Running] = deque()
        self.waits: deque[Span] = deque()
        self.decoded: deque[Span] = deque()
        self.life = object()
        self._at_work = threading.Condition()
        self._decoding = 0  # number of callbacks that are decoding

    def abandon(self) -> None:
        """Drop all exchanges under way. Once this returns, none of them issues a collective,
        decodes, or changes a memory. Waits for no other rank."""
        with self._at_work:
            self.life = object()
            self._at_work.wait_for(lambda: not self._decoding)
        self._queue.clear()
        self.waits.clear()
        self.decoded.clear()

    @contextmanager
    def callback_of(self, life: object) -> Iterator[None]:
        """The context of a callback's work. RuntimeError if its exchange was abandoned. life:
        `Pipeline.life` when the exchange started."""
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
        """Start an exchange, then let each exchange of an earlier bucket issue its next collective.

        rounds: the exchange. collectives: the number of futures that it yields. decode: called with
        the value that `rounds` returns, on a thread of the process group. Returns a future of
        decode's result."""
        done = new_future(device)
        earlier = list(self._queue)
        self._queue.append(_Running(rounds, collectives, decode, done, self.life))
        self._issue(self._queue[-1], None)
        for running in earlier:
            self._advance(running)
        return done

    def finish(self) -> None:
        """Issue all remaining collectives. Called after the last compressed bucket of a step."""
        while self._queue:
            self._advance(self._queue[0])

    def _advance(self, running: _Running) -> None:
        began = self._timestamps()
        value = running.issued.wait()
        self.waits.append((began, self._timestamps()))
        self._issue(running, value)

    def _issue(self, running: _Running, before: Tensor | None) -> None:
        """Issue the exchange's next collective. If it is the last one, its callback decodes.

        before: the value of the collective before; None for the first one."""
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
        except BaseException as error:  # whoever waits for `done` must raise it
            cause = error if isinstance(error, Exception) else RuntimeError(repr(error))
            running.done.set_exception(cause)  # type: ignore[arg-type]  # torch's stub is wrong


def _locals_of(suspended: Any) -> list[object]:
    """The values of the local variables of a suspended generator, and of generators among them."""
    frame = suspended.gi_frame
    found = [] if frame is None else list(frame.f_locals.values())
    inner = [each for each in found if isinstance(each, GeneratorType)]
    return found + [_locals_of(each) for each in inner]
