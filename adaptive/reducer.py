"""What happens to one DDP bucket: compress, exchange, decode, and keep the memory right.

1. Look at the local gradients: a bucket with a non-finite gradient is poisoned, so that it ends
   non-finite on every rank, as in dense DDP, and no memory is touched by it.
2. Accumulate each gradient into the memory and compress the sum: at the smallest CF wanted from
   the full tensor, at larger ones from that payload (multi-level compression).
3. Exchange all payloads of the bucket (`adaptive.exchange`), in one or two collectives.
4. When all is there (on a thread of the process group): decode the mean into the bucket's buffer,
   and take what was sent off the memory - or undo step 2 if any rank poisoned the bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import isfinite, nan

import torch
from torch import Tensor
from torch.futures import Future

from adaptive.bucket import Bucket, Grain, StepCFs, Unit, lay_out
from adaptive.bucket_step import BucketStep, OnMean
from adaptive.exchange.collectives import Exchange
from adaptive.exchange.pipeline import Pipeline
from adaptive.exchange.strategies import Strategy
from adaptive.foreign import only
from adaptive.memory.error_feedback import NoMemory
from adaptive.multilevel import measure_levels, strided_sample
from adaptive.parameters import Scratch, Slot
from adaptive.statistics.on_request import Instruments
from adaptive.statistics.vector import Tally
from compressors import Compressor
from compressors.base import Payload

Send = Callable[[Tensor], Future[Tensor]]


class BucketReducer:
    """Reduces buckets with one compressor, one memory and one exchange.

    grain: what is compressed as one. settling: backwards after which DDP cuts no buckets anew.
    clip_norm: largest norm of a parameter's local gradient, already scaled by 1/sqrt(N); or None.
    """

    def __init__(
        self,
        grain: Grain,
        memory: NoMemory,
        exchange: Exchange,
        pipeline: Pipeline,
        instruments: Instruments,
        settling: int,
        clip_norm: float | None = None,
    ) -> None:
        self._grain = grain
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
        return self._grain.joined and not self._is_early(step)

    def end_backward(self) -> None:
        """The next one may have other buckets."""
        self._backwards += 1

    def _is_early(self, step: int) -> bool:
        """Buckets may yet change. Also what was an early step before it was resumed is one: then
        DDP may be through with that, after backwards that were thrown away."""
        return min(step, self._backwards) < self._settling

    def plain(
        self, buffer: Tensor, slots: Sequence[Slot], on_mean: OnMean | None
    ) -> Future[Tensor]:
        """All-reduce the gradients as they are. on_mean: told every slot and its mean (flat)."""

        def finish(future: Future[Tensor]) -> Tensor:
            mean = future.value()
            if on_mean and _all_finite(mean):
                views = mean.split([slot.param.numel() for slot in slots])
                for slot, view in zip(slots, views, strict=True):
                    on_mean(slot, view)
            return mean

        return self._mean(buffer).then(finish)

    def dense(
        self,
        buffer: Tensor,
        slots: Sequence[Slot],
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
        if untouched and all(self._memory.idle(slot) for slot in slots):
            tally.grad = nan  # not measured
            return self.plain(buffer, slots, on_mean)
        bucket = self._open(buffer, slots, step, tally)
        sending = [part for part in bucket.parts if bucket.finite and not part.held]
        units = self._grain.cut(bucket, cfs) if tally.cfs and bucket.finite else []
        samples = [strided_sample(bucket.work[u.start : u.stop]).clone() for u in units]
        for part in sending:
            self._memory.fold(part.slot, part.grad)
        if not bucket.finite:  # the others' memories are not to take it for a mean
            bucket.work.fill_(nan)
        for unit, sample in zip(units, samples, strict=True):
            if not unit.held:
                direct = partial(_compress, unit, bucket.work[unit.start : unit.stop])
                measure_levels(unit, direct, direct, sample, tally)
        _write_back(bucket, buffer)

        def finish(future: Future[Tensor]) -> Tensor:
            mean = only(future.value())
            arrived = _all_finite(mean)
            for part in sending:
                if arrived:
                    self._memory.commit_dense(part.slot)
                else:
                    self._memory.undo_fold(part.slot)
            if sending and not arrived:  # what was folded in is not to be taken for sent
                mean.fill_(nan)
            if on_mean and arrived:
                for part in bucket.parts:
                    on_mean(part.slot, mean[part.start : part.stop])
            return mean

        return (send or self._mean)(buffer).then(finish)

    def compressed(
        self,
        buffer: Tensor,
        slots: Sequence[Slot],
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
        bucket = self._open(buffer, slots, step, tally)
        if self._grain.joined and self._memory.keeps_residual:
            lay_out(slots, self._memory.keeps_velocity)
        shards = self._exchange.world_size if strategy.sharded else 1
        work = BucketStep(
            index,
            strategy.collectives,
            leader,
            bucket,
            self._grain.cut(bucket, cfs, shards),
            cfs.measured.index(cfs.send),
            tally,
            self._memory,
            self._exchange,
            self._scratch,
            on_mean,
        )
        rounds = strategy.start(work)
        done = self._pipeline.run(rounds, strategy.collectives, bucket.work, last)

        def finish(future: Future[Tensor]) -> Tensor:
            future.value()  # raises what went wrong
            _write_back(bucket, buffer)
            return buffer

        return done.then(finish)

    def _mean(self, buffer: Tensor) -> Future[Tensor]:
        return self._exchange.all_reduce(buffer.div_(self._exchange.world_size))

    def _open(self, buffer: Tensor, slots: Sequence[Slot], step: int, tally: Tally) -> Bucket:
        wide = buffer.dtype in (torch.float32, torch.float64)
        work = buffer if wide else buffer.float()
        early = self._is_early(step)
        bucket = Bucket.open(work, slots, step, self._memory, tally, self._clip_norm, early)
        self._instruments.observe(bucket, tally)
        return bucket


def _compress(unit: Unit, a: Tensor, compressor: Compressor, cf: float) -> Payload:
    return compressor.compress(a, cf, unit.key)


def _write_back(bucket: Bucket, buffer: Tensor) -> None:
    """Bring a half-precision bucket up to date with its wider copy."""
    if bucket.work is not buffer:
        buffer.copy_(bucket.work)


def _all_finite(tensor: Tensor) -> bool:
    return isfinite(float(tensor.sum(dtype=torch.float64))) or bool(torch.isfinite(tensor).all())
