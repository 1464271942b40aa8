"""How the payloads of all ranks become the mean gradient: one function for each strategy.

- all_reduce: the sum of the payloads is the payload of the sum (linear compressors). Compressors
  that need what the others sent before they can finish (PowerSGD, sketches) have rounds of sums.
- all_gather: every rank sends its payloads to every other.
- sharded: every rank averages one shard and sends the compressed mean on. Tang and others,
  "DoubleSqueeze" (ICML 2019), with the ranks themselves as the server: bytes a rank sends do not
  grow with the number of ranks. Its second residual is folded into the first: the owner of a shard
  adds N times what the second compression lost to its own residual, which the next mean divides by
  N again.
- shared_indices: one rank chooses the indices for all, and the values at them are summed. Tyagi and
  Swany's AR-Topk, whose bytes do not grow with the number of ranks either. The ranks take turns in
  choosing, or the one with the largest error-fed gradient does. Each rank's residual loses exactly
  its own values at those indices.

`make_strategy` says which a compressor allows; `adaptive.exchange.choice` chooses among them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from math import isfinite, nan

import torch
from torch import Tensor

from adaptive.bucket import Unit, shard_borders
from adaptive.bucket_step import BucketStep, pack, payload_sizes, unpack
from adaptive.exchange.pipeline import Rounds
from adaptive.multilevel import levels_beside
from compressors import Compressor, NoCompression
from compressors.base import Payload
from compressors.grace import GraceCompressor
from compressors.rounds import Rounds as CompressorRounds
from compressors.rounds import RoundsCompressor
from compressors.sparsifier import Sparsifier


def gathered(step: BucketStep) -> Rounds:
    """One all-gather a bucket. Bytes a rank sends: (N-1) payloads.

    1. Compress, and pack all payloads of the bucket into one.
    2. All-gather. What comes back holds our own payloads too, so they are not kept meanwhile.
    3. Take what we sent off the memory, and decode the mean - or undo it all if any rank poisoned
       its payloads.
    """
    exchange = step.exchange
    wire = pack(step.units, [step.compress(unit) for unit in step.units], step.dtype)
    rows = yield exchange.all_gather(wire, f"bucket {step.index}")
    sizes = payload_sizes(step.units, step.dtype)
    rooms = [row.split(sizes) for row in rows]

    received = (
        [unit.compressor.read(room[i], unit.numel, unit.cf, step.dtype, unit.key) for room in rooms]
        for i, unit in enumerate(step.units)
    )
    first = [next(received)] if step.units else []
    # A rank poisons all payloads of a bucket or none.
    if first and any(map(step.units[0].compressor.is_poisoned, first[0])):
        step.undo()
        return
    step.settle_and_decode(chain(first, received), exchange.rank, 1 / exchange.world_size)


def summed(step: BucketStep) -> Rounds:
    """One all-reduce a bucket. Bytes a rank sends: 2(N-1)/N payloads.

    1. Compress, and pack all payloads of the bucket into one.
    2. All-reduce, in the payload's own dtype. A poisoned payload makes a poisoned sum.
    3. Take what we sent off the memory, and decode the mean.
    """
    exchange = step.exchange
    own = [step.compress(unit) for unit in step.units]
    wire = pack(step.units, own, step.dtype)
    dtype = step.units[0].compressor.wire_dtype(step.dtype) if step.units else step.dtype
    total = yield exchange.all_reduce(wire.view(dtype))
    received = unpack(step.units, total.view(torch.uint8), step.dtype)
    if step.poisoned(received):
        step.undo()
        return
    step.settle(own)
    step.decode([received], 1 / exchange.world_size)


def sharded(step: BucketStep) -> Rounds:
    """Two collectives a bucket. Bytes a rank sends: 2(N-1)/N payloads.

    1. Compress each shard, and send each to its owner (all-to-all).
    2. The owner decodes the mean of its shard, compresses it, and keeps what that loses.
    3. All-gather the compressed means.
    4. Take what we sent off the memory, add what our second compression lost, decode the mean -
       or undo it all if any rank poisoned its payloads.
    """
    exchange, n = step.exchange, step.exchange.world_size
    shards = _by_shard(step, n)
    sizes = [sum(payload_sizes(units, step.dtype)) for units in shards]
    before = step.tally.copy()
    own = [step.compress(unit) for unit in step.units]
    kept = step.tally.since(before)
    wire = pack(step.units, own, step.dtype)
    rows = yield exchange.all_to_all(wire, sizes, f"bucket {step.index}")
    mine = shards[exchange.rank]
    received = [unpack(mine, row, step.dtype) for row in rows]
    shard = Shard(step, mine, shard_borders(step.bucket.work.numel(), n)[exchange.rank])
    second = shard.compress_mean(received)
    packed = pack(mine, second, step.dtype)
    wire = packed.new_zeros(max(sizes))  # the collective wants equal sizes
    wire[: packed.numel()] = packed
    shard.keep_remainder(second)
    step.tally.lose(kept, shard.lost_share(second))
    rows = yield exchange.all_gather(wire, f"bucket {step.index}, compressed means")
    means: list[Payload] = []
    for units, row, size in zip(shards, rows, sizes, strict=True):
        means += unpack(units, row[:size], step.dtype)
    if step.poisoned(means):
        step.undo()
        return
    step.settle(own)
    shard.fold()
    step.decode([means], 1.0)


class Shard:
    """The shard that this rank owns, from `start` on: its mean, then what compressing that lost."""

    def __init__(self, step: BucketStep, units: Sequence[Unit], start: int) -> None:
        self._step = step
        self._units = units
        self._start = start
        numel = sum(unit.numel for unit in units)
        # Of its own for every bucket: it is in use until the second round is over.
        self._space = step.scratch.take(("shard", step.index), numel, step.bucket.work)

    def compress_mean(self, received: Sequence[Sequence[Payload]]) -> list[Payload]:
        """A payload of the mean for each unit; all poisoned if any that was received is, or if
        the mean is not finite."""
        scale = 1 / self._step.exchange.world_size
        self._space.zero_()
        payloads = []
        for i, unit in enumerate(self._units):
            for row in received:
                if not unit.compressor.is_poisoned(row[i]):
                    unit.compressor.add_to(self._view(unit), row[i], scale)
            payloads.append(unit.compressor.compress(self._view(unit), unit.cf, unit.key))
        rows = ((unit, row[i]) for i, unit in enumerate(self._units) for row in received)
        poisoned = any(unit.compressor.is_poisoned(payload) for unit, payload in rows)
        if poisoned or not all(isfinite(payload.total) for payload in payloads):
            pairs = zip(self._units, payloads, strict=True)
            return [unit.compressor.poison(payload) for unit, payload in pairs]
        return payloads

    def keep_remainder(self, sent: Sequence[Payload]) -> None:
        """Take what is sent, once packed, off the mean."""
        for unit, payload in zip(self._units, sent, strict=True):
            unit.compressor.subtract_from(self._view(unit), payload)

    def lost_share(self, sent: Sequence[Payload]) -> float:
        """Of the mean's energy, what the second compression loses."""
        total = sum(payload.total for payload in sent)
        return sum(payload.error for payload in sent) / total if total > 0 else 0.0

    def fold(self) -> None:
        """Add N times the remainder to this rank's own memory."""
        for unit in self._units:
            for part, start, stop in unit.ranges:
                rest = self._step.memory.remainder(part.slot)
                if rest is not None:
                    lost = self._space[part.start + start - self._start :][: stop - start]
                    rest[start:stop].add_(lost, alpha=self._step.exchange.world_size)

    def _view(self, unit: Unit) -> Tensor:
        return self._space[unit.start - self._start : unit.stop - self._start]


