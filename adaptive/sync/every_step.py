"""Synchronisers that exchange gradients in every step: autograd gets the ranks' mean gradient."""

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
    """The synchroniser of models that are too small for statistics. It exchanges gradients as DDP
    does without a hook, and counts the bytes."""

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
    """The synchroniser that replaces the gradients by the ranks' mean gradient.

    In a compressed step on a device, several of DDP's buckets are joined to one piece, which is
    compressed and exchanged as a whole: the number of launches of an exchange does not depend on
    its size. Dense steps exchange each of DDP's buckets by itself."""

    _at_backward: tuple[Tensor, int, Tensor] | None = None
    """A parameter, its number of writes and a sample of its values at the end of the last backward;
    None once an optimizer has stepped. Set after the first backward if no optimizer was handed
    over, and after every backward while `p.grad` holds velocities."""

    def __init__(self, averager: Averager) -> None:
        super().__init__(averager)
        # Exchanges of this backward whose mean DDP may not write to every `p.grad`: (parameters,
        # future of their mean).
        self._withheld: list[tuple[list[ModelParameter], Future[Tensor]]] = []
        # Buckets that will be exchanged as one piece, and the futures that DDP got for them.
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
        """A future of a bucket's mean. The bucket may be exchanged together with later buckets."""
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
        """Exchange the piece: a future of the ranks' mean. Gradients and mean are in units of the
        scaled loss, the memory is in units of the unscaled loss."""
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
            for each, buffer in zip(promised, buffers, strict=False):  # none for a single bucket
                each.set_result(buffer)
            return mean

        finished = done.then(finish)
        if "velocity" in averager.memory.now.keeps and averager.parameters.maybe_unused():
            self._withheld.append((of, finished))
        return finished

    @torch.no_grad()
    def _hand_over_withheld(self) -> None:
        """Write the means to every `p.grad` that exists. DDP writes them, too, except those of
        parameters that no rank has used. But SGD moves an unused parameter whose gradient is zero,
        not None."""
        for parameters, finished in self._withheld:
            # DDP has waited for the buckets' futures. The piece's future may be set a moment later.
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
        """Called before a backward: notice parameters that have moved since the last backward
        although no known optimizer has stepped. Either the optimizer was not handed over, or the
        script itself has moved the parameters along `p.grad`, as SAM does."""
        if self._at_backward is None:
            return
        (p, writes, before), self._at_backward = self._at_backward, None
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
        entered = stopwatch.timestamps()
        scale = loss_scale(averager.scaler, averager.parameters.device)
        averager.end()
        memory = averager.memory.now
        changed = averager.compresses or not memory.handover.leaves_gradients
        # After `detach` nothing is compared: the watch's hooks around optimizer steps are removed.
        watched = not averager.controller.forced_dense
        compare = watched and changed and bool(memory.keeps)
        if (watched and first) or (compare and "velocity" in memory.keeps):
            for p in itertools.islice(averager.parameters, 1):  # a model may have none
                self._at_backward = p, p._version, sample(local(p).detach()).clone()

        def waited() -> None:
            averager.pipeline.stream.backward_waited()
            self._hand_over_withheld()

        cf, known = averager.controller.plan.send, averager.parameters
        moving = [p for p in averager.watch.few if memory.momentum(known[p], cf) is not None]
        averager.watch.backward_ends(scale, compare, waited, moving)
        stopwatch.hook_left(entered, drain(averager.pipeline.waits))
        return last

    def before_step(self, optimizer: Optimizer, groups: Groups) -> Groups | None:
        averager, memory = self.averager, self.averager.memory
        self._at_backward = None
        if not averager.optimizers:
            averager.warn_once(memory.not_handed_over(optimizer))
        if not averager.watch.ours:
            return None  # no memory has changed these gradients (those of another DDP, say)
        changed = memory.now.handover.before_step(optimizer, groups)
        if memory.now.handover.other_optimizer:
            averager.watch.note_change()
        return changed

    def stop(self) -> None:
        if self._at_backward is not None:
            self.averager.memory.now.handover.show_gradients()

    def discard(self) -> None:
        self._at_backward = None
        self.averager.memory.discard()

    def abandon(self) -> None:
        self._at_backward = None
        self._forget()

    def _forget(self) -> None:
        """Drop what an earlier backward has left behind when it raised."""
        self._withheld.clear()
        self._piece.clear()
        self._promised.clear()

    def start_over(self) -> bool:
        self._at_backward = None
        kept = self.averager.parameters.values()
        waits = any(each.has_residual or each.velocity is not None for each in kept)
        self.averager.memory.discard()
        return waits
