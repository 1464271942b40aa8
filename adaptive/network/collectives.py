"""The collectives of the gradient exchange. They are asynchronous, and count their bytes.

A collective may only be issued in the body of a hook call, because DDP calls the hook in the same
order on all ranks. Callbacks of futures run in another order on each rank.
"""

from __future__ import annotations

import atexit
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.futures import Future

from adaptive.network.agreement import gather_objects
from adaptive.network.link import EmulatedLink, complete, done_with, new_future
from compressors.kernels.blocks import Flag, is_host, uninitialized

T = TypeVar("T")


@atexit.register
def _let_threads_finish() -> None:
    """Wait a moment at exit. A thread of the process group that still runs Python code when the
    interpreter shuts down aborts the process (torch 2.13, plain DDP too)."""
    time.sleep(0.05)


@dataclass
class Traffic:
    """The traffic of one rank in one step.

    payload: bytes handed to collectives. wire: bytes that the rank put on the wire, by ring
    algorithms. statistics: the bytes of `wire` that are statistics, which do not grow with the
    model. floats: elements of gradients sent, without indices. down: the bytes of `wire` that bring
    means back, which a parameter server would send. inside: with two levels, bytes sent inside the
    node, which `wire` leaves out. hops: number of messages that wait for one another, added up over
    buckets, without those of statistics. buckets: number of buckets exchanged. by_others: some
    collectives were issued by another library."""

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
    """Bytes that one rank sends to all-gather `payload` bytes among `world_size` ranks."""
    return payload * (world_size - 1)


def reduce_wire_bytes(payload: float, world_size: int) -> float:
    """Bytes that one rank sends to all-reduce `payload` bytes among `world_size` ranks."""
    return payload * 2 * (world_size - 1) / world_size


@dataclass
class PendingSum:
    """The sum of a small tensor over all ranks, under way. There is no callback, because a callback
    that still runs when the interpreter exits aborts the process.

    copies: see `Exchange`."""

    tensor: Tensor
    group: dist.ProcessGroup
    copies: int = 1
    work: dist.Work | None = None
    _copy: Tensor | None = None
    _copied: torch.Event | None = None

    def start(self) -> dist.Work:
        """Issue the collective, unless it was issued before."""
        self.work = self.work or dist.all_reduce(self.tensor, group=self.group, async_op=True)
        return self.work

    def wait(self) -> Tensor:
        """The sum. On a device the stream waits for the sum, and the host does not."""
        self.start().wait()
        if self.copies > 1:
            self.tensor.div_(self.copies)
            self.copies = 1
        return self.tensor

    def fetch(self) -> None:
        """Let a device copy the sum to the host, once the sum has arrived. The host does not wait.
        On the host this does nothing."""
        if self.tensor.device.type == "cpu" or self._copied is not None:
            return
        shape, dtype = self.tensor.shape, self.tensor.dtype
        self._copy = torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)
        self._copy.copy_(self.wait(), non_blocking=True)
        self._copied = torch.Event(self.tensor.device)
        self._copied.record()

    def read(self) -> Tensor:
        """The sum on the host, which waits for it."""
        self.fetch()
        if self._copy is None or self._copied is None:
            return self.wait()
        self._copied.synchronize()
        return self._copy


