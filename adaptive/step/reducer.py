"""The way of a gradient through one step: from DDP's bucket to the mean that DDP gets back.

1. Open the bucket: check the local gradients, clip them, add their norms to the statistics. If a
   gradient is not finite, the bucket is nonfinite: its mean is non-finite on every rank, as in
   dense DDP, and no memory changes.
2. Add each gradient to the residual in the memory (`adaptive.memory`): the error-fed gradient.
3. Compress the error-fed gradient at each measured CF. The payload at the smallest CF is made from
   the full tensor, the payload at each larger CF from the one before (multi-level compression).
4. Exchange all payloads of the bucket, in one or more collectives (`adaptive.exchange`).
5. When the last collective is done, on a thread of the process group: if any rank's bucket was
   nonfinite, drop all payloads. The error-fed gradients of the other ranks stay in their residuals.
6. Subtract the sent payload from the residual, and decode the mean into the bucket's buffer.

Whether a bucket is nonfinite is a `Flag`. On a device the `Flag` is a tensor, read by kernels, and
the host never waits for it. On the host it is a bool, and work on a nonfinite bucket is left out.

`Reducer.compressed` takes these six steps. `Reducer.dense` serves an uncompressed step: it adds the
residual to the gradient, and sends the sum in one all-reduce. A "gradient" here may also be the
update that an optimizer's step has made of the gradient (memory/updates.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import nan
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from adaptive.exchange.bucket import (
    EXACT,
    Bucket,
    BucketLayout,
    Granularity,
    StepCFs,
    Unit,
    by_shards,
    compress_levels,
    record_gradient_norms,
    record_levels,
    strided_sample,
)
from adaptive.exchange.bucket_memory import BucketMemory
from adaptive.exchange.strategies import Outgoing, Received, Strategy
from adaptive.memory.error_feedback import NoMemory
from adaptive.model.chunks import Destination
from adaptive.model.parameters import ModelParameter
from adaptive.network.collectives import Exchange
from adaptive.network.pipeline import Pipeline
from adaptive.statistics.requested import RequestedStatistics
from adaptive.statistics.vector import Tally
from compressors.base import Key, Payload
from compressors.kernels import all_finite, squared_norm
from compressors.kernels.blocks import Flag, Scalar, either, fill_if
from policies import DENSE

OnGradient = Callable[[ModelParameter, Tensor, Flag], None]
"""Called with a parameter, its flat gradient, and a flag: True if the gradient must be ignored,
since some gradient of the bucket is not finite."""

Send = Callable[[Tensor], Future[Tensor]]
"""Called with a flat tensor of this rank. Returns a future of the ranks' mean of it."""


@runtime_checkable
class SendsItself(Protocol):
    """A compressor that exchanges dense gradients by itself: another library's DDP hook."""

    def send(
        self, bucket: dist.GradBucket, work: Tensor, scale: Tensor | None, exchange: Exchange
    ) -> Future[Tensor]:
        """A future of the ranks' mean of `work`.

        work: the bucket's gradients, or a float32 copy of half-precision gradients.
        scale: the loss scale by which `work` was divided."""
        ...


@dataclass(frozen=True)
class Step:
    """One step, as all of its buckets see it.

    cfs: the CFs sent and measured. tally: this rank's statistics. on_mean: called with each mean
    gradient. on_local: called with each local gradient. updates: the buckets are chunks of
    optimizer updates, the same in every step, and not DDP's buckets of gradients."""

    number: int
    cfs: StepCFs
    tally: Tally
    on_mean: OnGradient | None = None
    on_local: OnGradient | None = None
    updates: bool = False


