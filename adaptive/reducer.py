"""The way of a gradient through one step: from DDP's bucket to the mean that DDP gets back.

1. Open the bucket: look at the local gradients, clip them, add up their norms. A bucket with a
   gradient that is not finite is poisoned, so that it ends non-finite on every rank, as in dense
   DDP, and no memory is touched by it.
2. Accumulate each gradient into the memory (`adaptive.memory`).
3. Compress the sum: at the smallest CF wanted from the full tensor, at larger ones from that
   payload (multi-level compression).
4. Exchange all payloads of the bucket, in one or more collectives (`adaptive.exchange`).
5. When all is there, on a thread of the process group: take what was sent off the memory, and
   decode the mean into the bucket's buffer.
6. Settle the memory; or, if any rank poisoned the bucket, undo step 2 instead of 5.

`Reducer.compressed` is that way. `Reducer.dense` is the shorter one of a step that is not
compressed: all that the memory holds is sent with the gradient, in one all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import isfinite, nan

import torch
from torch import Tensor
from torch.futures import Future

from adaptive.bucket import Bucket, Granularity, StepCFs, Unit, lay_out
from adaptive.exchange.collectives import Exchange
from adaptive.exchange.pipeline import Pipeline
from adaptive.exchange.strategies import Outgoing, Received, Strategy
from adaptive.foreign import only
from adaptive.memory.bucket_memory import BucketMemory
from adaptive.memory.error_feedback import NoMemory
from adaptive.multilevel import compress_levels, levels_beside, record_levels, strided_sample
from adaptive.parameters import ModelParameter, Scratch
from adaptive.statistics.on_request import RequestedStatistics
from adaptive.statistics.vector import Tally
from compressors import Compressor
from compressors.base import Payload
from compressors.rounds import RoundsCompressor

OnMean = Callable[[ModelParameter, Tensor], None]
Send = Callable[[Tensor], Future[Tensor]]


class Reducer:
    """Reduces buckets with one compressor, one memory and one exchange.

    granularity: what is compressed as one. settling: backwards after which DDP cuts no buckets
    anew. clip_norm: largest norm of a parameter's local gradient, already scaled by 1/sqrt(N), or
    None.
    """

    def __init__(
        self,
        granularity: Granularity,
        memory: NoMemory,
        exchange: Exchange,
        pipeline: Pipeline,
        instruments: RequestedStatistics,
        settling: int,
        clip_norm: float | None = None,
    ) -> None:
        self._granularity = granularity
        self._settling = settling
        self._memory = memory
        self._exchange = exchange
        self._pipeline = pipeline
        self._instruments = instruments
        self._clip_norm = clip_norm
        self._scratch = Scratch()
        self._backwards = 0

    def use(self, memory: NoMemory) -> None:
        """Another memory from the next step on."""
        self._memory = memory

    def joins(self, step: int) -> bool:
        """The tensors of a bucket are compressed as one, in this step's backward."""
        return self._granularity.joined and not self._is_early(step)

    def end_backward(self) -> None:
        """The next one may have other buckets."""
        self._backwards += 1

    def _is_early(self, step: int) -> bool:
        """Buckets may yet change. Also what was an early step before it was resumed is one: then
        DDP may be through with that, after backwards that were thrown away."""
        return min(step, self._backwards) < self._settling

    def plain(
        self, buffer: Tensor, parameters: Sequence[ModelParameter], on_mean: OnMean | None
    ) -> Future[Tensor]:
        """All-reduce the gradients as they are. on_mean: told each one's mean (flat)."""

        def finish(future: Future[Tensor]) -> Tensor:
            mean = future.value()
            if on_mean and _all_finite(mean):
                views = mean.split([parameter.tensor.numel() for parameter in parameters])
                for parameter, view in zip(parameters, views, strict=True):
                    on_mean(parameter, view)
            return mean

        return self._mean(buffer).then(finish)

    def dense(
        self,
        buffer: Tensor,
        parameters: Sequence[ModelParameter],
        step: int,
        cfs: StepCFs,
        tally: Tally,
        on_mean: OnMean | None,
        send: Send | None = None,
    ) -> Future[Tensor]:
        """All-reduce the gradients and all that the memory holds, uncompressed; the CFs in
        `tally.cfs` are measured on what is sent.

        send: another way to turn the buffer of each rank into the mean, instead of an all-reduce.
        """
        untouched = not (tally.cfs or tally.ladder or send) and self._clip_norm is None
        if untouched and all(self._memory.idle(parameter) for parameter in parameters):
            tally.grad = nan  # not measured
            return self.plain(buffer, parameters, on_mean)
        bucket = self._open(buffer, parameters, step, tally)
        sending = [part for part in bucket.parts if bucket.finite and not part.skipped]
        units = self._granularity.cut(bucket, cfs) if tally.cfs and bucket.finite else []
        samples = [strided_sample(bucket.work[u.start : u.stop]).clone() for u in units]
        for part in sending:
            self._memory.fold(part.parameter, part.grad)
        if not bucket.finite:  # the others' memories are not to take it for a mean
            bucket.work.fill_(nan)
        for unit, sample in zip(units, samples, strict=True):
            if not unit.skipped:
                direct = partial(_compress, unit, bucket.work[unit.start : unit.stop])
                levels = compress_levels(unit.base, direct, direct, unit.levels)
                record_levels(unit, levels, sample, tally)
        _write_back(bucket, buffer)

        def finish(future: Future[Tensor]) -> Tensor:
            mean = only(future.value())
            arrived = _all_finite(mean)
            for part in sending:
                if arrived:
                    self._memory.commit_dense(part.parameter)
                else:
                    self._memory.undo_fold(part.parameter)
            if sending and not arrived:  # what was folded in is not to be taken for sent
                mean.fill_(nan)
            if on_mean and arrived:
                for part in bucket.parts:
                    on_mean(part.parameter, mean[part.start : part.stop])
            return mean

        return (send or self._mean)(buffer).then(finish)

    def compressed(
        self,
        buffer: Tensor,
        parameters: Sequence[ModelParameter],
        step: int,
        cfs: StepCFs,
        tally: Tally,
        on_mean: OnMean | None,
        strategy: Strategy,
        leader: int,
        index: int,
        last: bool,
    ) -> Future[Tensor]:
        """Exchange the gradients of bucket `index` compressed as `cfs` says.

        strategy: how payloads become the mean. leader: the rank that chooses for all, if one does.
        last: no bucket of this step comes after it."""
        bucket = self._open(buffer, parameters, step, tally)  # 1
        if self._granularity.joined and self._memory.keeps_residual:
            lay_out(parameters, self._memory.keeps_velocity)
        shards = self._exchange.world_size if strategy.sharded else 1
        units = self._granularity.cut(bucket, cfs, shards)
        # With several rounds its room is read again when the next bucket has come by.
        room = ("joined", index if strategy.collectives > 1 else 0)
        memory = BucketMemory(self._memory, bucket, units, self._scratch, room)
        part = _OwnPart(bucket, units, memory, tally, cfs.measured.index(cfs.send))
        outgoing = part.outgoing(  # 2, 3
            strategy.takes_sum,
            index,
            leader,
            lambda numel: self._scratch.take(("shard", index), numel, bucket.work),
        )

        def finish(received: Received | None) -> Tensor:
            if received is None:  # some rank's gradients are not finite
                memory.undo()
                bucket.work.fill_(nan)
            else:
                decode(bucket, units, received, memory, self._exchange.rank)  # 5, 6
                if on_mean:
                    for each in bucket.parts:
                        on_mean(each.parameter, each.grad)
            _write_back(bucket, buffer)
            return buffer

        rounds = strategy.start(self._exchange, outgoing)  # 4
        return self._pipeline.run(rounds, strategy.collectives, finish, buffer.device, last)

    def _mean(self, buffer: Tensor) -> Future[Tensor]:
        return self._exchange.all_reduce(buffer.div_(self._exchange.world_size))

    def _open(
        self, buffer: Tensor, parameters: Sequence[ModelParameter], step: int, tally: Tally
    ) -> Bucket:
        wide = buffer.dtype in (torch.float32, torch.float64)
        work = buffer if wide else buffer.float()
        early = self._is_early(step)
        bucket = Bucket.open(work, parameters, step, self._memory, tally, self._clip_norm, early)
        self._instruments.observe(bucket, tally)
        return bucket


