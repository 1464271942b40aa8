"""How the payloads of all ranks become the mean gradient: one function for each strategy.

A strategy is handed what a rank has to send for one bucket (`Outgoing`) and hands back what has
arrived (`Received`). It knows no memory and no statistics. It is a generator, since a collective
may only be issued in the body of a hook call (`adaptive.exchange.pipeline`): it yields the future
of each collective that it has issued, and is sent its value.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence, Set
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from math import nan
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from adaptive.bucket import EXACT, Bucket, Unit, shard_borders
from adaptive.exchange.collectives import Exchange
from compressors import Compressor
from compressors.base import Key, Payload, split_bytes
from compressors.kernels import all_finite, squared_norms
from compressors.kernels.blocks import Flag, either, energies, fill_if, fresh, is_host
from compressors.rounds import RoundsCompressor
from compressors.sparsifier import Sparsifier
from compressors.wire.values import Full, ValueFormat
from policies import DENSE


@dataclass
class Outgoing:
    """What a rank has to send for one bucket.

    payloads: one a unit; for a strategy that `takes_sums` its only part is the error-fed gradient.
    If the bucket is poisoned so are payloads, but error-fed gradients are zero. report: is told,
    still in the hook's body, which payloads the strategy has made itself.
    """

    index: int
    bucket: Bucket
    units: list[Unit]
    payloads: Sequence[Payload]
    report: Callable[[Sequence[Payload]], None]

    @property
    def dtype(self) -> torch.dtype:
        return self.bucket.work.dtype


@dataclass
class Received:
    """What has arrived for one bucket. The mean of a unit is `scale` times the sum of its payloads.

    payloads: for each unit. poisoned: some rank's gradients were not finite, so they mean nothing.
    own: what this rank has sent of each unit; None: it is among the payloads, at this rank's place.
    lost: of units of which this rank has compressed the mean, what that has lost of it (flat).
    compressors: of each unit, by which the payloads are decoded; None: the unit's own.
    """

    payloads: Iterable[Sequence[Payload]]
    poisoned: Flag
    scale: float = 1.0
    own: Sequence[Payload] | None = None
    lost: Sequence[tuple[Unit, Tensor]] = ()
    compressors: Sequence[Compressor] | None = None


Rounds = Generator[Future[Tensor], Any, Received]
"""An exchange under way. After its last collective it runs on a thread of the process group."""


def gathered(exchange: Exchange, out: Outgoing) -> Rounds:
    """Every rank sends its payloads to every other. Bytes a rank sends: (N-1) payloads."""
    wire = pack(out, out.units, out.payloads)
    out.payloads = ()  # our own comes back, too
    rows = yield exchange.all_gather(wire)
    sizes = payload_sizes(out.units, out.dtype)
    by_unit = rows.split(sizes, dim=1)
    # One unit after the other, so that the decoded payloads of no more than one are in memory.
    received = (
        unit.compressor.read_all(from_ranks, unit.numel, unit.cf, out.dtype, unit.key)
        for unit, from_ranks in zip(out.units, by_unit, strict=True)
    )
    first = next(received, [])  # a rank poisons all payloads of a bucket or none
    poisoned = out.units[0].compressor.any_poisoned(first) if first else False
    everything = chain([first] if first else [], received)
    return Received(everything, poisoned, 1 / exchange.world_size)


def summed(exchange: Exchange, out: Outgoing) -> Rounds:
    """The sum of the payloads is the payload of the sum (linear compressors), also of a poisoned
    one. Bytes a rank sends: 2(N-1)/N payloads."""
    wire = pack(out, out.units, out.payloads)
    dtype = out.units[0].compressor.wire_dtype(out.dtype) if out.units else out.dtype
    total = yield exchange.all_reduce(wire.view(dtype))
    sums = unpack(out.units, total.view(torch.uint8), out.dtype)
    poisoned = any_poisoned(out.units, sums)
    return Received([[each] for each in sums], poisoned, 1 / exchange.world_size, out.payloads)


def sharded(
    exchange: Exchange,
    out: Outgoing,
    down_cf: float | None = None,
    server: dict[str, Tensor] | None = None,
) -> Rounds:
    """Each shard's payloads go to its owner (all-to-all), which compresses their mean, keeps what
    that loses, and sends it to all (all-gather): Tang and others, "DoubleSqueeze" (ICML 2019), with
    the ranks themselves as the server. Bytes a rank sends: (N-1)/N payloads up and as many down.

    down_cf: the CF of the means, 1 is "single compression"; None: that of the payloads. server: the
    error memory of the owner as a server, by the names of its units, as in the paper's algorithm 1:
    added to the mean, and what is then lost. None: that goes to the owner's residual as a rank."""
    work = out.bucket.work
    shards = [
        [unit for unit in out.units if start <= unit.start and unit.stop <= stop]
        for start, stop in pairwise(shard_borders(work.numel(), exchange.world_size))
    ]
    sizes = [sum(payload_sizes(units, out.dtype)) for units in shards]
    wire = pack(out, out.units, out.payloads)
    rows = yield exchange.all_to_all(wire, sizes)

    mine = shards[exchange.rank]
    received = [unpack(mine, row, out.dtype) for row in rows]
    down = [[_downward(unit, down_cf) for unit in units] for units in shards]
    down_sizes = [sum(payload_sizes(units, out.dtype)) for units in down]
    numels = [unit.numel for unit in mine]
    room = out.bucket.room("mean of a shard", sum(numels)).zero_()
    means = list(zip(mine, room.split(numels), strict=True))
    second: list[Payload] = []
    poisoned: Flag = False
    both = zip(means, down[exchange.rank], zip(*received, strict=True), strict=True)
    before: list[Tensor | None] = []
    for (unit, mean), below, payloads in both:
        kept = None if server is None else server.get(unit.key.name)
        before.append(kept)
        if kept is not None and kept.numel() == mean.numel():
            mean.copy_(kept)
        for payload in payloads:
            flag = unit.compressor.is_poisoned(payload)
            unit.compressor.add_to(mean, unit.compressor.void(payload, flag), 1 / len(payloads))
            poisoned = either(poisoned, flag)
        # What is drawn at random is not what was drawn for this rank's own payload.
        key = unit.key._replace(rank=unit.key.rank + len(payloads))
        second.append(below.compressor.compress(mean, below.cf, key))
    poisoned = either(poisoned, all_finite(room) ^ True)
    pairs = list(zip(down[exchange.rank], second, strict=True))
    second = [unit.compressor.poison(payload, poisoned) for unit, payload in pairs]
    wire = work.new_zeros(max(down_sizes), dtype=torch.uint8)  # the collective wants equal sizes
    wire[: down_sizes[exchange.rank]] = pack(out, down[exchange.rank], second)
    for (unit, _), (_, mean), payload in zip(pairs, means, second, strict=True):
        unit.compressor.subtract_from(mean, payload)
    if server is not None:
        for (unit, mean), kept in zip(means, before, strict=True):
            unspoilt = torch.zeros_like(mean) if kept is None else kept
            flag = torch.as_tensor(poisoned, device=mean.device)
            server[unit.key.name] = torch.where(flag, unspoilt, mean)
        means = []
    out.report(second)
    rows = yield exchange.all_gather(wire, means=True)

    everyones: list[Payload] = []
    for units, row, size in zip(down, rows, down_sizes, strict=True):
        everyones += unpack(units, row[:size], out.dtype)
    in_order = list(chain.from_iterable(down))
    poisoned = any_poisoned(in_order, everyones)
    fill_if(poisoned, room, 0.0)
    by = [unit.compressor for unit in in_order]
    return Received([[mean] for mean in everyones], poisoned, 1.0, out.payloads, means, by)


