"""Gradients are exchanged in every step: autograd gets the ranks' mean, and the optimizer steps."""

from __future__ import annotations

import itertools
import logging

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.optim import Optimizer

from adaptive.memory.handover import loss_scale
from adaptive.memory.step_watch import Groups, sample
from adaptive.model.parameters import ModelParameter, is_left_to_ddp, local, shaped
from adaptive.network.collectives import drain
from adaptive.step.averager import Averager
from adaptive.sync.base import Synchroniser
from compressors.kernels import kernels_for

log = logging.getLogger("adaptive")


class AsDDP(Synchroniser):
    """What DDP does without a hook, with the bytes counted and nothing measured: for models that
    are too small for statistics."""

    def reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        exchange, buffer = self.averager.exchange, bucket.buffer()
        if is_left_to_ddp(buffer, bucket.parameters()):
            done = exchange.mean_as_ddp(buffer)
        else:
            exchange.count_floats(buffer.numel())
            done = exchange.total(buffer.div_(exchange.world_size))
        return done

    def end_backward(self, last: Future[Tensor]) -> Future[Tensor]:
        self.averager.controller.count_dense_step()
        return last


class EveryStepSync(Synchroniser):
    """The mean of gradients takes the gradients' place."""

    _stood: tuple[Tensor, int, Tensor] | None = None
    """A parameter after a backward that no optimizer has stepped by yet, its number of writes, and
    a sample of it: after the first one without an optimizer, and while `p.grad` holds velocities.
    """

    def __init__(self, averager: Averager) -> None:
        super().__init__(averager)
        # Of the backward under way, buckets whose mean DDP may keep from some parameters.
        self._withheld: list[tuple[list[ModelParameter], Future[Tensor]]] = []

    def reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        if bucket.index() == 0:
            self._notice_moves()
            self._withheld.clear()
            self.averager.begin(self.alike)
        return self._mean(bucket)

    def _mean(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """The ranks' mean of a bucket's gradients, in units of the scaled loss as they came. The
        memory is in units of the loss itself."""
        averager, stopwatch = self.averager, self.averager.controller.stopwatch
        entered, now = stopwatch.timestamps(), averager.exchange_now
        buffer, of, stream = bucket.buffer(), bucket.parameters(), averager.pipeline.stream
        scale_now = loss_scale(averager.scaler, buffer.device)
        work, scale = buffer, None
        parameters: list[ModelParameter] = []
        if is_left_to_ddp(buffer, of):
            done = averager.mean_as_ddp(bucket)
        else:
            if (scale := scale_now) is not None:  # in float32: small gradients do not underflow
                work = (buffer if buffer.dtype == torch.float64 else buffer.float()).div_(scale)
            parameters += map(averager.parameters.find, of)
            done = averager.mean(bucket, work, parameters, scale)
        stopwatch.hook_left(entered, drain(averager.pipeline.waits))

        def finish(future: Future[Tensor]) -> Tensor:
            with averager.noting_failure(now):
                mean = future.value()
                if scale is not None:
                    mean = buffer.copy_(mean.mul_(scale))
                stopwatch.bucket_done(drain(averager.pipeline.decoded))
                stream.keep(work, scale_now)
                return mean

        finished = done.then(finish)
        moves = "velocity" in averager.memory.now.keeps
        if moves and parameters and averager.parameters.maybe_unused():
            self._withheld.append((parameters, finished))
        return finished

    @torch.no_grad()
    def _hand_over_withheld(self) -> None:
        """DDP has brought the means into `p.grad`, but for parameters that no rank has used. SGD
        moves these, too, if the script has set their gradients to zero."""
        for parameters, finished in self._withheld:
            pieces = finished.value().split([parameter.numel for parameter in parameters])
            grads, means = [], []
            for parameter, piece in zip(parameters, pieces, strict=True):
                grad = parameter.tensor.grad
                if grad is not None and not parameter.sharded:
                    grads.append(grad)
                    means.append(shaped(piece, parameter.tensor))
            if grads:
                torch._foreach_copy_(grads, means)
        self._withheld.clear()

    def _notice_moves(self) -> None:
        """Before a backward: have parameters moved since the last one, and no optimizer stepped?
        Then nobody has handed it over, or the script climbs by what it takes for a gradient (SAM).
        """
        if self._stood is None:
            return
        (p, writes, before), self._stood = self._stood, None
        now, averager = sample(local(p).detach()), self.averager
        same = kernels_for(now).look(lambda: torch.equal(before, now), True)
        if p._version == writes and same:
            return
        if averager.optimizers:
            averager.watch.note_change()
            return
        told = averager.memory.not_seen()
        if told and averager.exchange.first and averager.watch.is_new(told):
            log.warning("%s", told)

    def end_backward(self, last: Future[Tensor]) -> Future[Tensor]:
        averager, stopwatch = self.averager, self.averager.controller.stopwatch
        first = averager.controller.step == 0 and not averager.optimizers
        entered, scale = stopwatch.timestamps(), loss_scale(averager.scaler, averager.device)
        averager.end()
        # After `detach` nobody would compare gradients.
        memory = averager.memory.now
        changed = averager.compresses or not memory.handover.leaves_gradients
        compare = changed and bool(memory.keeps) and not averager.controller.forced_dense
        if first or (compare and "velocity" in memory.keeps):
            for p in itertools.islice(averager.parameters, 1):  # there may be none
                self._stood = p, p._version, sample(local(p).detach()).clone()

        def waited() -> None:
            averager.pipeline.stream.backward_waited()
            self._hand_over_withheld()

        averager.watch.backward_ends(scale, compare, waited)
        stopwatch.hook_left(entered, drain(averager.pipeline.waits))
        return last

    def before_step(self, optimizer: Optimizer, groups: Groups) -> Groups | None:
        averager, memory = self.averager, self.averager.memory
        self._stood = None
        if not averager.optimizers:
            told = memory.not_handed_over(optimizer)
            if told and averager.exchange.first and averager.watch.is_new(told):
                log.warning("%s", told)
        if not averager.watch.ours:
            return None  # another DDP's gradients, say, which no memory has changed
        changed = memory.now.handover.before_step(optimizer, groups)
        if memory.now.handover.other_optimizer:
            averager.watch.note_change()
        return changed

    def discard(self) -> None:
        self._stood = None
        self.averager.memory.discard()

    def abandon(self) -> None:
        self._stood = None
        self._withheld.clear()

    def start_over(self) -> bool:
        self._stood = None
        kept = self.averager.parameters.values()
        waits = any(each.filled or each.velocity is not None for each in kept)
        self.averager.memory.discard()
        self.averager.requested.follow(self.averager.memory.now)
        return waits