def _by_shard(step: BucketStep, n: int) -> list[list[Unit]]:
    borders = shard_borders(step.bucket.work.numel(), n)
    return [
        [unit for unit in step.units if start <= unit.start and unit.stop <= stop]
        for start, stop in itertools.pairwise(borders)
    ]


def shared_indices(step: BucketStep) -> Rounds:
    """Two collectives a bucket. Bytes a rank sends: (N-1)/N index lists, 2(N-1)/N value lists.

    1. Accumulate. The rank whose turn it is selects, and broadcasts its indices.
    2. All-reduce the values that each rank has at those indices; NaN if its gradients are not
       finite.
    3. Take what we sent off the memory, write the mean - or undo it all.
    """
    exchange, leader = step.exchange, step.leader
    sums = [step.accumulate(unit) for unit in step.units]
    sizes = [_index_nbytes(step, unit) for unit in step.units]
    chosen = torch.zeros(sum(sizes), dtype=torch.uint8, device=step.bucket.work.device)
    if exchange.rank == leader:
        for unit, a, room in zip(step.units, sums, chosen.split(sizes), strict=True):
            if room.numel():
                payload = unit.compressor.compress(a, unit.cf, unit.key)
                room.copy_(_sparse(unit).pack_indices(payload))
    chosen = yield exchange.broadcast(chosen, leader, f"bucket {step.index}, indices")
    rooms = chosen.split(sizes)
    own = [_own(step, *each) for each in zip(step.units, sums, rooms, strict=True)]
    values = torch.cat([payload.parts[-1] for payload in own])
    if not step.bucket.finite:
        values.fill_(nan)
    total = yield exchange.all_reduce(values)
    if not bool(torch.isfinite(total).all()):
        step.undo()
        return
    step.settle(own)
    means = total.split([payload.parts[-1].numel() for payload in own])
    received = [
        payload.with_parts(*payload.parts[:-1], mean)
        for payload, mean in zip(own, means, strict=True)
    ]
    step.decode([received], 1 / exchange.world_size)