def _downward(unit: Unit, cf: float | None) -> Unit:
    """The unit as it is sent back to all, at `cf`; None: as it came."""
    if cf is None or unit.compressor is EXACT:
        return unit
    cf = unit.compressor.supported(cf, unit.numel)
    return replace(unit, cf=cf, compressor=EXACT if cf == DENSE else unit.compressor)


def voted_indices(exchange: Exchange, out: Outgoing, values: ValueFormat) -> Rounds:
    """Each rank proposes 1/N of the indices, those of its own largest elements, and all ranks send
    their values at all of them: to the owner of each shard of the values, which sends the mean on.
    Both travel as `values` says; what the owner's coding loses goes to its own residual. Bytes a
    rank sends: (N-1)/N index lists, 2(N-1)/N value lists."""
    n, me, own = exchange.world_size, exchange.rank, list(out.payloads)
    sparse = [
        (i, unit, unit.compressor)
        for i, unit in enumerate(out.units)
        if isinstance(unit.compressor, Sparsifier)
    ]
    sizes = [compressor.index_nbytes(unit.numel, unit.cf * n) for _, unit, compressor in sparse]
    wire = fresh(sum(sizes), torch.uint8, out.bucket.work.device)
    for (i, unit, compressor), room in zip(sparse, wire.split(sizes), strict=True):
        proposed = compressor.compress(own[i].parts[0], unit.cf * n, unit.key)
        room.copy_(compressor.pack_indices(proposed))
    rows = yield exchange.all_gather(wire)

    for (i, unit, compressor), packed in zip(sparse, rows.split(sizes, dim=1), strict=True):
        own[i] = compressor.at_proposed(own[i].parts[0], packed, unit.cf, unit.key)
    empty = out.bucket.work[:0]
    lists = _ValueLists(own, {i for i, *_ in sparse}, values, n, empty)
    key = out.bucket.key._replace(name=f"values {out.index}")
    sent = lists.flat.clone()
    wires = [lists.encode(sent, rank, key, out.bucket.poisoned) for rank in range(n)]
    out.report([_rounded(*each) for each in zip(own, lists.put(own, sent), strict=True)])
    sizes = [wire.numel() for wire in wires]
    rows = yield exchange.all_to_all(torch.cat(wires), sizes)

    mean = torch.zeros_like(sent)  # but for what this rank owns, until all have sent theirs
    for row in rows:
        for piece, decoded in zip(lists.of(mean, me), lists.decode(row, me), strict=True):
            piece.add_(decoded, alpha=1 / n)
    poisoned = all_finite(mean) ^ True
    fill_if(poisoned, mean, 0.0)
    exact = mean.clone()
    wire = fresh(max(sizes), torch.uint8, mean.device).zero_()  # the collective wants equal sizes
    wire[: sizes[me]] = lists.encode(mean, me, key._replace(rank=key.rank + n), poisoned)
    # The next mean divides by the number of ranks what its owner alone has lost of this one.
    sent.sub_(exact.sub_(mean), alpha=n)
    rows = yield exchange.all_gather(wire, means=True)

    for rank, row in enumerate(rows):
        for piece, decoded in zip(
            lists.of(mean, rank), lists.decode(row[: sizes[rank]], rank), strict=True
        ):
            piece.copy_(decoded)
    received = [[payload] for payload in lists.put(own, mean)]
    return Received(received, all_finite(mean) ^ True, 1.0, lists.put(own, sent))


