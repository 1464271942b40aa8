"""Two levels: the ranks of a node average dense gradients, and the nodes exchange compressed ones.

Memories, statistics, policies and strategies see each node as one rank. The ranks of a node hold
the same residuals and parameters, and each rank sends one shard of the node's payloads.

1. The ranks of a node average a bucket's gradients (`NodeMeans`), before the session gets them.
2. With an all-gather each rank of the node compresses one shard of the bucket, if units may be cut
   anywhere. Else each rank compresses the whole bucket, and sends one shard of each payload.
3. Each rank exchanges its shard with one rank on each other node: the rank at the same place.
4. The ranks of a node gather the shards that arrived: a second collective after each collective
   between nodes.

All ranks of a node together send the bytes of one rank to other nodes. Steps 1 and 4 stay inside.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from adaptive.exchange.bucket import by_shards
from adaptive.exchange.choice import ExchangeName, ParameterServer
from adaptive.exchange.strategies import (
    Gathered,
    Outgoing,
    Rounds,
    Strategy,
    Wrapped,
    as_received,
    pack,
    payload_sizes,
    unpack,
)
from adaptive.model.parameters import is_left_to_ddp
from adaptive.model.replicas import Exchanging
from adaptive.network.agreement import gather_objects
from adaptive.network.collectives import (
    Exchange,
    after,
    all_gather_single,
    future_of,
    gather_wire_bytes,
    groups_joined,
    join_groups,
    reduce_wire_bytes,
)
from adaptive.network.link import EmulatedLink, complete, done_with, new_future
from compressors.kernels.blocks import uninitialized
from policies import checks

R = TypeVar("R")

VARIABLE = "LOCAL_WORLD_SIZE"
"""The environment variable in which torchrun says how many ranks a node has."""


@dataclass(frozen=True)
class TwoLevel:
    """Gradients are averaged dense inside a node, and exchanged compressed between nodes.

    node: the number of ranks of a node (consecutive ranks form a node), or the process group of
        this rank's node. None: the number that torchrun sets (LOCAL_WORLD_SIZE).
    between: the exchange between nodes: any value of `exchange` but `TwoLevel`.

    All nodes must have the same number of ranks. One node, or nodes of one rank, are one level.
    ValueError or TypeError for a value that is not accepted."""

    node: int | dist.ProcessGroup | None = None
    between: ExchangeName | str | Strategy | ParameterServer = "auto"

    def __post_init__(self) -> None:
        if self.node is not None and not isinstance(self.node, dist.ProcessGroup):
            checks.whole("node", self.node, least=1)

    def __repr__(self) -> str:
        """The same on every rank."""
        node = "a process group" if isinstance(self.node, dist.ProcessGroup) else repr(self.node)
        return f"TwoLevel(node={node}, between={self.between!r})"


class Nodes(NamedTuple):
    """The two process groups of a rank.

    inside: the ranks of its node. between: the ranks with the same place, one on each node."""

    inside: dist.ProcessGroup
    between: dist.ProcessGroup


def find_nodes(levels: TwoLevel | None, asked: bool, group: dist.ProcessGroup) -> Nodes | None:
    """This rank's two process groups; None for one level. A collective of `group`.

    asked: the script has asked for two levels. Then ValueError on every rank if two levels are
    impossible."""
    label = "" if levels is None else _label(levels, group)
    by_rank = gather_objects((repr(levels), label, groups_joined()), group)
    settings = {setting for setting, *_ in by_rank}
    if levels is None or len(settings) > 1:  # `agree` raises later if settings differ
        return None
    labels = [label for _, label, _ in by_rank]
    nodes = [[i for i, each in enumerate(labels) if each == label] for label in Counter(labels)]
    problem = _problem(levels, labels, nodes, dist.get_process_group_ranks(group))
    if problem and asked:
        raise ValueError(f"exchange={levels!r}: {problem}")
    if problem or len(nodes) == 1 or len(nodes[0]) == 1:
        return None
    own = next(node for node in nodes if dist.get_rank(group) in node)
    place = own.index(dist.get_rank(group))
    join_groups(max(joined for *_, joined in by_rank))
    return Nodes(_subgroup(group, own), _subgroup(group, [node[place] for node in nodes]))


def _label(levels: TwoLevel, group: dist.ProcessGroup) -> Any:
    """A label of this rank's node, the same on all ranks of the node: (size of a node, number of
    this node), the ranks of a process group, or the text of a malformed environment variable."""
    if isinstance(levels.node, dist.ProcessGroup):
        return tuple(dist.get_process_group_ranks(levels.node))
    if levels.node is not None:
        return levels.node, dist.get_rank(group) // levels.node
    text = os.environ.get(VARIABLE, "")
    if not text.isdecimal() or not int(text):
        return text
    return int(text), dist.get_rank() // int(text)


def _problem(
    levels: TwoLevel, labels: Sequence[Any], nodes: Sequence[Sequence[int]], ranks: Sequence[int]
) -> str:
    """Why two levels are impossible; "" if they are possible. ranks: the group's global ranks."""
    for rank, label in enumerate(labels):
        if isinstance(label, str):
            return (
                f"the environment variable {VARIABLE}, which torchrun sets, must be the number of "
                f"a node's ranks, got {label!r} on rank {rank}; or TwoLevel(node=8)"
            )
    sizes = [len(node) for node in nodes]
    given = {size for size, _ in labels} if levels.node is None else set()
    if len(given) > 1:  # one node of 2 ranks and one of 4 would look like three nodes of 2
        sizes = sorted(given)
    if len(set(sizes)) > 1:
        counts = ", ".join(map(str, sizes))
        return f"all nodes must have the same number of ranks, got nodes of {counts} ranks"
    if isinstance(levels.node, dist.ProcessGroup):
        for node in nodes:
            if tuple(ranks[i] for i in node) != labels[node[0]]:
                return (
                    f"node must be a process group of the ranks of one node, and the same on all "
                    f"of them; rank {node[0]} has one of ranks {labels[node[0]]}"
                )
        if any(sorted(places) != list(places) for places in zip(*nodes, strict=True)):
            return "nodes must be in the same order at every place, that of their ranks"
    return ""


