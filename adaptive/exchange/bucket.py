"""One DDP bucket: its parameters (a layout), the slices that are compressed as one tensor (units),
and the payloads of a unit at each CF that the step sends or measures.

A settled bucket has the same layout in every step, and is cut into units once for each set of CFs.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import nan
from operator import is_
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from adaptive.memory.error_feedback import NoMemory
from adaptive.model.parameters import ModelParameter
from adaptive.statistics.vector import Tally
from compressors import Compressor, Ladder, NoCompression, Sparsifier
from compressors.base import Key, Payload, Spec
from compressors.kernels import all_finite, cut_large, judge, kernels_for, squared_norms
from compressors.kernels.blocks import Flag, Scalar, fill_if, reused, uninitialized
from compressors.rounds import RoundsCompressor
from compressors.sharded import Sharded, cut_segments, each_shard, in_shards, shard_borders
from policies import DENSE

EXACT = NoCompression()
"""The compressor of units that a compressed step sends uncompressed."""

WHOLE = 4096
"""The sample of a tensor of at most this many elements is the whole tensor."""

SAMPLED = 256
"""The sample of a larger tensor has at least WHOLE elements, plus one for each SAMPLED elements of
the tensor."""

MOST_CUTS = 16
"""The largest number of sets of CFs for which a layout keeps its units."""

LARGEST = {dtype: torch.finfo(dtype).max ** 0.5 / 2**18 for dtype in (torch.float32, torch.float64)}
"""The magnitude to which a bucket's gradients are clamped if their squares overflow (on a device
perhaps always), by dtype: 7e13 in float32. So neither the residual, where gradients add up, nor a
compressor's sum of 10^9 squares overflows."""


@dataclass(frozen=True)
class StepCFs:
    """The CFs of one step, the same on every rank.

    send: the CF that is sent. measured: the CFs whose gain is measured, ascending; `send` is among
    them, unless it is dense (in any precision) or a DDP hook. layers: by parameter name, the CFs of
    the layers that send at another CF than `send`.
    """

    send: float = DENSE
    measured: tuple[float, ...] = ()
    layers: Mapping[str, float] = field(default_factory=dict, hash=False)

    def sent(self, layer: str) -> float:
        """The CF at which a layer sends."""
        return self.layers.get(layer, self.send)

    def levels(self, layer: str) -> tuple[float, ...]:
        """The CFs at which a layer is compressed, one for each measured CF. The layer's own CF
        takes the place of `send`."""
        if not self.layers:
            return self.measured
        return tuple(self.sent(layer) if cf == self.send else cf for cf in self.measured)


class Part(NamedTuple):
    """Elements [start, stop) of a bucket that belong to one parameter: the whole parameter, or its
    elements in one shard."""

    parameter: ModelParameter
    start: int
    stop: int


@dataclass(frozen=True)
class Unit:
    """A slice of a bucket that becomes one payload: elements [start, stop).

    compressor, cf: how the unit is sent. (A compressor that works in rounds sends units of CF 1,
    too.) base: the compressor for all CFs. levels: the CFs at which the unit is measured, one for
    each CF that the step measures. parts: the parts that the unit covers, in order. dtype: of the
    bucket. segments: lengths of the tensors with quantization scales, or with numbers of kept
    elements, of their own; (): one tensor. shards: number of shards, each compressed separately;
    above 1 the unit is a whole bucket.
    """

    start: int
    stop: int
    key: Key
    compressor: Compressor
    base: Compressor
    cf: float
    levels: tuple[float, ...]
    parts: tuple[Part, ...]
    dtype: torch.dtype = torch.float32
    segments: tuple[int, ...] = ()
    shards: int = 1

    @property
    def spec(self) -> Spec:
        """The spec of the payload that is sent."""
        return Spec(self.segments or (self.numel,), self.cf, self.dtype, self.key)

    def at(self, step: int) -> Unit:
        """The unit in this step."""
        return replace(self, key=self.key._replace(step=step))

    def compressor_at(self, cf: float) -> Compressor:
        """The compressor of this unit at `cf`."""
        if cf == DENSE:
            return EXACT
        found = self.base.at(cf)
        return found if self.shards == 1 else in_shards(found, self.shards)

    def shard(self, i: int) -> Unit:
        """Shard number i as a unit with one shard."""
        start, stop = shard_borders(self.numel, self.shards)[i : i + 2]
        spec = each_shard(self.spec, self.shards)[i]
        start, stop = start + self.start, stop + self.start
        parts = tuple(
            Part(parameter, max(begin, start), min(end, stop))
            for parameter, begin, end in self.parts
            if begin < stop and start < end
        )
        by = self.compressor.inner if isinstance(self.compressor, Sharded) else self.compressor
        segments = spec.segments if self.segments else ()
        return replace(
            self, start=start, stop=stop, key=spec.key, compressor=by, parts=parts,
            segments=segments, shards=1,
        )  # fmt: skip

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def floats(self) -> float:
        """Elements of this unit that are sent, indices not counted."""
        if self.cf == DENSE:
            return float(self.numel)
        if self.segments:
            return self.compressor_at(self.cf).floats(self.spec)
        shape = () if self.shards > 1 else self.key.shape
        return self.compressor_at(self.cf).floats(Spec.shaped(shape or (self.numel,), self.cf))


