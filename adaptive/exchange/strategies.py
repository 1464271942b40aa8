"""How the payloads of all ranks become the mean gradient: one function for each strategy.

- all_reduce: the sum of the payloads is the payload of the sum (linear compressors). Compressors
  that need what the others sent before they can finish (PowerSGD, sketches) have rounds of sums.
- all_gather: every rank sends its payloads to every other.
- sharded: every rank averages one shard and sends the compressed mean on. Tang and others,
  "DoubleSqueeze" (ICML 2019), with the ranks themselves as the server: bytes a rank sends do not
  grow with the number of ranks.
- shared_indices: one rank chooses the indices for all, and the values at them are summed. Tyagi and
  Swany's AR-Topk, whose bytes do not grow with the number of ranks either. The ranks take turns in
  choosing, or the one with the largest error-fed gradient does.

A strategy is handed what a rank has to send for one bucket (`Outgoing`) and hands back what has
arrived (`Received`). It knows no memory and no statistics. It is a generator, since a collective
may only be issued in the body of a hook call (`adaptive.exchange.pipeline`): it yields the future
of each collective that it has issued, and is sent its value.

`make_strategy` says which a compressor allows; `ExchangeChoice` takes the one that is fastest by
the alpha-beta model (ring algorithms, N ranks, payload B bytes): an all-gather takes
(N-1)(alpha + B/beta), the sharded exchange 2(N-1)(alpha + B/(N beta)). With few ranks or small
payloads the first wins, with many ranks the second.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from math import isfinite, nan
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.futures import Future

from adaptive.bucket import Unit, shard_borders
from adaptive.exchange.collectives import Exchange
from adaptive.exchange.link import LinkCost
from compressors import Compressor, NoCompression
from compressors.base import Payload
from compressors.grace import GraceCompressor
from compressors.kernels import Flag, Scalar, all_finite, fresh
from compressors.kernels.blocks import fill_if
from compressors.rounds import Rounds as CompressorRounds
from compressors.rounds import RoundsCompressor
from compressors.sparsifier import Sparsifier

EXCHANGES = (
    "auto",
    "all_reduce",
    "all_gather",
    "sharded",
    "shared_indices",
    "shared_indices_by_energy",
)


class Books(Protocol):
    """Who is told, still in the hook's body, what a strategy finds out about this rank's part."""

    def chosen(self, payloads: Sequence[Payload | None]) -> None:
        """What this rank sends of the units of which it handed over sums."""

    def compressed_again(self, lost_share: Scalar) -> None:
        """Of the energy of the payloads, a second compression has lost this share."""


@dataclass
class Outgoing:
    """What a rank has to send for one bucket.

    index: of the bucket, for messages. units: what is compressed as one, in order. payloads: one a
    unit, and None where the strategy compresses itself: then `sums` has the error-fed gradient
    (flat). dtype: of the gradients. poisoned: those of this rank are not finite; then so are its
    payloads, and sums are zero. leader: the rank that chooses for all, if one does. space: a buffer
    of so many elements, of this bucket's own until its mean is there.
    """

    index: int
    units: Sequence[Unit]
    payloads: Sequence[Payload | None]
    sums: Sequence[Tensor | None]
    dtype: torch.dtype
    device: torch.device
    numel: int
    poisoned: Flag
    leader: int
    space: Callable[[int], Tensor]
    books: Books

    def all_payloads(self) -> list[Payload]:
        """Of a strategy that compresses nothing itself."""
        return [payload for payload in self.payloads if payload is not None]


class Remainder(NamedTuple):
    """What a second compression has lost of the mean of the shard that this rank owns: `values`,
    from element `start` of the bucket on, in these units. The next mean divides it by the number of
    ranks, so the owner's memory takes it `times` that."""

    units: Sequence[Unit]
    values: Tensor
    start: int
    times: int


@dataclass
class Received:
    """What has arrived for one bucket. The mean of a unit is `scale` times the sum of its payloads.

    payloads: for each unit. poisoned: some rank's gradients were not finite, so that the payloads
    mean nothing. own: what this rank has sent, a payload for each unit; None: it is
    among the payloads, at this rank's place. remainder: for the memory, if there is one.
    """

    payloads: Iterable[Sequence[Payload]]
    poisoned: Flag
    scale: float = 1.0
    own: Sequence[Payload] | None = None
    remainder: Remainder | None = None


Rounds = Generator[Future[Tensor], Tensor, Received]
"""An exchange under way. After its last collective it runs on a thread of the process group."""


