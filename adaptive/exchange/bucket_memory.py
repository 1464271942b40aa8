"""The memory's work on one bucket in one step: it makes the error-fed gradients of the units, and
subtracts sent payloads from the residuals.

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

from adaptive.exchange.bucket import Bucket, Part, Unit
from adaptive.memory.error_feedback import NoMemory
from adaptive.model.parameters import ModelParameter
from compressors.base import Payload
from compressors.kernels.blocks import Flag, either, fill_if
from compressors.wire.values import generator


@dataclass(frozen=True, eq=False)
class _Run:
    """A run: neighbouring parameters of a bucket whose memory is updated as that of one parameter.
    They are elements [start, stop) of the bucket.

    joint: one parameter in place of all, with their joined residual and velocity. cf: the CF at
    which all of them are sent."""

    joint: ModelParameter
    parameters: Sequence[ModelParameter]
    cf: float
    start: int
    stop: int

    def copy_state_to_parameters(self) -> bool:
        """Copy the state of `joint`, except tensors, to each parameter, if the state has changed.
        Returns whether it has changed."""
        joint, first = self.joint, self.parameters[0]
        state = joint.has_residual, joint.started, joint.momentum_share
        changed = state != (first.has_residual, first.started, first.momentum_share)
        for each in self.parameters if changed else ():
            each.has_residual, each.started, each.momentum_share = state
        return changed


class BucketMemory:
    """Applies a memory to the units of one bucket in one step.

    units: units without a step number. Steps with the same CFs pass the same list. In a settled
    bucket the residuals of all parameters are in one flat tensor, in the order of the bucket. In
    other buckets each unit covers a single part. Runs are kept from step to step, and made again
    only if something that they depend on has changed."""

    def __init__(self, memory: NoMemory, bucket: Bucket, units: Sequence[Unit]) -> None:
        self._memory = memory
        self._bucket = bucket
        self._addends: dict[_Run, Tensor | None] = {}  # of the runs that are open
        self._runs: dict[ModelParameter, _Run] = {}  # by each of their parameters
        layout, keeps = bucket.layout, memory.keeps if units else ()
        self._flat = {name: layout.flat(name) for name in keeps if bucket.settled}
        if keeps:
            keys = memory.update_keys(layout.parameters)
            depend_on = memory, units, keys, {*bucket.skipped}
            if layout.runs[0] != depend_on:
                layout.runs = depend_on, self._find_runs(units, keys)
            self._runs = layout.runs[1]

    def open(self, unit: Unit) -> tuple[Tensor, Tensor | None]:
        """(target, addend): the unit's error-fed gradient is target + addend, or the target alone
        if the addend is None. The compressor adds the addend in place. The memory of a skipped part
        does not change, and its error-fed gradient is 0. The same holds for all parts of a
        nonfinite bucket."""
        grads, skips = self._bucket.slice_of(unit), self._bucket.skips_all(unit)
        if self._bucket.nonfinite is True or skips or not self._memory.keeps:
            return grads, None
        opened = [(run, self._open_run(run)) for run in self._runs_of(unit)]
        residual = self._slice("residual", unit)
        in_place = self._in_place(unit, residual)
        for run, addend in opened:
            if addend is None:
                continue
            start, stop = max(run.start, unit.start), min(run.stop, unit.stop)
            addend = addend[start - run.start : stop - run.start]
            if in_place and len(opened) == 1:
                return residual, addend
            residual[start - unit.start : stop - unit.start].add_(addend)
        if in_place:
            return residual, None
        buffer = self._bucket.buffer("error-fed gradients", self._bucket.work.numel())
        a = buffer[unit.start : unit.stop].copy_(residual)
        return self._fill_skipped(unit, a), None

    def accumulate(self, unit: Unit) -> None:
        """Add the gradient to the residual, for a unit that another rank of the node compresses."""
        target, addend = self.open(unit)
        if addend is not None:
            target.add_(addend)

    def subtract_sent(self, unit: Unit, payload: Payload) -> None:
        """Subtract the payload that this rank has sent for a unit from the unit's residual. If some
        part was skipped, or if the residual is of lower precision, the payload is decoded into the
        bucket first, whose gradients are no longer needed."""
        if not self._memory.keeps or self._bucket.skips_all(unit):
            return
        residual = self._slice("residual", unit)
        if self._in_place(unit, residual):
            unit.compressor.add_to(residual, payload, -1.0)
        else:
            sent = self._bucket.slice_of(unit).zero_()
            unit.compressor.add_to(sent, payload)
            residual.sub_(self._fill_skipped(unit, sent))

    def clear_velocity(self, unit: Unit, payload: Payload, nonfinite: Flag) -> None:
        """Momentum factor masking (DGC): set the velocity of the sent elements of a unit to zero.
        Does nothing if the memory does not mask at the unit's CF, or if the step is nonfinite."""
        indices = payload.positions() if unit.cf >= self._memory.masking else None
        if indices is None or unit.parts[0].parameter.velocity is None:
            return
        if indices.numel() == unit.numel:
            return
        # The index of an empty slot is `numel`: hence one element more.
        sent = torch.zeros(unit.numel + 1, dtype=torch.bool, device=indices.device)
        sent.index_fill_(0, indices.long(), True)
        fill_if(nonfinite, sent, False)
        self._fill_skipped(unit, sent)
        self._slice("velocity", unit).masked_fill_(sent[: unit.numel], 0.0)

    def received(self, nonfinite: Flag) -> None:
        """Turn the mean in the bucket into the gradient that the optimizer gets. (The mean has
        replaced the gradients.)"""
        for run in dict.fromkeys(self._runs.values()):
            mean = self._bucket.work[run.start : run.stop]
            self._memory.received(run.joint, mean, run.cf, nonfinite)

    def add_lost(self, lost: Sequence[tuple[Unit, Tensor]], times: int) -> None:
        """residual += times * (compression error of a mean), for each unit in `lost`."""
        if not self._memory.keeps:
            return
        for unit, values in lost:
            for run in self._runs_of(unit):
                run.joint.open_residual()  # `open` has opened it, unless the parameter is skipped
            name = f"{unit.key.name}, lost"
            self._add_to(self._slice("residual", unit), values, name, times)

    def _find_runs(
        self, units: Sequence[Unit], keys: Sequence[object]
    ) -> dict[ModelParameter, _Run]:
        """The run of each parameter. A parameter that is or may be skipped is a run by itself."""
        cfs = {part.parameter: unit.cf for unit in units for part in unit.parts}
        alone = self._bucket.skipped if self._flat else cfs
        rules: dict[Part, object] = {
            part: part.start if part.parameter in alone else (cfs[part.parameter], key)
            for part, key in zip(self._bucket.parts, keys, strict=True)
            if part.parameter in cfs
        }
        runs: dict[ModelParameter, _Run] = {}
        for _, alike in groupby(rules, rules.get):
            parts = [*alike]
            (joint, start, _), stop = parts[0], parts[-1].stop
            cf = cfs[joint]
            if len(parts) > 1:
                joint = copy(joint)
                for name, flat in self._flat.items():
                    setattr(joint, name, flat[start:stop])
            parameters = [part.parameter for part in parts]
            runs |= dict.fromkeys(parameters, _Run(joint, parameters, cf, start, stop))
        return runs

    def _runs_of(self, unit: Unit) -> Sequence[_Run]:
        """The runs of a unit's parts."""
        first = self._runs[unit.parts[0].parameter]
        if unit.stop <= first.stop:
            return [first]
        return [*dict.fromkeys(self._runs[part.parameter] for part in unit.parts)]

    def _open_run(self, run: _Run) -> Tensor | None:
        """Call `NoMemory.open` for a run, once a step, however many units the run has. Returns the
        tensor that must still be added to the residual (flat); None if there is none."""
        skipped = self._bucket.skipped.get(run.parameters[0], False)
        if run in self._addends or skipped is True:
            return self._addends.get(run)
        grads = self._bucket.work[run.start : run.stop]
        unchanged = either(self._bucket.nonfinite, skipped)
        addend = self._memory.open(run.joint, grads, run.cf, unchanged)
        if run.copy_state_to_parameters():  # the runs may be others now: the next step makes them
            self._bucket.layout.runs = None, None
        if addend is not None:
            residual = run.joint.open_residual()
            if residual.dtype != addend.dtype:
                self._add_to(residual, addend, run.parameters[0].name)
                addend = None
        self._addends[run] = addend
        return addend

    def _in_place(self, unit: Unit, residual: Tensor) -> bool:
        """Whether the residual itself is compressed, and the payload subtracted, without a copy."""
        skipped = self._bucket.skipped
        some = bool(skipped) and any(part.parameter in skipped for part in unit.parts)
        return not some and residual.dtype == self._bucket.work.dtype

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
        parameter = unit.parts[0].parameter
        whole: Tensor = getattr(parameter, name)
        first = self._bucket.layout.parts[parameter].start
        return whole[unit.start - first : unit.stop - first]

    def _fill_skipped(self, unit: Unit, x: Tensor) -> Tensor:
        """Zero the elements of skipped parameters, in place."""
        for parameter, start, stop in unit.parts if self._bucket.skipped else ():
            skipped = self._bucket.skipped.get(parameter, False)
            fill_if(skipped, x[start - unit.start : stop - unit.start], 0.0)
        return x