@dataclass
class Reducer:
    """Reduces buckets with one compressor, one memory and one exchange.

    memory: may be replaced between steps. settling: number of backwards after which DDP no longer
    rebuilds its buckets. clip_norm: the largest norm of a parameter's local gradient: the script's
    limit divided by sqrt(ranks). layouts: the layout of each settled bucket, by its parameters. A
    layout holds flat tensors of the memory, so it is dropped when these are freed or replaced.
    _sent_updates: the last compressed bucket was a chunk of updates.
    """

    granularity: Granularity
    memory: NoMemory
    exchange: Exchange
    pipeline: Pipeline
    requested: RequestedStatistics
    settling: int
    clip_norm: float | None = None
    _backwards: int = 0
    layouts: dict[Any, BucketLayout] = field(default_factory=dict)
    _sent_updates: bool = False

    def end_backward(self) -> None:
        """Count a backward: DDP rebuilds its buckets after the first ones (`settling`)."""
        self._backwards += 1

    def compressed(
        self,
        step: Step,
        buffer: Tensor,
        parameters: Sequence[ModelParameter],
        strategy: Strategy,
        index: int,
        to: Destination | None = None,
        energy: Scalar | None = None,
    ) -> Future[Tensor]:
        """Exchange the gradients of bucket `index`, compressed at `step.cfs`: a future of the mean.

        strategy: how payloads become the mean. to: where the mean is added; None: the mean replaces
        the gradients in `buffer`. energy: the bucket's squared norm, if the caller knows it.

        The caller calls `Pipeline.finish` after the last bucket."""
        if step.updates is not self._sent_updates:  # chunks and buckets have different layouts
            self._sent_updates = step.updates
            self.layouts.clear()
        bucket = self._open(step, buffer, parameters, energy)  # 1
        shards = self.exchange.world_size if strategy.sharded else strategy.node_shards
        granularity = self.granularity.uncoded if strategy.votes else self.granularity
        cut = granularity.cut(bucket, step.cfs, shards, strategy.sharded)
        units = [unit.at(step.number) for unit in cut]
        self.exchange.count_floats(sum(unit.floats for unit in units))
        record_gradient_norms(units, bucket.work, step.tally)
        memory = BucketMemory(self.memory, bucket, cut)
        before = step.tally.copy_of_levels() if strategy.sharded else None
        by_shard = by_shards(units, buffer.numel(), strategy.node_shards)
        own = by_shard.pop(strategy.node_shard)
        for unit in itertools.chain(*by_shard):
            memory.accumulate(unit)
        payloads = [_payload(step, bucket, unit, memory, strategy) for unit in own]  # 2, 3
        # The callback must not refer to `payloads`: a gathered payload is freed once it is packed.
        report: Callable[[Sequence[Payload]], None]
        if before is None:
            error_fed = [each.parts[0] for each in payloads] if strategy.takes_error_fed else []
            report = partial(_record_sent, step, bucket, units, error_fed)
        else:
            report = partial(_record_losses, step.tally, step.tally.copy_of_levels() - before)
        outgoing = Outgoing(index, bucket, units, payloads, report, step.tally.add_means)

        def finish(received: Received) -> Tensor:
            if received.nonfinite is not True:  # 5
                _decode(bucket, units, received, memory, self.exchange, to)  # 6
                if to is None:  # otherwise `_decode` has moved the parameters by the mean update
                    memory.received(received.nonfinite)
                _call_for_each(step.on_mean, parameters, bucket.work, received.nonfinite)
            fill_if(received.nonfinite, bucket.work if to is None else to.out, nan)
            return _written_back(bucket, buffer)

        rounds = strategy.rounds(self.exchange, outgoing)  # 4
        collectives = strategy.collectives(self.exchange.world_size)
        return self.pipeline.run(rounds, collectives, finish, buffer.device)

    def dense(
        self,
        step: Step,
        buffer: Tensor,
        parameters: Sequence[ModelParameter],
        send: Send | None = None,
        narrow: torch.dtype | None = None,
    ) -> Future[Tensor]:
        """All-reduce the sum of gradients and residuals, uncompressed: a future of the mean. The
        CFs of the tally are measured on the tensor that a compressed step would compress.

        send: makes the ranks' mean of the buffer, in place of the all-reduce.
        narrow: the precision of the all-reduce; rounding errors are not kept in any residual.
        """
        bucket: Bucket | None = None  # None: no memory or statistic needs the gradients
        tally, memory = step.tally, self.memory
        needed = tally.cfs or tally.measures or step.on_local or send
        untouched = not needed and self.clip_norm is None
        if untouched and all(memory.is_empty(parameter) for parameter in parameters):
            energy = squared_norm(buffer) if tally.energies else nan
            tally.at("grad").add_(energy)
            if "velocity" in memory.keeps:  # SGD has its momentum back: free the velocities
                self.layouts.clear()
        else:
            bucket = self._open(step, buffer, parameters)
            if bucket.nonfinite is not True:
                self._flush(step, bucket)
            # NaN tells the other ranks that nothing was sent, so that they keep their residuals.
            fill_if(bucket.nonfinite, bucket.work, nan)
            _written_back(bucket, buffer)

        life = self.pipeline.life

        def finish(future: Future[Tensor]) -> Tensor:
            mean = future.value()
            if bucket is None and step.on_mean is None:
                return mean
            with self.pipeline.callback_of(life):
                nonfinite = all_finite(mean) ^ True
                if bucket is not None:
                    _end_dense(memory, bucket, mean, nonfinite)
                _call_for_each(step.on_mean, parameters, mean, nonfinite)
                self.pipeline.stream.keep(bucket)
                return mean

        if send is None:
            send = self._mean_of if narrow is None else partial(self._mean_in, narrow)
        return send(buffer).then(finish)

    def _mean_of(self, buffer: Tensor) -> Future[Tensor]:
        self.exchange.count_floats(buffer.numel())
        return self.exchange.sum_by(self.pipeline.run, buffer.div_(self.exchange.world_size))

    def _mean_in(self, dtype: torch.dtype, buffer: Tensor) -> Future[Tensor]:
        """A future of the ranks' mean of `buffer`, summed in `dtype`."""
        narrow = buffer.to(dtype).div_(self.exchange.world_size)
        self.exchange.count_floats(narrow.nbytes / torch.float32.itemsize)

        def widen(future: Future[Tensor]) -> Tensor:
            self.pipeline.stream.keep([narrow], False)
            return buffer.copy_(future.value())

        return self.exchange.sum_by(self.pipeline.run, narrow).then(widen)

    def _open(
        self,
        step: Step,
        buffer: Tensor,
        parameters: Sequence[ModelParameter],
        energy: Scalar | None = None,
    ) -> Bucket:
        """The bucket of these parameters, opened (`Bucket.open`)."""
        wide = buffer.dtype in (torch.float32, torch.float64)
        work = buffer if wide else buffer.float()
        key = Key("", step.number, rank=self.exchange.rank)
        # The step number must reach `settling`, too. If a state of step 0 is loaded after a few
        # backwards, the run must repeat its first steps as they were, with unsettled buckets.
        settled = step.updates or min(step.number, self._backwards) >= self.settling
        whole = self.granularity.whole_buckets and settled
        layout = self.layouts.get(of := tuple(parameters)) or BucketLayout(of)
        if settled:
            self.layouts[of] = layout
        bucket = Bucket(work, key, whole, layout, settled=settled)
        bucket.open(self.memory, step.tally, self.clip_norm, energy)
        _call_for_each(step.on_local, parameters, work, bucket.nonfinite)
        self.requested.observe(work, step.tally)
        return bucket

    def _flush(self, step: Step, bucket: Bucket) -> None:
        """Add residuals to the gradients. The CFs of the tally are measured on the tensor that a
        compressed step would compress: on this sum, or in parameter space on the updates."""
        cut = self.granularity.cut(bucket, step.cfs) if step.tally.cfs else []
        units, measured = [unit.at(step.number) for unit in cut], bucket.work
        of, grads = bucket.layout.parameters, bucket.grads
        if units:
            updates = self.memory.handover.preview(of, grads)
            measured = bucket.work if updates is grads else torch.cat([*updates])
            record_gradient_norms(units, measured, step.tally)
        samples = [strided_sample(measured[unit.start : unit.stop]).clone() for unit in units]
        for parameter, grad in zip(of, grads, strict=True):
            skipped = bucket.skipped.get(parameter, False)
            if skipped is not True:
                self.memory.flush_into(parameter, grad, either(bucket.nonfinite, skipped))
        for unit, sample in zip(units, samples, strict=True):
            if not bucket.skips_all(unit):
                levels = compress_levels(unit, measured[unit.start : unit.stop])
                record_levels(unit, levels, measured, step.tally, sample)