def gathered(exchange: Exchange, out: Outgoing) -> Rounds:
    """One all-gather a bucket. Bytes a rank sends: (N-1) payloads.

    1. Pack all payloads of the bucket into one.
    2. All-gather. What comes back holds our own payloads too, so they are not kept meanwhile.
    """
    wire = pack(out.units, out.all_payloads(), out.dtype)
    out.payloads = ()
    rows = yield exchange.all_gather(wire, f"bucket {out.index}")
    sizes = payload_sizes(out.units, out.dtype)
    rooms = [row.split(sizes) for row in rows]
    # One unit after the other, so that the decoded payloads of no more than one are in memory.
    received = (
        [unit.compressor.read(room[i], unit.numel, unit.cf, out.dtype, unit.key) for room in rooms]
        for i, unit in enumerate(out.units)
    )
    first = [next(received)] if out.units else []
    poisoned: Flag = False
    for payload in first[0] if first else ():  # a rank poisons all payloads of a bucket or none
        poisoned = poisoned | out.units[0].compressor.is_poisoned(payload)
    return Received(chain(first, received), poisoned, 1 / exchange.world_size)


def summed(exchange: Exchange, out: Outgoing) -> Rounds:
    """One all-reduce a bucket. Bytes a rank sends: 2(N-1)/N payloads.

    1. Pack all payloads of the bucket into one.
    2. All-reduce, in the payload's own dtype. A poisoned payload makes a poisoned sum.
    """
    own = out.all_payloads()
    wire = pack(out.units, own, out.dtype)
    dtype = out.units[0].compressor.wire_dtype(out.dtype) if out.units else out.dtype
    total = yield exchange.all_reduce(wire.view(dtype))
    sums = unpack(out.units, total.view(torch.uint8), out.dtype)
    poisoned = _poisoned(out.units, sums)
    return Received([[payload] for payload in sums], poisoned, 1 / exchange.world_size, own)


def sharded(exchange: Exchange, out: Outgoing) -> Rounds:
    """Two collectives a bucket. Bytes a rank sends: 2(N-1)/N payloads.

    1. Send each shard's payloads to its owner (all-to-all).
    2. The owner decodes the mean of its shard, compresses it, and keeps what that loses.
    3. All-gather the compressed means.
    """
    n, own = exchange.world_size, out.all_payloads()
    borders = shard_borders(out.numel, n)
    shards = _by_shard(out.units, borders)
    sizes = [sum(payload_sizes(units, out.dtype)) for units in shards]
    wire = pack(out.units, own, out.dtype)
    rows = yield exchange.all_to_all(wire, sizes, f"bucket {out.index}")
    mine = shards[exchange.rank]
    received = [unpack(mine, row, out.dtype) for row in rows]
    shard = _Shard(mine, borders[exchange.rank], out.space(sum(unit.numel for unit in mine)))
    second = shard.compress_mean(received)
    packed = pack(mine, second, out.dtype)
    wire = packed.new_zeros(max(sizes))  # the collective wants equal sizes
    wire[: packed.numel()] = packed
    shard.keep_remainder(second)
    out.books.compressed_again(_lost_share(second))
    rows = yield exchange.all_gather(wire, f"bucket {out.index}, compressed means")
    means: list[Payload] = []
    for units, row, size in zip(shards, rows, sizes, strict=True):
        means += unpack(units, row[:size], out.dtype)
    poisoned = _poisoned(out.units, means)
    remainder = Remainder(mine, shard.values, shard.start, n)
    fill_if(poisoned, shard.values, 0.0)
    return Received([[mean] for mean in means], poisoned, 1.0, own, remainder)


class _Shard:
    """The shard that this rank owns, from `start` on: its mean, then what compressing that lost."""

    def __init__(self, units: Sequence[Unit], start: int, values: Tensor) -> None:
        self.start, self.values = start, values
        self._units = units

    def compress_mean(self, received: Sequence[Sequence[Payload]]) -> list[Payload]:
        """A payload of the mean for each unit; all poisoned if any that was received is, or if
        the mean is not finite."""
        scale = 1 / len(received)
        self.values.zero_()
        payloads = []
        poisoned: Flag = False
        for i, unit in enumerate(self._units):
            compressor, mean = unit.compressor, self._view(unit)
            for row in received:
                flag = compressor.is_poisoned(row[i])
                compressor.add_to(mean, compressor.void(row[i], flag), scale)
                poisoned = poisoned | flag
            # What is drawn at random is not what was drawn for this rank's own payload.
            key = unit.key._replace(rank=unit.key.rank + len(received))
            payloads.append(compressor.compress(mean, unit.cf, key))
        poisoned = poisoned | (all_finite(self.values) ^ True)
        pairs = zip(self._units, payloads, strict=True)
        return [unit.compressor.poison(payload, poisoned) for unit, payload in pairs]

    def keep_remainder(self, sent: Sequence[Payload]) -> None:
        """Take what is sent, once packed, off the mean."""
        for unit, payload in zip(self._units, sent, strict=True):
            unit.compressor.subtract_from(self._view(unit), payload)

    def _view(self, unit: Unit) -> Tensor:
        return self.values[unit.start - self.start : unit.stop - self.start]