class BucketLayout:
    """The parameters of a bucket, in order, with the units, runs and buffers derived from them.

    parts: the elements of each parameter. cuts: lists of units, by all that they depend on
    (`Granularity.cut`). runs: (all that runs depend on, runs) of the last step (`BucketMemory`).
    buffers: working memory by its use; on the host the next step reuses it."""

    def __init__(self, parameters: Sequence[ModelParameter]) -> None:
        self.parameters = parameters
        self.sizes = [parameter.numel for parameter in parameters]
        borders = itertools.pairwise(itertools.accumulate(self.sizes, initial=0))
        self.parts = {p: Part(p, *each) for p, each in zip(parameters, borders, strict=True)}
        self.cuts: dict[object, list[Unit]] = {}
        self.runs: tuple[object, Any] = None, None
        self.buffers: dict[str, Tensor] = {}
        self._flats: dict[str, tuple[Tensor, Sequence[Tensor]]] = {}  # with their views

    def flat(self, name: str) -> Tensor:
        """One flat tensor in place of the parameters' tensors of this name, which become its views.
        The flat tensor is made at the first call, and again once a parameter has another tensor of
        this name. The elements of a parameter that had no such tensor are zero."""
        flat, views = self._flats.get(name, (None, ()))
        held = [getattr(parameter, name, None) for parameter in self.parameters]
        if flat is None or not all(map(is_, held, views)):
            # On a CPU zeros take no memory until they are written.
            flat = self.parameters[0].zeros(name, sum(self.sizes))
            views = flat.split(self.sizes)
            self._flats[name] = flat, views
            self.runs = None, None
            for parameter, view, old in zip(self.parameters, views, held, strict=True):
                setattr(parameter, name, view if old is None else view.copy_(old))
        return flat


