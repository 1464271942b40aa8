"""A process group whose ranks are threads of one process, and its collectives in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from adaptive.network.link import new_future
from runs.simulate.turns import Turns

T = TypeVar("T")

BACKEND = "simulated"
SEGMENT = 1 << 20
"""Bytes of gloo's largest segment."""


class SimulatedGroup(dist.ProcessGroup):
    """One object for all ranks: which of them calls is known by its thread.

    A collective returns when it is done, so all that comes after it in its rank's thread, the
    callbacks of its future too, finds it done. (Of torch's overloads those are here that
    `torch.distributed` and DDP call.)

    On a GPU it returns when it is queued: on the stream of the rank that comes last, behind what
    the other ranks' streams had to do until they came; and their streams go on behind it.
    """

    def __init__(self, turns: Turns) -> None:
        super().__init__(0, turns.ranks)  # type: ignore[call-arg]  # torch's stub is wrong
        self.turns = turns

    def getBackendName(self) -> str:  # noqa: N802
        return BACKEND

    def getRank(self) -> int:  # noqa: N802
        return self.turns.rank

    def getSize(self) -> int:  # noqa: N802
        return self.turns.ranks

    def rank(self) -> int:
        return self.turns.rank

    def size(self) -> int:
        return self.turns.ranks

    def _meet(
        self, what: str, tensors: Sequence[Tensor], mine: T, together: Callable[[list[T]], None]
    ) -> None:
        """`Turns.meet`, with the ranks' streams in order. tensors: of this rank's."""
        device = device_with_streams(tensors)
        if device is None:
            self.turns.meet(what, mine, together)
            return
        ended: list[torch.cuda.Event] = []

        def in_order(ranks: list[tuple[torch.cuda.Event, list[torch.cuda.Event], T]]) -> None:
            for came, _, _ in ranks:
                torch.cuda.current_stream(device).wait_event(came)
            together([brought for _, _, brought in ranks])
            for _, told, _ in ranks:
                told.append(_passed(device))

        self.turns.meet(what, (_passed(device), ended, mine), in_order)
        torch.cuda.current_stream(device).wait_event(ended[0])

    def allreduce(  # type: ignore[override]
        self, tensors: list[Tensor], opts: Any = None
    ) -> dist.Work:
        if opts is not None and opts.reduceOp != dist.ReduceOp.SUM:
            raise ValueError(f"op must be SUM in a simulated group, got {opts.reduceOp}")
        for tensor in tensors:
            self._meet(f"an all-reduce of {_described(tensor)}", [tensor], tensor, ring_sum)
        return _Done(tensors)

    def broadcast(  # type: ignore[override]
        self, tensors: list[Tensor], opts: Any
    ) -> dist.Work:
        source, which = opts.rootRank, opts.rootTensor

        def copy(ranks: list[list[Tensor]]) -> None:
            sent = ranks[source][which]
            for received in ranks:
                for tensor in received:
                    if tensor is not sent:
                        tensor.copy_(sent)

        what = f"a broadcast of {_described(*tensors)} from {source}"
        self._meet(what, tensors, tensors, copy)
        return _Done(tensors)

    def allgather(  # type: ignore[override]
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        def copy(ranks: list[tuple[list[Tensor], Tensor]]) -> None:
            for received, _ in ranks:
                for place, (_, sent) in zip(received, ranks, strict=True):
                    place.copy_(sent)

        for received, sent in zip(outputs, inputs, strict=True):
            what = f"an all-gather of {_described(sent)}"
            self._meet(what, [sent], (received, sent), copy)
        return _Done(outputs[0])

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        places = output.view(self.turns.ranks, input.numel()).unbind()
        self.allgather([list(places)], [input.view(-1)], opts)
        return _Done([output])

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        opts: Any = None,
    ) -> dist.Work:
        """Sizes: elements of the first dimension from and to each rank; empty: all alike."""

        def parts(tensor: Tensor, sizes: list[int]) -> list[Tensor]:
            return list(tensor.split(sizes) if sizes else tensor.chunk(self.turns.ranks))

        def copy(ranks: list[tuple[list[Tensor], list[Tensor]]]) -> None:
            for i, (received, _) in enumerate(ranks):
                for place, (_, sent) in zip(received, ranks, strict=True):
                    place.copy_(sent[i])

        mine = (parts(output, output_sizes), parts(input, input_sizes))
        self._meet(f"an all-to-all of {_described(input)}", [input], mine, copy)
        return _Done([output])

    def send(self, tensors: list[Tensor], receiver: int, tag: int) -> dist.Work:
        device, sent = device_with_streams(tensors), [tensor.clone() for tensor in tensors]
        self.turns.send(receiver, tag, (sent, device and _passed(device)))
        return _Done(tensors)

    def recv(self, tensors: list[Tensor], sender: int, tag: int) -> dist.Work:
        return _Receiving(self.turns, tensors, sender, tag)

    def barrier(self, opts: Any = None) -> dist.Work:
        self.turns.meet("a barrier", None, lambda _: None)
        return _Done([])

    # Their names in older versions of torch.
    _allgather_base = all_gather_single
    alltoall_base = all_to_all_single  # type: ignore[assignment]


