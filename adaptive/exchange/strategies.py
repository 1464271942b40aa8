"""How the payloads of all ranks become the mean gradient: the contract of a strategy, and ours.

A strategy is handed what a rank has to send for one bucket (`Outgoing`) and hands back what has
arrived (`Received`). It knows no memory and no statistics. Its rounds are a generator, since a
collective may only be issued in the body of a hook call (`adaptive.network.pipeline`).
docs/own_exchange.md says how to add one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import nan, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.futures import Future

from adaptive.bucket.bucket import (
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
"""Bytes of an element that travels uncompressed in a compressed step."""


@dataclass
class Outgoing:
    """What a rank has to send for one bucket of gradients.

    index: of the bucket in its step. units: what of the bucket is compressed as one tensor, each
    with its `compressor`, `spec` and `numel`; the same on every rank.
    payloads: one a unit that this rank compresses. For a strategy that `takes_sums` its only part
    is the error-fed gradient. If the bucket is nonfinite so are payloads, but error-fed gradients
    are zero. report: is told, still in the hook's body, which payloads the strategy has made
    itself. report_means: is told instead, where means are measured, what each CF keeps of one:
    (CFs, 3), as `Payload.energies`.
    """

    index: int
    bucket: Bucket
    units: list[Unit]
    payloads: Sequence[Payload]
    report: Callable[[Sequence[Payload]], None]
    report_means: Callable[[Tensor], None]

    @property
    def dtype(self) -> torch.dtype:
        return self.bucket.work.dtype

    def pack(self) -> Tensor:
        """This rank's payloads as one tensor (bytes,), uint8: as long on every rank. ValueError if
        a compressor has made another number of bytes than it announced."""
        return pack(self, self.units, self.payloads)

    def received(self, rows: Tensor) -> Received:
        """What `rows` (ranks, bytes; uint8) bring: row r is what rank r has packed."""
        return as_received(unpack(self.units, rows), len(rows))


@dataclass
class Received:
    """What has arrived for one bucket. The mean of a unit is `scale` times the sum of its payloads.

    payloads: for each unit, the same in the same order on every rank, or their parameters part.
    nonfinite: some rank's gradients were not finite, so payloads mean nothing.
    own: what this rank has sent of each unit; None: it is among the payloads, at this rank's place.
    lost: of units of which this rank has compressed the mean, what that has lost of it (flat).
    compressors: of each unit, by which the payloads are decoded; None: the unit's own.
    """

    payloads: Iterable[Sequence[Payload]]
    nonfinite: Flag
    scale: float = 1.0
    own: Sequence[Payload] | None = None
    lost: Sequence[tuple[Unit, Tensor]] = ()
    compressors: Sequence[Compressor] | None = None


Rounds = Generator[Future[Tensor], Any, Received]
"""An exchange under way. After its last collective it runs on a thread of the process group."""


class Piece(NamedTuple):
    """One tensor that a step sends, as far as the number of its bytes is concerned.

    cf: that of its payload; 1 if it travels uncompressed."""

    compressor: Compressor
    shape: tuple[int, ...]
    cf: float

    @property
    def nbytes(self) -> float:
        """Bytes of the payload, of float32 gradients."""
        if self.cf == DENSE:
            return float(FP32 * prod(self.shape))
        return self.compressor.nbytes(Spec.shaped(self.shape, self.cf))


class Strategy(ABC):
    """A strategy is one way in which the payloads of all ranks become their mean.

    An object serves all buckets of one model, several of which may be under way at a time: what
    belongs to a bucket is a local variable of `rounds`. All ranks must do the same.

    name: for errors; that of the class, if it gives none.
    Of ours only. takes_sums: it compresses error-fed gradients itself. sharded: no unit crosses the
    border between the shards of two ranks. votes: payloads hold the values at any number
    of indices, in full. parts: a bucket is cut into so many, of which this rank compresses number
    `part` and other ranks the others, so no unit may cross a border between parts. calls:
    operations and launches that it takes for a bucket, with compressing and decoding, as counted on
    the path of a device (docs/gpu.md).
    """

    name: str = ""
    takes_sums: bool = False
    sharded: bool = False
    votes: bool = False
    parts: int = 1
    part: int = 0
    calls: int = 0

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.name = cls.name or cls.__name__

    @abstractmethod
    def rounds(self, exchange: Exchange, outgoing: Outgoing) -> Rounds:
        """The exchange of one bucket, as a generator. It yields the future of each collective as
        soon as that is issued, is sent the collective's value, and returns what has arrived.

        exchange: has this rank (`rank`), the number of ranks (`world_size`, 2 or more) and the
            collectives: `all_gather`, `all_reduce`, `all_to_all`, `pass_on`. Only these are
            counted, emulated, and go through two levels.
        outgoing: what this rank has to send. It may be empty, on all ranks alike.

        Number and sizes of collectives depend on what is alike on all ranks only. What follows the
        last one runs on another thread, where nothing may be issued."""

    @abstractmethod
    def nbytes(self, pieces: Sequence[Piece], ranks: int) -> float:
        """Bytes that one rank puts on the wire to exchange these pieces among so many ranks. What
        policies decide by. The largest number of any rank, if ranks differ.

        pieces: the tensors of a step; `piece.nbytes` is the size of a payload."""

    def collectives(self, ranks: int) -> int:
        """How many futures `rounds` yields among so many ranks, 1 or more."""
        return 1

    def __repr__(self) -> str:
        """Its class and its settings: what must be alike on all ranks."""
        return settings_of(self)


class Wrapped(Strategy):
    """Another strategy, to be changed in part."""

    def __init__(self, inner: Strategy) -> None:
        self.inner, self.name = inner, inner.name
        self.takes_sums, self.sharded, self.votes = inner.takes_sums, inner.sharded, inner.votes
        self.parts, self.part = inner.parts, inner.part
        self.calls = inner.calls

    def rounds(self, exchange: Exchange, outgoing: Outgoing) -> Rounds:
        return self.inner.rounds(exchange, outgoing)

    def nbytes(self, pieces: Sequence[Piece], ranks: int) -> float:
        return self.inner.nbytes(pieces, ranks)

    def collectives(self, ranks: int) -> int:
        return self.inner.collectives(ranks)


class Gathered(Strategy):
    """Every rank sends its payloads to every other."""

    name = "all_gather"
    calls = 40

    def rounds(self, exchange: Exchange, outgoing: Outgoing) -> Rounds:
        return gathered(exchange, outgoing)

    def nbytes(self, pieces: Sequence[Piece], ranks: int) -> float:
        return gather_wire_bytes(sum(piece.nbytes for piece in pieces), ranks)


class Summed(Strategy):
    """Payloads are summed on the wire."""

    name = "all_reduce"

    def rounds(self, exchange: Exchange, outgoing: Outgoing) -> Rounds:
        return summed(exchange, outgoing)

    def nbytes(self, pieces: Sequence[Piece], ranks: int) -> float:
        return reduce_wire_bytes(sum(piece.nbytes for piece in pieces), ranks)


class InRounds(Summed):
    """A compressor that needs what other ranks sent compresses error-fed gradients in rounds."""

    takes_sums = True

    def __init__(self, compressor: RoundsCompressor) -> None:
        self.compressor = compressor

    def rounds(self, exchange: Exchange, outgoing: Outgoing) -> Rounds:
        return in_rounds(exchange, outgoing, self.compressor)

    def collectives(self, ranks: int) -> int:
        return self.compressor.rounds_count


class ShardedMeans(Summed):
    """Each rank averages one shard, and sends the compressed mean to all. back: how."""

    name = "sharded"
    sharded = True
    calls = 90

    def __init__(self, back: Means) -> None:
        self.back = back

    def rounds(self, exchange: Exchange, outgoing: Outgoing) -> Rounds:
        return sharded(exchange, outgoing, self.back)

    def collectives(self, ranks: int) -> int:
        return 2


def gathered(exchange: Exchange, out: Outgoing) -> Rounds:
    """Every rank sends its payloads to every other. Bytes a rank sends: (N-1) payloads."""
    wire = out.pack()
    out.payloads = ()  # our own comes back, too
    rows = yield exchange.all_gather(wire)
    return out.received(rows)


def as_received(payloads: Iterator[Sequence[Payload]], ranks: int) -> Received:
    """Of all ranks, for each unit: one unit after the other, so that the decoded payloads of no
    more than one are in memory."""
    first = next(payloads, [])  # a rank poisons all payloads of a bucket or none
    nonfinite = any_nonfinite(first) if first else False
    return Received(chain([first] if first else [], payloads), nonfinite, 1 / ranks)


def summed(exchange: Exchange, out: Outgoing) -> Rounds:
    """The sum of the payloads is that of the sum (`Compressor.sums`), also of a
    nonfinite one. Bytes a rank sends: 2(N-1)/N payloads."""
    wire = out.pack()
    dtype = out.units[0].compressor.sum_dtype if out.units else None
    total = yield exchange.all_reduce(wire.view(dtype or out.dtype))
    sums = list(unpack(out.units, total.view(torch.uint8)[None]))
    nonfinite = any_nonfinite([*chain(*sums)])
    return Received(sums, nonfinite, 1 / exchange.world_size, out.payloads)


@dataclass
class Means:
    """How the means of `sharded` are sent back to all ranks.

    cf: the CF. 1 is "single compression"; None: that of the payloads. measured: ascending CFs at
    which each mean is compressed, to learn what they keep of it. memory: the error memory of the
    owner as a server, by the names of its units, as in the algorithm 1 of DoubleSqueeze: it is
    added to the mean, and is then what was lost. None: that goes to the owner's residual as a rank.
    """

    cf: float | None = None
    measured: tuple[float, ...] = ()
    memory: dict[str, Tensor] | None = None


def sharded(exchange: Exchange, out: Outgoing, back: Means) -> Rounds:
    """Each shard's payloads go to its owner (all-to-all), which compresses their mean, keeps what
    that loses, and sends it to all (all-gather): Tang and others, "DoubleSqueeze" (ICML 2019), with
    the ranks themselves as the server. Bytes a rank sends: (N-1)/N payloads up and as many down.
    """
    work, back = out.bucket.work, replace(back)  # as it is in this step
    n, rank = exchange.world_size, exchange.rank
    # No later step has units of the same names as one whose buckets DDP is yet to cut anew.
    server = back.memory if out.bucket.settled else None
    wire = pack(out, out.units, out.payloads)
    rows = yield exchange.all_to_all(wire, shard_sizes(out.units, work.numel(), n))

    mine = _owned(out.units, work.numel(), n, rank)
    received = unpack(mine, rows)
    down = [_downward(unit, back) for unit in out.units]
    down_sizes = shard_sizes(down, work.numel(), n)
    mine_down = [_downward(unit, back) for unit in mine]
    numels = [unit.numel for unit in mine]
    shard = out.bucket.buffer("mean of a shard", sum(numels))
    means = list(zip(mine, shard.split(numels), strict=True))
    second: list[Payload] = []
    nonfinite: Flag = False
    both = zip(means, mine_down, received, strict=True)
    before: list[Tensor | None] = []
    for (unit, mean), below, payloads in both:
        kept = None if server is None else server.get(unit.key.name)
        before.append(kept)
        flag = any_nonfinite(payloads)  # of any rank: then nothing comes of the mean
        unit.compressor.mean_of(mean, payloads, 1 / len(payloads), flag)
        nonfinite = either(nonfinite, flag)
        if kept is not None and kept.numel() == mean.numel():
            mean.add_(kept)
        # What is drawn at random is not what was drawn for this rank's own payload.
        key = unit.key._replace(rank=unit.key.rank + len(payloads))
        payload, levels = _compress_mean(replace(below, key=key), mean, back.measured)
        second.append(payload)
        if levels:
            out.report_means(energies_of(levels))
    nonfinite = either(nonfinite, all_finite(shard) ^ True)
    second = [payload.as_nonfinite(nonfinite) for payload in second]
    wire = pack(out, mine_down, second, max(down_sizes))  # the collective wants equal sizes
    for unit, (_, mean), payload in zip(mine_down, means, second, strict=True):
        unit.compressor.add_to(mean, payload, -1.0)
    if server is not None:
        for (unit, mean), kept in zip(means, before, strict=True):
            unchanged = torch.zeros_like(mean) if kept is None else kept
            flag = torch.as_tensor(nonfinite, device=mean.device)
            server[unit.key.name] = torch.where(flag, unchanged, mean)
        means = []
    if not back.measured:
        out.report(second)
    rows = yield exchange.all_gather(wire, means=True)

    everyones = [[payload] for payload in _means(down, rows, work.numel(), n)]
    nonfinite = any_nonfinite([*chain(*everyones)])
    fill_if(nonfinite, shard, 0.0)
    by = [unit.compressor for unit in down]
    return Received(everyones, nonfinite, 1.0, out.payloads, means, by)


def _all_in_one(units: Sequence[Unit]) -> Sharded | None:
    """The compressor of a bucket's only unit, if that has all shards."""
    by = units[0].compressor if units else None
    return by if isinstance(by, Sharded) else None


