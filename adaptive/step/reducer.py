"""The way of a gradient through one step: from DDP's bucket to the mean that DDP gets back.

1. Open the bucket: look at the local gradients, clip them, add up their norms. A bucket with a
   gradient that is not finite is nonfinite, so that it ends non-finite on every rank, as in dense
   DDP, and no memory is touched by it.
2. Accumulate each gradient into the memory (`adaptive.memory`).
3. Compress the sum: at the smallest CF wanted from the full tensor, at larger ones from that
   payload (multi-level compression).
4. Exchange all payloads of the bucket, in one or more collectives (`adaptive.exchange`).
5. When all is there, on a thread of the process group: if any rank's gradients were not finite,
   nothing comes of the payloads. What the other ranks have accumulated goes with later steps.
6. Take what was sent off the memory, decode the mean into the bucket's buffer, settle the memory.

On a device nobody waits to know whether a bucket is nonfinite: a `Flag` goes along, and the device
does what depends on it. On the host it is a bool, and what is known to be in vain is not done.

`Reducer.compressed` is that way. `Reducer.dense` is the shorter one of a step that is not
compressed: all that the memory holds is sent with the gradient, in one all-reduce. What is called a
gradient here may be the update that an optimizer's step has made of it (memory/updates.py).
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import nan
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from adaptive.bucket.bucket import (
    EXACT,
    Bucket,
    Granularity,
    Part,
    StepCFs,
    Unit,
    by_shards,
    compress_levels,
    record_gradient_norms,
    record_levels,
    strided_sample,
)
from adaptive.bucket.bucket_memory import BucketMemory
from adaptive.bucket.requested import RequestedStatistics
from adaptive.exchange.strategies import Outgoing, Received, Strategy
from adaptive.memory.error_feedback import NoMemory
from adaptive.model.chunks import Destination
from adaptive.model.parameters import ModelParameter
from adaptive.network.collectives import Exchange
from adaptive.network.pipeline import Pipeline
from adaptive.statistics.vector import Tally
from compressors.base import Key, Payload
from compressors.kernels import all_finite, squared_norm
from compressors.kernels.blocks import Flag, Scalar, either, fill_if, reused
from policies import DENSE

OnGradient = Callable[[ModelParameter, Tensor, Flag], None]
"""Is told a gradient of a parameter, flat, and whether it is to be passed over as not finite."""

Send = Callable[[Tensor], Future[Tensor]]


@runtime_checkable
class SendsItself(Protocol):
    """A compressor whose steps are dense, and that turns gradients into their mean itself."""

    def send(
        self, bucket: dist.GradBucket, work: Tensor, scale: Tensor | None, exchange: Exchange
    ) -> Future[Tensor]:
        """A future of the ranks' mean of `work`, the bucket's gradients or a wider copy of them.
        scale: that of the loss, by which `work` was divided."""
        ...


@dataclass(frozen=True)
class Step:
    """What the buckets of one step have in common: its number, what is sent and measured, this
    rank's statistics, and who is told the means and this rank's own gradients.

    updates: buckets hold updates, in chunks that stay as they are, and not DDP's gradients."""

    number: int
    cfs: StepCFs
    tally: Tally
    on_mean: OnGradient | None = None
    on_local: OnGradient | None = None
    updates: bool = False


