"""Voted indices: all ranks send their values at the same elements, the union of all proposals."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace
from functools import cache
from itertools import chain

import torch
from torch import Tensor

from adaptive.exchange.strategies import Outgoing, Piece, Received, Rounds, Strategy
from adaptive.network.collectives import Exchange, gather_wire_bytes, reduce_wire_bytes
from compressors.base import Key, Payload, Spec
from compressors.kernels import all_finite, kernels_for, squared_norms
from compressors.kernels.blocks import Flag, energies, fill_if, uninitialized
from compressors.sharded import each_shard, in_shards, shard_borders
from compressors.sparsifier import Sparsifier
from compressors.value_list import ValueList
from compressors.wire.values import Full, ValueFormat
from policies import DENSE


class Voted(Strategy):
    """The voted exchange. Each rank proposes 1/N of the indices: those of its own largest elements.
    All ranks then have values at the same indices, the proposals of all. Each rank owns one shard
    of these values: it gets the shard's values of all ranks, and sends their mean to all. Values
    and means are coded as `values` says. The coding error of a mean goes to its owner's residual. A
    rank sends (N-1)/N index lists and 2(N-1)/N value lists."""

    name = "voted_indices"
    takes_error_fed = True
    votes = True
    calls = 110

    def __init__(self, values: ValueFormat) -> None:
        self.values = values

    def rounds(self, exchange: Exchange, outgoing: Outgoing) -> Rounds:
        n, rank, own = exchange.world_size, exchange.rank, list(outgoing.payloads)
        sparse = [
            (i, unit, unit.compressor)
            for i, unit in enumerate(outgoing.units)
            if isinstance(unit.compressor, Sparsifier)
        ]
        sizes = [
            compressor.index_nbytes(unit.spec.at(unit.cf * n)) for _, unit, compressor in sparse
        ]
        wire = uninitialized(sum(sizes), torch.uint8, outgoing.bucket.work.device)
        for (i, unit, compressor), slot in zip(sparse, wire.split(sizes), strict=True):
            proposed = compressor.compress(own[i].parts[0], unit.spec.at(unit.cf * n))
            slot.copy_(compressor.pack_indices(proposed))
        rows = yield exchange.all_gather(wire)

        for (i, unit, compressor), packed in zip(sparse, rows.split(sizes, dim=1), strict=True):
            own[i] = compressor.at_union(own[i].parts[0], packed, unit.spec)
        empty = outgoing.bucket.work[:0]
        lists = _ValueLists(own, {i for i, *_ in sparse}, self.values, n, empty)
        key = outgoing.bucket.key._replace(name=f"values {outgoing.index}")
        sent = lists.flat.clone()
        wire = lists.encode(sent, key, outgoing.bucket.nonfinite)
        outgoing.report([_rounded(*each) for each in zip(own, lists.put(own, sent), strict=True)])
        rows = yield exchange.all_to_all(wire, lists.sizes)

        mean = torch.zeros_like(sent)  # this rank's pieces are filled now, the others at the end
        lists.mean_of(lists.of(mean, rank), rows, rank)
        nonfinite = all_finite(mean) ^ True
        fill_if(nonfinite, mean, 0.0)
        exact = mean.clone()
        # All ranks must send the same number of bytes.
        wire = uninitialized(max(lists.sizes), torch.uint8, mean.device).zero_()
        wire[: lists.sizes[rank]] = lists.encode_own(lists.of(mean, rank), key, nonfinite, rank)
        # This rank alone keeps the coding error of the mean, and the next mean divides what it
        # keeps by N. So N times the error counts as not sent.
        sent.sub_(exact.sub_(mean), alpha=n)
        rows = yield exchange.all_gather(wire, means=True)

        lists.read_means(mean, rows)
        received = [[payload] for payload in lists.put(own, mean)]
        return Received(received, all_finite(mean) ^ True, 1.0, lists.put(own, sent))

    def nbytes(self, pieces: Sequence[Piece], ranks: int) -> float:
        """Bytes of the indices that a rank proposes, and of the values at all proposed indices."""
        indices, values = 0.0, 0.0
        for piece in pieces:
            if piece.cf == DENSE:
                values += piece.nbytes
                continue
            compressor, spec = piece.compressor, piece.spec
            assert isinstance(compressor, Sparsifier)
            proposed = spec.at(piece.cf * ranks)
            all_proposed = zip(spec.segments, proposed.counts, strict=True)
            most = sum(min(length, ranks * count) for length, count in all_proposed)
            count = max(spec.num_kept, most)
            indices += compressor.index_nbytes(proposed)
            values += compressor.values.size(count, torch.float32)
        return gather_wire_bytes(indices, ranks) + reduce_wire_bytes(values, ranks)

    def collectives(self, ranks: int) -> int:
        return 3


class _ValueLists:
    """The values of a bucket's payloads, joined: first those of the coded payloads, then those of
    the uncoded payloads. Both runs are cut into one piece for each rank, so a rank owns two pieces.

    flat: the values. coded: indices of the payloads whose values are coded by `form`. sizes: bytes
    of each rank's pieces."""

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
        self._border = sum(self._numels[: len(coded)])
        self._by = in_shards(_value_list(form), ranks), in_shards(_value_list(_FULL), ranks)
        numels = self._border, self.flat.numel() - self._border
        self._specs = [Spec((numel,), dtype=self.flat.dtype) for numel in numels]
        both = [by.sizes(spec) for by, spec in zip(self._by, self._specs, strict=True)]
        self._coded_sizes, self._full_sizes = both
        self.sizes = [sum(each) for each in zip(*both, strict=True)]

    def of(self, x: Tensor, rank: int) -> list[Tensor]:
        """A rank's two pieces of `x`, which has the layout of `flat`."""
        pieces = []
        for run, by in zip(self._runs(x), self._by, strict=True):
            start, stop = shard_borders(run.numel(), by.shards)[rank : rank + 2]
            pieces.append(run[start:stop])
        return pieces

    def encode(self, x: Tensor, key: Key, nonfinite: Flag) -> Tensor:
        """The bytes of all ranks' pieces of `x`. Sets `x` to the values that they decode to."""
        wires = []
        for run, by, spec in zip(self._runs(x), self._by, self._specs, strict=True):
            wires.append(_written(by.compress(run, spec._replace(key=key)), nonfinite, x))
        if not wires[1].numel():
            return wires[0]
        both = zip(wires, (self._coded_sizes, self._full_sizes), strict=True)
        pieces = zip(*(wire.split(list(sizes)) for wire, sizes in both), strict=True)
        return torch.cat([*chain.from_iterable(pieces)])

    def encode_own(self, pieces: Sequence[Tensor], key: Key, nonfinite: Flag, rank: int) -> Tensor:
        """As `encode`, for one rank's pieces. Random rounding is another than in `encode`, where
        the borders of a shard are in the key's name."""
        each = zip(pieces, self._by, self._own_specs(rank), strict=True)
        made = [by.inner.compress(piece, spec._replace(key=key)) for piece, by, spec in each]
        return torch.cat([_written(payload, nonfinite, self.flat) for payload in made])

    def mean_of(self, pieces: Sequence[Tensor], rows: Tensor, rank: int) -> None:
        """Fill the rank's pieces with the mean of the ranks' pieces. rows: (ranks, bytes)."""
        sizes = [self._coded_sizes[rank], self._full_sizes[rank]]
        each = zip(pieces, self._by, self._own_specs(rank), rows.split(sizes, dim=1), strict=True)
        for piece, by, spec, data in each:
            if piece.numel():
                by.inner.mean_of(piece, by.inner.read(data, spec), 1 / len(rows))

    def read_means(self, x: Tensor, rows: Tensor) -> None:
        """Fill `x`, which has the layout of `flat`. rows: (ranks, bytes); each row begins with the
        bytes of its rank's pieces."""
        (coded, full), by = self._runs(x), self._by[0]
        if coded.numel():
            by.mean_of(coded, [by.read_means(rows, self._specs[0])], 1.0)
        if full.numel():
            sizes = []
            for both in zip(self._coded_sizes, self._full_sizes, strict=True):
                sizes += [*both, rows.shape[1] - sum(both)]
            full.copy_(torch.cat(rows.reshape(-1).split(sizes)[1::3]).view(x.dtype))

    def _runs(self, x: Tensor) -> Sequence[Tensor]:
        return x[: self._border], x[self._border :]

    def _own_specs(self, rank: int) -> list[Spec]:
        both = zip(self._by, self._specs, strict=True)
        return [each_shard(spec, by.shards)[rank] for by, spec in both]

    def put(self, payloads: Sequence[Payload], x: Tensor) -> list[Payload]:
        """The payloads with the values of `x`, which has the layout of `flat`."""
        changed = list(payloads)
        for i, values in zip(self._order, x.split(self._numels), strict=True):
            changed[i] = changed[i].with_parts(*changed[i].parts[:-1], values)
        return changed


def _rounded(payload: Payload, sent: Payload) -> Payload:
    """The payload `sent`, with energies. payload: the same payload before coding has changed its
    values."""
    exact, values = payload.parts[-1], sent.parts[-1]
    norms = squared_norms([values, exact - values])
    kept, lost = kernels_for(norms).numbers(norms)
    total, _, error = payload.scalars
    return replace(sent, energies=energies(total, kept, error + lost, values))


def _written(payload: Payload, nonfinite: Flag, like: Tensor) -> Tensor:
    """The bytes of a payload of values; all NaN if `nonfinite`."""
    wire = uninitialized(payload.nbytes, torch.uint8, like.device)
    if payload.nbytes:
        payload.as_nonfinite(nonfinite).write(wire)
    return wire


_value_list = cache(ValueList)
_FULL = Full()
