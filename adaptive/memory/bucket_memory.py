"""The memory's side of one bucket in one step: the error-fed gradients of what is compressed, and
what was sent taken off them again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from adaptive.bucket import Bucket, Part, Unit, as_one
from adaptive.memory.error_feedback import Addition, NoMemory
from adaptive.parameters import ModelParameter, Scratch
from compressors.base import Payload
from compressors.kernels.blocks import Flag, but_not, either, fill_if


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
        self._joined: list[tuple[ModelParameter, Unit]] = []

    def open(self, unit: Unit) -> Addition:
        """The unit's error-fed gradient, to be added up by whoever compresses it. A skipped part is
        not opened, and counts as zero; neither is any of a bucket that is known to be poisoned,
        whose gradients are zero."""
        if self._bucket.poisoned is True:
            return Addition(self._bucket.work[unit.start : unit.stop], None)
        if len(unit.ranges) > 1:
            return self._together(unit) or Addition(self._copied(unit), None)
        part, start, stop = unit.ranges[0]
        if part.skipped is True:
            return Addition(part.grad[start:stop], None)
        if part.skipped is not False:
            return Addition(self._copied(unit), None)
        target, addend = self._addition(part, unit.waiting_cf)
        return Addition(target[start:stop], None if addend is None else addend[start:stop])

    def undo(self, poisoned: Flag) -> None:
        """The memory as it was, if some rank's gradients were not finite. While the bucket still
        holds this rank's."""
        flag = but_not(poisoned, self._bucket.poisoned)
        if flag is False:
            return
        for part in self._bucket.parts:
            if part.parameter in self._opened:
                own = but_not(flag, part.skipped)
                self._memory.undo_open(part.parameter, part.grad, own)
        for joined, unit in self._joined:
            grads = self._bucket.work[unit.start : unit.stop]
            self._memory.undo_open(joined, grads, flag)
            _spread(joined, unit)

    def take_off(self, unit: Unit, payload: Payload) -> None:
        """What this rank has sent for a unit goes off what the memory holds. Where that does not
        lie together, by way of the bucket, whose gradients are no longer needed."""
        kept = [
            (rest[start:stop], part.grad[start:stop], part.skipped)
            for part, start, stop in unit.ranges
            if part.skipped is not True
            and (rest := self._memory.remainder(part.parameter)) is not None
        ]
        if not kept:
            return
        whole = len(kept) == len(unit.ranges) and all(skipped is False for *_, skipped in kept)
        together = as_one([rest for rest, *_ in kept]) if whole else None
        if together is not None:
            unit.compressor.subtract_from(together, payload)
            return
        decoded = self._bucket.work[unit.start : unit.stop].zero_()
        unit.compressor.add_to(decoded, payload)
        for rest, sent, skipped in kept:
            fill_if(skipped, sent, 0.0)
            rest.sub_(sent)

    def clear_velocity(self, unit: Unit, payload: Payload, poisoned: Flag) -> None:
        """Momentum factor masking: the velocity of what this rank has sent for a unit becomes zero,
        where the memory wants that; not in a poisoned step."""
        indices = unit.compressor.indices(payload) if self._memory.masks(unit.cf) else None
        if indices is None:
            return
        # An index past the end stands for an empty slot.
        sent = torch.zeros(unit.numel + 1, dtype=torch.bool, device=indices.device)
        sent.index_fill_(0, indices, True)
        fill_if(poisoned, sent, False)
        pieces = [
            part.parameter.velocity[start:stop]
            for part, start, stop in unit.ranges
            if part.parameter.velocity is not None and part.skipped is False
        ]
        together = as_one(pieces) if len(pieces) == len(unit.ranges) else None
        if together is not None:
            together.masked_fill_(sent[: unit.numel], 0.0)
            return
        for part, start, stop in unit.ranges:
            velocity = part.parameter.velocity
            if velocity is not None and part.skipped is not True:
                first = part.start + start - unit.start
                here = sent[first : first + stop - start]
                fill_if(part.skipped, here, False)
                velocity[start:stop].masked_fill_(here, 0.0)

    def settle(self) -> None:
        """All is taken off."""
        for parameter in self._opened:
            self._memory.settle(parameter)
        for joined, _ in self._joined:
            self._memory.settle(joined)

    def keep(self, lost: Sequence[tuple[Unit, Tensor]], times: int) -> None:
        """Add what a second compression has lost of units, so many times, to what the memory
        holds."""
        for unit, values in lost:
            for part, start, stop in unit.ranges:
                rest = self._memory.remainder(part.parameter)
                if rest is not None:
                    first = part.start + start - unit.start
                    rest[start:stop].add_(values[first : first + stop - start], alpha=times)

    def _unmoved(self, part: Part) -> Flag:
        """The memory of a part must stay as it is, which on a device it finds out itself."""
        return either(self._bucket.poisoned, part.skipped)

    def _addition(self, part: Part, cf: float) -> Addition:
        """What the memory makes of a part; asked once a step, however many units share it."""
        opened = self._opened.get(part.parameter)
        if opened is None:
            flag = self._unmoved(part)
            opened = self._memory.open(part.parameter, part.grad, cf, flag)
            self._opened[part.parameter] = opened
        return opened

    def _together(self, unit: Unit) -> Addition | None:
        """The parts' error-fed gradients, if they lie one after the other in memory."""
        if any(piece.part.skipped is not False for piece in unit.ranges):
            return None
        joined = self._as_one_parameter(unit)
        if joined is not None:
            grads, poisoned = self._bucket.work[unit.start : unit.stop], self._bucket.poisoned
            addition = self._memory.open(joined, grads, unit.waiting_cf, poisoned)
            self._joined.append((joined, unit))
            _spread(joined, unit)
            return addition
        opened = [(self._addition(part, unit.waiting_cf), a, b) for part, a, b in unit.ranges]
        target = as_one([addition.target[a:b] for addition, a, b in opened])
        addends = [each.addend[a:b] for each, a, b in opened if each.addend is not None]
        if target is None:
            return None
        if not addends:
            return Addition(target, None)
        addend = as_one(addends) if len(addends) == len(opened) else None
        return None if addend is None else Addition(target, addend)

    def _as_one_parameter(self, unit: Unit) -> ModelParameter | None:
        """What is kept for the unit's parameters, as if they were one: with as many operations as
        for one, if all of it lies together and moves alike."""
        parameters = [piece.part.parameter for piece in unit.ranges]
        if not all(piece.whole for piece in unit.ranges) or not self._memory.alike(parameters):
            return None
        first = parameters[0]
        if first.residual is None or len({_moves(parameter) for parameter in parameters}) > 1:
            return None
        residual = as_one([p.residual for p in parameters if p.residual is not None])
        velocities = [p.velocity for p in parameters if p.velocity is not None]
        velocity = as_one(velocities) if velocities else None
        if residual is None or (velocities and velocity is None):
            return None
        return replace(first, residual=residual, velocity=velocity)

    def _copied(self, unit: Unit) -> Tensor:
        """The same, wherever they lie."""
        work = self._bucket.work
        room = self._scratch.take(self._room, work.numel(), work)
        for part, start, stop in unit.ranges:
            place = room[part.start + start : part.start + stop]
            if part.skipped is True:
                place.zero_()
            else:
                target, addend = self._addition(part, unit.waiting_cf)
                if addend is not None:
                    target[start:stop].add_(addend[start:stop])
                place.copy_(target[start:stop])
                fill_if(part.skipped, place, 0.0)
        return room[unit.start : unit.stop]


def _moves(parameter: ModelParameter) -> tuple[object, ...]:
    """What the next step of a parameter's memory depends on."""
    there = parameter.residual is not None, parameter.velocity is not None
    return (*there, parameter.filled, parameter.started, parameter.stepped, parameter.lag)


def _spread(joined: ModelParameter, unit: Unit) -> None:
    """What has happened to all of a unit's parameters as one has happened to each."""
    for piece in unit.ranges:
        own = piece.part.parameter
        own.filled, own.started = joined.filled, joined.started
        own.fresh, own.lag = joined.fresh, joined.lag