@dataclass
class Reducer:
    """Reduces buckets with one compressor, one memory and one exchange.

    memory: may be replaced between steps. settling: backwards after which DDP no longer rebuilds
    its buckets. clip_norm: largest norm of a parameter's local gradient, scaled by 1/sqrt(N).
    """

    granularity: Granularity
    memory: NoMemory
    exchange: Exchange
    pipeline: Pipeline
    requested: RequestedStatistics
    settling: int
    clip_norm: float | None = None
    _backwards: int = 0
    _buffers: defaultdict[int, dict[str, Tensor]] = field(default_factory=lambda: defaultdict(dict))

    def end_backward(self) -> None:
        """The next one may have other buckets."""
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
        """Exchange the gradients of bucket `index` compressed as `step.cfs` says.

        strategy: how payloads become the mean. to: where it goes; the bucket is scratch then.
        energy: the bucket's squared norm, if it is known. After the last bucket comes
        `Pipeline.finish`."""
        buffers = reused(self._buffers[index], buffer.device)
        bucket = self._open(step, buffer, parameters, buffers, energy)  # 1
        shards = self.exchange.world_size if strategy.sharded else strategy.parts
        granularity = self.granularity.in_full if strategy.votes else self.granularity
        cut = granularity.in_shards if strategy.sharded else granularity.cut
        units = cut(bucket, step.cfs, shards)
        self.exchange.count_floats(sum(unit.floats for unit in units))
        record_gradient_norms(units, bucket.work, step.tally)
        memory = BucketMemory(self.memory, bucket, units)
        before = step.tally.copy_of_levels() if strategy.sharded else None
        by_part = by_shards(units, buffer.numel(), strategy.parts)
        own = by_part.pop(strategy.part)
        for unit in itertools.chain(*by_part):
            memory.accumulate(unit)
        payloads = [_payload(step, bucket, unit, memory, strategy) for unit in own]  # 2, 3
        added = None if before is None else step.tally.copy_of_levels() - before
        # `report` keeps no list of all payloads alive: those that are gathered can go once packed.
        sums = [payload.parts[0] for payload in payloads] if strategy.takes_sums else []

        def report(made: Sequence[Payload]) -> None:
            if added is not None:
                step.tally.lose(added, _lost_share(made))
                return
            for unit, a, payload in zip(units, sums, made, strict=True):
                in_vain = unit.compressor is EXACT or unit.skipped or bucket.nonfinite is True
                if not in_vain:
                    levels = compress_levels(unit, a, sent=payload)
                    record_levels(unit, levels, bucket.work, step.tally)

        outgoing = Outgoing(index, bucket, units, payloads, report, step.tally.add_means)

        def finish(received: Received) -> Tensor:
            if received.nonfinite is not True:  # 5
                _decode(bucket, units, received, memory, self.exchange, to)  # 6
                if to is None:  # else updates, to which no rule of a user's is put
                    memory.received(received.nonfinite)
                _tell(step.on_mean, parameters, bucket.work, received.nonfinite)
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
        """All-reduce the gradients and all that the memory holds, uncompressed; the CFs that
        the tally asks for are measured on what is sent.

        send: another way to turn the buffer of each rank into the mean, instead of an all-reduce.
        narrow: the precision in which it is summed; what this rounds away is lost.
        """
        sending: Sequence[Part] = ()
        parts: Sequence[Part] = ()
        not_finite: Flag = False  # gradients of this rank
        tally, memory = step.tally, self.memory
        looked_at = tally.cfs or tally.ladder or tally.measures or step.on_local or send
        untouched = not looked_at and self.clip_norm is None
        if untouched and all(memory.is_empty(parameter) for parameter in parameters):
            known = squared_norm(buffer) if tally.energies else nan
            tally.at("grad").add_(known)
        else:
            bucket = self._open(step, buffer, parameters, {})
            not_finite, parts = bucket.nonfinite, bucket.parts
            if not_finite is not True:
                sending = [part for part in bucket.parts if part.skipped is not True]
                self._fold(step, bucket, sending)
            # The others' memories must not take it for sent.
            fill_if(not_finite, bucket.work, nan)
            _written_back(bucket, buffer)

        life = self.pipeline.life

        def finish(future: Future[Tensor]) -> Tensor:
            mean = future.value()
            if not parts and step.on_mean is None:
                return mean
            with self.pipeline.callback_of(life):
                nonfinite = all_finite(mean) ^ True
                for part in sending:
                    part.parameter.end_dense(either(nonfinite, part.skipped))
                for part in parts if nonfinite is not True else ():
                    of_part = mean[part.start : part.stop]
                    memory.received(part.parameter, of_part, DENSE, nonfinite)
                if sending:  # what was folded in is not to be taken for sent
                    fill_if(nonfinite, mean, nan)
                _tell(step.on_mean, parameters, mean, nonfinite)
                self.pipeline.stream.keep(sending, not_finite)
                return mean

        if send is None:
            send = self._mean_of if narrow is None else partial(self._mean_in, narrow)
        return send(buffer).then(finish)

    def _mean_of(self, buffer: Tensor) -> Future[Tensor]:
        self.exchange.count_floats(buffer.numel())
        return self.exchange.sum_by(self.pipeline, buffer.div_(self.exchange.world_size))

    def _mean_in(self, dtype: torch.dtype, buffer: Tensor) -> Future[Tensor]:
        """The mean, summed in this precision."""
        narrow = buffer.to(dtype).div_(self.exchange.world_size)
        self.exchange.count_floats(narrow.nbytes / torch.float32.itemsize)

        def widen(future: Future[Tensor]) -> Tensor:
            self.pipeline.stream.keep([narrow], False)
            return buffer.copy_(future.value())

        return self.exchange.sum_by(self.pipeline, narrow).then(widen)

    def _open(
        self,
        step: Step,
        buffer: Tensor,
        parameters: Sequence[ModelParameter],
        buffers: dict[str, Tensor],
        energy: Scalar | None = None,
    ) -> Bucket:
        wide = buffer.dtype in (torch.float32, torch.float64)
        work = buffer if wide else buffer.float()
        key = Key("", step.number, rank=self.exchange.rank)
        # A step may have been an early one before it was resumed: then DDP may be through with
        # cutting buckets anew, after backwards that were thrown away.
        settled = step.updates or min(step.number, self._backwards) >= self.settling
        whole = self.granularity.whole_buckets and settled
        bucket = Bucket(work, key, whole, buffers, updates=step.updates, settled=settled)
        bucket.open(parameters, self.memory, step.tally, self.clip_norm, energy)
        _tell(step.on_local, parameters, work, bucket.nonfinite)
        self.requested.observe(bucket, step.tally)
        return bucket

    def _fold(self, step: Step, bucket: Bucket, parts: Sequence[Part]) -> None:
        """Add what the memory holds of these parts to their gradients, and measure the sum (of what
        would be compressed)."""
        units = self.granularity.cut(bucket, step.cfs) if step.tally.cfs else []
        measured = bucket.work
        if units:
            grads = [part.grad for part in bucket.parts]
            of = [part.parameter for part in bucket.parts]
            turned = self.memory.handover.preview(of, grads, [1] * len(grads))
            measured = bucket.work if turned is grads else torch.cat([*turned])
            record_gradient_norms(units, measured, step.tally)
        samples = [strided_sample(measured[unit.start : unit.stop]).clone() for unit in units]
        for part in parts:
            self.memory.fold(part.parameter, part.grad, either(bucket.nonfinite, part.skipped))
        for unit, sample in zip(units, samples, strict=True):
            if not unit.skipped:
                levels = compress_levels(unit, measured[unit.start : unit.stop])
                record_levels(unit, levels, measured, step.tally, sample)


