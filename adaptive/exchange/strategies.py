"""How the payloads of all ranks become the mean gradient: the contract of a strategy, and four
strategies.

A strategy gets the payloads that a rank sends for one bucket (`Outgoing`) and returns the payloads
that have arrived (`Received`). A strategy knows no memory and no statistics. `Strategy.rounds` is a
generator, since a collective may only be issued in the body of a hook call
(`adaptive.network.pipeline`). docs/own_exchange.md says how to add a strategy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import nan, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.futures import Future

from adaptive.exchange.bucket import (
    EXACT,
    Bucket,
    Unit,
    by_shards,
    compress_levels,
    energies_of,
    with_energies,
)
from adaptive.network.collectives import Exchange, gather_wire_bytes, reduce_wire_bytes
from compressors import Compressor
from compressors.base import Payload, Spec, any_nonfinite
from compressors.kernels import all_finite
from compressors.kernels.blocks import Flag, either, fill_if, uninitialized
from compressors.rounds import RoundsCompressor
from compressors.sharded import Sharded, in_shards
from policies import DENSE
from policies.checks import settings_of

FP32 = 4
"""Bytes of an element that is sent uncompressed in a compressed step."""


@dataclass
class Outgoing:
    """What a rank sends for one bucket of gradients.

    index: the bucket's index in its step. units: slices of the bucket, each compressed as one
    tensor with its own `compressor`, `spec` and `numel`; the same on every rank.
    payloads: one for each unit that this rank compresses. A nonfinite bucket has NaN payloads. For
    a strategy with `takes_error_fed` the only part of a payload is the error-fed gradient, which is
    zero in a nonfinite bucket.
    report: a strategy that makes payloads itself calls `report` with them, in the hook's body.
    report_means: called in place of `report` if the CFs of means are measured, with the energies of
    one mean at each CF: (CFs, 3), as `Payload.energies`.
    """

    index: int
    bucket: Bucket
    units: list[Unit]
    payloads: Sequence[Payload]
    report: Callable[[Sequence[Payload]], None]
    report_means: Callable[[Tensor], None]

    def pack(self) -> Tensor:
        """This rank's payloads as one tensor (bytes,), uint8, of the same length on every rank.
        ValueError if a payload is not of the size that the compressor's `nbytes` announced."""
        return pack(self, self.units, self.payloads)

    def received(self, rows: Tensor) -> Received:
        """The payloads in `rows` (ranks, bytes; uint8). Rank r has packed row r."""
        return as_received(unpack(self.units, rows), len(rows))


@dataclass
class Received:
    """What has arrived for one bucket. The mean of a unit is `scale` times the sum of its payloads.

    payloads: for each unit, the payloads to add up. Their order must be the same on every rank:
    otherwise sums round differently, and the ranks' parameters differ.
    nonfinite: some rank's gradients were not finite, so payloads must be ignored.
    own: for each unit, the payload that this rank has sent; None: `payloads[unit][rank]`.
    lost: for each unit whose mean this rank compressed, the compression error of the mean (flat).
    compressors: for each unit, the compressor that decodes its payloads; None: the unit's own.
    """

    payloads: Iterable[Sequence[Payload]]
    nonfinite: Flag
    scale: float = 1.0
    own: Sequence[Payload] | None = None
    lost: Sequence[tuple[Unit, Tensor]] = ()
    compressors: Sequence[Compressor] | None = None


Rounds = Generator[Future[Tensor], Any, Received]
"""The exchange of one bucket, a generator (`Strategy.rounds`). The code after the last collective
runs on a thread of the process group."""


class Piece(NamedTuple):
    """One tensor that a step sends: only the facts from which its number of bytes follows.

    cf: the CF of the tensor's payload; 1 if the tensor is sent uncompressed. segments: see `Unit`.
    """

    compressor: Compressor
    shape: tuple[int, ...]
    cf: float
    segments: tuple[int, ...] = ()

    @property
    def spec(self) -> Spec:
        """The spec of a float32 tensor."""
        spec = Spec.shaped(self.shape, self.cf)
        return spec._replace(segments=self.segments) if self.segments else spec

    @property
    def nbytes(self) -> float:
        """Bytes of the payload of a float32 tensor."""
        if self.cf == DENSE:
            return float(FP32 * prod(self.shape))
        return self.compressor.nbytes(self.spec)