def _sparse(unit: Unit) -> Sparsifier:
    assert isinstance(unit.compressor, Sparsifier)
    return unit.compressor


def _index_nbytes(step: BucketStep, unit: Unit) -> int:
    """Bytes of a unit's indices; 0 for one that is sent as it is."""
    if isinstance(unit.compressor, NoCompression):
        return 0
    return _sparse(unit).index_nbytes(unit.numel, unit.cf)


def _own(step: BucketStep, unit: Unit, a: Tensor, indices: Tensor) -> Payload:
    """What this rank has at the chosen `indices` (as packed); the tally takes its norms."""
    measured = step.bucket.finite and not unit.held
    if isinstance(unit.compressor, NoCompression):
        payload = unit.compressor.compress(a, unit.cf, unit.key)
        if measured:
            step.record(unit, levels_beside(unit, a, payload))
        return payload.with_parts(payload.parts[0].clone())
    sparse = _sparse(unit)
    payload = sparse.at(a, indices, unit.cf, unit.key)
    if measured:
        step.record(unit, levels_beside(unit, a, payload))
    return replace(payload, cf=unit.cf)


def in_rounds(step: BucketStep, compressor: RoundsCompressor) -> Rounds:
    """As many all-reduces a bucket as the compressor has rounds.

    1. Accumulate. What is sent uncompressed (`dense_below`, a layer at CF 1) travels with the
       first round.
    2. All-reduce what the compressor hands out, give it the sum, and so on. A rank whose gradients
       are not finite sends NaN.
    3. Take what of our own is in the mean off the memory, and decode the mean - or undo it all.
    """
    exchange, finite = step.exchange, step.bucket.finite
    units = [unit for unit in step.units if unit.compressor is compressor]
    plain = [unit for unit in step.units if unit.compressor is not compressor]
    if not units:  # all of the bucket travels uncompressed
        yield from _uncompressed(step, compressor.rounds_count)
        return
    sums = [step.accumulate(unit) for unit in units]
    own: dict[Unit, Payload] = {unit: step.compress(unit) for unit in plain}

    def report(payloads: Sequence[Payload]) -> None:
        own.update(zip(units, payloads, strict=True))
        if finite:
            _record(step, units, sums, payloads)

    rounds = compressor.rounds(
        sums,
        [unit.cf for unit in units],
        [unit.key for unit in units],
        exchange.world_size,
        report,
        held=[i for i, unit in enumerate(units) if unit.held],
    )
    share = next(rounds)
    first = torch.cat([share, *(own[unit].parts[0] for unit in plain)]) if plain else share
    total = yield exchange.all_reduce(first if finite else first.fill_(nan))
    sums_of_plain = total[share.numel() :].clone()
    total = total[: share.numel()]
    for _ in range(compressor.rounds_count - 1):
        total = yield exchange.all_reduce(rounds.send(total))
    means = _returned(rounds, total)
    if any(compressor.is_poisoned(mean) for mean in means) or not _finite(sums_of_plain):
        step.undo()
        return
    step.settle([own[unit] for unit in step.units])
    for unit, mean in zip(units, means, strict=True):
        compressor.write_to(step.view(unit), mean)
    rest = sums_of_plain.split([unit.numel for unit in plain])
    for unit, summed in zip(plain, rest, strict=True):
        step.view(unit).copy_(summed).div_(exchange.world_size)
    step.announce()


