"""The memory's side of one bucket in one step: the error-fed gradients of what is compressed, and
what was sent taken off them again.

A residual in bfloat16 has 8 significant bits. What a step adds to an element that has waited for a
hundred is less than the last of them, and rounding to the nearest would lose it every time; so the
sum is rounded up or down at random, by its distance from either, and what is lost is nothing in the
mean (Gupta and others, "Deep Learning with Limited Numerical Precision", ICML 2015, section 3.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from adaptive.bucket.bucket import Bucket, Part, Unit
from adaptive.memory.error_feedback import NoMemory
from adaptive.model.parameters import ModelParameter, lay_out
from compressors.base import Payload
from compressors.kernels.blocks import Flag, either, fill_if
from compressors.wire.values import generator


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
        self._units = units
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
        of a bucket that is known to be nonfinite, whose gradients are zero."""
        grads = self._bucket.of(unit)
        if self._bucket.nonfinite is True or unit.skipped or not self._memory.keeps:
            return grads, None
        for part, _, _ in unit.ranges:
            self._open(self._runs[part], unit.cf)
        residual, run = self._kept("residual", unit), self._runs[unit.ranges[0].part]
        addend = run.addend  # none if the residual has fewer bits: then it has been added
        if addend is not None:
            addend = addend[unit.start - run.start :][: unit.numel]
        if self._directly(unit, residual):
            return residual, addend
        if addend is not None:
            residual.add_(addend)
        buffer = self._bucket.buffer("error-fed gradients", self._bucket.work.numel())
        a = buffer[unit.start : unit.stop].copy_(residual)
        return _fill_skipped(unit, a), None

    def accumulate(self, unit: Unit) -> None:
        """`open`, of a unit that another rank compresses."""
        target, addend = self.open(unit)
        if addend is not None:
            target.add_(addend)

    def subtract_sent(self, unit: Unit, payload: Payload) -> None:
        """Subtract what this rank has sent for a unit from what the memory holds. Where some of it
        was skipped, or the residual has fewer bits, by way of the bucket, whose gradients are no
        longer needed."""
        if not self._memory.keeps or unit.skipped:
            return
        residual = self._kept("residual", unit)
        if self._directly(unit, residual):
            unit.compressor.add_to(residual, payload, -1.0)
        else:
            sent = self._bucket.of(unit).zero_()
            unit.compressor.add_to(sent, payload)
            residual.sub_(_fill_skipped(unit, sent))

    def clear_velocity(self, unit: Unit, payload: Payload, nonfinite: Flag) -> None:
        """Momentum factor masking: the velocity of what this rank has sent for a unit becomes zero,
        where the memory wants that; not in a nonfinite step."""
        indices = payload.positions() if unit.cf >= self._memory.masking else None
        if indices is None or unit.ranges[0].part.parameter.velocity is None:
            return
        if indices.numel() == unit.numel:
            return
        # An index past the end stands for an empty slot.
        sent = torch.zeros(unit.numel + 1, dtype=torch.bool, device=indices.device)
        sent.index_fill_(0, indices.long(), True)
        fill_if(nonfinite, sent, False)
        _fill_skipped(unit, sent)
        self._kept("velocity", unit).masked_fill_(sent[: unit.numel], 0.0)

    def received(self, nonfinite: Flag) -> None:
        """Turn the mean, which has taken the gradients' place, into what the optimizer gets."""
        cfs = {part: unit.cf for unit in self._units for part, *_ in unit.ranges}
        for run in dict.fromkeys(self._runs.values()):
            self._memory.received(run.kept, run.grads, cfs[run.parts[0]], nonfinite)

    def add_lost(self, lost: Sequence[tuple[Unit, Tensor]], times: int) -> None:
        """Add so many times what a second compression has lost to what the memory holds."""
        if not self._memory.keeps:
            return
        for unit, values in lost:
            for part, _, _ in unit.ranges:
                part.parameter.open_residual()
            name = f"{unit.key.name}, lost"
            self._add_to(self._kept("residual", unit), values, name, times)

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
        flag = either(self._bucket.nonfinite, run.skipped)  # a device finds out itself
        run.addend, run.opened = self._memory.open(run.kept, run.grads, cf, flag), True
        run.spread()
        if run.addend is None:
            return
        residual = run.kept.open_residual()
        if not self._fused or residual.dtype != run.addend.dtype:
            self._add_to(residual, run.addend, run.parts[0].parameter.name)
            run.addend = None

    def _directly(self, unit: Unit, residual: Tensor) -> bool:
        """The residual's own memory is what is compressed, and what was sent is taken off there."""
        return unit.sent_whole and residual.dtype == self._bucket.work.dtype

    def _add_to(self, residual: Tensor, x: Tensor, name: str, times: int = 1) -> None:
        """residual += times * x; if that has fewer bits rounded at random, by `name` and the
        bucket's key."""
        if residual.dtype == x.dtype:
            residual.add_(x, alpha=times)
            return
        total = torch.add(residual, x, alpha=times)
        made_by = generator(x.device, 0, self._bucket.key._replace(name=name))
        noise = torch.randint(
            1 << 16, x.shape, generator=made_by, dtype=torch.int32, device=x.device
        )
        # Of a float32 the upper half is a bfloat16: a carry out of the lower half rounds it up.
        total.view(torch.int32).add_(noise).bitwise_and_(-1 << 16)
        residual.copy_(total)

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