def _payload(
    step: Step, bucket: Bucket, unit: Unit, memory: BucketMemory, strategy: Strategy
) -> Payload:
    """The payload of a unit for the strategy; with `takes_error_fed` the error-fed gradient itself.
    Afterwards the residual holds the error-fed gradient, until `_decode` subtracts what was sent.

    The payload of a nonfinite bucket is NaN, so that the mean is non-finite on all ranks."""
    compressor, nonfinite = unit.compressor, bucket.nonfinite
    target, addend = memory.open(unit)
    if strategy.takes_error_fed and compressor is not EXACT:
        a = target if addend is None else target.add_(addend)
        return Payload((a,), unit.spec.at(1.0))
    if bucket.skips_all(unit) or nonfinite is True:
        sent = compressor.compress(target, unit.spec)
    elif not _measures(step, unit):
        sent = compressor.compress(target, unit.spec._replace(measured=False), addend)
        unknown = torch.full((1, 3), nan, dtype=torch.float64, device=target.device)
        step.tally.add_levels(unknown, unknown)
    else:
        levels = compress_levels(unit, target, addend)
        record_levels(unit, levels, bucket.work, step.tally, times=strategy.node_shards)
        sent = levels[step.cfs.measured.index(step.cfs.send)]
        sent = replace(sent, spec=sent.spec.at(unit.cf))
    return sent.as_nonfinite(nonfinite)