class Strategy(ABC):
    """A strategy is one way in which the payloads of all ranks become their mean.

    One object serves all buckets of a model, and several exchanges may be under way at a time. So
    the state of one bucket's exchange belongs in local variables of `rounds`.

    name: shown in errors; by default the name of the class.
    The remaining attributes are for the strategies of this package.
    takes_error_fed: the strategy compresses the error-fed gradients itself. sharded: no unit
    crosses the border between the shards of two ranks. votes: payloads hold values in full
    precision, at any number of indices. node_shards, node_shard: a bucket is cut into `node_shards`
    equal shards, and no unit crosses a border between shards; this rank compresses shard number
    `node_shard`, and the node's other ranks compress the other shards. calls: torch operations and
    kernel launches for one bucket, compressing and decoding included, as counted on a device
    (docs/gpu.md).
    """

    name: str = ""
    takes_error_fed: bool = False
    sharded: bool = False
    votes: bool = False
    node_shards: int = 1
    node_shard: int = 0
    calls: int = 0

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.name = cls.name or cls.__name__

    @abstractmethod
    def rounds(self, exchange: Exchange, outgoing: Outgoing) -> Rounds:
        """The exchange of one bucket, as a generator. It issues a collective, yields the
        collective's future, is sent the future's value, and in the end returns what has arrived.

        exchange: has this rank (`rank`), the number of ranks (`world_size`, 2 or more) and the
            collectives: `all_gather`, `all_reduce`, `all_to_all`, `pass_on`. Other collectives are
            not counted in bytes, do not run on an emulated link, and do not work with two levels.
        outgoing: what this rank sends. It may be empty, on all ranks at once.

        The number and the sizes of collectives must be the same on all ranks. The code after the
        last collective runs on another thread, and must issue none."""

    @abstractmethod
    def nbytes(self, pieces: Sequence[Piece], ranks: int) -> float:
        """Bytes that one rank puts on the wire to exchange these pieces among `ranks` ranks; if
        ranks differ, the largest number. Policies decide by these bytes.

        pieces: the tensors of a step; `piece.nbytes` is the size of a payload."""

    def collectives(self, ranks: int) -> int:
        """Number of futures that `rounds` yields, 1 or more."""
        return 1

    def __repr__(self) -> str:
        """The strategy's class and settings, which must be the same on all ranks."""
        return settings_of(self)


class Wrapped(Strategy):
    """A strategy that passes all calls on to an inner strategy. Subclasses override some calls."""

    def __init__(self, inner: Strategy) -> None:
        self.inner, self.name = inner, inner.name
        self.takes_error_fed, self.sharded = inner.takes_error_fed, inner.sharded
        self.node_shards, self.node_shard = inner.node_shards, inner.node_shard
        self.votes, self.calls = inner.votes, inner.calls

    def rounds(self, exchange: Exchange, outgoing: Outgoing) -> Rounds:
        return self.inner.rounds(exchange, outgoing)

    def nbytes(self, pieces: Sequence[Piece], ranks: int) -> float:
        return self.inner.nbytes(pieces, ranks)

    def collectives(self, ranks: int) -> int:
        return self.inner.collectives(ranks)


class Gathered(Strategy):
    """All-gather: every rank sends its payload to every other rank. A rank sends N-1 payloads."""

    name = "all_gather"
    calls = 40

    def rounds(self, exchange: Exchange, outgoing: Outgoing) -> Rounds:
        wire = outgoing.pack()
        outgoing.payloads = ()  # frees them: the all-gather brings this rank's payloads back, too
        rows = yield exchange.all_gather(wire)
        return outgoing.received(rows)

    def nbytes(self, pieces: Sequence[Piece], ranks: int) -> float:
        return gather_wire_bytes(sum(piece.nbytes for piece in pieces), ranks)


