"""The collectives of the gradient exchange: asynchronous, and their bytes counted.

Collectives are issued in the hook's body, in the order that DDP calls the hook; never from a
future's callback (callbacks run in an order that differs between ranks).
"""

from __future__ import annotations

import atexit
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.futures import Future

from adaptive.network.link import EmulatedLink, new_future
from compressors.kernels.blocks import Flag, is_host, uninitialized

T = TypeVar("T")


@atexit.register
def _let_threads_finish() -> None:
    """A thread of the process group that is still in Python when the interpreter is taken down
    aborts the process (torch 2.13, plain DDP too): give them the moment that they need."""
    time.sleep(0.05)


@dataclass
class Traffic:
    """Bytes that a rank has handed to collectives, bytes that it put on the wire (by ring
    algorithms), how many of these are statistics, which do not grow with the model, and elements
    of gradients sent, indices not counted. down: of the bytes on the wire those that bring means
    back, which a server would send in the ranks' stead. inside: bytes that a rank sent inside its
    node, where it is one of several (`two_level.py`); they are not among those on the wire. hops:
    messages that had to wait for one another, but for statistics; those of several buckets count
    one by one. buckets: that were exchanged. by_others: some collectives were issued by others."""

    payload: int = 0
    wire: float = 0.0
    statistics: float = 0.0
    floats: float = 0.0
    down: float = 0.0
    inside: float = 0.0
    hops: int = 0
    buckets: int = 0
    by_others: bool = False


def gather_wire_bytes(payload: float, world_size: int) -> float:
    """Bytes a rank sends to all-gather `payload` bytes among `world_size` ranks."""
    return payload * (world_size - 1)


def reduce_wire_bytes(payload: float, world_size: int) -> float:
    """Bytes a rank sends to all-reduce `payload` bytes among `world_size` ranks."""
    return payload * 2 * (world_size - 1) / world_size


@dataclass
class PendingSum:
    """A sum that nobody waits for yet. It has no callback: one could still be running on a thread
    of the process group when the interpreter exits, which aborts the process.

    copies: the number of ranks with the same tensor, which counts once."""

    tensor: Tensor
    group: dist.ProcessGroup
    copies: int = 1
    work: dist.Work | None = None
    _copy: Tensor | None = None
    _copied: torch.Event | None = None

    def start(self) -> dist.Work:
        """Begin; every rank must do so at the same place among its collectives."""
        self.work = self.work or dist.all_reduce(self.tensor, group=self.group, async_op=True)
        return self.work

    def wait(self) -> Tensor:
        """The sum over all ranks; on a device it is the stream that waits, not the host."""
        self.start().wait()
        if self.copies > 1:
            self.tensor.div_(self.copies)
            self.copies = 1
        return self.tensor

    def fetch(self) -> None:
        """Let a device copy the sum to the host once it is there, while the host goes on."""
        if self.tensor.device.type == "cpu" or self._copied is not None:
            return
        self._copy = torch.empty(self.tensor.shape, dtype=self.tensor.dtype, pin_memory=True)
        self._copy.copy_(self.wait(), non_blocking=True)
        self._copied = torch.Event(self.tensor.device)
        self._copied.record()

    def read(self) -> Tensor:
        """The sum over all ranks, on the host."""
        self.fetch()
        if self._copy is None or self._copied is None:
            return self.wait()
        self._copied.synchronize()
        return self._copy


class RunsRounds(Protocol):
    """What runs an exchange of several collectives: the pipeline."""

    def run(
        self,
        rounds: Generator[Future[Tensor], Any, T],
        collectives: int,
        decode: Callable[[T], Tensor],
        device: torch.device,
    ) -> Future[Tensor]:
        """See `Pipeline.run`."""
        ...


