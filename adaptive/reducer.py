"""The way of a gradient through one step: from DDP's bucket to the mean that DDP gets back.

1. Open the bucket: look at the local gradients, clip them, add up their norms. A bucket with a
   gradient that is not finite is poisoned, so that it ends non-finite on every rank, as in dense
   DDP, and no memory is touched by it.
2. Accumulate each gradient into the memory (`adaptive.memory`).
3. Compress the sum: at the smallest CF wanted from the full tensor, at larger ones from that
   payload (multi-level compression).
4. Exchange all payloads of the bucket, in one or more collectives (`adaptive.exchange`).
5. When all is there, on a thread of the process group: if any rank poisoned the bucket, undo step
   2, and let nothing come of the payloads.
6. Take what was sent off the memory, decode the mean into the bucket's buffer, settle the memory.

On a device nobody waits to know whether a bucket is poisoned: a `Flag` goes along, and what depends
on it is done by the device. On the host it is a bool, and what is known to be in vain is not done.

`Reducer.compressed` is that way. `Reducer.dense` is the shorter one of a step that is not
compressed: all that the memory holds is sent with the gradient, in one all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import nan

import torch
from torch import Tensor
from torch.futures import Future

from adaptive.bucket import Bucket, Granularity, StepCFs, Unit, lay_out
from adaptive.exchange.collectives import Exchange
from adaptive.exchange.pipeline import Pipeline
from adaptive.exchange.strategies import Outgoing, Received, Strategy
from adaptive.memory.bucket_memory import BucketMemory
from adaptive.memory.error_feedback import NoMemory
from adaptive.multilevel import compress_levels, levels_beside, record_levels, strided_sample
from adaptive.parameters import ModelParameter, Scratch
from adaptive.statistics.on_request import RequestedStatistics
from adaptive.statistics.vector import Tally
from compressors import Compressor
from compressors.base import Key, Payload
from compressors.kernels import Flag, Scalar, all_finite
from compressors.kernels.blocks import but_not, either, fill_if
from compressors.rounds import RoundsCompressor

OnMean = Callable[[ModelParameter, Tensor, Flag], None]
"""Is told the mean of a parameter, flat, and whether it is to be passed over as not finite."""

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
            if on_mean:
                poisoned = all_finite(mean) ^ True
                views = mean.split([parameter.tensor.numel() for parameter in parameters])
                for parameter, view in zip(parameters, views, strict=True):
                    on_mean(parameter, view, poisoned)
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
        """All-reduce the gradients and all that the memory holds, uncompressed; the CFs that
        the tally asks for are measured on what is sent.

        send: another way to turn the buffer of each rank into the mean, instead of an all-reduce.
        """
        asked = tally.asked
        untouched = not (asked.cfs or asked.ladder or send) and self._clip_norm is None
        if untouched and all(self._memory.idle(parameter) for parameter in parameters):
            tally.at("grad").fill_(nan)  # not measured
            return self.plain(buffer, parameters, on_mean)
        bucket = self._open(buffer, parameters, step, tally)
        known = bucket.poisoned is True
        sending = [part for part in bucket.parts if not known and part.skipped is not True]
        units = self._granularity.cut(bucket, cfs) if asked.cfs and not known else []
        samples = [strided_sample(bucket.work[u.start : u.stop]).clone() for u in units]
        for part in sending:
            self._memory.fold(part.parameter, part.grad, either(bucket.poisoned, part.skipped))
        for unit, sample in zip(units, samples, strict=True):
            if not unit.skipped:
                direct = partial(_compress, unit, bucket.work[unit.start : unit.stop])
                levels = compress_levels(unit.base, direct, direct, unit.levels)
                record_levels(unit, levels, sample, tally)
        fill_if(bucket.poisoned, bucket.work, nan)  # the others' memories must not take it for sent
        _write_back(bucket, buffer)

        def finish(future: Future[Tensor]) -> Tensor:
            mean = future.value()
            poisoned = all_finite(mean) ^ True
            for part in sending:
                flag = but_not(but_not(poisoned, bucket.poisoned), part.skipped)
                self._memory.undo_fold(part.parameter, flag)
                self._memory.end_dense(part.parameter, either(poisoned, part.skipped))
            if sending:  # what was folded in is not to be taken for sent
                fill_if(poisoned, mean, nan)
            if on_mean:
                for part in bucket.parts:
                    on_mean(part.parameter, mean[part.start : part.stop], poisoned)
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
            strategy,
            index,
            leader,
            lambda numel: self._scratch.take(("shard", index), numel, bucket.work),
        )

        def finish(received: Received) -> Tensor:
            memory.undo(received.poisoned)  # 5, while the bucket still holds the gradients
            if received.poisoned is not True:
                corrupt = decode(bucket, units, received, memory, self._exchange.rank)  # 6
                self._exchange.count_corrupt(corrupt)
                if on_mean:
                    for each in bucket.parts:
                        on_mean(each.parameter, each.grad, received.poisoned)
            fill_if(received.poisoned, bucket.work, nan)
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
        key = Key("", step, rank=self._exchange.rank)
        bucket, energies = Bucket.open(
            work, parameters, key, self._memory, tally, self._clip_norm, early
        )
        self._instruments.observe(bucket, energies, tally)
        return bucket


class _OwnPart:
    """What this rank has to send for one bucket, and what the statistics are told of it.

    sent: position, among the CFs measured, of the one to send."""

    def __init__(
        self, bucket: Bucket, units: Sequence[Unit], memory: BucketMemory, tally: Tally, sent: int
    ) -> None:
        self._bucket, self._units, self._memory = bucket, units, memory
        self._tally, self._sent = tally, sent

    def outgoing(
        self,
        strategy: Strategy,
        index: int,
        leader: int,
        space: Callable[[int], Tensor],
    ) -> Outgoing:
        """Accumulate each unit into the memory, and compress it; those whose sums the strategy
        takes are accumulated only."""
        bucket = self._bucket
        before = self._tally.copy_of_levels() if strategy.sharded else None
        payloads: list[Payload | None] = []
        self._sums: list[Tensor | None] = []
        for unit in self._units:
            summed = strategy.takes_sum(unit)
            self._sums.append(self._accumulate(unit) if summed else None)
            payloads.append(None if summed else self._compress(unit))
        if before is not None:
            self._added = self._tally.copy_of_levels() - before
        return Outgoing(
            index=index,
            units=self._units,
            payloads=payloads,
            sums=self._sums,
            dtype=bucket.work.dtype,
            device=bucket.work.device,
            numel=bucket.work.numel(),
            poisoned=bucket.poisoned,
            leader=leader,
            space=space,
            books=self,
        )

    def chosen(self, payloads: Sequence[Payload | None]) -> None:
        """See `Books`."""
        for unit, a, payload in zip(self._units, self._sums, payloads, strict=True):
            known = self._bucket.poisoned is True or unit.skipped
            if a is not None and payload is not None and not known:
                levels = levels_beside(unit, a, payload)
                record_levels(unit, levels, strided_sample(self._view(unit)), self._tally)

    def compressed_again(self, lost_share: Scalar) -> None:
        """See `Books`."""
        self._tally.lose(self._added, lost_share)

    def _view(self, unit: Unit) -> Tensor:
        """The unit's slice of the bucket: the gradient."""
        return self._bucket.work[unit.start : unit.stop]

    def _accumulate(self, unit: Unit) -> Tensor:
        """The unit's error-fed gradient, added up (flat); zeros if the bucket is poisoned."""
        target, addend = self._memory.open(unit)
        return target if addend is None else target.add_(addend)

    def _compress(self, unit: Unit) -> Payload:
        """What this rank sends for a unit. The memory is accumulated, not settled.

        A rank whose gradients are not finite sends a poisoned payload, so that all ranks end the
        step with a non-finite bucket, as in dense DDP."""
        compressor, poisoned = unit.compressor, self._bucket.poisoned
        target, addend = self._memory.open(unit)
        if unit.skipped or poisoned is True:
            payload = compressor.compress(target, unit.cf, unit.key)
            return compressor.poison(payload, poisoned)

        def again(compressor: Compressor, cf: float) -> Payload:
            return compressor.compress(target, cf, unit.key)

        def first(compressor: Compressor, cf: float) -> Payload:
            if addend is None:
                return again(compressor, cf)
            return compressor.compress_sum(target, addend, cf, unit.key)

        sample = strided_sample(self._view(unit))
        levels = compress_levels(unit.base, first, again, unit.levels)
        record_levels(unit, levels, sample, self._tally)
        return compressor.poison(replace(levels[self._sent], cf=unit.cf), poisoned)


