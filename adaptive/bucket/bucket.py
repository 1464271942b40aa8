"""One DDP bucket in one step: whose gradients it holds, what of it is compressed as one (a unit),
and the payloads of a unit at every CF that the step sends or measures."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import nan
from typing import NamedTuple

import torch
from torch import Tensor

from adaptive.memory.error_feedback import NoMemory
from adaptive.model.parameters import ModelParameter
from adaptive.statistics.vector import Tally
from compressors import Compressor, Ladder, NoCompression, Sparsifier
from compressors.base import Key, Payload, Spec
from compressors.kernels import all_finite, cut_large, judge, kernels_for, squared_norms
from compressors.kernels.blocks import Flag, Scalar, fill_if, uninitialized
from compressors.rounds import RoundsCompressor
from compressors.sharded import Sharded, each_shard, in_shards, shard_borders
from policies import DENSE

EXACT = NoCompression()
"""For what travels uncompressed among what is compressed."""

WHOLE = 4096
"""Elements up to which a tensor is its own sample."""

SHARE = 256
"""Of what exceeds WHOLE, one element in this many."""


LARGEST = {dtype: torch.finfo(dtype).max ** 0.5 / 2**18 for dtype in (torch.float32, torch.float64)}
"""The largest magnitude of a gradient, by precision (7e13 in float32). What is larger would
overflow sooner or later: in the memory, where gradients add up, or in what compressors make of the
squares of up to 10^9 of them."""


@dataclass(frozen=True)
class StepCFs:
    """The CFs of one step, the same on every rank.

    send: the CF of the step. measured: ascending; with `send`, unless that is dense, in
    whatever precision, or a DDP hook's. layers: the CFs of the layers (by parameter name) that
    do not send at `send`.
    """

    send: float = DENSE
    measured: tuple[float, ...] = ()
    layers: Mapping[str, float] = field(default_factory=dict)

    def sent(self, layer: str) -> float:
        """What a layer sends at."""
        return self.layers.get(layer, self.send)

    def levels(self, layer: str) -> tuple[float, ...]:
        """What a layer is to be compressed at for each of the CFs measured."""
        if not self.layers:
            return self.measured
        return tuple(self.sent(layer) if cf == self.send else cf for cf in self.measured)


@dataclass(eq=False, slots=True)
class Part:
    """One parameter's piece of a bucket: elements [start, stop) of its buffer.

    skipped: sends nothing this step, and keeps its memory to itself."""

    parameter: ModelParameter
    start: int
    stop: int
    grad: Tensor
    skipped: Flag


class Range(NamedTuple):
    """Elements [start, stop) of a bucket, which are all of a part or, between shards, some."""

    part: Part
    start: int
    stop: int


@dataclass(frozen=True)
class Unit:
    """What one payload stands for: elements [start, stop) of the bucket.

    compressor: by which it is compressed, at `cf`; one that works in rounds also sends what is not
    compressed. base: by which it is measured, at `levels`, a CF for each one that the step
    measures. ranges: the parts that it covers, in order. dtype: of the bucket. segments: lengths of
    the tensors that have scales of their own; of none: all of it is one. shards: all of a bucket,
    in so many shards, each of which is compressed by itself.
    """

    start: int
    stop: int
    key: Key
    compressor: Compressor
    base: Compressor
    cf: float
    levels: tuple[float, ...]
    ranges: tuple[Range, ...]
    dtype: torch.dtype = torch.float32
    segments: tuple[int, ...] = ()
    shards: int = 1

    @property
    def spec(self) -> Spec:
        """What is sent."""
        return Spec(self.segments or (self.numel,), self.cf, self.dtype, self.key)

    def by(self, cf: float) -> Compressor:
        """What compresses it at `cf`."""
        if cf == DENSE:
            return EXACT
        found = self.base.at(cf)
        return found if self.shards == 1 else in_shards(found, self.shards)

    def shard(self, i: int) -> Unit:
        """One of the shards, as a unit of its own."""
        start, stop = shard_borders(self.numel, self.shards)[i : i + 2]
        spec = each_shard(self.spec, self.shards)[i]
        start, stop = start + self.start, stop + self.start
        ranges = tuple(
            Range(part, max(begin, start), min(end, stop))
            for part, begin, end in self.ranges
            if begin < stop and start < end
        )
        by = self.compressor.inner if isinstance(self.compressor, Sharded) else self.compressor
        segments = spec.segments if self.segments else ()
        return replace(
            self, start=start, stop=stop, key=spec.key, compressor=by, ranges=ranges,
            segments=segments, shards=1,
        )  # fmt: skip

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def floats(self) -> float:
        """Elements that are sent of it, indices not counted."""
        if self.cf == DENSE:
            return float(self.numel)
        shape = () if self.shards > 1 else self.key.shape
        return self.by(self.cf).floats(Spec.shaped(shape or (self.numel,), self.cf))

    @property
    def skipped(self) -> bool:
        """All of it sends nothing this step, as the host knows."""
        return all(piece.part.skipped is True for piece in self.ranges)

    @property
    def sent_whole(self) -> bool:
        """None of it is skipped this step, as the host knows."""
        return all(piece.part.skipped is False for piece in self.ranges)


@dataclass(eq=False)
class Bucket:
    """One DDP bucket in one step, with the pieces that its parameters have of it.

    work: the bucket's gradients, flat, in the memory's precision; the mean ends up there.
    key: of all parts, but for their names and shapes. whole: neighbouring parts are compressed as
    one. nonfinite: a gradient is not finite. The gradients of a nonfinite bucket are set to zero.
    Finite gradients whose squares are not finite in that precision (norms above 1.8e19 in float32)
    are cut to LARGEST; the step counts as one that tells nothing. buffers: what `buffer` has given
    out, which on the host the same bucket of the next step finds again. updates: it holds updates,
    not gradients. settled: later steps have the same bucket.
    """

    work: Tensor
    key: Key
    whole: bool
    buffers: dict[str, Tensor]
    parts: list[Part] = field(default_factory=list)
    nonfinite: Flag = False
    updates: bool = False
    settled: bool = True

    def open(
        self,
        parameters: Sequence[ModelParameter],
        memory: NoMemory,
        tally: Tally,
        clip_norm: float | None,
        energy: Scalar | None = None,
    ) -> None:
        """Look at the local gradients of these parameters, clip them, and add their norms to the
        tally. energy: the squared norm of all, if it is known."""
        grads = self.work.split([parameter.numel for parameter in parameters])
        one_by_one = clip_norm is not None or memory.maybe_unused()
        pieces = grads if one_by_one else [self.work]
        if energy is None or one_by_one:
            energies = squared_norms(pieces)
        else:
            energies = torch.as_tensor(energy, dtype=torch.float64).reshape(1)
        kernels, largest = kernels_for(self.work), LARGEST[self.work.dtype]
        overflows = kernels.look(
            lambda: not energies.sum() <= torch.finfo(self.work.dtype).max, None
        )
        if overflows and all_finite(self.work):
            self.work.clamp_(-largest, largest)
            energies = squared_norms(pieces)
            tally.at("nonfinite").add_(1)
        if clip_norm is not None:
            energies = _clip(grads, energies, clip_norm)
        self.nonfinite = judge(energies, self.work, tally.at("grad"), tally.at("nonfinite"))
        if overflows is None:  # nobody knows whether there is anything to cut
            cut_large(energies, self.work, largest)
        known = kernels.numbers(energies) if one_by_one else ()
        start = 0
        for parameter, grad, skipped in zip(
            parameters, grads, memory.skipped(parameters, known), strict=True
        ):
            stop = start + grad.numel()
            self.parts.append(Part(parameter, start, stop, grad, skipped))
            start = stop
        fill_if(self.nonfinite, self.work, 0.0)

    def of(self, unit: Unit) -> Tensor:
        """The unit's slice of `work`."""
        return self.work[unit.start : unit.stop]

    def buffer(self, use: str, numel: int) -> Tensor:
        """Working memory for one use, with whatever was left there."""
        buffer = self.buffers.get(use)
        if buffer is None or buffer.numel() != numel or buffer.dtype != self.work.dtype:
            buffer = self.buffers[use] = uninitialized(numel, self.work.dtype, self.work.device)
        return buffer


