"""Gradients are exchanged in every step: autograd gets the ranks' mean, and the optimizer steps."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.optim import Optimizer

from adaptive.memory.handover import Groups, loss_scale
from adaptive.memory.step_watch import sample
from adaptive.model.chunks import joined_nbytes
from adaptive.model.parameters import ModelParameter, is_left_to_ddp, local, shaped
from adaptive.network.collectives import drain
from adaptive.network.link import new_future
from adaptive.step.averager import Averager
from adaptive.sync.base import Synchroniser
from compressors.kernels import kernels_for


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
    """The mean of gradients takes the gradients' place.

    On a device several of DDP's buckets are compressed and exchanged as one piece: an exchange
    costs the host as many launches whatever its size. Steps that are not compressed take DDP's
    buckets as they come."""

    _stood: tuple[Tensor, int, Tensor] | None = None
    """A parameter after a backward that no optimizer has stepped by yet, its number of writes, and
    a sample of it: after the first one without an optimizer, and while `p.grad` holds velocities.
    """

    def __init__(self, averager: Averager) -> None:
        super().__init__(averager)
        # Of the backward under way, pieces whose mean DDP may keep from some parameters.
        self._withheld: list[tuple[list[ModelParameter], Future[Tensor]]] = []
        # Buckets that wait to be exchanged as one piece, and the futures that DDP has of them.
        self._piece: list[dist.GradBucket] = []
        self._promised: list[Future[Tensor]] = []

    def reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        if bucket.index() == 0:
            self._notice_moves()
            self._forget()
            self.averager.begin(self.alike)
        return self._mean(bucket)

    def _mean(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """A future of the ranks' mean of a bucket's gradients."""
        averager, buffer = self.averager, bucket.buffer()
        stopwatch, now = averager.controller.stopwatch, averager.exchange_now
        entered = stopwatch.timestamps()

        def finish(future: Future[Tensor]) -> Tensor:
            with averager.noting_failure(now):
                return future.value()

        if is_left_to_ddp(buffer, bucket.parameters()):
            done = averager.exchange.mean_as_ddp(buffer).then(finish)
        else:
            done = self._join(bucket)
        if self._piece and bucket.is_last():
            self._exchange()
        stopwatch.hook_left(entered, drain(averager.pipeline.waits))
        return done

    def _join(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """A future of the mean of a bucket, which may wait for those that follow."""
        buffer = bucket.buffer()
        if self._piece and self._piece[0].buffer().dtype != buffer.dtype:
            self._exchange()
        self._piece.append(bucket)
        least = joined_nbytes(buffer.device) if self.averager.compresses else 0
        full = sum(each.buffer().nbytes for each in self._piece) >= least or bucket.is_last()
        if full and len(self._piece) == 1:
            return self._exchange()
        self._promised.append(new_future(buffer.device))
        done = self._promised[-1]
        if full:
            self._exchange()
        return done

    def _exchange(self) -> Future[Tensor]:
        """Make the ranks' mean of the piece, in units of the scaled loss as its gradients came. The
        memory is in units of the loss itself."""
        averager, stopwatch = self.averager, self.averager.controller.stopwatch
        buckets, self._piece = self._piece, []
        promised, self._promised = self._promised, []
        now, stream = averager.exchange_now, averager.pipeline.stream
        buffers = [bucket.buffer() for bucket in buckets]
        flat = torch.cat(buffers) if promised else buffers[0]
        scale = loss_scale(averager.scaler, flat.device)
        work = flat
        if scale is not None:  # in float32: small gradients do not underflow
            work = (flat if flat.dtype == torch.float64 else flat.float()).div_(scale)
        of = [averager.parameters.find(p) for bucket in buckets for p in bucket.parameters()]
        done = averager.mean(buckets[-1], work, of, scale)

        def finish(future: Future[Tensor]) -> Tensor:
            try:
                with averager.noting_failure(now):
                    mean = future.value()
                    if scale is not None:
                        mean = flat.copy_(mean.mul_(scale))
                    if promised:
                        pieces = mean.split([buffer.numel() for buffer in buffers])
                        torch._foreach_copy_(buffers, list(pieces))
                    stopwatch.bucket_done(drain(averager.pipeline.decoded))
                    stream.keep(flat, work, scale)
            except BaseException as error:
                for each in promised:
                    each.set_exception(error)  # type: ignore[arg-type]  # torch's stub is wrong
                raise
            for each, buffer in zip(promised, buffers, strict=False):  # of one bucket there is none
                each.set_result(buffer)
            return mean

        finished = done.then(finish)
        moves = "velocity" in averager.memory.now.keeps
        if moves and averager.parameters.maybe_unused():
            self._withheld.append((of, finished))
        return finished

    @torch.no_grad()
    def _hand_over_withheld(self) -> None:
        """DDP has brought the means into `p.grad`, but for parameters that no rank has used. SGD
        moves these, too, if the script has set their gradients to zero."""
        for parameters, finished in self._withheld:
            # DDP has waited for the buckets of a piece; the piece itself may be a moment later.
            pieces = finished.wait().split([parameter.numel for parameter in parameters])
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
        averager.warn_once(averager.memory.not_seen())

    def end_backward(self, last: Future[Tensor]) -> Future[Tensor]:
        averager, stopwatch = self.averager, self.averager.controller.stopwatch
        first = averager.controller.step == 0 and not averager.optimizers
        entered, scale = (
            stopwatch.timestamps(),
            loss_scale(averager.scaler, averager.parameters.device),
        )
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
            averager.warn_once(memory.not_handed_over(optimizer))
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
        self._forget()

    def _forget(self) -> None:
        """What is left of a backward that has raised."""
        self._withheld.clear()
        self._piece.clear()
        self._promised.clear()

    def start_over(self) -> bool:
        self._stood = None
        kept = self.averager.parameters.values()
        waits = any(each.has_residual or each.velocity is not None for each in kept)
        self.averager.memory.discard()
        return waits