class _OwnPart:
    """What this rank has to send for one bucket, and what the statistics are told of it.

    sent: position in `tally.cfs` of the CF to send."""

    def __init__(
        self, bucket: Bucket, units: Sequence[Unit], memory: BucketMemory, tally: Tally, sent: int
    ) -> None:
        self._bucket, self._units, self._memory = bucket, units, memory
        self._tally, self._sent = tally, sent

    def outgoing(
        self,
        takes_sum: Callable[[Unit], bool],
        index: int,
        leader: int,
        space: Callable[[int], Tensor],
    ) -> Outgoing:
        """Accumulate each unit into the memory, and compress it; those that the strategy
        `takes_sum` of are accumulated only."""
        bucket, before = self._bucket, self._tally.copy()
        payloads: list[Payload | None] = []
        self._sums: list[Tensor | None] = []
        for unit in self._units:
            summed = takes_sum(unit)
            self._sums.append(self._accumulate(unit) if summed else None)
            payloads.append(None if summed else self._compress(unit))
        self._kept = self._tally.since(before)
        return Outgoing(
            index=index,
            units=self._units,
            payloads=payloads,
            sums=self._sums,
            dtype=bucket.work.dtype,
            device=bucket.work.device,
            numel=bucket.work.numel(),
            finite=bucket.finite,
            leader=leader,
            space=space,
            books=self,
        )

    def chosen(self, payloads: Sequence[Payload | None]) -> None:
        """See `Books`."""
        for unit, a, payload in zip(self._units, self._sums, payloads, strict=True):
            if a is not None and payload is not None and self._bucket.finite and not unit.skipped:
                levels = levels_beside(unit, a, payload)
                record_levels(unit, levels, strided_sample(self._view(unit)), self._tally)

    def compressed_again(self, lost_share: float) -> None:
        """See `Books`."""
        self._tally.lose(self._kept, lost_share)

    def _view(self, unit: Unit) -> Tensor:
        """The unit's slice of the bucket: the gradient."""
        return self._bucket.work[unit.start : unit.stop]

    def _accumulate(self, unit: Unit) -> Tensor:
        """The unit's error-fed gradient, added up (flat); zeros if the bucket is not finite."""
        if not self._bucket.finite:
            return torch.zeros_like(self._view(unit))
        target, addend = self._memory.open(unit)
        return target if addend is None else target.add_(addend)

    def _compress(self, unit: Unit) -> Payload:
        """What this rank sends for a unit. The memory is accumulated, not settled.

        A rank whose gradients are not finite sends a poisoned payload, so that all ranks end the
        step with a non-finite bucket, as in dense DDP."""
        compressor = unit.compressor
        if not self._bucket.finite:
            zeros = torch.zeros_like(self._view(unit))
            return compressor.poison(compressor.compress(zeros, unit.cf, unit.key))
        target, addend = self._memory.open(unit)
        if unit.skipped:
            return compressor.compress(target, unit.cf, unit.key)

        def again(compressor: Compressor, cf: float) -> Payload:
            return compressor.compress(target, cf, unit.key)

        def first(compressor: Compressor, cf: float) -> Payload:
            if addend is None:
                return again(compressor, cf)
            return compressor.compress_sum(target, addend, cf, unit.key)

        sample = strided_sample(self._view(unit))
        levels = compress_levels(unit.base, first, again, unit.levels)
        record_levels(unit, levels, sample, self._tally)
        return replace(levels[self._sent], cf=unit.cf)