def decode(
    bucket: Bucket, units: Sequence[Unit], received: Received, memory: BucketMemory, rank: int
) -> Flag:
    """Take what this rank has sent off the memory, and write the mean into the bucket: one unit
    after the other, so that the decoded payloads of no more than one are in memory. Nothing comes
    of a poisoned step, as a device finds out. Returns whether a payload is corrupt."""
    poisoned = received.poisoned
    corrupt: Flag = False
    for i, (unit, payloads) in enumerate(zip(units, received.payloads, strict=True)):
        compressor = unit.compressor
        means = [compressor.void(payload, poisoned) for payload in payloads]
        own = means[rank] if received.own is None else compressor.void(received.own[i], poisoned)
        memory.take_off(unit, own)
        memory.clear_velocity(unit, own, poisoned)
        mean = bucket.work[unit.start : unit.stop]
        if isinstance(compressor, RoundsCompressor):
            compressor.write_to(mean, means[0])
            continue
        mean.zero_()
        for payload in means:
            compressor.add_to(mean, payload, received.scale)
            corrupt = corrupt | payload.corrupt
    memory.settle()
    if received.remainder is not None:
        memory.keep(received.remainder)
    return corrupt


def _compress(unit: Unit, a: Tensor, compressor: Compressor, cf: float) -> Payload:
    return compressor.compress(a, cf, unit.key)


def _write_back(bucket: Bucket, buffer: Tensor) -> None:
    """Bring a half-precision bucket up to date with its wider copy."""
    if bucket.work is not buffer:
        buffer.copy_(bucket.work)