class Exchange:
    """Asynchronous collectives over one process group, counted, perhaps over an emulated link.

    everyone: all ranks that decide alike, whose statistics are summed; None: those of the group.
    Where a model is sharded they are more: the group then has the ranks that hold the same shard.
    distinct: the ranks with states of their own. replicas: the ranks with the same parameters.
    first: this rank logs and writes for all.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        link: EmulatedLink | None = None,
        everyone: dist.ProcessGroup | None = None,
    ) -> None:
        self.group = group
        self.world_size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.everyone = group if everyone is None else everyone
        self.ranks = dist.get_world_size(self.everyone)
        self.place = dist.get_rank(self.everyone)
        self.first = self.place == 0
        self.distinct, self.replicas = self.everyone, group
        self._link = link
        self._traffic = Traffic()
        self.invalid: deque[Tensor] = deque()  # of `count_invalid`, to be drained

    def all_reduce(self, tensor: Tensor) -> Future[Tensor]:
        """Sum `tensor` over the ranks, in place."""
        self._round_the_ring(2)  # other shards of a model may not be empty
        if tensor.numel() == 0:  # on every rank, since sizes agree
            nothing = new_future(tensor.device)
            nothing.set_result(tensor)
            return nothing
        work = dist.all_reduce(tensor, group=self.group, async_op=True)
        wire = reduce_wire_bytes(tensor.nbytes, self.world_size)
        done = future_of(work, self.group, tensor).then(lambda future: after(future, tensor))
        self._traffic.down += wire / 2
        return self._hold(done, tensor.nbytes, wire, tensor.device)

    def receiver_for(
        self, session: Any, calls: Callable[[bool], AbstractContextManager[None]]
    ) -> Any:
        """The object that gets the replica's buckets and passes them on to the session. calls: the
        context of a hook call, see `Averager.replica_calls`."""
        return session

    def adapt(self, strategy: Any, divisible: bool) -> Any:
        """The strategy, adapted to these collectives. divisible: units may be cut anywhere."""
        return strategy

    def sum_by(self, pipeline: RunsRounds, tensor: Tensor) -> Future[Tensor]:
        """The same in a hook's body, in as many collectives as it takes."""
        return self.all_reduce(tensor)

    def total(self, tensor: Tensor) -> Future[Tensor]:
        """The same anywhere, in one collective."""
        return self.all_reduce(tensor)

    def mean_as_ddp(self, gradients: Tensor) -> Future[Tensor]:
        """The mean over the ranks as DDP itself makes it, also of sparse gradients, where the
        process group can sum these (gloo gathers their indices and values). Not counted."""
        work = dist.all_reduce(gradients.div_(self.world_size), group=self.group, async_op=True)
        return future_of(work, self.group, gradients).then(lambda future: future.value()[0])

    def sum_later(self, tensor: Tensor) -> PendingSum:
        """A sum of a small `tensor` over everyone, in place, for somebody to start and read. An
        emulated link does not hold it back."""
        wire = reduce_wire_bytes(tensor.nbytes, self.ranks)
        self._traffic.payload += tensor.nbytes
        self._traffic.wire += wire
        self._traffic.statistics += wire
        self._traffic.down += wire / 2
        return PendingSum(tensor, self.everyone)

    def gather_objects(self, own: T) -> list[T]:
        """Of each rank of the group, in order. Waits for them."""
        found = [own] * self.world_size
        dist.all_gather_object(found, own, group=self.group)
        return found

    def any_rank(self, flag: Flag, device: torch.device) -> Future[Tensor]:
        """Whether the flag is set on any rank of everyone: a tensor of one element, above 0 if so.
        Counted as statistics, which an emulated link does not hold back."""
        tensor = torch.as_tensor(flag, device=device).to(torch.float32).reshape(1)
        self.sum_later(tensor)
        work = dist.all_reduce(tensor, group=self.everyone, async_op=True)
        return future_of(work, self.everyone, tensor).then(lambda future: after(future, tensor))

    def all_gather(self, payload: Tensor, means: bool = False) -> Future[Tensor]:
        """Gather `payload` (uint8, n elements) into a tensor of shape (world size, n). means: each
        rank's payload is of the mean, not of its own gradients."""
        n, size = self.world_size, payload.numel()
        out = uninitialized(n * size, payload.dtype, payload.device)
        work = all_gather_single(out, payload, self.group)
        wire = gather_wire_bytes(size, n)
        self._traffic.down += wire * means
        self._round_the_ring()
        return self._receive(work, size, wire, out.view(n, size))

    def all_to_all(self, payload: Tensor, sizes: Sequence[int]) -> Future[Tensor]:
        """Send the first sizes[0] bytes of `payload` (uint8) to rank 0, the next sizes[1] to rank
        1, and so on; a tensor of shape (world size, sizes[rank]) of what the ranks sent here."""
        n, size = self.world_size, sizes[self.rank]
        out = uninitialized(n * size, payload.dtype, payload.device)
        work = dist.all_to_all_single(
            out, payload, [size] * n, list(sizes), self.group, async_op=True
        )
        wire = payload.nbytes * (n - 1) / n  # on average over the ranks
        self._round_the_ring()
        return self._receive(work, payload.nbytes, wire, out.view(n, size))

    def pass_on(self, payload: Tensor, to: int, source: int) -> Future[Tensor]:
        """Send `payload` (uint8, n elements) to rank `to`, and receive as much (n,) from rank
        `source`. Every rank must be the `to` of one rank and the `source` of another."""
        return self._pass(payload, to, source, payload.numel())

    def _pass(self, own: Tensor, to: int, source: int, nbytes: int) -> Future[Tensor]:
        """nbytes: of all that the node sends."""
        out = uninitialized(own.numel(), own.dtype, own.device)
        ranks = range(self.world_size)
        received, sent = ([own.numel() * (i == at) for i in ranks] for at in (source, to))
        work = dist.all_to_all_single(out, own, received, sent, self.group, async_op=True)
        self._traffic.hops += 1
        return self._receive(work, nbytes, nbytes, out)

    def to_neighbours(
        self, payload: Tensor, receivers: Sequence[int], sources: Sequence[int]
    ) -> Arriving:
        """Send `payload` (uint8, n elements) to each of the `receivers`, and receive as much from
        each of the `sources` (ranks of the group). Every rank must be in as many of the lists of
        others as it says, in the same order of calls."""
        rows = uninitialized(len(sources) * payload.numel(), payload.dtype, payload.device)
        rows = rows.view(len(sources), payload.numel())
        calls: list[tuple[Any, Tensor, int]] = [
            *((dist.irecv, row, rank) for row, rank in zip(rows.unbind(), sources, strict=True)),
            *((dist.isend, payload, rank) for rank in receivers),
        ]
        # By the ranks of the default group, in all versions of torch.
        each = [(*call, dist.get_global_rank(self.group, rank)) for *call, rank in calls]
        if is_host(payload.device) or not each:
            works = [call(tensor, rank, self.group) for call, tensor, rank in each]
        else:  # NCCL's would wait for one another
            batch = [dist.P2POp(call, tensor, rank, self.group) for call, tensor, rank in each]
            works = dist.batch_isend_irecv(batch)
        nbytes = payload.numel() * len(receivers)
        self._traffic.payload += nbytes
        self._traffic.wire += nbytes
        self._traffic.hops += 1  # to all of them at once
        arriving = Arriving(works, payload, rows)
        if self._link is not None:
            arriving.held = self._link.hold(arriving, nbytes, rows.device)
        return arriving

    def count_reduced(self, done: Future[Tensor], tensor: Tensor, cf: float) -> Future[Tensor]:
        """Count an all-reduce of `tensor`, compressed by `cf`, that somebody else has issued; hold
        it back as the link would. done: theirs, as any future of this group's."""
        done = known_there(done, self.group, tensor.device)
        self._traffic.by_others = True
        self.count_floats(tensor.numel() / cf)
        nbytes = round(torch.float32.itemsize * tensor.numel() / cf)
        wire = reduce_wire_bytes(nbytes, self.world_size)
        self._traffic.down += wire / 2
        self._round_the_ring(2)
        return self._hold(done, nbytes, wire, tensor.device)

    def count_floats(self, floats: float) -> None:
        """So many elements of gradients are sent, of one bucket."""
        self._traffic.floats += floats
        self._traffic.buckets += 1

    def count_invalid(self, flag: Flag) -> None:
        """Something that has arrived on a device cannot have been sent. The host raises at once."""
        if isinstance(flag, Tensor):
            self.invalid.append(flag)

    @property
    def sent(self) -> float:
        """Bytes on the wire since the last `take_traffic`, but for statistics."""
        return self._traffic.wire - self._traffic.statistics

    @property
    def shards(self) -> int:
        """In how many parts each replica of the model is; 1 if it is not sharded."""
        return self.ranks // self.world_size

    def take_traffic(self) -> Traffic:
        """What was counted so far; counting starts again from zero."""
        taken, self._traffic = self._traffic, Traffic()
        return taken

    def _round_the_ring(self, times: int = 1) -> None:
        """A collective whose messages go from rank to rank."""
        self._traffic.hops += times * (self.world_size - 1)

    def _hold(
        self, done: Future[Tensor], nbytes: int, wire: float, device: torch.device
    ) -> Future[Tensor]:
        """Count what was sent; `done`, no sooner than an emulated link has carried it."""
        self._traffic.payload += nbytes
        self._traffic.wire += wire
        return self._link.hold(done, wire, device) if self._link else done

    def _receive(self, work: dist.Work, nbytes: int, wire: float, rows: Tensor) -> Future[Tensor]:
        """A future of the `rows` that a collective fills; fails if that has failed, instead of
        handing on a buffer that nothing was received in."""
        done = future_of(work, self.group, rows).then(lambda future: after(future, rows))
        return self._hold(done, nbytes, wire, rows.device)


