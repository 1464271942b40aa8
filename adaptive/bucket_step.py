"""The work on one bucket in one step that every exchange needs: compress, settle, decode, undo.

`BucketMemory` is the memory's side of it: the error-fed gradients of what is compressed, and what
was sent taken off them again. `pack` puts all payloads of a bucket into one contiguous uint8
tensor, so that one collective carries them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import nan

import torch
from torch import Tensor

from adaptive.bucket import Bucket, Part, Unit, as_one
from adaptive.exchange.collectives import Exchange
from adaptive.memory.error_feedback import Addition, NoMemory
from adaptive.multilevel import measure_levels, record_levels, strided_sample
from adaptive.parameters import Scratch, Slot
from adaptive.statistics.vector import Tally
from compressors import Compressor
from compressors.base import Payload
from compressors.scratch import fresh
from policies import DENSE


def payload_sizes(units: Sequence[Unit], dtype: torch.dtype) -> list[int]:
    """Bytes of each unit's payload: the same on every rank."""
    return [unit.compressor.payload_nbytes(unit.numel, unit.cf, dtype) for unit in units]


def pack(units: Sequence[Unit], payloads: Sequence[Payload], dtype: torch.dtype) -> Tensor:
    """The payloads one after the other. RuntimeError if one has not its announced size."""
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


class BucketMemory:
    """units: what is compressed as one, in order. room: name of the scratch in which to put
    together what does not lie together in memory."""

    def __init__(
        self,
        memory: NoMemory,
        bucket: Bucket,
        units: Sequence[Unit],
        scratch: Scratch,
        room: object,
    ) -> None:
        self._memory = memory
        self._bucket = bucket
        self._units = units
        self._scratch = scratch
        self._room = room
        self._opened: dict[Slot, Addition] = {}

    @property
    def masks(self) -> bool:
        """It has to know where something was sent."""
        return any(self._memory.masks(unit.cf) for unit in self._units)

    def open(self, unit: Unit) -> Addition:
        """The unit's error-fed gradient, to be added up by whoever compresses it. A held part is
        not opened, and counts as zero."""
        if len(unit.ranges) > 1:
            return self._together(unit) or Addition(self._copied(unit), None)
        part, start, stop = unit.ranges[0]
        if part.held:
            return Addition(part.grad[start:stop], None)
        target, addend = self._addition(part, unit.waiting_cf)
        return Addition(target[start:stop], None if addend is None else addend[start:stop])

    def take_off(self, unit: Unit, payload: Payload) -> None:
        """What this rank has sent for a unit goes off what the memory holds. Where that does not
        lie together, by way of the bucket, whose gradients are no longer needed."""
        kept = [
            (rest[start:stop], part.grad[start:stop])
            for part, start, stop in unit.ranges
            if not part.held and (rest := self._memory.remainder(part.slot)) is not None
        ]
        if not kept:
            return
        together = as_one([rest for rest, _ in kept]) if len(kept) == len(unit.ranges) else None
        if together is not None:
            unit.compressor.subtract_from(together, payload)
            return
        decoded = self._bucket.work[unit.start : unit.stop].zero_()
        unit.compressor.add_to(decoded, payload)
        for rest, sent in kept:
            rest.sub_(sent)

    def settle(self, own: Sequence[Payload]) -> None:
        """All is taken off. own: a payload for each unit, if this `masks`."""
        sent = self._sent(own) if self.masks else {}
        cfs = {piece.part.slot: unit.cf for unit in self._units for piece in unit.ranges}
        for part in self._bucket.parts:
            if not part.held:
                cf = cfs.get(part.slot, DENSE)  # an empty parameter is in no unit
                self._memory.settle(part.slot, cf, sent.get(part.slot))

    def undo(self) -> None:
        """The memory as it was."""
        for part in self._bucket.parts:
            if part.slot in self._opened:
                self._memory.undo_open(part.slot, part.grad)

    def _addition(self, part: Part, cf: float) -> Addition:
        """What the memory makes of a part; asked once a step, however many units share it."""
        opened = self._opened.get(part.slot)
        if opened is None:
            opened = self._opened[part.slot] = self._memory.open(part.slot, part.grad, cf)
        return opened

    def _together(self, unit: Unit) -> Addition | None:
        """The parts' error-fed gradients, if they lie one after the other in memory."""
        if any(piece.part.held for piece in unit.ranges):
            return None
        opened = [(self._addition(part, unit.waiting_cf), a, b) for part, a, b in unit.ranges]
        target = as_one([addition.target[a:b] for addition, a, b in opened])
        addends = [each.addend[a:b] for each, a, b in opened if each.addend is not None]
        if target is None:
            return None
        if not addends:
            return Addition(target, None)
        addend = as_one(addends) if len(addends) == len(opened) else None
        return None if addend is None else Addition(target, addend)

    def _copied(self, unit: Unit) -> Tensor:
        """The same, wherever they lie."""
        work = self._bucket.work
        room = self._scratch.take(self._room, work.numel(), work)
        for part, start, stop in unit.ranges:
            place = room[part.start + start : part.start + stop]
            if part.held:
                place.zero_()
            else:
                target, addend = self._addition(part, unit.waiting_cf)
                if addend is not None:
                    target[start:stop].add_(addend[start:stop])
                place.copy_(target[start:stop])
        return room[unit.start : unit.stop]

    def _sent(self, own: Sequence[Payload]) -> dict[Slot, list[Tensor] | None]:
        """By parameter, the indices of what was sent; None if that is all of it."""
        sent: dict[Slot, list[Tensor] | None] = {}
        for unit, payload in zip(self._units, own, strict=True):
            indices = unit.compressor.indices(payload)
            borders = [piece.part.start + piece.start for piece in unit.ranges]
            pieces = _split(indices, [border - unit.start for border in borders])
            for (part, start, stop), within in zip(unit.ranges, pieces, strict=True):
                known = sent.setdefault(part.slot, [])
                if part.held:
                    continue
                if within is not None:
                    if known is not None:
                        known.append(within + (unit.start - part.start))
                elif stop - start == part.grad.numel():
                    sent[part.slot] = None
                elif known is not None:
                    known.append(torch.arange(start, stop, device=part.grad.device))
        return sent


