"""The memory's side of one bucket in one step: the error-fed gradients of what is compressed, and
what was sent taken off them again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from adaptive.bucket import Bucket, Part, Unit, as_one
from adaptive.exchange.strategies import Remainder
from adaptive.memory.error_feedback import Addition, NoMemory
from adaptive.parameters import ModelParameter, Scratch
from compressors.base import Payload
from policies import DENSE


class BucketMemory:
    """What a memory does with one bucket in one step.

    units: what is compressed as one, in order. room: name of the scratch in which to put
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
        self._opened: dict[ModelParameter, Addition] = {}

    @property
    def masks(self) -> bool:
        """It has to know where something was sent."""
        return any(self._memory.masks(unit.cf) for unit in self._units)

    def open(self, unit: Unit) -> Addition:
        """The unit's error-fed gradient, to be added up by whoever compresses it. A skipped part is
        not opened, and counts as zero."""
        if len(unit.ranges) > 1:
            return self._together(unit) or Addition(self._copied(unit), None)
        part, start, stop = unit.ranges[0]
        if part.skipped:
            return Addition(part.grad[start:stop], None)
        target, addend = self._addition(part, unit.waiting_cf)
        return Addition(target[start:stop], None if addend is None else addend[start:stop])

    def take_off(self, unit: Unit, payload: Payload) -> None:
        """What this rank has sent for a unit goes off what the memory holds. Where that does not
        lie together, by way of the bucket, whose gradients are no longer needed."""
        kept = [
            (rest[start:stop], part.grad[start:stop])
            for part, start, stop in unit.ranges
            if not part.skipped and (rest := self._memory.remainder(part.parameter)) is not None
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
        cfs = {piece.part.parameter: unit.cf for unit in self._units for piece in unit.ranges}
        for part in self._bucket.parts:
            if not part.skipped:
                cf = cfs.get(part.parameter, DENSE)  # an empty parameter is in no unit
                self._memory.settle(part.parameter, cf, sent.get(part.parameter))

    def keep(self, remainder: Remainder) -> None:
        """Add what a second compression has lost to what the memory holds."""
        values, start = remainder.values, remainder.start
        for unit in remainder.units:
            for part, first, stop in unit.ranges:
                rest = self._memory.remainder(part.parameter)
                if rest is not None:
                    lost = values[part.start + first - start :][: stop - first]
                    rest[first:stop].add_(lost, alpha=remainder.times)

    def undo(self) -> None:
        """The memory as it was."""
        for part in self._bucket.parts:
            if part.parameter in self._opened:
                self._memory.undo_open(part.parameter, part.grad)

    def _addition(self, part: Part, cf: float) -> Addition:
        """What the memory makes of a part; asked once a step, however many units share it."""
        opened = self._opened.get(part.parameter)
        if opened is None:
            opened = self._opened[part.parameter] = self._memory.open(part.parameter, part.grad, cf)
        return opened

    def _together(self, unit: Unit) -> Addition | None:
        """The parts' error-fed gradients, if they lie one after the other in memory."""
        if any(piece.part.skipped for piece in unit.ranges):
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
            if part.skipped:
                place.zero_()
            else:
                target, addend = self._addition(part, unit.waiting_cf)
                if addend is not None:
                    target[start:stop].add_(addend[start:stop])
                place.copy_(target[start:stop])
        return room[unit.start : unit.stop]

    def _sent(self, own: Sequence[Payload]) -> dict[ModelParameter, list[Tensor] | None]:
        """By parameter, the indices of what was sent; None if that is all of it."""
        sent: dict[ModelParameter, list[Tensor] | None] = {}
        for unit, payload in zip(self._units, own, strict=True):
            indices = unit.compressor.indices(payload)
            borders = [piece.part.start + piece.start for piece in unit.ranges]
            pieces = _split(indices, [border - unit.start for border in borders])
            for (part, start, stop), within in zip(unit.ranges, pieces, strict=True):
                known = sent.setdefault(part.parameter, [])
                if part.skipped:
                    continue
                if within is not None:
                    if known is not None:
                        known.append(within + (unit.start - part.start))
                elif stop - start == part.grad.numel():
                    sent[part.parameter] = None
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
