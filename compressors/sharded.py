"""A compressor that cuts a tensor into shards, one for each rank, and compresses each separately.

The shards of equal length are the rows of a matrix. On a device all rows are compressed, written,
read and decoded at once if the compressor can (`Compressor.compress_rows`), so that the number of
operations does not grow with the number of ranks. On the host shards are compressed one after the
other, each in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from compressors.base import Compressor, Key, Payload, Spec, check_flat, check_out
from compressors.kernels import kernels_for
from compressors.kernels.blocks import Flag, either


def shard_borders(numel: int, shards: int) -> list[int]:
    """The start of each shard, and the end: `shards` + 1 positions. Lengths of shards are equal up
    to one element; the longer shards come last."""
    length, longer = divmod(numel, shards)
    return [length * i + max(0, i - (shards - longer)) for i in range(shards + 1)]


@dataclass(frozen=True)
class Joined(Payload):
    """A joined payload consists of the payloads of neighbouring pieces of a tensor.

    each: these payloads, in order. `parts` is empty."""

    each: tuple[Payload, ...] = ()

    @staticmethod
    def of(each: Sequence[Payload], spec: Spec) -> Joined:
        """The payloads of the pieces of a tensor with this spec, as one."""
        known = [payload.energies for payload in each if payload.energies is not None]
        energies = torch.stack(known).sum(0) if len(known) == len(each) > 1 else None
        if len(each) == 1:
            energies = each[0].energies
        invalid: Flag = False
        for payload in each:
            invalid = either(invalid, payload.invalid)
        return Joined((), spec.at(each[0].cf), energies, invalid, each=tuple(each))

    @property
    def nbytes(self) -> int:
        return sum(payload.nbytes for payload in self.each)

    @property
    def marks(self) -> list[Tensor]:
        return [mark for payload in self.each for mark in payload.marks]

    def write(self, out: Tensor) -> None:
        slots = out.split([payload.nbytes for payload in self.each])
        for payload, slot in zip(self.each, slots, strict=True):
            payload.write(slot)

    def positions(self) -> Tensor | None:
        starts, found = 0, list[Tensor]()
        for payload in self.each:
            kept = payload.positions()
            if kept is None:
                return None
            # On a device an index past the end of its piece means an empty slot.
            found.append(torch.where(kept < payload.numel, kept + starts, self.numel))
            starts += payload.numel
        return torch.cat(found)

    def as_nonfinite(self, flag: Flag = True) -> Payload:
        each = (payload.as_nonfinite(flag) if payload.nbytes else payload for payload in self.each)
        return replace(self, each=tuple(each))

    def _filled(self, flag: Flag, value: float) -> Payload:
        return replace(self, each=tuple(payload._filled(flag, value) for payload in self.each))


class Sharded(Compressor):
    """A sharded compressor cuts a tensor into `shards` shards, and compresses each by `inner`. Its
    payload consists of the shards' payloads, one after the other."""

    def __init__(self, inner: Compressor, shards: int) -> None:
        self.inner, self.shards = inner, shards
        self.name, self.multilevel, self.selects = inner.name, inner.multilevel, inner.selects

    def compress(self, x: Tensor, spec: Spec, add: Tensor | None = None) -> Payload:
        check_flat(x, spec, add)
        groups = self._groups(spec, x)
        sizes = [_numel(group) for group in groups]
        adds = [None] * len(groups) if add is None else add.split(sizes)
        each: list[Payload] = []
        for group, piece, addend in zip(groups, x.split(sizes), adds, strict=True):
            each += self._compress(group, piece, addend)
        return Joined.of(each, spec)

    def _compress(self, group: Sequence[Spec], x: Tensor, add: Tensor | None) -> list[Payload]:
        if len(group) == 1:
            return [self.inner.compress(x, group[0], add)]
        made = self.inner.compress_rows(x, group, add)
        if made is not None:
            return [made]
        sizes = [shard.numel for shard in group]
        adds = [None] * len(group) if add is None else add.split(sizes)
        return list(map(self.inner.compress, x.split(sizes), group, adds))

    def smaller(self, payload: Payload, factor: float) -> Payload:
        assert isinstance(payload, Joined)
        each = [self.inner.smaller(piece, factor) for piece in payload.each]
        return Joined.of(each, payload.spec)

    def add_to(self, out: Tensor, payload: Payload, scale: float = 1.0) -> None:
        assert isinstance(payload, Joined)
        for slot, piece in zip(_slots(out, payload), payload.each, strict=True):
            self.inner.add_to(slot, piece, scale)

    def mean_of(
        self, out: Tensor, payloads: Sequence[Payload], scale: float, as_zeros: Flag = False
    ) -> None:
        (payload,) = payloads
        assert isinstance(payload, Joined)
        for slot, piece in zip(_slots(out, payload), payload.each, strict=True):
            self.inner.mean_of(slot, [piece], scale, as_zeros)

    def add_all(
        self, out: Tensor, payloads: Sequence[Payload], scale: float, as_zeros: Flag = False
    ) -> None:
        (payload,) = payloads
        assert isinstance(payload, Joined)
        for slot, piece in zip(_slots(out, payload), payload.each, strict=True):
            self.inner.add_all(slot, [piece], scale, as_zeros)

    def sizes(self, spec: Spec) -> tuple[int, ...]:
        """Bytes of each shard's payload."""
        bare = spec._replace(key=Key("", shape=spec.key.shape))
        return _sizes(self.inner, bare, self.shards)

    def nbytes(self, spec: Spec) -> int:
        return sum(self.sizes(spec))

    def nearest(self, spec: Spec) -> float:
        return self.inner.nearest(spec)

    def floats(self, spec: Spec) -> float:
        return sum(self.inner.floats(shard) for shard in each_shard(spec, self.shards))

    def read(self, data: Tensor, spec: Spec) -> list[Payload]:
        return [self.read_shards(row.split(self.sizes(spec)), spec) for row in data]

    def read_means(self, rows: Tensor, spec: Spec) -> Payload:
        """The payload of a tensor. rows: (shards, bytes; uint8); each row begins with the payload
        of its shard."""
        each, sizes = list[Payload](), self.sizes(spec)
        first = 0
        for group in self._groups(spec, rows):
            own = rows[first : first + len(group)]
            made = self.inner.read_rows(own, group) if len(group) > 1 else None
            if made is not None:
                each.append(made)
            else:
                for row, shard, size in zip(own, group, sizes[first:], strict=False):
                    each += self.inner.read(row[None, :size], shard)
            first += len(group)
        return Joined.of(each, spec)

    def read_shards(self, shards: Sequence[Tensor], spec: Spec) -> Payload:
        """The payload of a tensor from the bytes of its shards' payloads (each flat; uint8)."""
        of = each_shard(spec, self.shards)
        each = [self.inner.read(data[None], own)[0] for data, own in zip(shards, of, strict=True)]
        return Joined.of(each, spec)

    def _groups(self, spec: Spec, where: Tensor) -> list[tuple[Spec, ...]]:
        """Groups of neighbouring shards that are compressed at once: shards of equal length; on the
        host each shard is a group."""
        shards = each_shard(spec, self.shards)
        if kernels_for(where).may_read:
            return [(shard,) for shard in shards]
        border = self.shards - spec.numel % self.shards
        return [group for group in (shards[:border], shards[border:]) if group]


