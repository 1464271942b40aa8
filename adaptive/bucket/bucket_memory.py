"""The memory's side of one bucket in one step: makes the error-fed gradients of the units, and
subtracts from the residuals what was sent.

A residual in bfloat16 has 8 significant bits. After a hundred steps without being sent, an element
of the residual is so large that a step adds less than the last bit, and rounding to nearest would
lose every addition. So the sum is rounded up or down at random (stochastic rounding), with the sum
as its expectation (Gupta and others, "Deep Learning with Limited Numerical Precision", ICML 2015,
section 3.1).
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
    """Neighbouring parts of a bucket whose memory is updated by one rule, as one parameter.

    joint: stands for all parts, with their joined residual and velocity. start: the first element
    in the bucket. grads: the gradients of all parts (a view). opened: `NoMemory.open` was called in
    this step. addend: must still be added to the residual after that; None: nothing."""

    joint: ModelParameter
    parts: Sequence[Part]
    start: int
    grads: Tensor
    opened: bool = False
    addend: Tensor | None = None

    @property
    def skipped(self) -> Flag:
        """Only a run of a single part can be skipped."""
        return self.parts[0].skipped

    def copy_state_to_parts(self) -> None:
        """Copy the state of `joint`, but for tensors, to the parameter of each part."""
        joint = self.joint
        for part in self.parts:
            own = part.parameter
            own.has_residual, own.started = joint.has_residual, joint.started
            own.momentum_share = joint.momentum_share


class BucketMemory:
    """Applies a memory to the units of one bucket in one step.

    In a bucket with `Bucket.whole` the residuals of all parts lie in one flat tensor, in the order
    of the bucket. In other buckets each unit covers a single part."""

    def __init__(self, memory: NoMemory, bucket: Bucket, units: Sequence[Unit]) -> None:
        self._memory = memory
        self._bucket = bucket
        self._units = units
        parts = {part: u.cf for u in units if memory.keeps for part, *_ in u.ranges}
        parameters = [part.parameter for part in parts]
        self._flat = lay_out(parameters, memory.keeps) if bucket.whole and parts else {}
        self._runs: dict[Part, _Run] = {}  # by each of their parts
        for _, alike in groupby(parts, lambda part: self._update_key(part, parts[part])):
            run = self._run(list(alike))
            self._runs.update(dict.fromkeys(run.parts, run))
        # If each unit lies in one run, the compressor adds the addend in the pass that compresses.
        # Otherwise `_open_run` adds the addend for all units of the run.
        self._fused = all(len({self._runs.get(part) for part, *_ in u.ranges}) == 1 for u in units)

    def open(self, unit: Unit) -> tuple[Tensor, Tensor | None]:
        """(target, addend): the unit's error-fed gradient is target + addend; None: the target
        alone. The compressor adds the addend in place. The memory of a skipped part does not
        change, and its elements are 0. The same holds for all parts of a nonfinite bucket."""
        grads = self._bucket.slice_of(unit)
        if self._bucket.nonfinite is True or unit.all_skipped or not self._memory.keeps:
            return grads, None
        for part, _, _ in unit.ranges:
            self._open_run(self._runs[part], unit.cf)
        residual, run = self._slice("residual", unit), self._runs[unit.ranges[0].part]
        addend = run.addend  # None if the residual is of lower precision: already added then
        if addend is not None:
            addend = addend[unit.start - run.start :][: unit.numel]
        if self._in_place(unit, residual):
            return residual, addend
        if addend is not None:
            residual.add_(addend)
        buffer = self._bucket.buffer("error-fed gradients", self._bucket.work.numel())
        a = buffer[unit.start : unit.stop].copy_(residual)
        return _fill_skipped(unit, a), None

    def accumulate(self, unit: Unit) -> None:
        """Add the gradient of a unit that another rank compresses to the residual."""
        target, addend = self.open(unit)
        if addend is not None:
            target.add_(addend)

    def subtract_sent(self, unit: Unit, payload: Payload) -> None:
        """Subtract the payload that this rank has sent for a unit from the unit's residual. If some
        part was skipped, or if the residual is of lower precision, the payload is decoded into the
        bucket first, whose gradients are no longer needed."""
        if not self._memory.keeps or unit.all_skipped:
            return
        residual = self._slice("residual", unit)
        if self._in_place(unit, residual):
            unit.compressor.add_to(residual, payload, -1.0)
        else:
            sent = self._bucket.slice_of(unit).zero_()
            unit.compressor.add_to(sent, payload)
            residual.sub_(_fill_skipped(unit, sent))

    def clear_velocity(self, unit: Unit, payload: Payload, nonfinite: Flag) -> None:
        """Momentum factor masking (DGC): set the velocity of the sent elements of a unit to zero.
        Only if the memory masks at the unit's CF, and if the step is not nonfinite."""
        indices = payload.positions() if unit.cf >= self._memory.masking else None
        if indices is None or unit.ranges[0].part.parameter.velocity is None:
            return
        if indices.numel() == unit.numel:
            return
        # The index of an empty slot is `numel`: hence one element more.
        sent = torch.zeros(unit.numel + 1, dtype=torch.bool, device=indices.device)
        sent.index_fill_(0, indices.long(), True)
        fill_if(nonfinite, sent, False)
        _fill_skipped(unit, sent)
        self._slice("velocity", unit).masked_fill_(sent[: unit.numel], 0.0)

    def received(self, nonfinite: Flag) -> None:
        """Turn the mean, which has replaced the gradients in the bucket, into the gradient that the
        optimizer gets."""
        cfs = {part: unit.cf for unit in self._units for part, *_ in unit.ranges}
        for run in dict.fromkeys(self._runs.values()):
            self._memory.received(run.joint, run.grads, cfs[run.parts[0]], nonfinite)

    def add_lost(self, lost: Sequence[tuple[Unit, Tensor]], times: int) -> None:
        """residual += times * (compression error of a mean), for each unit in `lost`."""
        if not self._memory.keeps:
            return
        for unit, values in lost:
            for part, _, _ in unit.ranges:
                part.parameter.open_residual()
            name = f"{unit.key.name}, lost"
            self._add_to(self._slice("residual", unit), values, name, times)

    def _update_key(self, part: Part, cf: float) -> object:
        """Equal for parts that form one run. A part that is or may be skipped is a run alone."""
        if not self._flat or part.skipped is not False:
            return part.start
        return (cf, *self._memory.update_key(part.parameter))

    def _run(self, parts: Sequence[Part]) -> _Run:
        start, stop, joint = parts[0].start, parts[-1].stop, parts[0].parameter
        if len(parts) > 1:
            joint = copy(joint)
            for name, flat in self._flat.items():
                setattr(joint, name, flat[start:stop])
        return _Run(joint, parts, start, self._bucket.work[start:stop])

    def _open_run(self, run: _Run, cf: float) -> None:
        """`NoMemory.open` for a run, once a step, however many units the run has."""
        if run.opened or run.skipped is True:
            return
        unchanged = either(self._bucket.nonfinite, run.skipped)
        run.addend, run.opened = self._memory.open(run.joint, run.grads, cf, unchanged), True
        run.copy_state_to_parts()
        if run.addend is None:
            return
        residual = run.joint.open_residual()
        if not self._fused or residual.dtype != run.addend.dtype:
            self._add_to(residual, run.addend, run.parts[0].parameter.name)
            run.addend = None

    def _in_place(self, unit: Unit, residual: Tensor) -> bool:
        """The residual itself is compressed, and the payload is subtracted from it: no copy."""
        none_skipped = all(part.skipped is False for part, _, _ in unit.ranges)
        return none_skipped and residual.dtype == self._bucket.work.dtype

    def _add_to(self, residual: Tensor, x: Tensor, name: str, times: int = 1) -> None:
        """residual += times * x, with stochastic rounding if the residual is of lower precision.
        The random numbers are seeded by the bucket's key with this name."""
        if residual.dtype == x.dtype:
            residual.add_(x, alpha=times)
            return
        total = torch.add(residual, x, alpha=times)
        random = generator(x.device, 0, self._bucket.key._replace(name=name))
        noise = torch.randint(
            1 << 16, x.shape, generator=random, dtype=torch.int32, device=x.device
        )
        # The upper 16 bits of a float32 are a bfloat16: a carry from the lower 16 rounds it up.
        total.view(torch.int32).add_(noise).bitwise_and_(-1 << 16)
        residual.copy_(total)

    def _slice(self, name: str, unit: Unit) -> Tensor:
        """The unit's elements of the tensor kept under this name, "residual" or "velocity"."""
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