def _clip(grads: Sequence[Tensor], energies: Tensor, clip_norm: float) -> Tensor:
    """Scale gradients whose norm is larger down to `clip_norm`; their squared norms then."""
    too_large = (energies > clip_norm**2) & energies.isfinite()
    factors = torch.where(too_large, clip_norm / energies.sqrt(), 1.0)
    torch._foreach_mul_(list(grads), list(factors.to(grads[0].dtype)))
    return torch.where(too_large, clip_norm**2, energies)


@dataclass(frozen=True)
class Granularity:
    """How a bucket is cut into units. The same on every rank.

    compressor: for everything but parts of fewer than `dense_below` elements, which are sent as
    they are. whole_buckets: neighbouring parts are compressed as one ("bucket" granularity), not
    one by one ("layer"). Only in buckets that stay as they are: in the first backward there is a
    single one of the whole model, as which the memory is not laid out. segments: what is compressed
    as one consists of the parts, each with scales of its own.
    """

    compressor: Compressor
    whole_buckets: bool = False
    dense_below: int = 0
    segments: bool = False

    @property
    def as_one(self) -> bool:
        """Nothing tells the parts of a bucket apart."""
        return self.whole_buckets and not self.segments

    @cached_property
    def in_full(self) -> Granularity:
        """The same for a sparsifier, with values that are coded by whoever exchanges them."""
        assert isinstance(self.compressor, Sparsifier | Ladder)
        return replace(self, compressor=self.compressor.in_full())

    def cut(self, bucket: Bucket, cfs: StepCFs, shards: int = 1) -> list[Unit]:
        """The units of a bucket, in order; none crosses the border between two of `shards`
        equal shards."""
        borders = shard_borders(bucket.work.numel(), shards)
        units: list[Unit] = []
        run: list[Range] = []
        for part in bucket.parts:
            if part.start == part.stop:
                continue
            small = part.grad.numel() < self.dense_below
            inside = [border for border in borders if part.start < border < part.stop]
            for start, stop in itertools.pairwise([part.start, *inside, part.stop]):
                if run and (small or not bucket.whole or start in borders):
                    units.append(self._unit(bucket, run, self.compressor, cfs))
                    run = []
                if small:
                    units.append(self._unit(bucket, [Range(part, start, stop)], EXACT, cfs))
                else:
                    run.append(Range(part, start, stop))
        if run:
            units.append(self._unit(bucket, run, self.compressor, cfs))
        return units

    def in_shards(self, bucket: Bucket, cfs: StepCFs, shards: int) -> list[Unit]:
        """The units of a bucket of which each of `shards` ranks owns one shard: one for all of a
        bucket that is compressed as a whole but for their borders, else as `cut` makes them."""
        parts = [part for part in bucket.parts if part.start != part.stop]
        in_full = any(part.grad.numel() < self.dense_below for part in parts)
        if in_full or not bucket.whole or not 1 < shards <= bucket.work.numel():
            return self.cut(bucket, cfs, shards)
        ranges = [Range(part, part.start, part.stop) for part in parts]
        unit = self._unit(bucket, ranges, self.compressor, cfs)
        if unit.compressor is EXACT:
            return self.cut(bucket, cfs, shards)
        return [replace(unit, compressor=in_shards(unit.compressor, shards), shards=shards)]

    def _unit(
        self, bucket: Bucket, ranges: Sequence[Range], base: Compressor, cfs: StepCFs
    ) -> Unit:
        first, start, stop = ranges[0].part, ranges[0].start, ranges[-1].stop
        layer, shape = first.parameter.name, tuple(first.parameter.local.shape)
        key = bucket.key._replace(name=layer, shape=shape)
        if (start, stop) != (first.start, first.stop):  # not the parameter: a name of its own
            begin = start - first.start
            key = key._replace(name=f"{layer}[{begin}:{begin + stop - start}]", shape=())
        cf = cfs.sent(layer)
        compressor = base.at(cf)
        if base is EXACT or cf == DENSE:
            cf, in_rounds = DENSE, isinstance(self.compressor, RoundsCompressor)
            compressor = self.compressor if in_rounds else EXACT
        levels = cfs.levels(layer)
        dtype = bucket.work.dtype
        own = tuple(each.stop - each.start for each in ranges) if self.segments else ()
        return Unit(start, stop, key, compressor, base, cf, levels, tuple(ranges), dtype, own)