def shard_sizes(units: Sequence[Unit], numel: int, shards: int) -> list[int]:
    """Bytes of the payloads of each shard of a bucket of `numel` elements."""
    if whole := _all_in_one(units):
        return list(whole.sizes(units[0].spec))
    return [sum(payload_sizes(own)) for own in by_shards(units, numel, shards)]


def _owned(units: Sequence[Unit], numel: int, shards: int, rank: int) -> Sequence[Unit]:
    """The units of this rank's shard."""
    return [units[0].shard(rank)] if _all_in_one(units) else by_shards(units, numel, shards)[rank]


def _means(units: Sequence[Unit], rows: Tensor, numel: int, shards: int) -> Iterator[Payload]:
    """The payload of each unit. rows: (shards, bytes; uint8), each of which begins with those of
    its shard."""
    if whole := _all_in_one(units):
        yield whole.read_means(rows, units[0].spec)
        return
    for row, own in zip(rows, by_shards(units, numel, shards), strict=True):
        for payload in unpack(own, row[None, : sum(payload_sizes(own))]):
            yield from payload


def _downward(unit: Unit, back: Means) -> Unit:
    """The unit as it is sent back to all."""
    if back.cf is None or unit.compressor is EXACT:
        return unit
    by = unit.by(back.cf)
    cf = by.nearest(unit.spec.at(back.cf))
    if cf == DENSE:
        by = EXACT if unit.shards == 1 else in_shards(EXACT, unit.shards)
    return replace(unit, cf=cf, compressor=by)