def _uncompressed(step: BucketStep, collectives: int) -> Rounds:
    """One round of sums does; the others have nothing to send."""
    own = [step.compress(unit) for unit in step.units]
    empty = step.bucket.work.new_empty(0)
    flat = torch.cat([empty, *(payload.parts[0] for payload in own)])
    flat = yield step.exchange.all_reduce(flat)
    for _ in range(collectives - 1):
        yield step.exchange.all_reduce(empty)
    sums = flat.split([unit.numel for unit in step.units])
    received = [payload.with_parts(each) for payload, each in zip(own, sums, strict=True)]
    if step.poisoned(received):
        step.undo()
        return
    step.settle(own)
    step.decode([received], 1 / step.exchange.world_size)


def _record(
    step: BucketStep, units: Sequence[Unit], sums: Sequence[Tensor], payloads: Sequence[Payload]
) -> None:
    for unit, a, payload in zip(units, sums, payloads, strict=True):
        if not unit.held:
            step.record(unit, levels_beside(unit, a, payload))


def _returned(rounds: CompressorRounds, total: Tensor) -> list[Payload]:
    try:
        rounds.send(total)
    except StopIteration as stop:
        return stop.value
    raise RuntimeError("the compressor has more rounds than it announced")


def _finite(summed: Tensor) -> bool:
    return bool(torch.isfinite(summed).all())


EXCHANGES = (
    "auto",
    "all_reduce",
    "all_gather",
    "sharded",
    "shared_indices",
    "shared_indices_by_energy",
)


@dataclass(frozen=True)
class Strategy:
    """name: one of EXCHANGES. collectives: that it issues a bucket.

    sharded: units must not cross the borders of the ranks' shards. by_energy: the rank with the
        largest error-fed gradient chooses for all, not one after the other.
    """

    name: str
    start: Callable[[BucketStep], Rounds]
    collectives: int
    sharded: bool = False
    by_energy: bool = False


GATHERED = Strategy("all_gather", gathered, 1)
SUMMED = Strategy("all_reduce", summed, 1)
SHARDED = Strategy("sharded", sharded, 2, sharded=True)
SHARED_INDICES = Strategy("shared_indices", shared_indices, 2)
BY_ENERGY = Strategy("shared_indices_by_energy", shared_indices, 2, by_energy=True)


def strategies(base: Compressor) -> list[Strategy]:
    """The ways open to a compressor, the one that suits it on any network first."""
    if isinstance(base, RoundsCompressor):
        return [Strategy("all_reduce", partial(in_rounds, compressor=base), base.rounds_count)]
    if base.linear:
        return [SUMMED, GATHERED, SHARDED] if base.error_feedback else [SUMMED, GATHERED]
    if isinstance(base, GraceCompressor):  # a second compression would have a ctx of its own
        return [GATHERED]
    ways = [GATHERED, SHARDED]
    if isinstance(base, Sparsifier) and base.values.lossless:
        ways += [SHARED_INDICES, BY_ENERGY]
    return ways


def make_strategy(base: Compressor, exchange: str) -> Strategy:
    """The way called `exchange`; ValueError if the compressor does not allow it."""
    ways = strategies(base)
    for way in ways:
        if way.name == exchange:
            return way
    accepted = ", ".join(["auto", *(way.name for way in ways)])
    raise ValueError(f"exchange must be one of {accepted} for base {base.name!r}; got {exchange!r}")


def check_exchange(exchange: str, base: Compressor) -> str:
    """`exchange` if it is "auto" or a way that `base` allows; ValueError otherwise."""
    return exchange if exchange == "auto" else make_strategy(base, exchange).name
