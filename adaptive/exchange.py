"""How payloads become the mean gradient: the collectives, and the count of their bytes.

Collectives are issued in the hook's body, in the order that DDP calls the hook; never from a
future's callback (callbacks run in an order that differs between ranks).
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from adaptive.link import EmulatedLink
from compressors.kernels import fresh


@atexit.register
def _let_threads_finish() -> None:
    """A thread of the process group that is still in Python when the interpreter is taken down
    aborts the process (torch 2.13, plain DDP too): give them the moment that they need."""
    time.sleep(0.05)


@dataclass
class Traffic:
    """payload: bytes handed to collectives. wire: bytes a rank put on the wire (ring algorithms:
    (N-1) x payload for an all-gather, 2(N-1)/N x payload for an all-reduce). statistics: of wire,
    what is no gradient and so does not grow with the model."""

    payload: int = 0
    wire: float = 0.0
    statistics: float = 0.0


def gather_wire_bytes(payload: float, world_size: int) -> float:
    """Bytes a rank sends to all-gather `payload` bytes among `world_size` ranks."""
    return payload * (world_size - 1)


def reduce_wire_bytes(payload: float, world_size: int) -> float:
    """Bytes a rank sends to all-reduce `payload` bytes among `world_size` ranks."""
    return payload * 2 * (world_size - 1) / world_size


def shard_wire_bytes(payload: float, world_size: int) -> float:
    """Bytes a rank sends, on average over the ranks, when `payload` bytes are scattered from every
    rank (all-to-all) or broadcast from one."""
    return payload * (world_size - 1) / world_size


@dataclass
class PendingSum:
    """A sum that nobody waits for yet. It has no callback: one could still be running on a thread
    of the process group when the interpreter exits, which aborts the process.

    work: None as long as it has not been started."""

    tensor: Tensor
    group: dist.ProcessGroup
    work: dist.Work | None = None

    def start(self) -> PendingSum:
        """Begin; every rank must do so at the same place among its collectives."""
        if self.work is None:
            self.work = dist.all_reduce(self.tensor, group=self.group, async_op=True)
        return self

    def wait(self) -> Tensor:
        """The sum over all ranks."""
        work = self.start().work
        assert work is not None
        work.wait()
        return self.tensor


class Exchange:
    """Asynchronous collectives over one process group, counted, perhaps over an emulated link.

    traffic: since the last `take_traffic`.
    """

    def __init__(self, group: dist.ProcessGroup, link: EmulatedLink | None = None) -> None:
        self.group = group
        self.world_size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.traffic = Traffic()
        self._link = link

    def all_reduce(self, tensor: Tensor) -> Future[Tensor]:
        """Sum `tensor` over the ranks, in place."""
        if tensor.numel() == 0:  # on every rank, since sizes agree
            nothing: Future[Tensor] = Future()
            nothing.set_result(tensor)
            return nothing
        work = dist.all_reduce(tensor, group=self.group, async_op=True)
        wire = self._count(tensor.numel() * tensor.element_size(), reduce_wire_bytes)
        return self._hold(work, wire)

    def sum_later(self, tensor: Tensor) -> PendingSum:
        """A sum of a small `tensor` over the ranks, in place, to be started and, a step later,
        read. An emulated link does not hold it back."""
        wire = self._count(tensor.numel() * tensor.element_size(), reduce_wire_bytes)
        self.traffic.statistics += wire
        return PendingSum(tensor, self.group)

    def all_gather(self, payload: Tensor) -> Future[Tensor]:
        """Gather `payload` (uint8, n elements) into a tensor of shape (world size, n)."""
        flat = fresh(self.world_size * payload.numel(), payload.dtype, payload.device)
        out = flat.view(self.world_size, payload.numel())
        work = _all_gather(flat, payload, self.group)
        wire = self._count(payload.numel(), gather_wire_bytes)
        return _value_after(self._hold(work, wire), out)

    def all_to_all(self, payload: Tensor, sizes: Sequence[int]) -> Future[Tensor]:
        """Send the first sizes[0] bytes of `payload` (uint8) to rank 0, the next sizes[1] to rank
        1, and so on; a tensor of shape (world size, sizes[rank]) of what the ranks sent here."""
        size = sizes[self.rank]
        flat = fresh(self.world_size * size, payload.dtype, payload.device)
        out = flat.view(self.world_size, size)
        work = dist.all_to_all_single(
            flat, payload, [size] * self.world_size, list(sizes), self.group, async_op=True
        )
        wire = self._count(payload.numel(), shard_wire_bytes)
        return _value_after(self._hold(work, wire), out)

    def broadcast(self, tensor: Tensor, source: int) -> Future[Tensor]:
        """Make `tensor` on every rank that of the rank `source` of the group, in place."""
        work = dist.broadcast(tensor, group_src=source, group=self.group, async_op=True)
        wire = self._count(tensor.numel() * tensor.element_size(), shard_wire_bytes)
        return _value_after(self._hold(work, wire), tensor)

    def hold_reduced(self, done: Future[Tensor], tensor: Tensor, cf: float) -> Future[Tensor]:
        """Count an all-reduce of `tensor`, compressed by `cf`, that somebody else has issued; hold
        it back as the link would."""
        wire = self._count(round(4 * tensor.numel() / cf), reduce_wire_bytes)
        return self._link.hold(done, wire) if self._link else done

    def take_traffic(self) -> Traffic:
        """The traffic counted so far; counting starts again from zero."""
        taken, self.traffic = self.traffic, Traffic()
        return taken

    def _count(self, payload: int, wire_bytes: Callable[[float, int], float]) -> float:
        wire = wire_bytes(payload, self.world_size)
        self.traffic.payload += payload
        self.traffic.wire += wire
        return wire

    def _hold(self, work: dist.Work, wire: float) -> Future[Tensor]:
        done: Future[Tensor] = work.get_future().then(lambda f: f.value()[0])
        return self._link.hold(done, wire) if self._link else done


def _value_after(done: Future[Tensor], out: Tensor) -> Future[Tensor]:
    """A future of `out` once `done` is; if `done` failed, so does it. A callback that did not read
    the future would hand on a receive buffer that nothing was received in."""

    def finish(future: Future[Tensor]) -> Tensor:
        future.value()  # raises what went wrong
        return out

    return done.then(finish)


def _all_gather(out: Tensor, payload: Tensor, group: dist.ProcessGroup) -> dist.Work:
    # torch renamed all_gather_into_tensor, which warns since; older versions have only that.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(out, payload, group=group, async_op=True)