@dataclass(eq=False)
class Bucket:
    """One DDP bucket in one step.

    work: the bucket's gradients, flat, in the residual's precision; the mean overwrites them.
    key: the key of all parts, without name and shape. whole: neighbouring parts are compressed as
    one tensor. skipped: the parameters that send nothing in this step and keep their residual, each
    with True, or with a flag whose value only the device knows. nonfinite: a gradient is not
    finite; then all gradients of the bucket are set to zero. Finite gradients whose squares
    overflow (norms above 1.8e19 in float32) are clamped to LARGEST, and the statistics count the
    step as nonfinite. settled: later steps have the same bucket.
    """

    work: Tensor
    key: Key
    whole: bool
    layout: BucketLayout = field(default_factory=lambda: BucketLayout(()))
    skipped: Mapping[ModelParameter, Flag] = field(default_factory=dict)
    nonfinite: Flag = False
    settled: bool = True

    def __post_init__(self) -> None:
        self.buffers = reused(self.layout.buffers, self.work.device)

    @property
    def parts(self) -> Collection[Part]:
        """The elements of each parameter, in order."""
        return self.layout.parts.values()

    @property
    def grads(self) -> Sequence[Tensor]:
        """Each parameter's gradient: a view of `work`."""
        return self.work.split(self.layout.sizes)

    def open(
        self,
        memory: NoMemory,
        tally: Tally,
        clip_norm: float | None,
        energy: Scalar | None = None,
    ) -> None:
        """Check the local gradients, clip them, and add their norms to the tally. energy: the
        squared norm of the bucket, if the caller knows it."""
        one_by_one = clip_norm is not None or memory.maybe_unused()
        pieces = self.grads if one_by_one else [self.work]
        if energy is None or one_by_one:
            energies = squared_norms(pieces)
        else:
            device = self.work.device
            energies = torch.as_tensor(energy, dtype=torch.float64, device=device).reshape(1)
        kernels, largest = kernels_for(self.work), LARGEST[self.work.dtype]
        most = torch.finfo(self.work.dtype).max
        overflows = kernels.look(lambda: not sum(energies.tolist()) <= most, None)
        if overflows and all_finite(self.work):
            self.work.clamp_(-largest, largest)
            energies = squared_norms(pieces)
            tally.at("nonfinite").add_(1)
        if clip_norm is not None:
            energies = _clip(pieces, energies, clip_norm)
        self.nonfinite = judge(energies, self.work, tally.at("grad"), tally.at("nonfinite"))
        if overflows is None:  # only the device knows whether squares overflow
            cut_large(energies, self.work, largest)
        known = kernels.numbers(energies) if one_by_one else ()
        self.skipped = memory.skipped(self.layout.parameters, known)
        fill_if(self.nonfinite, self.work, 0.0)

    def slice_of(self, unit: Unit) -> Tensor:
        """The unit's elements of `work` (a view)."""
        return self.work[unit.start : unit.stop]

    def skips_all(self, unit: Unit) -> bool:
        """Whether the host knows that all parameters of this unit are skipped in this step."""
        skipped = self.skipped
        return bool(skipped) and all(skipped.get(part.parameter) is True for part in unit.parts)

    def buffer(self, use: str, numel: int) -> Tensor:
        """Uninitialized working memory for one use."""
        buffer = self.buffers.get(use)
        if buffer is None or buffer.numel() != numel or buffer.dtype != self.work.dtype:
            buffer = self.buffers[use] = uninitialized(numel, self.work.dtype, self.work.device)
        return buffer


def _clip(grads: Sequence[Tensor], energies: Tensor, clip_norm: float) -> Tensor:
    """Scale each gradient with a larger norm down to `clip_norm`, in place. Returns the squared
    norms of the clipped gradients."""
    too_large = (energies > clip_norm**2) & energies.isfinite()
    factors = torch.where(too_large, clip_norm / energies.sqrt(), 1.0)
    torch._foreach_mul_(list(grads), list(factors.to(grads[0].dtype)))
    return torch.where(too_large, clip_norm**2, energies)


