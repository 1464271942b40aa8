"""The work on one bucket in one step that every exchange needs: compress, settle, decode, undo."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import nan

import torch
from torch import Tensor

from adaptive.bucket import Bucket, Part, Unit
from adaptive.exchange import Exchange
from adaptive.multilevel import measure_levels, record_levels
from adaptive.residual import Addition, NoMemory, Slot
from adaptive.sample import strided_sample
from adaptive.scratch import Scratch
from adaptive.tally import Tally
from compressors import Compressor
from compressors.base import Payload
from policies import DENSE

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
    _opened: dict[Slot, Addition] = field(default_factory=dict)

    @property
    def _masks(self) -> bool:
        """The memory has to know where something was sent."""
        return any(self.memory.masks(unit.cf) for unit in self.units)

    @property
    def dtype(self) -> torch.dtype:
        return self.bucket.work.dtype

    def view(self, unit: Unit) -> Tensor:
        """The unit's slice of the bucket: the gradient, in the end the mean."""
        return self.bucket.work[unit.start : unit.stop]

    def open(self, unit: Unit) -> Addition:
        """The unit's error-fed gradient, to be added up by whoever compresses it. A held part is
        not opened, and counts as zero."""
        if len(unit.ranges) > 1:
            return Addition(self._joined(unit), None)
        part, start, stop = unit.ranges[0]
        if part.held:
            return Addition(part.grad[start:stop], None)
        target, addend = self._addition(part)
        return Addition(target[start:stop], None if addend is None else addend[start:stop])

    def accumulate(self, unit: Unit) -> Tensor:
        """The unit's error-fed gradient, added up (flat); zeros if the bucket is not finite."""
        if not self.bucket.finite:
            return torch.zeros_like(self.view(unit))
        target, addend = self.open(unit)
        return target if addend is None else target.add_(addend)

    def compress(self, unit: Unit) -> Payload:
        """What this rank sends for a unit. The memory is accumulated, not settled.

        A rank whose gradients are not finite sends a poisoned payload, so that all ranks end the
        step with a non-finite bucket, as in dense DDP."""
        compressor = unit.compressor
        if not self.bucket.finite:
            zeros = torch.zeros_like(self.view(unit))
            return compressor.poison(compressor.compress(zeros, unit.cf, unit.key))
        target, addend = self.open(unit)
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
            self._take_off(unit, payload)
        self._settled(own)

    def settle_and_decode(
        self, received: Iterable[Sequence[Payload]], rank: int, scale: float
    ) -> None:
        """`settle` and `decode`, one unit after the other, so that the decoded payloads of no more
        than one are in memory. received: for each unit, all ranks' payloads."""
        own = []
        for unit, payloads in zip(self.units, received, strict=True):
            self._take_off(unit, payloads[rank])
            if self._masks:
                own.append(payloads[rank])
            mean = self.view(unit).zero_()
            for payload in payloads:
                unit.compressor.add_to(mean, payload, scale)
        self._settled(own)
        self.announce()

    def _settled(self, own: Sequence[Payload]) -> None:
        sent = self._sent(own) if self._masks else {}
        cfs = {piece.part.slot: unit.cf for unit in self.units for piece in unit.ranges}
        for part in self.bucket.parts:
            if not part.held:
                cf = cfs.get(part.slot, DENSE)  # an empty parameter is in no unit
                self.memory.settle(part.slot, cf, sent.get(part.slot))

    def undo(self) -> None:
        """The gradients of some rank are not finite: the memory as it was, the mean NaN."""
        for part in self.bucket.parts:
            if part.slot in self._opened:
                self.memory.undo_open(part.slot, part.grad)
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

    def _addition(self, part: Part) -> Addition:
        """What the memory makes of a part; asked once a step, however many units share it."""
        opened = self._opened.get(part.slot)
        if opened is None:
            opened = self._opened[part.slot] = self.memory.open(part.slot, part.grad)
        return opened

    def _joined(self, unit: Unit) -> Tensor:
        """The error-fed gradients of several parts, one after the other."""
        work = self.bucket.work
        # With several rounds it is read again when the next bucket has come by.
        name = ("joined", self.index if self.collectives > 1 else 0)
        room = self.scratch.take(name, work.numel(), work)
        for part, start, stop in unit.ranges:
            place = room[part.start + start : part.start + stop]
            if part.held:
                place.zero_()
            else:
                target, addend = self._addition(part)
                if addend is not None:
                    target[start:stop].add_(addend[start:stop])
                place.copy_(target[start:stop])
        return room[unit.start : unit.stop]

    def _sent(self, own: Sequence[Payload]) -> dict[Slot, list[Tensor] | None]:
        """By parameter, the indices of what was sent; None if that is all of it."""
        sent: dict[Slot, list[Tensor] | None] = {}
        for unit, payload in zip(self.units, own, strict=True):
            indices = unit.compressor.indices(payload)
            for part, start, stop in unit.ranges:
                known = sent.setdefault(part.slot, [])
                if part.held:
                    continue
                if indices is None:
                    if stop - start == part.grad.numel():
                        sent[part.slot] = None
                    elif known is not None:
                        known.append(torch.arange(start, stop, device=part.grad.device))
                    continue
                if known is None:
                    continue
                within = indices + (unit.start - part.start)
                if len(unit.ranges) > 1:
                    within = within[(within >= start) & (within < stop)]
                known.append(within)
        return sent

    def _take_off(self, unit: Unit, payload: Payload) -> None:
        if len(unit.ranges) == 1:
            part, start, stop = unit.ranges[0]
            rest = None if part.held else self.memory.remainder(part.slot)
            if rest is not None:
                unit.compressor.subtract_from(rest[start:stop], payload)
            return
        decoded = self.view(unit).zero_()  # the gradients there are no longer needed
        unit.compressor.add_to(decoded, payload)
        for part, start, stop in unit.ranges:
            rest = None if part.held else self.memory.remainder(part.slot)
            if rest is not None:
                rest[start:stop].sub_(part.grad[start:stop])