def _by_shard(units: Sequence[Unit], borders: Sequence[int]) -> list[list[Unit]]:
    return [
        [unit for unit in units if start <= unit.start and unit.stop <= stop]
        for start, stop in itertools.pairwise(borders)
    ]


def _lost_share(payloads: Sequence[Payload]) -> Scalar:
    """Of their tensors' energy, what payloads lose."""
    known = [payload.energies for payload in payloads if payload.energies is not None]
    if not known:
        return 0.0
    total, _, lost = torch.stack(known).sum(0)
    return torch.where(total > 0, lost / total, 0.0)


def shared_indices(exchange: Exchange, out: Outgoing) -> Rounds:
    """Two collectives a bucket. Bytes a rank sends: (N-1)/N index lists, 2(N-1)/N value lists.

    1. The rank whose turn it is selects, and broadcasts its indices.
    2. All-reduce the values that each rank has at those indices; NaN if its gradients are not
       finite.

    Each rank has sent exactly its own values at those indices.
    """
    units, sums = out.units, [a for a in out.sums if a is not None]
    sizes = [_index_nbytes(unit) for unit in units]
    chosen = torch.zeros(sum(sizes), dtype=torch.uint8, device=out.device)
    if exchange.rank == out.leader:
        for unit, a, room in zip(units, sums, chosen.split(sizes), strict=True):
            if room.numel():
                payload = unit.compressor.compress(a, unit.cf, unit.key)
                room.copy_(_sparse(unit).pack_indices(payload))
    chosen = (yield exchange.broadcast(chosen, out.leader, f"bucket {out.index}, indices"))[0]
    own = [_at(*each) for each in zip(units, sums, chosen.split(sizes), strict=True)]
    out.books.chosen(own)
    own = [_apart(unit, payload) for unit, payload in zip(units, own, strict=True)]
    values = torch.cat([payload.parts[-1] for payload in own])
    fill_if(out.poisoned, values, nan)
    total = yield exchange.all_reduce(values)
    poisoned = all_finite(total) ^ True
    means = total.split([payload.parts[-1].numel() for payload in own])
    received = [
        [payload.with_parts(*payload.parts[:-1], mean)]
        for payload, mean in zip(own, means, strict=True)
    ]
    return Received(received, poisoned, 1 / exchange.world_size, own)


def _sparse(unit: Unit) -> Sparsifier:
    assert isinstance(unit.compressor, Sparsifier)
    return unit.compressor


def _index_nbytes(unit: Unit) -> int:
    """Bytes of a unit's indices; 0 for one that is sent as it is."""
    if isinstance(unit.compressor, NoCompression):
        return 0
    return _sparse(unit).index_nbytes(unit.numel, unit.cf)


def _at(unit: Unit, a: Tensor, indices: Tensor) -> Payload:
    """What `a` has at the chosen `indices` (as packed)."""
    if isinstance(unit.compressor, NoCompression):
        return unit.compressor.compress(a, unit.cf, unit.key)
    return _sparse(unit).at(a, indices, unit.cf, unit.key)


def _apart(unit: Unit, payload: Payload) -> Payload:
    """The payload in memory of its own, at the CF of its unit."""
    if isinstance(unit.compressor, NoCompression):
        return payload.with_parts(payload.parts[0].clone())
    return replace(payload, cf=unit.cf)