class Exchange:
    """The asynchronous collectives of one process group. They count their bytes, and may run on an
    emulated link.

    everyone: the ranks that make the same decisions, and sum their statistics; None: those of the
    group. In a sharded model the group has the ranks with the same shard, and `everyone` all ranks.
    world_size, rank: number of ranks in the group, and this rank's number there. ranks, place:
    number of ranks in `everyone`, and this rank's number there. first: this rank logs and writes
    for all ranks. distinct: the ranks whose saved states differ. replicas: the ranks with the same
    parameters. copies: number of ranks (of a node) that sum the same tensors, each of which counts
    once. invalid: flags of `count_invalid` that the controller has not read yet."""

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
        self.distinct, self.replicas, self.copies = self.everyone, group, 1
        self._link = link
        self._traffic = Traffic()
        self.invalid: deque[Tensor] = deque()

    def all_reduce(self, tensor: Tensor) -> Future[Tensor]:
        """A future of the sum of `tensor` over the group, in place."""
        return self._sum(tensor, tensor, self.group)

    def receiver_for(
        self, session: Any, calls: Callable[[bool], AbstractContextManager[None]]
    ) -> Any:
        """The object that gets the replica's buckets, and passes them on to the session. calls: the
        context of a hook call, see `Averager.replica_calls`."""
        return session

    def adapt(self, strategy: Any, divisible: bool) -> Any:
        """The strategy, adapted to these collectives. divisible: units may be cut at any
        element."""
        return strategy

    def sum_by(self, run: Callable[..., Future[Tensor]], tensor: Tensor) -> Future[Tensor]:
        """The same as `all_reduce`, in as many collectives as needed. run: `Pipeline.run`, which
        issues them. Only in the body of a hook call."""
        return self.all_reduce(tensor)

    def total(self, tensor: Tensor) -> Future[Tensor]:
        """A future of the sum of `tensor` over `replicas`, in place and in one collective. Also
        outside of hook calls."""
        return self._sum(tensor, tensor, self.replicas, self.copies)

    def _sum(
        self, own: Tensor, whole: Tensor, group: dist.ProcessGroup, copies: int = 1
    ) -> Future[Tensor]:
        """A future of the sum of `own` over a group, in place. own: this rank's shard of the node's
        tensor `whole`; the bytes of `whole` are counted. copies: number of ranks with the same
        tensor, which counts once."""
        n = dist.get_world_size(group)
        # Empty tensors count, too: the number of hops must be the same for all shards of a model.
        self._traffic.hops += 2 * (n - 1)
        if whole.numel() == 0:  # empty on all ranks of the group
            return done_with(own)

        def counted_once(future: Future[Any]) -> Tensor:
            total = after(future, own)
            if copies == 1:
                return total
            return total.div_(copies) if total.is_floating_point() else total.floor_divide_(copies)

        done = done_with(own)
        if own.numel():  # else `own` is empty on all ranks of the group
            work = dist.all_reduce(own, group=group, async_op=True)
            done = future_of(work, group, own).then(counted_once)
        wire = reduce_wire_bytes(whole.nbytes, n)
        self._traffic.down += wire / 2
        return self._hold(done, whole.nbytes, wire, own.device)

    def mean_as_ddp(self, gradients: Tensor) -> Future[Tensor]:
        """A future of the ranks' mean, made as DDP makes it without a hook. Sparse gradients need a
        process group that can sum them (gloo gathers their indices and values). The bytes are not
        counted."""
        group = self.replicas
        gradients.div_(dist.get_world_size(group))
        work = dist.all_reduce(gradients, group=group, async_op=True)
        return future_of(work, group, gradients).then(lambda future: future.value()[0])

    def sum_later(self, tensor: Tensor) -> PendingSum:
        """The sum of a small `tensor` over everyone, in place: the caller starts and reads the sum.
        Its bytes count as statistics. An emulated link does not delay it."""
        self._count_statistics(tensor)
        return PendingSum(tensor, self.everyone, self.copies)

    def _count_statistics(self, tensor: Tensor) -> None:
        """Count the bytes of an all-reduce of `tensor` over everyone as statistics."""
        wire = reduce_wire_bytes(tensor.nbytes, self.ranks)
        self._traffic.payload += tensor.nbytes
        self._traffic.wire += wire
        self._traffic.statistics += wire
        self._traffic.down += wire / 2

    def gather_objects(self, own: T) -> list[T]:
        """The object of each rank of the group, in order. Waits for all of them."""
        return gather_objects(own, self.group)

    def gather_from_everyone(self, own: T) -> list[T]:
        """The object of each rank of everyone, in order. Waits for all of them."""
        return gather_objects(own, self.everyone)

    def any_rank(self, flag: Flag, device: torch.device) -> Future[Tensor]:
        """A future of one element, above 0 if the flag is set on some rank of everyone. Its bytes
        count as statistics. An emulated link does not delay it."""
        tensor = torch.as_tensor(flag, device=device).to(torch.float32).reshape(1)
        self._count_statistics(tensor)
        work = dist.all_reduce(tensor, group=self.everyone, async_op=True)
        return future_of(work, self.everyone, tensor).then(lambda future: after(future, tensor))

    def all_gather(self, payload: Tensor, means: bool = False) -> Future[Tensor]:
        """A future of the payloads of all ranks, (world size, n). payload: uint8 (n,). means: the
        payloads are of means, not of the ranks' gradients."""
        wire = gather_wire_bytes(payload.numel(), self.world_size)
        self._traffic.down += wire * means
        return self._all_gather(payload, payload.numel(), wire)

    def _all_gather(self, own: Tensor, nbytes: int, wire: float) -> Future[Tensor]:
        """As `all_gather`. own: this rank's part of the node's `nbytes` bytes, which are `wire`
        bytes on the wire."""
        n, size = self.world_size, own.numel()
        out = uninitialized(n * size, own.dtype, own.device)
        work = all_gather_single(out, own, self.group)
        self._traffic.hops += n - 1
        return self._receive(work, nbytes, wire, out.view(n, size))

    def all_to_all(self, payload: Tensor, sizes: Sequence[int]) -> Future[Tensor]:
        """Send the first sizes[0] bytes of `payload` (uint8) to rank 0, the next sizes[1] bytes to
        rank 1, and so on. A future of the bytes received, (world size, sizes[rank])."""
        return self._all_to_all(payload, sizes, payload.nbytes)

    def _all_to_all(self, own: Tensor, sizes: Sequence[int], nbytes: int) -> Future[Tensor]:
        """As `all_to_all`. own: this rank's part of the node's `nbytes` bytes."""
        n, size = self.world_size, sizes[self.rank]
        out = uninitialized(n * size, own.dtype, own.device)
        work = dist.all_to_all_single(out, own, [size] * n, list(sizes), self.group, async_op=True)
        wire = nbytes * (n - 1) / n  # on average over the ranks
        self._traffic.hops += n - 1
        return self._receive(work, nbytes, wire, out.view(n, size))

    def pass_on(self, payload: Tensor, to: int, source: int) -> Future[Tensor]:
        """Send `payload` (uint8, n elements) to rank `to`. A future of the payload (n,) of rank
        `source`. Every rank must be the `to` of one rank and the `source` of another."""
        return self._pass(payload, to, source, payload.numel())

    def _pass(self, own: Tensor, to: int, source: int, nbytes: int) -> Future[Tensor]:
        """As `pass_on`. own: this rank's part of the node's `nbytes` bytes."""
        out = uninitialized(own.numel(), own.dtype, own.device)
        ranks = range(self.world_size)
        received, sent = ([own.numel() * (i == at) for i in ranks] for at in (source, to))
        work = dist.all_to_all_single(out, own, received, sent, self.group, async_op=True)
        self._traffic.hops += 1
        return self._receive(work, nbytes, nbytes, out)

    def to_neighbours(
        self, payload: Tensor, receivers: Sequence[int], sources: Sequence[int]
    ) -> Callable[[], Tensor]:
        """Send `payload` (uint8, n elements) to each of the `receivers`, and receive a payload of n
        bytes from each of the `sources` (ranks of the group). If rank a has b among its receivers,
        b must have a among its sources in the same call. Returns a function that waits for the
        messages, (sources, n), to be called once. (With gloo such messages have no future.)"""
        rows = uninitialized(len(sources) * payload.numel(), payload.dtype, payload.device)
        rows = rows.view(len(sources), payload.numel())
        calls: list[tuple[Any, Tensor, int]] = [
            *((dist.irecv, row, rank) for row, rank in zip(rows.unbind(), sources, strict=True)),
            *((dist.isend, payload, rank) for rank in receivers),
        ]
        # All versions of torch take ranks of the default group here.
        each = [(*call, dist.get_global_rank(self.group, rank)) for *call, rank in calls]
        if is_host(payload.device) or not each:
            works = [call(tensor, rank, self.group) for call, tensor, rank in each]
        else:  # with NCCL separate calls would wait for one another
            batch = [dist.P2POp(call, tensor, rank, self.group) for call, tensor, rank in each]
            works = dist.batch_isend_irecv(batch)
        nbytes = payload.numel() * len(receivers)
        self._traffic.payload += nbytes
        self._traffic.wire += nbytes
        self._traffic.hops += 1  # one hop: all messages are sent at once

        def arrived(sent: Tensor = payload) -> Tensor:  # keeps `payload` alive until it is sent
            for work in works:
                work.wait()
            return rows

        if self._link is None:
            return arrived
        return self._link.hold(arrived, nbytes, rows.device).wait

    def count_reduced(self, done: Future[Tensor], tensor: Tensor, cf: float) -> Future[Tensor]:
        """Count an all-reduce of `tensor`, compressed by `cf`, that another library has issued on
        this group, and delay it by the emulated link. done: the future of the all-reduce."""
        done = future_with_device(done, self.group, tensor.device)
        self._traffic.by_others = True
        self.count_floats(tensor.numel() / cf)
        nbytes = round(torch.float32.itemsize * tensor.numel() / cf)
        wire = reduce_wire_bytes(nbytes, self.world_size)
        self._traffic.down += wire / 2
        self._traffic.hops += 2 * (self.world_size - 1)
        return self._hold(done, nbytes, wire, tensor.device)

    def count_floats(self, floats: float) -> None:
        """Count the elements sent for one bucket."""
        self._traffic.floats += floats
        self._traffic.buckets += 1

    def count_invalid(self, flag: Flag) -> None:
        """Keep a device's flag for the controller. The flag is set if bytes have arrived that no
        compressor can have made. (On the host decoding such bytes raises an error at once.)"""
        if isinstance(flag, Tensor):
            self.invalid.append(flag)

    @property
    def sent(self) -> float:
        """Bytes on the wire since the last `take_traffic`, without statistics."""
        return self._traffic.wire - self._traffic.statistics

    @property
    def shards(self) -> int:
        """Number of shards of each replica of the model; 1 if it is not sharded."""
        return self.ranks // self.world_size

    def take_traffic(self) -> Traffic:
        """The traffic counted since the last call. Counting starts again from zero."""
        taken, self._traffic = self._traffic, Traffic()
        return taken

    def _hold(
        self, done: Future[Tensor], nbytes: int, wire: float, device: torch.device
    ) -> Future[Tensor]:
        """Count the bytes. Returns `done`, delayed by the emulated link if there is one."""
        self._traffic.payload += nbytes
        self._traffic.wire += wire
        return self._link.hold(done.wait, wire, device) if self._link else done

    def _receive(self, work: dist.Work, nbytes: int, wire: float, rows: Tensor) -> Future[Tensor]:
        """A future of `rows`, which a collective fills. It fails if the collective has failed."""
        done = future_of(work, self.group, rows).then(lambda future: after(future, rows))
        return self._hold(done, nbytes, wire, rows.device)