@dataclass(frozen=True, eq=False)
class Granularity:
    """How a bucket is cut into units. The same on every rank.

    compressor: compresses all parameters, except those of fewer than `dense_below` elements, which
    are sent uncompressed. whole_buckets: neighbouring parts are one unit (granularity "bucket");
    False: each part is a unit ("layer"). In a bucket that DDP may still rebuild each part is a
    unit, because only settled buckets have flat residuals. segments: each part of a unit has its
    own quantization scales, or its own number of kept elements: granularity "layer" by one
    selection for the whole bucket.
    """

    compressor: Compressor
    whole_buckets: bool = False
    dense_below: int = 0
    segments: bool = False

    @property
    def as_one(self) -> bool:
        """Whether a bucket is compressed as one tensor, without regard to its parts."""
        return self.whole_buckets and not self.segments

    @cached_property
    def uncoded(self) -> Granularity:
        """This granularity with a sparsifier whose payloads hold any number of values, in full
        precision: the strategy encodes the values itself."""
        assert isinstance(self.compressor, Sparsifier | Ladder)
        return replace(self, compressor=self.compressor.uncoded())

    def cut(
        self, bucket: Bucket, cfs: StepCFs, shards: int = 1, sharded: bool = False
    ) -> Sequence[Unit]:
        """The units of a bucket, in order, without a step number (`Unit.at`). No unit crosses a
        border between the bucket's `shards` equal shards.

        sharded: for the sharded exchange. The bucket is then one unit with `shards` shards, if it
        is compressed whole and no part is sent uncompressed."""
        cuts, of = bucket.layout.cuts, (self, cfs, shards, sharded, bucket.whole, bucket.work.dtype)
        if of not in cuts:
            if len(cuts) == MOST_CUTS:
                cuts.clear()
            cuts[of] = self._units(bucket, cfs, shards)
            if sharded and bucket.whole and 1 < shards <= bucket.work.numel():
                first, *others = self._units(bucket, cfs, 1)
                if not others and EXACT not in (first.base, first.compressor):
                    by = in_shards(first.compressor, shards)
                    cuts[of] = [replace(first, compressor=by, shards=shards)]
        return cuts[of]

    def _units(self, bucket: Bucket, cfs: StepCFs, shards: int) -> list[Unit]:
        borders = shard_borders(bucket.work.numel(), shards)
        units: list[list[Part]] = []
        joins = False  # the next part may join the last unit
        for parameter, first, last in bucket.parts:
            small = last - first < self.dense_below
            inside = (border for border in borders if first < border < last)
            for start, stop in itertools.pairwise(sorted({first, *inside, last})):
                if not joins or small or not bucket.whole or start in borders:
                    units.append([])
                units[-1].append(Part(parameter, start, stop))
                joins = not small
        return [self._unit(bucket, parts, cfs) for parts in units]

    def _unit(self, bucket: Bucket, parts: Sequence[Part], cfs: StepCFs) -> Unit:
        parameter, start, stop = parts[0].parameter, parts[0].start, parts[-1].stop
        layer, shape = parameter.name, tuple(parameter.local.shape)
        key = bucket.key._replace(name=layer, shape=shape)
        first = bucket.layout.parts[parameter]  # all elements of the first parameter
        if (start, stop) != (first.start, first.stop):
            begin = start - first.start
            key = key._replace(name=f"{layer}[{begin}:{begin + stop - start}]", shape=())
        small = first.stop - first.start < self.dense_below
        cf, base = cfs.sent(layer), EXACT if small else self.compressor
        compressor = base.at(cf)
        if base is EXACT or cf == DENSE:
            cf, in_rounds = DENSE, isinstance(self.compressor, RoundsCompressor)
            compressor = self.compressor if in_rounds else EXACT
        levels = cfs.levels(layer)
        dtype = bucket.work.dtype
        segments = tuple(each.stop - each.start for each in parts) if self.segments else ()
        return Unit(start, stop, key, compressor, base, cf, levels, tuple(parts), dtype, segments)


def by_shards(units: Sequence[Unit], numel: int, shards: int) -> list[list[Unit]]:
    """The units of each shard of a bucket of `numel` elements. No unit may cross a border."""
    borders = itertools.pairwise(shard_borders(numel, shards))
    return [[u for u in units if start <= u.start and u.stop <= stop] for start, stop in borders]


def strided_sample(grad: Tensor) -> Tensor:
    """Elements of `grad` (flat) at equal distances, copied to a contiguous tensor; a small `grad`
    itself. The gain before error feedback is measured on the sample, because a second selection
    from all elements would cost as much as the compression. The sample is so large that every CF
    keeps some of its elements."""
    stride = _sample_stride(grad.numel())
    return grad if stride == 1 else grad[::stride].contiguous()