def _end_dense(memory: NoMemory, bucket: Bucket, mean: Tensor, nonfinite: Flag) -> None:
    """End a dense step: empty the memory, which was sent, unless the step is nonfinite."""
    for parameter, start, stop in bucket.parts:
        parameter.end_dense(either(nonfinite, bucket.skipped.get(parameter, False)))
        if nonfinite is not True:
            memory.received(parameter, mean[start:stop], DENSE, nonfinite)
    # A nonfinite step keeps the residuals, and its mean contains them, too. So the optimizer must
    # not step by this mean.
    fill_if(nonfinite, mean, nan)


def _measures(step: Step, unit: Unit) -> bool:
    """Whether this step measures the energies of a unit's payloads."""
    sent_only = unit.levels == (unit.cf,)
    return not sent_only or step.tally.energies or bool(step.tally.by_layer)


def _record_sent(
    step: Step,
    bucket: Bucket,
    units: Sequence[Unit],
    error_fed: Sequence[Tensor],
    sent: Sequence[Payload],
) -> None:
    """Add to the tally the energies of payloads that a strategy itself has made of `error_fed`."""
    if bucket.nonfinite is True:
        return
    for unit, a, payload in zip(units, error_fed, sent, strict=True):
        if unit.compressor is not EXACT and not bucket.skips_all(unit):
            levels = compress_levels(unit, a, sent=payload)
            record_levels(unit, levels, bucket.work, step.tally)


def _record_losses(tally: Tally, added: Tensor, means: Sequence[Payload]) -> None:
    """Take off the tally what the compression of means has lost of `added`, the energies that a
    bucket's own payloads have added to the tally: a share of sum ||a - c||^2 / sum ||a||^2."""
    known = [payload.energies for payload in means if payload.energies is not None]
    if known:
        total, _, lost = torch.stack(known).sum(0)
        tally.lose(added, torch.where(total > 0, lost / total, 0.0))


def _decode(
    bucket: Bucket,
    units: Sequence[Unit],
    received: Received,
    memory: BucketMemory,
    exchange: Exchange,
    to: Destination | None,
) -> None:
    """Subtract this rank's payloads from its residuals, and add the mean to `to` (None: write the
    mean to the bucket). Units are decoded one after the other, so that only the decoded payloads of
    one unit are in memory. In a nonfinite step payloads count as zeros."""
    nonfinite = received.nonfinite
    invalid: Flag = False
    for i, (unit, payloads) in enumerate(zip(units, received.payloads, strict=True)):
        compressor = unit.compressor
        sent = payloads[exchange.rank] if received.own is None else received.own[i]
        own = sent.as_zeros(nonfinite)
        memory.subtract_sent(unit, own)
        memory.clear_velocity(unit, own, nonfinite)
        mean = bucket.slice_of(unit)
        if received.compressors is not None:
            compressor = received.compressors[i]
        if to is None:
            compressor.mean_of(mean, payloads, received.scale, nonfinite)
        else:
            out, scale = to.out[unit.start : unit.stop], to.times * received.scale
            compressor.add_all(out, payloads, scale, nonfinite)
        for payload in payloads:
            invalid = either(invalid, payload.invalid)
    exchange.count_invalid(invalid)
    # This rank alone keeps the compression error of the mean. Its gradient has weight 1/N in the
    # next mean, so the residual takes N times the error.
    memory.add_lost(received.lost, exchange.world_size)


def _call_for_each(
    listener: OnGradient | None,
    parameters: Sequence[ModelParameter],
    flat: Tensor,
    nonfinite: Flag,
) -> None:
    if listener is not None:
        views = flat.split([parameter.numel for parameter in parameters])
        for parameter, view in zip(parameters, views, strict=True):
            listener(parameter, view, nonfinite)


def _written_back(bucket: Bucket, buffer: Tensor) -> Tensor:
    """DDP's buffer with the values of `bucket.work`, the float32 copy of a narrower buffer."""
    return buffer if bucket.work is buffer else buffer.copy_(bucket.work)
