"""The memory's side of one bucket in one step: the error-fed gradients of what is compressed, and
what was sent taken off them again."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from adaptive.bucket import Bucket, Part, Unit
from adaptive.memory.error_feedback import NoMemory
from adaptive.parameters import ModelParameter, lay_out
from compressors.base import Payload
from compressors.kernels.blocks import Flag, but_not, either, fill_if


@dataclass(eq=False)
class _Run:
    """Neighbouring parts of a bucket whose memory moves alike, as if they were one parameter.

    kept: what is kept for all of them. grads: their gradients, from element `start` of the bucket
    on. addend: what is to be added to the residual, once `opened`."""

    kept: ModelParameter
    parts: Sequence[Part]
    start: int
    grads: Tensor
    opened: bool = False
    addend: Tensor | None = None

    @property
    def skipped(self) -> Flag:
        """Of a part by itself; those of several are not."""
        return self.parts[0].skipped

    def spread(self) -> None:
        """What has happened to all has happened to each."""
        for part in self.parts:
            own = part.parameter
            own.filled, own.started, own.lag = self.kept.filled, self.kept.started, self.kept.lag


class BucketMemory:
    """What a memory does with one bucket in one step. What is kept for a bucket that is compressed
    as a whole lies together; in others every unit is of a single part.

    units: what is compressed as one, in order."""

    def __init__(self, memory: NoMemory, bucket: Bucket, units: Sequence[Unit]) -> None:
        self._memory = memory
        self._bucket = bucket
        parts = {part: u.cf for u in units if memory.keeps for part, *_ in u.ranges}
        parameters = [part.parameter for part in parts]
        self._flat = lay_out(parameters, memory.keeps) if bucket.whole and parts else {}
        self._runs: dict[Part, _Run] = {}  # by each of their parts
        for _, alike in groupby(parts, lambda part: self._moves(part, parts[part])):
            run = self._run(list(alike))
            self._runs.update(dict.fromkeys(run.parts, run))
        # Each unit lies in one run: then whoever compresses it adds the addend, in the same pass.
        # Otherwise it is added when the run is opened, for all units of the run.
        self._fused = all(len({self._runs.get(part) for part, *_ in u.ranges}) == 1 for u in units)

    def open(self, unit: Unit) -> tuple[Tensor, Tensor | None]:
        """The unit's error-fed gradient: a tensor, and what whoever compresses it is to add to that
        in place, if there is more. A skipped part is not opened, and counts as zero; neither is any
        of a bucket that is known to be poisoned, whose gradients are zero."""
        grads = self._bucket.of(unit)
        if self._bucket.poisoned is True or unit.skipped or not self._memory.keeps:
            return grads, None
        for part, _, _ in unit.ranges:
            self._open(self._runs[part], unit.cf)
        residual, run = self._kept("residual", unit), self._runs[unit.ranges[0].part]
        addend = run.addend
        if addend is not None:
            addend = addend[unit.start - run.start :][: unit.numel]
        if unit.sent_whole:
            return residual, addend
        if addend is not None:
            residual.add_(addend)
        room = self._bucket.room("error-fed gradients", self._bucket.work.numel())
        a = room[unit.start : unit.stop].copy_(residual)
        return _fill_skipped(unit, a), None

    def undo(self, poisoned: Flag) -> None:
        """The memory as it was, if some rank's gradients were not finite. While the bucket still
        holds this rank's."""
        flag = but_not(poisoned, self._bucket.poisoned)
        for run in dict.fromkeys(self._runs.values()):
            if run.opened and flag is not False:
                self._memory.undo_open(run.kept, run.grads, but_not(flag, run.skipped))
                run.spread()

    def take_off(self, unit: Unit, payload: Payload) -> None:
        """What this rank has sent for a unit goes off what the memory holds. Where some of it was
        skipped, by way of the bucket, whose gradients are no longer needed."""
        if not self._memory.keeps or unit.skipped:
            return
        residual = self._kept("residual", unit)
        if unit.sent_whole:
            unit.compressor.subtract_from(residual, payload)
        else:
            sent = self._bucket.of(unit).zero_()
            unit.compressor.add_to(sent, payload)
            residual.sub_(_fill_skipped(unit, sent))

    def clear_velocity(self, unit: Unit, payload: Payload, poisoned: Flag) -> None:
        """Momentum factor masking: the velocity of what this rank has sent for a unit becomes zero,
        where the memory wants that; not in a poisoned step."""
        indices = unit.compressor.indices(payload) if self._memory.masks(unit.cf) else None
        if indices is None or unit.ranges[0].part.parameter.velocity is None:
            return
        # An index past the end stands for an empty slot.
        sent = torch.zeros(unit.numel + 1, dtype=torch.bool, device=indices.device)
        sent.index_fill_(0, indices, True)
        fill_if(poisoned, sent, False)
        _fill_skipped(unit, sent)
        self._kept("velocity", unit).masked_fill_(sent[: unit.numel], 0.0)

    def add_lost(self, lost: Sequence[tuple[Unit, Tensor]], times: int) -> None:
        """Add so many times what a second compression has lost to what the memory holds."""
        if not self._memory.keeps:
            return
        for unit, values in lost:
            for part, _, _ in unit.ranges:
                part.parameter.open_residual()
            self._kept("residual", unit).add_(values, alpha=times)

    def _moves(self, part: Part, cf: float) -> object:
        """Equal for parts that move alike; one that is skipped, or may be, moves by itself."""
        if not self._flat or part.skipped is not False:
            return part.start
        return (cf, *self._memory.moves(part.parameter))

    def _run(self, parts: Sequence[Part]) -> _Run:
        start, stop, kept = parts[0].start, parts[-1].stop, parts[0].parameter
        if len(parts) > 1:
            kept = copy(kept)
            for name, flat in self._flat.items():
                setattr(kept, name, flat[start:stop])
        return _Run(kept, parts, start, self._bucket.work[start:stop])

    def _open(self, run: _Run, cf: float) -> None:
        """Once a step, however many units share it."""
        if run.opened or run.skipped is True:
            return
        flag = either(self._bucket.poisoned, run.skipped)  # a device finds out itself
        run.addend, run.opened = self._memory.open(run.kept, run.grads, cf, flag), True
        run.spread()
        if not self._fused and run.addend is not None:
            run.kept.open_residual().add_(run.addend)
            run.addend = None

    def _kept(self, name: str, unit: Unit) -> Tensor:
        """What is kept of a unit's elements under this name."""
        if self._flat:
            return self._flat[name][unit.start : unit.stop]
        part = unit.ranges[0].part
        whole: Tensor = getattr(part.parameter, name)
        return whole[unit.start - part.start : unit.stop - part.start]


def _fill_skipped(unit: Unit, x: Tensor) -> Tensor:
    """Zero the elements of skipped parts, in place."""
    for part, start, stop in unit.ranges:
        fill_if(part.skipped, x[start - unit.start : stop - unit.start], 0.0)
    return x