def decode(
    bucket: Bucket, units: Sequence[Unit], received: Received, memory: BucketMemory, rank: int
) -> None:
    """Take what this rank has sent off the memory, and write the mean into the bucket: one unit
    after the other, so that the decoded payloads of no more than one are in memory."""
    sent = []
    for i, (unit, payloads) in enumerate(zip(units, received.payloads, strict=True)):
        own = payloads[rank] if received.own is None else received.own[i]
        memory.take_off(unit, own)
        if memory.masks:
            sent.append(own)
        mean = bucket.work[unit.start : unit.stop]
        if isinstance(unit.compressor, RoundsCompressor):
            unit.compressor.write_to(mean, payloads[0])
            continue
        mean.zero_()
        for payload in payloads:
            unit.compressor.add_to(mean, payload, received.scale)
    memory.settle(sent)
    if received.remainder is not None:
        memory.keep(received.remainder)


def _compress(unit: Unit, a: Tensor, compressor: Compressor, cf: float) -> Payload:
    return compressor.compress(a, cf, unit.key)


def _write_back(bucket: Bucket, buffer: Tensor) -> None:
    """Bring a half-precision bucket up to date with its wider copy."""
    if bucket.work is not buffer:
        buffer.copy_(bucket.work)


def _all_finite(tensor: Tensor) -> bool:
    return isfinite(float(tensor.sum(dtype=torch.float64))) or bool(torch.isfinite(tensor).all())