@dataclass(eq=False)
class Arriving:
    """What neighbours have sent, there or under way (a point-to-point exchange has no future with
    gloo). payload: this rank's own, to be left alone until then. held: when an emulated link lets
    it through."""

    works: Sequence[dist.Work]
    payload: Tensor
    rows: Tensor
    held: Future[Tensor] | None = None

    def wait(self) -> Tensor:
        """Called once: as the emulated link does, or nobody."""
        for work in self.works:
            work.wait()
        return self.rows

    def payloads(self) -> Tensor:
        """(sources, bytes), once all are there."""
        return self.wait() if self.held is None else self.held.wait()


def all_gather_single(out: Tensor, own: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Gather every rank's `own`, one after the other. (torch renamed all_gather_into_tensor, which
    warns since; older versions have only that.)"""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(out, own, group=group, async_op=True)


def future_of(work: dist.Work, group: dist.ProcessGroup, tensor: Tensor) -> Future[Any]:
    """The future of a collective of the group, on this tensor: the one place where it is taken.

    gloo's futures know no device. Only one stream waits until gloo has copied what has arrived to a
    GPU: the default stream, on a thread of gloo's. So there a future that knows the device is
    completed on that stream. Whatever waits for it, or follows it, is then behind the copy."""
    return known_there(work.get_future(), group, tensor.device)


def known_there(future: Future[Any], group: dist.ProcessGroup, device: torch.device) -> Future[Any]:
    """A future of collectives of the group that knows the device, on which what they bring lies."""
    if device.type != "cuda" or not _is_gloo(group, device):
        return future
    done: Future[Any] = new_future(device)

    def complete(arrived: Future[Any]) -> None:
        try:
            with torch.cuda.stream(torch.cuda.default_stream(device)):
                done.set_result(arrived.value())
        except Exception as error:  # whoever waits for the collective must see it, whatever it is
            done.set_exception(error)

    future.add_done_callback(complete)
    return done


def _is_gloo(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether gloo carries the group's tensors on the device."""
    try:
        return bool(group._get_backend(device).name() == "gloo")
    except RuntimeError:  # a group written in Python has none of torch's
        return False


def after(future: Future[Any], tensor: Tensor) -> Tensor:
    """The tensor that a collective has filled; raises what went wrong with it. (Process groups
    differ in what they take for the collective's value.)"""
    future.value()
    return tensor


def groups_joined() -> int:
    """The number that torch puts into the name of a group that its ranks alone make: how many
    groups this rank is in, or, from torch 2.14 on, how many it has made or seen made."""
    world = distributed_c10d._world
    counts_all = "group_count" in distributed_c10d._hash_ranks_to_str.__code__.co_names
    return world.group_count if counts_all else len(world.pg_names)


def join_groups(count: int) -> None:
    """Before `new_group(use_local_synchronization=True)`: make groups of this rank alone until its
    `groups_joined` is `count`, the largest of the new group's ranks.

    torch names the new group by its ranks and by that number. Ranks with different numbers would
    wait for each other under different names."""
    for _ in range(groups_joined(), count):
        dist.new_group([dist.get_rank()], use_local_synchronization=True)


def drain(queue: deque[T]) -> list[T]:
    """All that threads have put into the queue so far."""
    taken = []
    with suppress(IndexError):
        while True:
            taken.append(queue.popleft())
    return taken
