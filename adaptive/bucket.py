"""One DDP bucket in one step: whose gradients it holds, and what of it is compressed as one.

`StepCFs` says what is sent and measured in a step, and what that means for each layer. What is kept
for the parameters of a bucket lies next to one another in memory, in the order in which DDP fills
its buckets, so that it can be compressed as one without being copied together in every step.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor

from adaptive.memory.error_feedback import NoMemory
from adaptive.parameters import ModelParameter
from adaptive.statistics.vector import Tally
from compressors import Compressor, NoCompression
from compressors.base import Key
from compressors.kernels import squared_norms
from compressors.kernels.blocks import Flag, Scalar, fill_if, is_host
from compressors.rounds import RoundsCompressor
from policies import DENSE


@dataclass(frozen=True)
class StepCFs:
    """The same on every rank.

    send: the CF of the step. measured: ascending; with `send`, unless that is dense or a foreign
        hook's.
    layers: for a CF of these, the CFs of the layers (by parameter name) that have another.
    """

    send: float = DENSE
    measured: tuple[float, ...] = ()
    layers: Mapping[float, Mapping[str, float]] = field(default_factory=dict)

    @property
    def sent_layers(self) -> Mapping[str, float]:
        """The layers that do not send at `send`, and their CFs."""
        return self.layers.get(self.send, {})

    def sent(self, layer: str) -> float:
        """What a layer sends at."""
        return self.sent_layers.get(layer, self.send)

    def levels(self, layer: str) -> tuple[float, ...]:
        """What a layer is to be compressed at for each of the CFs measured."""
        if not self.layers:
            return self.measured
        return tuple(self.layers.get(cf, {}).get(layer, cf) for cf in self.measured)


@dataclass(frozen=True)
class Part:
    """One parameter's piece of a bucket: elements [start, stop) of its buffer.

    grad: that slice. skipped: sends nothing this step, and keeps its memory to itself.
    """

    parameter: ModelParameter
    start: int
    stop: int
    grad: Tensor
    key: Key
    skipped: Flag


class Range(NamedTuple):
    """Elements [start, stop) of a part."""

    part: Part
    start: int
    stop: int

    @property
    def whole(self) -> bool:
        return self.stop - self.start == self.part.grad.numel()


@dataclass(frozen=True)
class Unit:
    """What one payload stands for: elements [start, stop) of the bucket.

    compressor: by which it is compressed, at `cf`; one that works in rounds also sends what is not
    compressed. base: by which it is measured, at `levels`, a CF for each one that the step
    measures. ranges: the parts that it covers, in order.
    """

    start: int
    stop: int
    key: Key
    compressor: Compressor
    base: Compressor
    cf: float
    levels: tuple[float, ...]
    ranges: tuple[Range, ...]

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def waiting_cf(self) -> float:
        """The CF by which its elements wait in the residual; DENSE if all are sent."""
        return DENSE if self.compressor is EXACT else self.cf

    @property
    def skipped(self) -> bool:
        """All of it sends nothing this step, as the host knows."""
        return all(piece.part.skipped is True for piece in self.ranges)


class Bucket:
    """One DDP bucket in one step, with the pieces that its parameters have of it.

    work: the bucket's gradients, flat, in the memory's precision; the mean ends up there.
    early: it is of the first backward, after which DDP cuts the buckets anew (of the first two with
    a static graph). poisoned: a gradient is not finite, or its squares or their sum are not in that
    precision; larger ones (norms above 1.8e19 in float32) would overflow the memory sooner or
    later, or what compressors make of it. The gradients of a poisoned bucket are set to zero.
    """

    def __init__(
        self, work: Tensor, parts: Sequence[Part], early: bool, poisoned: Flag = False
    ) -> None:
        self.work = work
        self.parts = parts
        self.early = early
        self.poisoned = poisoned

    @classmethod
    def open(
        cls,
        work: Tensor,
        parameters: Sequence[ModelParameter],
        key: Key,
        memory: NoMemory,
        tally: Tally,
        clip_norm: float | None,
        early: bool,
    ) -> tuple[Bucket, Tensor]:
        """Look at the local gradients, clip them, and add their norms to the tally; also returns
        ||g||^2 of each part (float64). key: its step and rank hold for all parts."""
        sizes = [parameter.tensor.numel() for parameter in parameters]
        grads = work.split(sizes)
        energies = squared_norms(grads)
        if clip_norm is not None:
            energies = _clip(grads, energies, clip_norm)
        fits = (energies <= torch.finfo(work.dtype).max).all()  # nan does not
        poisoned: Flag = fits ^ True
        known: Sequence[Scalar] = energies.unbind()
        if is_host(work.device):
            poisoned, known = not bool(fits), energies.tolist()
        parts, start = [], 0
        for parameter, grad, energy in zip(parameters, grads, known, strict=True):
            skipped = memory.skips(parameter, energy)
            own = key._replace(name=parameter.name, shape=tuple(parameter.tensor.shape))
            parts.append(Part(parameter, start, start + grad.numel(), grad, own, skipped))
            start += grad.numel()
        for energy in known if is_host(work.device) else (energies.sum(),):
            tally.at("grad").add_(energy)
        tally.spoil(poisoned)
        fill_if(poisoned, work, 0.0)
        return cls(work, parts, early, poisoned), energies


def _clip(grads: Sequence[Tensor], energies: Tensor, clip_norm: float) -> Tensor:
    """Scale gradients whose norm is larger down to `clip_norm`; their squared norms then."""
    too_large = (energies > clip_norm**2) & energies.isfinite()
    factors = torch.where(too_large, clip_norm / energies.sqrt(), 1.0)
    for i, grad in enumerate(grads):
        if not is_host(grad.device) or too_large[i]:
            grad.mul_(factors[i])
    return torch.where(too_large, clip_norm**2, energies)


EXACT = NoCompression()
"""For what travels uncompressed among what is compressed."""


@dataclass(frozen=True)
class Granularity:
    """How a bucket is cut into units. The same on every rank.

    compressor: for everything but parts of fewer than `dense_below` elements, which are sent as
    they are. joined: neighbouring parts are compressed as one ("bucket" granularity), not one by
    one ("layer"). Only in buckets that stay as they are: before that there is a single one of the
    whole model, for which neither the memory nor the room is laid out.
    """

    compressor: Compressor
    joined: bool = False
    dense_below: int = 0

    def cut(self, bucket: Bucket, cfs: StepCFs, shards: int = 1) -> list[Unit]:
        """The units of a bucket, in order; none crosses the border between two of `shards`
        equal shards."""
        borders = shard_borders(bucket.work.numel(), shards)
        joined = self.joined and not bucket.early
        units: list[Unit] = []
        run: list[Range] = []
        for part in bucket.parts:
            for start, stop in _pieces(part.start, part.stop, borders):
                piece = Range(part, start - part.start, stop - part.start)
                small = part.grad.numel() < self.dense_below
                if run and (small or not joined or start in borders):
                    units.append(self._unit(run, self.compressor, cfs))
                    run = []
                if small:
                    units.append(self._unit([piece], EXACT, cfs))
                else:
                    run.append(piece)
        if run:
            units.append(self._unit(run, self.compressor, cfs))
        return units

    def _unit(self, ranges: Sequence[Range], base: Compressor, cfs: StepCFs) -> Unit:
        first, last = ranges[0], ranges[-1]
        start, stop = first.part.start + first.start, last.part.start + last.stop
        key = first.part.key
        if len(ranges) > 1 or not first.whole:  # not the parameter: no shape, a name of its own
            name = f"{key.name}[{first.start}:{first.start + stop - start}]"
            key = key._replace(name=name, shape=())
        layer = first.part.parameter.name
        cf, compressor = cfs.sent(layer), base
        if base is EXACT or cf == DENSE:
            cf, in_rounds = DENSE, isinstance(self.compressor, RoundsCompressor)
            compressor = self.compressor if in_rounds else EXACT
        return Unit(start, stop, key, compressor, base, cf, cfs.levels(layer), tuple(ranges))


def shard_borders(numel: int, shards: int) -> list[int]:
    """Where each shard begins, and the end: `shards` + 1 positions, as even as can be."""
    return [numel * i // shards for i in range(shards + 1)]


def _pieces(start: int, stop: int, borders: Sequence[int]) -> list[tuple[int, int]]:
    """[start, stop) cut at the borders inside it; nothing of an empty one."""
    first = bisect_right(borders, start)
    inside = [border for border in borders[first:] if border < stop]
    ends = [start, *inside, stop]
    return [(a, b) for a, b in itertools.pairwise(ends) if a < b]


def as_one(tensors: Sequence[Tensor]) -> Tensor | None:
    """A flat view of all, if each begins in memory where the one before ends; else None."""
    first = tensors[0]
    storage, end = first.untyped_storage().data_ptr(), first.data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != end or tensor.untyped_storage().data_ptr() != storage:
            return None
        end += tensor.numel() * tensor.element_size()
    return first.as_strided((sum(t.numel() for t in tensors),), (1,))


def lay_out(parameters: Sequence[ModelParameter], velocities: bool) -> None:
    """Give the parameters of a bucket that have none yet places next to one another, in the order
    in which their gradients arrived. What they hold already moves there."""
    for what in ("residual", "velocity") if velocities else ("residual",):
        without = [parameter for parameter in parameters if what not in parameter.places]
        if not without:
            continue
        without.sort(key=lambda parameter: parameter.arrived)
        sizes = [parameter.tensor.numel() for parameter in without]
        # Zeros that nobody has written yet take no memory on a CPU.
        room = torch.zeros(sum(sizes), dtype=without[0].dtype, device=without[0].tensor.device)
        for parameter, place in zip(without, room.split(sizes), strict=True):
            parameter.places[what] = place
            held = getattr(parameter, what)
            if held is not None:
                setattr(parameter, what, place.copy_(held))


class GradientOrder:
    """This watches in which order gradients become ready in a backward, until `end()`: it sets
    `parameter.arrived` to the place of each parameter."""

    def __init__(self, parameters: Mapping[Tensor, ModelParameter]) -> None:
        self._places = count()
        self._handles = [
            p.register_hook(self._counted(parameter)) for p, parameter in parameters.items()
        ]

    def _counted(self, parameter: ModelParameter) -> Callable[[Tensor], None]:
        def arrive(_: Tensor) -> None:
            parameter.arrived = min(parameter.arrived, next(self._places))

        return arrive

    def end(self) -> None:
        """The first backward is over. May be called again."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