def _split(indices: Tensor | None, borders: Sequence[int]) -> Sequence[Tensor | None]:
    """Indices cut at the borders, of which the first is 0."""
    if indices is None or len(borders) == 1:
        return [indices] * len(borders)
    if bool((indices[1:] < indices[:-1]).any()):  # random ones
        indices = indices.sort().values
    cuts = torch.searchsorted(indices, torch.tensor(borders[1:], device=indices.device))
    return indices.tensor_split(cuts.cpu())


OnMean = Callable[[Slot, Tensor], None]


@dataclass
class BucketStep:
    """index: of the bucket. collectives: that its exchange has. sent: position in `tally.cfs` of
    the CF to send. leader: the rank that chooses for all, if one does.

    units: what is compressed as one, in order. on_mean: told every slot and its mean (flat).
    """

    index: int
    collectives: int
    leader: int
    bucket: Bucket
    units: Sequence[Unit]
    sent: int
    tally: Tally
    memory: NoMemory
    exchange: Exchange
    scratch: Scratch
    on_mean: OnMean | None

    def __post_init__(self) -> None:
        # With several rounds it is read again when the next bucket has come by.
        room = ("joined", self.index if self.collectives > 1 else 0)
        self._kept = BucketMemory(self.memory, self.bucket, self.units, self.scratch, room)

    @property
    def dtype(self) -> torch.dtype:
        return self.bucket.work.dtype

    def view(self, unit: Unit) -> Tensor:
        """The unit's slice of the bucket: the gradient, in the end the mean."""
        return self.bucket.work[unit.start : unit.stop]

    def accumulate(self, unit: Unit) -> Tensor:
        """The unit's error-fed gradient, added up (flat); zeros if the bucket is not finite."""
        if not self.bucket.finite:
            return torch.zeros_like(self.view(unit))
        target, addend = self._kept.open(unit)
        return target if addend is None else target.add_(addend)

    def compress(self, unit: Unit) -> Payload:
        """What this rank sends for a unit. The memory is accumulated, not settled.

        A rank whose gradients are not finite sends a poisoned payload, so that all ranks end the
        step with a non-finite bucket, as in dense DDP."""
        compressor = unit.compressor
        if not self.bucket.finite:
            zeros = torch.zeros_like(self.view(unit))
            return compressor.poison(compressor.compress(zeros, unit.cf, unit.key))
        target, addend = self._kept.open(unit)
        if unit.held:
            return compressor.compress(target, unit.cf, unit.key)

        def again(compressor: Compressor, cf: float) -> Payload:
            return compressor.compress(target, cf, unit.key)

        def first(compressor: Compressor, cf: float) -> Payload:
            if addend is None:
                return again(compressor, cf)
            return compressor.compress_sum(target, addend, cf, unit.key)

        sample = strided_sample(self.view(unit))
        levels = measure_levels(unit, first, again, sample, self.tally)
        return replace(levels[self.sent], cf=unit.cf)

    def record(self, unit: Unit, levels: Sequence[Payload]) -> None:
        """Add what `levels`, a payload for each of the unit's, keep of it to the tally."""
        record_levels(unit, levels, strided_sample(self.view(unit)), self.tally)

    def settle(self, own: Sequence[Payload]) -> None:
        """Take what this rank has sent, a payload for each unit, off the memory."""
        for unit, payload in zip(self.units, own, strict=True):
            self._kept.take_off(unit, payload)
        self._kept.settle(own)

    def settle_and_decode(
        self, received: Iterable[Sequence[Payload]], rank: int, scale: float
    ) -> None:
        """`settle` and `decode`, one unit after the other, so that the decoded payloads of no more
        than one are in memory. received: for each unit, all ranks' payloads."""
        own = []
        for unit, payloads in zip(self.units, received, strict=True):
            self._kept.take_off(unit, payloads[rank])
            if self._kept.masks:
                own.append(payloads[rank])
            mean = self.view(unit).zero_()
            for payload in payloads:
                unit.compressor.add_to(mean, payload, scale)
        self._kept.settle(own)
        self.announce()

    def undo(self) -> None:
        """The gradients of some rank are not finite: the memory as it was, the mean NaN."""
        self._kept.undo()
        self.bucket.work.fill_(nan)

    def decode(self, received: Sequence[Sequence[Payload]], scale: float) -> None:
        """The mean, `scale` times the sum of all ranks' payloads, into the bucket."""
        self.bucket.work.zero_()
        for payloads in received:
            for unit, payload in zip(self.units, payloads, strict=True):
                unit.compressor.add_to(self.view(unit), payload, scale)
        self.announce()

    def announce(self) -> None:
        """The mean is in the bucket."""
        if self.on_mean:
            for part in self.bucket.parts:
                self.on_mean(part.slot, part.grad)

    def poisoned(self, payloads: Sequence[Payload]) -> bool:
        """Some rank has poisoned what it sent."""
        pairs = zip(self.units, payloads, strict=True)
        return any(unit.compressor.is_poisoned(payload) for unit, payload in pairs)
