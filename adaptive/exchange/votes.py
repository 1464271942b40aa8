"""Indices that the ranks vote on: all ranks then send their values at the same elements."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace
from itertools import chain, pairwise
from math import prod

import torch
from torch import Tensor

from adaptive.bucket import shard_borders
from adaptive.exchange.collectives import Exchange, gather_wire_bytes, reduce_wire_bytes
from adaptive.exchange.strategies import Outgoing, Piece, Received, Rounds, Strategy
from compressors.base import Key, Payload, Spec, kept, split_rows
from compressors.kernels import all_finite, kernels_for, squared_norms
from compressors.kernels.blocks import Flag, energies, fill_if, fresh
from compressors.sparsifier import Sparsifier
from compressors.wire.values import Full, ValueFormat
from policies import DENSE


class Voted(Strategy):
    """The ranks vote on indices, and send their values at all of them, coded as `values` says."""

    name = "voted_indices"
    takes_sums = True
    votes = True

    def __init__(self, values: ValueFormat) -> None:
        self.values = values

    def rounds(self, exchange: Exchange, outgoing: Outgoing) -> Rounds:
        return voted_indices(exchange, outgoing, self.values)

    def nbytes(self, pieces: Sequence[Piece], ranks: int) -> float:
        return voted_bytes(pieces, ranks)

    def collectives(self, ranks: int) -> int:
        return 3


def voted_bytes(pieces: Sequence[Piece], ranks: int) -> float:
    """Bytes that a rank puts on the wire in `voted_indices`: the indices that it proposes, and
    values at all that the ranks propose."""
    indices, values = 0.0, 0.0
    for piece in pieces:
        if piece.cf == DENSE:
            values += piece.nbytes
            continue
        compressor, numel = piece.compressor, prod(piece.shape)
        assert isinstance(compressor, Sparsifier)
        count = max(kept(numel, piece.cf), min(numel, ranks * kept(numel, piece.cf * ranks)))
        indices += compressor.index_nbytes(Spec((numel,), piece.cf * ranks))
        values += compressor.values.size(count, torch.float32)
    return gather_wire_bytes(indices, ranks) + reduce_wire_bytes(values, ranks)


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
    sizes = [compressor.index_nbytes(unit.spec.at(unit.cf * n)) for _, unit, compressor in sparse]
    wire = fresh(sum(sizes), torch.uint8, out.bucket.work.device)
    for (i, unit, compressor), room in zip(sparse, wire.split(sizes), strict=True):
        proposed = compressor.compress(own[i].parts[0], unit.spec.at(unit.cf * n))
        room.copy_(compressor.pack_indices(proposed))
    rows = yield exchange.all_gather(wire)

    for (i, unit, compressor), packed in zip(sparse, rows.split(sizes, dim=1), strict=True):
        own[i] = compressor.at_proposed(own[i].parts[0], packed, unit.spec)
    empty = out.bucket.work[:0]
    lists = _ValueLists(own, {i for i, *_ in sparse}, values, n, empty)
    key = out.bucket.key._replace(name=f"values {out.index}")
    sent = lists.flat.clone()
    wires = [lists.encode(sent, rank, key, out.bucket.nonfinite) for rank in range(n)]
    out.report([_rounded(*each) for each in zip(own, lists.put(own, sent), strict=True)])
    sizes = [wire.numel() for wire in wires]
    rows = yield exchange.all_to_all(torch.cat(wires), sizes)

    mean = torch.zeros_like(sent)  # but for what this rank owns, until all have sent theirs
    for row in rows:
        for piece, decoded in zip(lists.of(mean, me), lists.decode(row, me), strict=True):
            piece.add_(decoded, alpha=1 / n)
    nonfinite = all_finite(mean) ^ True
    fill_if(nonfinite, mean, 0.0)
    exact = mean.clone()
    wire = fresh(max(sizes), torch.uint8, mean.device).zero_()  # the collective wants equal sizes
    wire[: sizes[me]] = lists.encode(mean, me, key._replace(rank=key.rank + n), nonfinite)
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

    def encode(self, x: Tensor, rank: int, key: Key, nonfinite: Flag) -> Tensor:
        """The bytes of the rank's pieces of `x`, which become what `decode` makes of these."""
        parts: list[Tensor] = []
        for form, piece in zip(self._forms, self.of(x, rank), strict=True):
            if piece.numel():
                coded, decoded = form.encode(piece, key)
                parts += coded
                piece.copy_(decoded)
        payload = Payload(tuple(parts), Spec.of(x, key=key))
        wire = fresh(payload.nbytes, torch.uint8, x.device)
        (payload.as_nonfinite(nonfinite) if parts else payload).write(wire)
        return wire

    def decode(self, wire: Tensor, rank: int) -> list[Tensor]:
        """The rank's pieces, from their bytes."""
        dtype, numels = self.flat.dtype, [each.stop - each.start for each in self._slices[rank]]
        layouts = [
            form.layout(numel, dtype) if numel else ()
            for form, numel in zip(self._forms, numels, strict=True)
        ]
        (parts,) = split_rows(wire[None], *chain(*layouts))
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
    kept, lost = kernels_for(norms).numbers(norms)
    total, _, error = payload.scalars
    return replace(sent, energies=energies(total, kept, error + lost, values))