class _ValueLists:
    """The values of a bucket's payloads one after the other, those that are coded first, and all of
    them cut into two pieces for each rank: of what is coded, and of what is not.

    flat: the values. coded: which payloads' values travel as `form` says."""

    def __init__(
        self,
        payloads: Sequence[Payload],
        coded: Set[int],
        form: ValueFormat,
        ranks: int,
        empty: Tensor,
    ) -> None:
        self._order = sorted(range(len(payloads)), key=lambda i: i not in coded)
        lists = [payloads[i].parts[-1] for i in self._order]
        self._numels = [each.numel() for each in lists]
        self.flat = torch.cat([empty, *lists])
        self._forms = (form, Full())
        border = sum(self._numels[: len(coded)])
        cuts = shard_borders(border, ranks), shard_borders(self.flat.numel() - border, ranks)
        self._slices = [
            [slice(first + a, first + b) for first, (a, b) in zip((0, border), each, strict=True)]
            for each in zip(*map(pairwise, cuts), strict=True)
        ]

    def of(self, x: Tensor, rank: int) -> list[Tensor]:
        """The rank's pieces of `x`, which is like `flat`."""
        return [x[where] for where in self._slices[rank]]

    def encode(self, x: Tensor, rank: int, key: Key, poisoned: Flag) -> Tensor:
        """The bytes of the rank's pieces of `x`, which become what `decode` makes of these."""
        parts: list[Tensor] = []
        for form, piece in zip(self._forms, self.of(x, rank), strict=True):
            if piece.numel():
                coded, decoded = form.encode(piece, key)
                parts += coded
                piece.copy_(decoded)
        payload = Payload(tuple(parts), x.numel(), 1.0, key)
        wire = fresh(payload.nbytes, torch.uint8, x.device)
        (EXACT.poison(payload, poisoned) if parts else payload).write(wire)
        return wire

    def decode(self, wire: Tensor, rank: int) -> list[Tensor]:
        """The rank's pieces, from their bytes."""
        dtype, numels = self.flat.dtype, [each.stop - each.start for each in self._slices[rank]]
        layouts = [
            form.layout(numel, dtype) if numel else ()
            for form, numel in zip(self._forms, numels, strict=True)
        ]
        parts = split_bytes(wire, *chain(*layouts))
        first, pieces = len(layouts[0]), []
        for form, own, numel in zip(
            self._forms, (parts[:first], parts[first:]), numels, strict=True
        ):
            pieces.append(form.decode(own, numel, dtype) if numel else self.flat[:0])
        return pieces

    def put(self, payloads: Sequence[Payload], x: Tensor) -> list[Payload]:
        """The payloads with the values of `x`, which is like `flat`."""
        changed = list(payloads)
        for i, values in zip(self._order, x.split(self._numels), strict=True):
            changed[i] = changed[i].with_parts(*changed[i].parts[:-1], values)
        return changed