def _payload(
    step: Step, bucket: Bucket, unit: Unit, memory: BucketMemory, strategy: Strategy
) -> Payload:
    """What this rank hands to a strategy for a unit. The memory is accumulated, not settled.

    A rank whose gradients are not finite sends a nonfinite payload, so that all ranks end the step
    with a non-finite bucket, as in dense DDP."""
    compressor, nonfinite = unit.compressor, bucket.nonfinite
    target, addend = memory.open(unit)
    if strategy.takes_sums and compressor is not EXACT:
        a = target if addend is None else target.add_(addend)
        return Payload((a,), unit.spec.at(1.0))
    if unit.skipped or nonfinite is True:
        sent = compressor.compress(target, unit.spec)
    else:
        levels = compress_levels(unit, target, addend)
        record_levels(unit, levels, bucket.work, step.tally, times=strategy.parts)
        sent = levels[step.cfs.measured.index(step.cfs.send)]
        sent = replace(sent, spec=sent.spec.at(unit.cf))
    return sent.as_nonfinite(nonfinite)


def _lost_share(payloads: Sequence[Payload]) -> Scalar:
    """Of their tensors' energy, what payloads lose."""
    known = [payload.energies for payload in payloads if payload.energies is not None]
    if not known:
        return 0.0
    total, _, lost = torch.stack(known).sum(0)
    return torch.where(total > 0, lost / total, 0.0)


def _decode(
    bucket: Bucket,
    units: Sequence[Unit],
    received: Received,
    memory: BucketMemory,
    exchange: Exchange,
    to: Destination | None,
) -> None:
    """Take what this rank has sent off the memory, and write the mean to where it goes: one unit
    after the other, so that the decoded payloads of no more than one are in memory. Nothing comes
    of a nonfinite step, as a device finds out."""
    nonfinite = received.nonfinite
    invalid: Flag = False
    for i, (unit, payloads) in enumerate(zip(units, received.payloads, strict=True)):
        compressor = unit.compressor
        sent = payloads[exchange.rank] if received.own is None else received.own[i]
        own = sent.as_zeros(nonfinite)
        memory.take_off(unit, own)
        memory.clear_velocity(unit, own, nonfinite)
        mean = bucket.of(unit)
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
    # Only this rank keeps what was lost here, and its share of the next mean is 1/N: so N times it.
    memory.add_lost(received.lost, exchange.world_size)


def _tell(
    whom: OnGradient | None, parameters: Sequence[ModelParameter], flat: Tensor, nonfinite: Flag
) -> None:
    if whom is not None:
        views = flat.split([parameter.numel for parameter in parameters])
        for parameter, view in zip(parameters, views, strict=True):
            whom(parameter, view, nonfinite)


def _written_back(bucket: Bucket, buffer: Tensor) -> Tensor:
    """The buffer, where it is of half precision up to date with its wider copy."""
    return buffer if bucket.work is buffer else buffer.copy_(bucket.work)