class _Done(dist.Work):
    """A collective that is over."""

    def __init__(self, result: list[Tensor]) -> None:
        super().__init__()
        device = device_with_streams(result)
        # One that knows the device: whoever waits for it does so on the stream that is current.
        future: Any = Future() if device is None else new_future(device)
        future.set_result(result)
        self._future: Future[list[Tensor]] = future

    def wait(self, timeout: Any = None) -> bool:
        self._future.wait()  # on a GPU the stream waits that is current now
        return True

    def get_future(self) -> Future[list[Tensor]]:
        return self._future


class _Receiving(dist.Work):
    """A message that is received once somebody waits for it."""

    def __init__(self, turns: Turns, tensors: list[Tensor], sender: int, tag: int) -> None:
        super().__init__()
        self._tensors: list[Tensor] | None = tensors
        expected = turns.expect(sender, tag)
        self._receive = lambda: turns.receive(expected)

    def wait(self, timeout: Any = None) -> bool:
        tensors, self._tensors = self._tensors, None
        if not tensors:
            return True
        message, passed = self._receive()
        if passed is not None:
            torch.cuda.current_stream(tensors[0].device).wait_event(passed)
        for tensor, sent in zip(tensors, message, strict=True):
            tensor.copy_(sent)
        return True


def device_with_streams(tensors: Sequence[Tensor]) -> torch.device | None:
    """The GPU that the tensors are on; None if they are on the host."""
    return tensors[0].device if tensors and tensors[0].is_cuda else None


def _passed(device: torch.device) -> torch.cuda.Event:
    """Of what the current stream has to do until now."""
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


@contextmanager
def simulated_group(ranks: int) -> Iterator[SimulatedGroup]:
    """As long as it lasts, the default process group is a simulated one."""
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, _make, devices=["cpu", "cuda"])
    dist.init_process_group(BACKEND, store=dist.HashStore(), rank=0, world_size=ranks)
    try:
        group = dist.group.WORLD
        assert isinstance(group, SimulatedGroup)
        yield group
    finally:
        dist.destroy_process_group()


def _make(store: dist.Store, rank: int, size: int, timeout: timedelta) -> SimulatedGroup:
    return SimulatedGroup(Turns(size))


def _described(*tensors: Tensor) -> str:
    return " and ".join(f"{tensor.numel()} {tensor.dtype}" for tensor in tensors)


def ring_sum(tensors: Sequence[Tensor]) -> None:
    """Sum tensors of one shape, a rank's each, into all of them.

    Floating-point addition is not associative. A ring all-reduce (Patarasu and Yuan 2009) gives
    each rank a chunk to finish, whose sum starts at the neighbour and comes round to it; the
    chunks are cut as gloo cuts them, so that a simulated run is a real one to the bit.
    """
    flat = [tensor.view(-1) for tensor in tensors]
    ranks = len(flat)
    size = _chunk(flat[0].numel(), flat[0].element_size(), ranks)
    for last in range(ranks):
        parts = [each[last * size : (last + 1) * size] for each in flat]
        total = parts[last - 1].clone()
        for hop in range(2, ranks + 1):
            total.add_(parts[last - hop])
        for part in parts:
            part.copy_(total)


def _chunk(numel: int, itemsize: int, ranks: int) -> int:
    """Elements in a rank's chunk (the last ones may be short or empty): a whole number of
    segments, at least two, all of one size."""
    nbytes = numel * itemsize
    largest = itemsize * max(1, SEGMENT // itemsize)
    segments = _up(max(-(-nbytes // largest), 2 * ranks), ranks)
    segment = _up(-(-nbytes // segments), itemsize)
    return segments // ranks * segment // itemsize


def _up(count: int, unit: int) -> int:
    """`count` rounded up to a multiple of `unit`."""
    return -(-count // unit) * unit