class Summed(Strategy):
    """All-reduce: the sum of the payloads is the payload of the sum (`Compressor.sums`), and NaN if
    one of the payloads is NaN. A rank sends 2(N-1)/N payloads."""

    name = "all_reduce"

    def rounds(self, exchange: Exchange, outgoing: Outgoing) -> Rounds:
        wire = outgoing.pack()
        dtype = outgoing.units[0].compressor.sum_dtype if outgoing.units else None
        total = yield exchange.all_reduce(wire.view(dtype or outgoing.bucket.work.dtype))
        sums = list(unpack(outgoing.units, total.view(torch.uint8)[None]))
        nonfinite = any_nonfinite([*chain(*sums)])
        return Received(sums, nonfinite, 1 / exchange.world_size, outgoing.payloads)

    def nbytes(self, pieces: Sequence[Piece], ranks: int) -> float:
        return reduce_wire_bytes(sum(piece.nbytes for piece in pieces), ranks)


class InRounds(Summed):
    """The exchange of a compressor that works in rounds (PowerSGD). In each round the compressor
    hands out a tensor, and gets the sum of all ranks' tensors. A nonfinite bucket sends NaN."""

    takes_error_fed = True

    def __init__(self, compressor: RoundsCompressor) -> None:
        self.compressor = compressor

    def rounds(self, exchange: Exchange, outgoing: Outgoing) -> Rounds:
        compressor = self.compressor
        if not outgoing.units:
            for _ in range(compressor.rounds_count):
                yield exchange.all_reduce(outgoing.bucket.work.new_empty(0))
            return Received((), False)
        own: list[Payload] = []

        def report(payloads: Sequence[Payload]) -> None:
            own.extend(payloads)
            outgoing.report(payloads)

        rounds = compressor.rounds(
            [payload.parts[0] for payload in outgoing.payloads],
            [unit.spec for unit in outgoing.units],
            exchange.world_size,
            report,
        )
        handed_out = next(rounds)
        fill_if(outgoing.bucket.nonfinite, handed_out, nan)
        for _ in range(compressor.rounds_count - 1):
            total = yield exchange.all_reduce(handed_out)
            handed_out = rounds.send(total)
        total = yield exchange.all_reduce(handed_out)
        try:
            rounds.send(total)  # on a thread of the process group, which must not issue collectives
        except StopIteration as stop:
            means: list[Payload] = stop.value
        else:
            raise RuntimeError(f"compressor {compressor.name!r} has more rounds than rounds_count")
        return Received([[mean] for mean in means], any_nonfinite(means), 1.0, own)

    def collectives(self, ranks: int) -> int:
        return self.compressor.rounds_count


class ShardedMeans(Summed):
    """The sharded exchange: an all-to-all brings the payloads of each shard of a bucket to the
    shard's owner. The owner compresses the mean of the payloads, keeps the compression error, and
    sends the compressed mean to all ranks by an all-gather. From Tang and others, "DoubleSqueeze"
    (ICML 2019), with each rank as the server of one shard. A rank sends (N-1)/N payloads of
    gradients and (N-1)/N payloads of means.

    back: how means are compressed and sent back."""

    name = "sharded"
    sharded = True
    calls = 90

    def __init__(self, back: Means) -> None:
        self.back = back

    def rounds(self, exchange: Exchange, outgoing: Outgoing) -> Rounds:
        back = replace(self.back)  # a policy may change `self.back`
        bucket, units, n = outgoing.bucket, outgoing.units, exchange.world_size
        numel = bucket.work.numel()
        wire = outgoing.pack()
        rows = yield exchange.all_to_all(wire, shard_sizes(units, numel, n))

        # This rank owns shard number `rank`: the mean of the shard, added to the server's error.
        own = _units_of_shard(units, numel, n, exchange.rank)
        numels = [unit.numel for unit in own]
        shard = bucket.buffer("mean of a shard", sum(numels))
        means = list(zip(own, shard.split(numels), strict=True))
        # An unsettled bucket does not come again, and no errors are kept by the names of its units.
        memory = back.memory if bucket.settled else None
        errors, flag = _fill_with_means(means, rows, memory)
        nonfinite = either(flag, all_finite(shard) ^ True)

        # The mean, compressed. Afterwards `shard` holds what the payloads have lost of the mean.
        down, payloads = [_downward(unit, back) for unit in own], list[Payload]()
        for unit, (_, mean) in zip(down, means, strict=True):
            payload, levels = _compress_mean(unit, mean, back.measured, n)
            payloads.append(payload.as_nonfinite(nonfinite))
            if levels:
                outgoing.report_means(energies_of(levels))
        mean_units = [_downward(unit, back) for unit in units]
        size = max(shard_sizes(mean_units, numel, n))  # an all-gather needs rows of equal size
        wire = pack(outgoing, down, payloads, size)
        for unit, (_, mean), payload in zip(down, means, payloads, strict=True):
            unit.compressor.add_to(mean, payload, -1.0)
        if memory is not None:
            _keep_errors(memory, means, errors, nonfinite)
        if not back.measured:
            outgoing.report(payloads)
        rows = yield exchange.all_gather(wire, means=True)

        received = [[payload] for payload in _means(mean_units, rows, numel, n)]
        nonfinite = any_nonfinite([*chain(*received)])
        fill_if(nonfinite, shard, 0.0)
        lost = means if memory is None else ()
        by = [unit.compressor for unit in mean_units]
        return Received(received, nonfinite, 1.0, outgoing.payloads, lost, by)

    def collectives(self, ranks: int) -> int:
        return 2