def all_gather_single(out: Tensor, own: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Gather every rank's `own` to `out`, one after the other. (New versions of torch call this
    function all_gather_single, and warn of the old name.)"""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(out, own, group=group, async_op=True)


def future_of(work: dist.Work, group: dist.ProcessGroup, tensor: Tensor) -> Future[Any]:
    """The future of a collective of the group on this tensor. All callers get futures of
    collectives here.

    gloo's futures know no device. With tensors on a GPU, a thread of gloo copies the result to the
    device on its default stream. So the future returned here knows the device, and is completed on
    that stream. Work that waits for the future then comes after the copy."""
    return future_with_device(work.get_future(), group, tensor.device)


def future_with_device(
    future: Future[Any], group: dist.ProcessGroup, device: torch.device
) -> Future[Any]:
    """A future like `future`, of a collective of the group, that knows the device of its result."""
    if device.type != "cuda" or not _is_gloo(group, device):
        return future
    done: Future[Any] = new_future(device)

    def arrived(future: Future[Any]) -> None:
        with torch.cuda.stream(torch.cuda.default_stream(device)):
            complete(done, future.value)

    future.add_done_callback(arrived)
    return done


def _is_gloo(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether gloo exchanges the group's tensors on this device."""
    try:
        return bool(group._get_backend(device).name() == "gloo")
    except RuntimeError:  # a process group written in Python has no backend of torch's
        return False