def _numel(group: Sequence[Spec]) -> int:
    return sum(shard.numel for shard in group)


def _slots(out: Tensor, payload: Joined) -> Sequence[Tensor]:
    """The piece of `out` for each piece of the payload."""
    check_out(out, payload)
    return out.split([piece.numel for piece in payload.each])


@lru_cache(maxsize=256)
def in_shards(inner: Compressor, shards: int) -> Sharded:
    """`Sharded`, made once, so that callers can compare compressors with `is`."""
    return Sharded(inner, shards)


@lru_cache(maxsize=256)
def each_shard(spec: Spec, shards: int) -> tuple[Spec, ...]:
    """The spec of each shard of a tensor."""
    cut, at = cut_segments(spec.segments, shards), shard_borders(spec.numel, shards)
    name = spec.key.name
    keys = (spec.key._replace(name=f"{name}[{a}:{b}]", shape=()) for a, b in pairwise(at))
    return tuple(spec._replace(segments=own, key=key) for own, key in zip(cut, keys, strict=True))


@lru_cache(maxsize=256)
def cut_segments(segments: tuple[int, ...], shards: int) -> tuple[tuple[int, ...], ...]:
    """The segments of each shard of a tensor: the tensor's segments, cut at the ends of shards."""
    borders = shard_borders(sum(segments), shards)
    found: list[tuple[int, ...]] = []
    lengths = iter(segments)
    left = 0
    for start, stop in pairwise(borders):
        space, own = stop - start, list[int]()
        while space:
            left = left or next(lengths)
            own.append(min(left, space))
            space, left = space - own[-1], left - own[-1]
        found.append(tuple(own))
    return tuple(found)


@lru_cache(maxsize=1024)
def _sizes(inner: Compressor, spec: Spec, shards: int) -> tuple[int, ...]:
    return tuple(inner.nbytes(shard) for shard in each_shard(spec, shards))