def as_received(payloads: Iterator[Sequence[Payload]], ranks: int) -> Received:
    """`Received` for the payloads of all ranks, unit by unit. `payloads` is read one unit at a
    time, so that only one unit's payloads are in memory."""
    # The first unit tells for all: a rank makes all payloads of a bucket NaN, or none.
    first = next(payloads, [])
    nonfinite = any_nonfinite(first) if first else False
    return Received(chain([first] if first else [], payloads), nonfinite, 1 / ranks)


@dataclass
class Means:
    """How the sharded exchange sends means back to all ranks.

    cf: the CF of means; 1: means are not compressed; None: the CF of the gradients. measured:
    ascending CFs at which each mean is compressed, to measure the gain of each.
    memory: the error memory of this rank as the server of its shard, by unit name (DoubleSqueeze,
    algorithm 1). The memory is added to the mean, and then holds the compression error of the mean.
    None: the compression error is added to the residual of this rank's own gradients.
    """

    cf: float | None = None
    measured: tuple[float, ...] = ()
    memory: dict[str, Tensor] | None = None


def _all_in_one(units: Sequence[Unit]) -> Sharded | None:
    """The compressor of a bucket's only unit, if this unit spans all shards; else None."""
    by = units[0].compressor if units else None
    return by if isinstance(by, Sharded) else None


def shard_sizes(units: Sequence[Unit], numel: int, shards: int) -> list[int]:
    """Bytes of the payloads of each shard of a bucket of `numel` elements."""
    if whole := _all_in_one(units):
        return list(whole.sizes(units[0].spec))
    return [sum(payload_sizes(own)) for own in by_shards(units, numel, shards)]


def _units_of_shard(units: Sequence[Unit], numel: int, shards: int, i: int) -> Sequence[Unit]:
    """The units of shard number i of a bucket of `numel` elements."""
    return [units[0].shard(i)] if _all_in_one(units) else by_shards(units, numel, shards)[i]


def _means(units: Sequence[Unit], rows: Tensor, numel: int, shards: int) -> Iterator[Payload]:
    """The payload of each unit's mean. rows: (shards, bytes; uint8). A row holds the payloads of
    its shard's units, and is padded."""
    if whole := _all_in_one(units):
        yield whole.read_means(rows, units[0].spec)
        return
    for row, own in zip(rows, by_shards(units, numel, shards), strict=True):
        for payload in unpack(own, row[None, : sum(payload_sizes(own))]):
            yield from payload


def _downward(unit: Unit, back: Means) -> Unit:
    """The unit, with the CF and the compressor by which its mean is sent back to all ranks."""
    if back.cf is None or unit.compressor is EXACT:
        return unit
    by = unit.compressor_at(back.cf)
    cf = by.nearest(unit.spec.at(back.cf))
    if cf == DENSE:
        by = EXACT if unit.shards == 1 else in_shards(EXACT, unit.shards)
    return replace(unit, cf=cf, compressor=by)