def in_rounds(exchange: Exchange, out: Outgoing, compressor: RoundsCompressor) -> Rounds:
    """As many all-reduces a bucket as the compressor has rounds.

    1. What is sent uncompressed (`dense_below`, a layer at CF 1) travels with the first round.
    2. All-reduce what the compressor hands out, give it the sum, and so on. A rank whose gradients
       are not finite sends NaN.
    """
    units = [unit for unit, a in zip(out.units, out.sums, strict=True) if a is not None]
    sums = [a for a in out.sums if a is not None]
    plain, n = out.all_payloads(), exchange.world_size
    if not units:
        return (yield from _all_plain(exchange, out, compressor.rounds_count))
    compressed: list[Payload] = []

    def report(payloads: Sequence[Payload]) -> None:
        compressed.extend(payloads)
        out.books.chosen(_merged(payloads, [None] * len(plain), out.sums))

    rounds = compressor.rounds(
        sums,
        [unit.cf for unit in units],
        [unit.key for unit in units],
        n,
        report,
        skipped=[i for i, unit in enumerate(units) if unit.skipped],
    )
    share = next(rounds)
    first = torch.cat([share, *(payload.parts[0] for payload in plain)]) if plain else share
    fill_if(out.poisoned, first, nan)
    total = yield exchange.all_reduce(first)
    sums_of_plain = total[share.numel() :].clone()
    total = total[: share.numel()]
    for _ in range(compressor.rounds_count - 1):
        total = yield exchange.all_reduce(rounds.send(total))
    means = _returned(rounds, total)
    poisoned = all_finite(sums_of_plain) ^ True
    for mean in means:
        poisoned = poisoned | compressor.is_poisoned(mean)
    parts = sums_of_plain.split([payload.numel for payload in plain])
    averages = [p.with_parts(part.div_(n)) for p, part in zip(plain, parts, strict=True)]
    received = [[mean] for mean in _merged(means, averages, out.sums) if mean is not None]
    own = [payload for payload in _merged(compressed, plain, out.sums) if payload is not None]
    return Received(received, poisoned, 1.0, own)


def _all_plain(exchange: Exchange, out: Outgoing, collectives: int) -> Rounds:
    """All of the bucket travels uncompressed: one round of sums does, and the others, which every
    rank must issue alike, have nothing to send."""
    own = out.all_payloads()
    empty = torch.empty(0, dtype=out.dtype, device=out.device)
    flat = torch.cat([empty, *(payload.parts[0] for payload in own)])
    flat = yield exchange.all_reduce(flat)
    for _ in range(collectives - 1):
        yield exchange.all_reduce(empty)
    sums = flat.split([payload.numel for payload in own])
    received = [payload.with_parts(each) for payload, each in zip(own, sums, strict=True)]
    poisoned = _poisoned(out.units, received)
    return Received([[payload] for payload in received], poisoned, 1 / exchange.world_size, own)


def _merged(
    compressed: Sequence[Payload],
    plain: Sequence[Payload | None],
    sums: Sequence[Tensor | None],
) -> list[Payload | None]:
    """One a unit, in order: of those with a sum the next of `compressed`, else of `plain`."""
    with_sum, without = iter(compressed), iter(plain)
    return [next(without) if a is None else next(with_sum) for a in sums]


def _returned(rounds: CompressorRounds, total: Tensor) -> list[Payload]:
    try:
        rounds.send(total)
    except StopIteration as stop:
        return stop.value
    raise RuntimeError("the compressor has more rounds than it announced")


# -- one payload for all of a bucket ---------------------------------------------------------


def payload_sizes(units: Sequence[Unit], dtype: torch.dtype) -> list[int]:
    """Bytes of each unit's payload: the same on every rank."""
    return [unit.compressor.payload_nbytes(unit.numel, unit.cf, dtype) for unit in units]


def pack(units: Sequence[Unit], payloads: Sequence[Payload], dtype: torch.dtype) -> Tensor:
    """The payloads one after the other, in one contiguous uint8 tensor, so that one collective
    carries them. RuntimeError if one has not its announced size."""
    sizes = payload_sizes(units, dtype)
    device = payloads[0].parts[0].device if payloads else torch.device("cpu")
    wire = fresh(sum(sizes), torch.uint8, device)
    for unit, payload, size, room in zip(units, payloads, sizes, wire.split(sizes), strict=True):
        if payload.nbytes != size:
            raise RuntimeError(
                f"compressor {unit.compressor.name!r} announced {size} bytes for {unit.numel} "
                f"elements at CF {unit.cf:g} and made {payload.nbytes}"
            )
        payload.write(room)
    return wire


def unpack(units: Sequence[Unit], wire: Tensor, dtype: torch.dtype) -> list[Payload]:
    """The payloads that one rank packed. CorruptPayload if the bytes cannot be theirs."""
    rooms = wire.split(payload_sizes(units, dtype))
    return [
        unit.compressor.read(data, unit.numel, unit.cf, dtype, unit.key)
        for unit, data in zip(units, rooms, strict=True)
    ]