def _rounded(payload: Payload, sent: Payload) -> Payload:
    """`sent` with its energies: the payload with values that coding has changed."""
    exact, values = payload.parts[-1], sent.parts[-1]
    norms = squared_norms([values, exact - values])
    kept, lost = norms.tolist() if is_host(norms.device) else norms.unbind()
    total, _, error = payload.scalars
    return replace(sent, energies=energies(total, kept, error + lost, values))


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
        [unit.cf for unit in out.units],
        [unit.key for unit in out.units],
        exchange.world_size,
        report,
    )
    handed_out = next(rounds)
    fill_if(out.bucket.poisoned, handed_out, nan)
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
    return Received([[mean] for mean in means], any_poisoned(out.units, means), 1.0, own)


def payload_sizes(units: Sequence[Unit], dtype: torch.dtype) -> list[int]:
    """Bytes of each unit's payload: the same on every rank."""
    return [unit.compressor.payload_nbytes(unit.numel, unit.cf, dtype) for unit in units]


def pack(out: Outgoing, units: Sequence[Unit], payloads: Sequence[Payload]) -> Tensor:
    """The payloads one after the other in one uint8 tensor, so that one collective carries them.
    ValueError if one has not its announced size."""
    sizes = payload_sizes(units, out.dtype)
    wire = fresh(sum(sizes), torch.uint8, out.bucket.work.device)
    for unit, payload, room in zip(units, payloads, wire.split(sizes), strict=True):
        if payload.nbytes != room.numel():
            raise ValueError(
                f"compressor {unit.compressor.name!r} announced {room.numel()} bytes for "
                f"{unit.numel} elements at CF {unit.cf:g} and made {payload.nbytes}; "
                f"payload_nbytes must depend on its arguments only"
            )
        payload.write(room)
    return wire


def unpack(units: Sequence[Unit], wire: Tensor, dtype: torch.dtype) -> list[Payload]:
    """The payloads that one rank packed."""
    parts = wire.split(payload_sizes(units, dtype))
    return [read(unit, data, dtype) for unit, data in zip(units, parts, strict=True)]


def read(unit: Unit, data: Tensor, dtype: torch.dtype) -> Payload:
    """A payload of the unit. CorruptPayload if the bytes cannot be one."""
    return unit.compressor.read(data, unit.numel, unit.cf, dtype, unit.key)


def any_poisoned(units: Sequence[Unit], payloads: Sequence[Payload]) -> Flag:
    """Some rank has poisoned what it sent."""
    flag: Flag = False
    for unit, payload in zip(units, payloads, strict=True):
        flag = either(flag, unit.compressor.is_poisoned(payload))
    return flag