def _fill_with_means(
    means: Sequence[tuple[Unit, Tensor]], rows: Tensor, memory: Mapping[str, Tensor] | None
) -> tuple[list[Tensor | None], Flag]:
    """Fill each unit's tensor with the mean of the ranks' payloads in `rows`, and add the error in
    the server's memory. Returns these errors, and whether some payload is not finite."""
    errors: list[Tensor | None] = []
    nonfinite: Flag = False
    received = unpack([unit for unit, _ in means], rows)
    for (unit, mean), payloads in zip(means, received, strict=True):
        flag = any_nonfinite(payloads)  # some rank's gradient was not finite
        unit.compressor.mean_of(mean, payloads, 1 / len(payloads), flag)
        error = None if memory is None else memory.get(unit.key.name)
        if error is not None and error.numel() == mean.numel():
            mean.add_(error)
        errors.append(error)
        nonfinite = either(nonfinite, flag)
    return errors, nonfinite


def _keep_errors(
    memory: dict[str, Tensor],
    lost: Sequence[tuple[Unit, Tensor]],
    before: Sequence[Tensor | None],
    nonfinite: Flag,
) -> None:
    """Set the server's memory to what the payloads have lost of each mean; in a nonfinite step to
    the error of before."""
    for (unit, error), old in zip(lost, before, strict=True):
        unchanged = torch.zeros_like(error) if old is None else old
        flag = torch.as_tensor(nonfinite, device=error.device)
        memory[unit.key.name] = torch.where(flag, unchanged, error)


def _compress_mean(
    unit: Unit, mean: Tensor, measured: tuple[float, ...], ranks: int
) -> tuple[Payload, Sequence[Payload]]:
    """(payload that is sent back, payloads at the CFs measured) for the mean of a unit."""
    # Random rounding needs another seed here than for this rank's own payload.
    unit = replace(unit, key=unit.key._replace(rank=unit.key.rank + ranks))
    by, levels = unit.compressor, list[Payload]()
    if measured and unit.base is not EXACT:
        levels = compress_levels(replace(unit, levels=measured), mean)
    if not levels or unit.cf not in measured:
        return with_energies(by, by.compress(mean, unit.spec), mean), levels
    payload = levels[measured.index(unit.cf)]
    return replace(payload, spec=payload.spec.at(unit.cf)), levels


def payload_sizes(units: Sequence[Unit]) -> list[int]:
    """Bytes of each unit's payload: the same on every rank."""
    return [unit.compressor.nbytes(unit.spec) for unit in units]


def pack(
    out: Outgoing, units: Sequence[Unit], payloads: Sequence[Payload], size: int | None = None
) -> Tensor:
    """The payloads one after the other in one uint8 tensor, so that one collective sends them all.
    size: bytes of the tensor, padded with zeros; None: no padding.
    ValueError if a payload is not of the size that the compressor's `nbytes` announced."""
    sizes = payload_sizes(units)
    taken = sum(sizes)
    whole = uninitialized(taken if size is None else size, torch.uint8, out.bucket.work.device)
    wire = whole[:taken]
    if whole.numel() > taken:
        whole[taken:].zero_()
    for unit, payload, slot in zip(units, payloads, wire.split(sizes), strict=True):
        if payload.nbytes != slot.numel():
            raise ValueError(
                f"compressor {unit.compressor.name!r} announced {slot.numel()} bytes for "
                f"{unit.numel} elements at CF {unit.cf:g} and made {payload.nbytes}; "
                f"nbytes must depend on its arguments only"
            )
        payload.write(slot)
    return whole


def unpack(units: Sequence[Unit], rows: Tensor) -> Iterator[list[Payload]]:
    """For each unit in turn, the payloads of all ranks: the inverse of `pack`.

    rows: (ranks, bytes; uint8). InvalidPayload if no compressor can have made these bytes."""
    by_unit = rows.split(payload_sizes(units), dim=1)
    for unit, from_ranks in zip(units, by_unit, strict=True):
        payloads = unit.compressor.read(from_ranks, unit.spec)
        if len(payloads) != len(rows):  # each rank would miss another one, or find none of its own
            raise ValueError(
                f"compressor {unit.compressor.name!r}: read must return the payload of each of "
                f"{len(rows)} rows, got {len(payloads)}"
            )
        yield payloads