def by_shards(units: Sequence[Unit], numel: int, shards: int) -> list[list[Unit]]:
    """The units of a bucket of `numel` elements, which cross no border, in each of its shards."""
    borders = itertools.pairwise(shard_borders(numel, shards))
    return [[u for u in units if start <= u.start and u.stop <= stop] for start, stop in borders]


def strided_sample(grad: Tensor) -> Tensor:
    """Elements of `grad` (flat) at equal distances, contiguous; `grad` itself if it is small, and
    always enough that a candidate CF keeps some. The gain before error feedback is measured on it:
    a second full selection would cost as much as the compression itself."""
    stride = sampling(grad.numel())
    return grad if stride == 1 else grad[::stride].contiguous()


def sampling(numel: int) -> int:
    """The distance of the elements in `strided_sample`."""
    return max(1, numel // max(1, min(numel, WHOLE + numel // SHARE)))


def compress_levels(
    unit: Unit, target: Tensor, addend: Tensor | None = None, sent: Payload | None = None
) -> list[Payload]:
    """A payload of target + addend, added up in place, for each of the unit's levels (multi-level
    compression, GraVAC section 3.2): the smallest CF's from the full tensor, each larger one's from
    the payload before it, if the compressor can. CF 1 is the tensor itself. sent: the payload at
    the unit's own CF, if there is one already."""
    payloads = {} if sent is None else {unit.cf: sent}
    before: tuple[Compressor, Payload] | None = None
    for cf in sorted(set(unit.levels)):
        how = unit.by(cf)
        if cf in payloads:
            pass
        elif before is not None and how is before[0] and how.multilevel:
            payloads[cf] = how.smaller(before[1], max(1.0, cf / before[1].cf))
        else:
            payloads[cf] = how.compress(target, unit.spec.at(cf), addend)
            addend = None
        payloads[cf] = with_energies(how, payloads[cf], target)
        before = how, payloads[cf]
    return [payloads[cf] for cf in unit.levels]


def with_energies(by: Compressor, payload: Payload, a: Tensor) -> Payload:
    """The payload of `a` (flat) with its energies, which a compressor may leave unknown."""
    if payload.energies is not None:
        return payload
    kept = torch.zeros_like(a)
    by.add_to(kept, payload)
    return replace(payload, energies=squared_norms([a, kept, a - kept]).to(a.device))


def record_gradient_norms(units: Sequence[Unit], flat: Tensor, tally: Tally) -> None:
    """Add ||g|| of each unit to the tally, for the gain "raw". flat: a bucket of gradients, before
    anything is added to them."""
    if tally.norms:
        grads = [flat[unit.start : unit.stop] for unit in units]
        tally.at("grad_norms").add_(squared_norms(grads).sqrt().sum())


def record_levels(
    unit: Unit,
    levels: Sequence[Payload],
    flat: Tensor,
    tally: Tally,
    sample: Tensor | None = None,
    times: int = 1,
) -> None:
    """Add what `levels`, a payload for each of the unit's, keep and lose to the tally, and what
    they would of a sample of gradients, if the tally asks for that.

    flat: the bucket's gradients, of which a sample is taken, unless it was before. Where a sample
    tells nothing of the whole, the numbers of the whole stand in for its own. times: see
    `Tally.add_levels`."""
    own = energies_of(levels)
    if tally.by_layer:
        tally.add_layer(unit.ranges[0].part.parameter.name, own, times)
    if not tally.samples or not unit.base.sampled:
        sampled = own if tally.samples else torch.full_like(own, nan)
        tally.add_levels(own, sampled, times)
        return
    if sample is None:
        sample = strided_sample(flat[unit.start : unit.stop])
    of_sample = energies_of(compress_levels(_of_sample(unit, sample.numel()), sample))
    tally.add_levels(own, of_sample, times)


def _of_sample(unit: Unit, numel: int) -> Unit:
    """The unit that its `strided_sample`, of so many elements, would be."""
    key, stop = unit.key._replace(shape=()), unit.start + numel
    unit = replace(unit, shards=1)
    if numel == unit.numel or not unit.segments:
        return replace(unit, key=key, stop=stop)
    stride = sampling(unit.numel)
    ends = [0, *(-(-end // stride) for end in itertools.accumulate(unit.segments))]
    lengths = (after - before for before, after in itertools.pairwise(ends))
    return replace(unit, key=key, stop=stop, segments=tuple(filter(None, lengths)))


def energies_of(payloads: Sequence[Payload]) -> Tensor:
    """The `Payload.energies` of each, (payloads, 3). They are known."""
    known = [p.energies for p in payloads if p.energies is not None]
    return known[0][None] if len(known) == 1 else torch.stack(known)