def _compress_mean(
    below: Unit, mean: Tensor, measured: tuple[float, ...]
) -> tuple[Payload, Sequence[Payload]]:
    """What is sent back of the mean of a unit, and its payloads at the CFs measured."""
    by, levels = below.compressor, list[Payload]()
    if measured and below.base is not EXACT:
        levels = compress_levels(replace(below, levels=measured), mean)
    if not levels or below.cf not in measured:
        return with_energies(by, by.compress(mean, below.spec), mean), levels
    payload = levels[measured.index(below.cf)]
    return replace(payload, spec=payload.spec.at(below.cf)), levels


def in_rounds(exchange: Exchange, out: Outgoing, compressor: RoundsCompressor) -> Rounds:
    """As many all-reduces as the compressor has rounds: of what it hands out, and then is given the
    sum of. A rank whose gradients are not finite sends NaN."""
    if not out.units:
        for _ in range(compressor.rounds_count):
            yield exchange.all_reduce(out.bucket.work.new_empty(0))
        return Received((), False)
    own: list[Payload] = []

    def report(payloads: Sequence[Payload]) -> None:
        own.extend(payloads)
        out.report(payloads)

    rounds = compressor.rounds(
        [payload.parts[0] for payload in out.payloads],
        [unit.spec for unit in out.units],
        exchange.world_size,
        report,
    )
    handed_out = next(rounds)
    fill_if(out.bucket.nonfinite, handed_out, nan)
    for _ in range(compressor.rounds_count - 1):
        total = yield exchange.all_reduce(handed_out)
        handed_out = rounds.send(total)
    total = yield exchange.all_reduce(handed_out)
    try:
        rounds.send(total)  # on a thread of the process group, where nothing may be issued
    except StopIteration as stop:
        means: list[Payload] = stop.value
    else:
        raise RuntimeError(f"compressor {compressor.name!r} has more rounds than rounds_count")
    return Received([[mean] for mean in means], any_nonfinite(means), 1.0, own)


def payload_sizes(units: Sequence[Unit]) -> list[int]:
    """Bytes of each unit's payload: the same on every rank."""
    return [unit.compressor.nbytes(unit.spec) for unit in units]


def pack(
    out: Outgoing, units: Sequence[Unit], payloads: Sequence[Payload], size: int | None = None
) -> Tensor:
    """The payloads one after the other in one uint8 tensor, so that one collective carries them.
    size: bytes of it, those that no payload takes being zeros; None: as many as they take.
    ValueError if a payload has not its announced size."""
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
    """The payloads of each unit that the ranks packed into their rows (ranks, bytes), one unit
    after the other. InvalidPayload if the bytes cannot be that."""
    by_unit = rows.split(payload_sizes(units), dim=1)
    for unit, from_ranks in zip(units, by_unit, strict=True):
        yield unit.compressor.read(from_ranks, unit.spec)