def after(future: Future[Any], tensor: Tensor) -> Tensor:
    """The tensor that a collective has filled; raises the error of a collective that has failed.
    (The value of the future itself differs between process groups.)"""
    future.value()
    return tensor


def groups_joined() -> int:
    """The number of process groups, as torch counts them: those that this rank is in; from torch
    2.14 on those that this rank has made or seen made. torch puts the number into the name of a
    group that only its own ranks make."""
    world = distributed_c10d._world
    counts_all = "group_count" in distributed_c10d._hash_ranks_to_str.__code__.co_names
    return world.group_count if counts_all else len(world.pg_names)


def join_groups(count: int) -> None:
    """Make process groups of this rank alone, until `groups_joined` is `count`. To be called before
    `new_group(use_local_synchronization=True)`. count: the largest `groups_joined` of the new
    group's ranks.

    torch names the new group by its ranks and by `groups_joined`. Ranks with different numbers
    would wait for each other under different names."""
    for _ in range(groups_joined(), count):
        dist.new_group([dist.get_rank()], use_local_synchronization=True)


def drain(queue: deque[T]) -> list[T]:
    """Take all items out of a queue that other threads may be adding to."""
    taken = []
    with suppress(IndexError):
        while True:
            taken.append(queue.popleft())
    return taken