def _poisoned(units: Sequence[Unit], payloads: Sequence[Payload]) -> Flag:
    """Some rank has poisoned what it sent."""
    flag: Flag = False
    for unit, payload in zip(units, payloads, strict=True):
        flag = flag | unit.compressor.is_poisoned(payload)
    return flag


# -- which strategies there are --------------------------------------------------------------


def _nothing(unit: Unit) -> bool:
    return False


def _everything(unit: Unit) -> bool:
    return True


def _for_rounds(unit: Unit) -> bool:
    return isinstance(unit.compressor, RoundsCompressor)


@dataclass(frozen=True)
class Strategy:
    """A strategy is one way in which payloads become the mean.

    name: one of EXCHANGES. start: begins the exchange of one bucket. collectives: that it issues a
    bucket. takes_sum: of these units it wants the error-fed gradients, and compresses them itself.
    sharded: units must not cross the borders of the ranks' shards. by_energy: the rank with the
    largest error-fed gradient chooses for all, not one after the other.
    """

    name: str
    start: Callable[[Exchange, Outgoing], Rounds]
    collectives: int
    takes_sum: Callable[[Unit], bool] = _nothing
    sharded: bool = False
    by_energy: bool = False


GATHERED = Strategy("all_gather", gathered, 1)
SUMMED = Strategy("all_reduce", summed, 1)
SHARDED = Strategy("sharded", sharded, 2, sharded=True)
SHARED_INDICES = Strategy("shared_indices", shared_indices, 2, _everything)
BY_ENERGY = Strategy("shared_indices_by_energy", shared_indices, 2, _everything, by_energy=True)


def strategies(base: Compressor) -> list[Strategy]:
    """The strategies that a compressor allows, the one that suits it on any network first."""
    if isinstance(base, RoundsCompressor):
        start = partial(in_rounds, compressor=base)
        return [Strategy("all_reduce", start, base.rounds_count, _for_rounds)]
    if base.linear:
        return [SUMMED, GATHERED, SHARDED] if base.error_feedback else [SUMMED, GATHERED]
    if isinstance(base, GraceCompressor):  # a second compression would have a ctx of its own
        return [GATHERED]
    allowed = [GATHERED, SHARDED]
    if isinstance(base, Sparsifier) and base.values.lossless:
        allowed += [SHARED_INDICES, BY_ENERGY]
    return allowed


def make_strategy(base: Compressor, exchange: str) -> Strategy:
    """The strategy called `exchange`; ValueError if the compressor does not allow it."""
    allowed = strategies(base)
    for strategy in allowed:
        if strategy.name == exchange:
            return strategy
    accepted = ", ".join(["auto", *(strategy.name for strategy in allowed)])
    raise ValueError(f"exchange must be one of {accepted} for base {base.name!r}; got {exchange!r}")


def check_exchange(exchange: str, base: Compressor) -> str:
    """`exchange` if it is "auto" or a strategy that `base` allows; ValueError otherwise."""
    return exchange if exchange == "auto" else make_strategy(base, exchange).name


WORTH = 0.9
"""Compressing twice keeps less of the gradient, so it must save at least a tenth of the time."""


class ExchangeChoice:
    """The strategy for each payload size: a fixed one, or with "auto" the fastest on `link`.

    ValueError if the compressor does not allow `exchange`.
    """

    def __init__(self, base: Compressor, exchange: str, world_size: int) -> None:
        self._strategies = strategies(base)
        self._fixed = None if exchange == "auto" else make_strategy(base, exchange)
        self._world_size = world_size
        self.link = LinkCost()

    @property
    def measures(self) -> bool:
        """The choice depends on the link, which is to be measured."""
        if self._fixed is not None or self._world_size <= 2:
            return False
        return self._strategies[0] is GATHERED and SHARDED in self._strategies

    @property
    def by_energy(self) -> bool:
        """The ranks' energies must be known."""
        return self._fixed is not None and self._fixed.by_energy

    def pick(self, nbytes: float) -> Strategy:
        """For payloads of `nbytes` a bucket."""
        if not self.measures:
            return self._fixed or self._strategies[0]
        n, link = self._world_size, self.link
        if not isfinite(link.beta):  # an injected clock tells nothing: count the bytes
            link = LinkCost(0.0, 1.0)
        return SHARDED if link.sharded(nbytes, n) < WORTH * link.gathered(nbytes, n) else GATHERED