def _sample_stride(numel: int) -> int:
    """The distance of the elements of a `strided_sample`."""
    return max(1, numel // max(1, min(numel, WHOLE + numel // SAMPLED)))


def compress_levels(
    unit: Unit, target: Tensor, addend: Tensor | None = None, sent: Payload | None = None
) -> list[Payload]:
    """target += addend in place, then a payload of `target` for each of the unit's levels.

    Multi-level compression (GraVAC section 3.2): the payload at the smallest CF is made from the
    full tensor. Each further payload is made from the payload before it, if the compressor can do
    so. The payload at CF 1 is the tensor itself. sent: the payload at the unit's own CF, if it has
    been made already (and `target` has its addend)."""
    payloads = {} if sent is None else {unit.cf: sent}
    before: tuple[Compressor, Payload] | None = None
    for cf in sorted(set(unit.levels)):
        compressor = unit.compressor_at(cf)
        if cf in payloads:
            pass
        elif before is not None and compressor is before[0] and compressor.multilevel:
            payloads[cf] = compressor.smaller(before[1], max(1.0, cf / before[1].cf))
        else:
            payloads[cf] = compressor.compress(target, unit.spec.at(cf), addend)
            addend = None
        payloads[cf] = with_energies(compressor, payloads[cf], target)
        before = compressor, payloads[cf]
    return [payloads[cf] for cf in unit.levels]


def with_energies(by: Compressor, payload: Payload, a: Tensor) -> Payload:
    """The payload of `a` (flat) with energies, which are computed here if the payload has none."""
    if payload.energies is not None:
        return payload
    kept = torch.zeros_like(a)
    by.add_to(kept, payload)
    return replace(payload, energies=squared_norms([a, kept, a - kept]).to(a.device))


def record_gradient_norms(units: Sequence[Unit], flat: Tensor, tally: Tally) -> None:
    """Add ||g|| of each unit, or of each of its segments, to the tally, for the gain "raw". flat: a
    bucket's gradients, before a residual is added."""
    if not tally.norms:
        return
    grads = [flat[unit.start : unit.stop] for unit in units]
    one = [grad for grad, unit in zip(grads, units, strict=True) if not unit.segments]
    tally.at("grad_norms").add_(squared_norms(one).sqrt().sum())
    for grad, unit in zip(grads, units, strict=True):
        if unit.segments:
            tally.at("grad_norms").add_(_sum_of_norms(unit, grad))


def _kept_norms(unit: Unit, by: Compressor, payload: Payload) -> Tensor:
    """The sum of the norms that a payload keeps of the unit's segments (0-dim, float64)."""
    assert payload.energies is not None
    kept = torch.zeros(unit.numel, dtype=unit.dtype, device=payload.energies.device)
    by.add_to(kept, payload)
    return _sum_of_norms(unit, kept)


def _sum_of_norms(unit: Unit, x: Tensor) -> Tensor:
    """The sum of the norms of what is compressed as one (0-dim, float64): the unit's segments, cut
    at the borders of its shards. x: of the unit (flat)."""
    lengths = [*itertools.chain(*cut_segments(unit.segments, unit.shards))]
    squares = kernels_for(x).sum_pieces(x.double().square(), np.array(lengths, np.int64))
    # On a device the sum of a piece of zeros, a difference, may be a little less than 0.
    return squares.clamp_(min=0.0).sqrt_().sum()


def record_levels(
    unit: Unit,
    levels: Sequence[Payload],
    flat: Tensor,
    tally: Tally,
    sample: Tensor | None = None,
    times: int = 1,
) -> None:
    """Add to the tally the energies of `levels`, the payloads of a unit at its levels. If the tally
    asks for samples, also add the energies of a sample of gradients, compressed at the same levels.
    A compressor that cannot be judged by samples (not `Compressor.sampled`) is judged by the
    energies of `levels` instead.

    flat: the bucket's gradients, from which the sample is taken. sample: a sample that the caller
    has taken; None: it is taken here. times: see `Tally.add_levels`."""
    own = energies_of(levels)
    kept = None
    if tally.norms and unit.segments:
        pairs = zip(unit.levels, levels, strict=True)
        kept = torch.stack([_kept_norms(unit, unit.compressor_at(cf), each) for cf, each in pairs])
    if tally.by_layer:
        tally.add_layer(unit.parts[0].parameter.name, own, times)
    if not tally.samples or not unit.base.sampled:
        sampled = own if tally.samples else torch.full_like(own, nan)
        tally.add_levels(own, sampled, times, kept)
        return
    if sample is None:
        sample = strided_sample(flat[unit.start : unit.stop])
    of_sample = energies_of(compress_levels(_sample_unit(unit, sample.numel()), sample))
    tally.add_levels(own, of_sample, times, kept)


def _sample_unit(unit: Unit, numel: int) -> Unit:
    """The unit that compresses the `strided_sample` of a unit. numel: elements of the sample."""
    key, stop = unit.key._replace(shape=()), unit.start + numel
    unit = replace(unit, shards=1)
    if numel == unit.numel or not unit.segments:
        return replace(unit, key=key, stop=stop)
    stride = _sample_stride(unit.numel)
    ends = [0, *(-(-end // stride) for end in itertools.accumulate(unit.segments))]
    lengths = (after - before for before, after in itertools.pairwise(ends))
    return replace(unit, key=key, stop=stop, segments=tuple(filter(None, lengths)))


def energies_of(payloads: Sequence[Payload]) -> Tensor:
    """The `Payload.energies` of all payloads, (payloads, 3). No energies may be unknown."""
    known = [p.energies for p in payloads if p.energies is not None]
    return known[0][None] if len(known) == 1 else torch.stack(known)