def _subgroup(group: dist.ProcessGroup, ranks: Sequence[int]) -> dist.ProcessGroup:
    """A subgroup with the backend and the timeout of its parent. ranks: ranks of the parent."""
    of_default = [dist.get_global_rank(group, rank) for rank in ranks]
    devices = sorted(group._device_types, key=lambda device: device.type == "cpu")
    options = getattr(group._get_backend(devices[0]), "options", None)
    made = dist.new_group(
        of_default,
        timeout=getattr(options, "_timeout", None),
        backend=None if group is dist.group.WORLD else dist.get_backend(group),
        use_local_synchronization=True,
    )
    assert isinstance(made, dist.ProcessGroup)
    return made


class NodeExchange(Exchange):
    """The collectives of two levels: `world_size` is the number of nodes, `rank` this node's.

    A collective between nodes returns one shard of its result, the shard of this rank's place.
    `adapt` adds a second collective inside the node, which gathers the shards to the whole result.

    Bytes on the wire are those of the whole node. Bytes inside the node are counted separately.
    """

    def __init__(
        self, nodes: Nodes, everyone: dist.ProcessGroup, link: EmulatedLink | None = None
    ) -> None:
        super().__init__(nodes.between, link, everyone)
        self.ranks, self.place = self.world_size, self.rank
        self.distinct, self.replicas = nodes.between, everyone
        self._inside = nodes.inside
        self.node_size = self.copies = dist.get_world_size(nodes.inside)
        self.node_shard = dist.get_rank(nodes.inside)
        # (shard) -> a future of the whole result: starts the collective inside the node that
        # completes the collective between nodes issued last.
        self._gather_shards: Callable[[Tensor], Future[Tensor]] | None = None

    def receiver_for(
        self, session: Exchanging, calls: Callable[[bool], AbstractContextManager[None]]
    ) -> NodeMeans:
        return NodeMeans(self, session, calls)

    # -- for strategies --

    def adapt(self, strategy: Strategy, divisible: bool) -> Strategy:
        """The strategy, with a second collective after each of its own. divisible: units may be
        cut anywhere."""
        if divisible and isinstance(strategy, Gathered):
            return _ShardedGather(strategy, self)
        return _InTwoLevels(strategy, self)

    def gather_by_shards(self, out: Outgoing) -> Rounds:
        """The rounds of `Gathered` with shards: each rank of the node has compressed its own shard
        of the bucket."""
        units, n = by_shards(out.units, out.bucket.work.numel(), self.node_size), self.world_size
        sizes = [sum(payload_sizes(of_shard)) for of_shard in units]
        most = max(sizes)
        own = _padded(pack(out, units[self.node_shard], out.payloads), most)
        out.payloads = ()  # frees them: the all-gather brings this rank's payloads back, too
        wire = gather_wire_bytes(self.node_size * most, n)
        shard = yield self._all_gather(own, sum(sizes), wire)
        shape = self.node_size, n, most
        rows = yield self._gather(shard.reshape(-1), lambda whole: whole.view(shape))
        of_shards = zip(units, rows, sizes, strict=True)
        received = (unpack(each, row[:, :size]) for each, row, size in of_shards)
        return as_received(chain.from_iterable(received), n)

    def in_two_levels(
        self, rounds: Generator[Future[Tensor], Any, R]
    ) -> Generator[Future[Tensor], Any, R]:
        """The rounds of an exchange, with a second collective after each of their own."""
        issued = next(rounds)
        while True:
            gather_shards = self._gather_shards
            assert gather_shards is not None  # set by the collective that `rounds` has just issued
            shard = yield issued
            value = yield gather_shards(shard)
            try:
                issued = rounds.send(value)
            except StopIteration as stop:
                made: R = stop.value
                return made

    def all_reduce(self, tensor: Tensor) -> Future[Tensor]:
        """Sum this rank's shard of `tensor` over the nodes, in place. The second collective makes
        the whole sum."""
        numel, size = tensor.numel(), self._shard_numel(tensor.numel())
        own = self._own_shard(tensor.view(-1), size)

        def completed(rows: Tensor) -> Tensor:
            tensor.view(-1).copy_(rows[:numel])
            return tensor

        self._gather_shards = lambda shard: self._gather(_padded(shard, size), completed)
        return self._sum(own, tensor, self.group)

    def all_gather(self, payload: Tensor, means: bool = False) -> Future[Tensor]:
        """A future of shards (nodes, bytes of a shard). The second collective makes payloads of
        them: (nodes, bytes of a payload)."""
        numel, size = payload.numel(), self._shard_numel(payload.numel())
        self._gather_shards = partial(self._gather_rows, numel)
        own = _padded(self._own_shard(payload, size), size)
        wire = gather_wire_bytes(numel, self.world_size)
        self._traffic.down += wire * means
        return self._all_gather(own, numel, wire)

    def all_to_all(self, payload: Tensor, sizes: Sequence[int]) -> Future[Tensor]:
        """A future of shards (nodes, bytes of a shard). The second collective makes payloads of
        them: (nodes, sizes[rank])."""
        shards = [self._shard_numel(size) for size in sizes]
        pieces = zip(payload.split(list(sizes)), shards, strict=True)
        own = [_padded(self._own_shard(piece, size), size) for piece, size in pieces]
        self._gather_shards = partial(self._gather_rows, sizes[self.rank])
        return self._all_to_all(torch.cat(own), shards, payload.nbytes)

    def pass_on(self, payload: Tensor, to: int, source: int) -> Future[Tensor]:
        """A future of one shard of the payload that node `source` passes on. The second collective
        makes the whole payload."""
        numel, size = payload.numel(), self._shard_numel(payload.numel())
        self._gather_shards = lambda shard: self._gather(shard, lambda whole: whole[:numel])
        own = _padded(self._own_shard(payload, size), size)
        return self._pass(own, to, source, numel)

    def _gather_rows(self, numel: int, shard: Tensor) -> Future[Tensor]:
        """A future of (nodes, numel). shard: (nodes, bytes of this rank's shard)."""
        n = self.world_size

        def in_order(rows: Tensor) -> Tensor:
            of_nodes = rows.view(self.node_size, n, -1).transpose(0, 1)
            return of_nodes.reshape(n, -1)[:, :numel]

        return self._gather(shard.reshape(-1), in_order)

    def _gather(self, own: Tensor, made: Callable[[Tensor], Tensor]) -> Future[Tensor]:
        """All-gather `own` inside the node. Returns a future of made(gathered tensor)."""
        out = uninitialized(self.node_size * own.numel(), own.dtype, own.device)
        if not own.numel():
            return done_with(made(out))
        self._traffic.inside += gather_wire_bytes(own.nbytes, self.node_size)
        work = all_gather_single(out, own.contiguous(), self._inside)
        return future_of(work, self._inside, out).then(lambda future: made(after(future, out)))

    def _shard_numel(self, numel: int) -> int:
        """Elements of one shard of `numel` elements, rounded up."""
        return -(-numel // self.node_size)

    def _own_shard(self, flat: Tensor, size: int) -> Tensor:
        """This rank's shard of `flat` (a view): at most `size` elements."""
        return flat[self.node_shard * size :][:size]

    # -- for other callers --

    def sum_by(self, run: Callable[..., Future[Tensor]], tensor: Tensor) -> Future[Tensor]:
        def rounds() -> Generator[Future[Tensor], Any, Tensor]:
            return (yield self.all_reduce(tensor))

        return run(self.in_two_levels(rounds()), 2, lambda total: total, tensor.device)

    def node_mean(self, gradients: Tensor) -> Future[Tensor]:
        """A future of the mean over the ranks of the node, in place."""
        self._traffic.inside += reduce_wire_bytes(gradients.nbytes, self.node_size)
        gradients.div_(self.node_size)
        work = dist.all_reduce(gradients, group=self._inside, async_op=True)
        done = future_of(work, self._inside, gradients)
        return done.then(lambda future: after(future, gradients))


class _InTwoLevels(Wrapped):
    """A strategy, with a second collective after each of its own."""

    def __init__(self, inner: Strategy, nodes: NodeExchange) -> None:
        super().__init__(inner)
        self._nodes = nodes

    def rounds(self, exchange: Exchange, outgoing: Outgoing) -> Rounds:
        return self._nodes.in_two_levels(self.inner.rounds(exchange, outgoing))

    def collectives(self, ranks: int) -> int:
        return 2 * self.inner.collectives(ranks)


class _ShardedGather(_InTwoLevels):
    """`Gathered` with shards: each rank of a node compresses its own shard of the bucket."""

    def __init__(self, inner: Strategy, nodes: NodeExchange) -> None:
        super().__init__(inner, nodes)
        self.node_shards, self.node_shard = nodes.node_size, nodes.node_shard

    def rounds(self, exchange: Exchange, outgoing: Outgoing) -> Rounds:
        return self._nodes.gather_by_shards(outgoing)


def _padded(shard: Tensor, size: int) -> Tensor:
    """The shard with zeros appended: all ranks of a node must send the same number of bytes."""
    if shard.numel() == size:
        return shard
    return torch.cat([shard, shard.new_zeros(size - shard.numel())])


@dataclass(eq=False)
class NodeMeans:
    """A receiver of buckets between DDP and the session. It replaces the gradients of a rank by the
    mean over the rank's node. Once that mean is there, the session gets the bucket, in the body of
    the next hook call. The session gets the last bucket at the end of backward.

    calls: the context of a hook call, see `Averager.replica_calls`.
    """

    exchange: NodeExchange
    session: Exchanging
    calls: Callable[[bool], AbstractContextManager[None]]
    # Buckets not handed on yet: (bucket, future of the node's mean, future that DDP waits for).
    _waiting: deque[tuple[dist.GradBucket, Future[Tensor], Future[Tensor]]] = field(
        default_factory=deque
    )
    _last: Future[Tensor] | None = None

    def reduce(self, bucket: dist.GradBucket, at_once: bool = False) -> Future[Tensor]:
        """See `Exchanging`."""
        if bucket.index() == 0:  # drop buckets that an earlier backward left when it raised
            self._waiting.clear()
        buffer = bucket.buffer()
        with self.calls(False):
            left = is_left_to_ddp(buffer, bucket.parameters())
            mean = done_with(buffer) if left else self.exchange.node_mean(buffer)
        done = new_future(buffer.device)
        self._waiting.append((bucket, mean, done))
        self._hand_on(keep=1)
        return done

    def end_backward(self, last: Future[Tensor]) -> Future[Tensor]:
        """See `Exchanging`."""
        self._hand_on(keep=0)
        assert self._last is not None
        return self.session.end_backward(self._last)

    def _hand_on(self, keep: int) -> None:
        """Hand buckets on to the session, except the last `keep` buckets."""
        while len(self._waiting) > keep:
            bucket, mean, done = self._waiting.popleft()
            with self.calls(False):
                mean.wait()
            self._last = self.session.reduce(bucket)
            self._last.then(partial(_pass_on, done))


def _pass_on(done: Future[Tensor], mean: Future[Tensor]) -> None:
    complete(done, mean.value)
