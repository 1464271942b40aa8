"""The synchroniser of parameter space: each rank's optimizer steps with local gradients, and the
ranks exchange the updates (see `adaptive/memory/updates.py`). In a dense step the ranks exchange
gradients, as DDP does."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import inf, isfinite, nan

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.optim import Optimizer

from adaptive.memory.handover import Groups, is_torchs_own, loss_scale
from adaptive.memory.model_memory import unmeasured
from adaptive.memory.updates import UpdateHandover
from adaptive.model.chunks import Chunk, Destination
from adaptive.model.parameters import is_left_to_ddp
from adaptive.model.uniting import unite_gradients
from adaptive.network.collectives import drain
from adaptive.network.link import done_with
from adaptive.network.timing import Span
from adaptive.step.averager import Averager
from adaptive.step.reducer import Step
from adaptive.sync.every_step import EveryStepSync
from compressors.kernels import all_finite, kernels_for, squared_norm
from compressors.kernels.blocks import Flag, Scalar, either, fill_if

UNDER_WAY = 4
"""The number of chunks that are exchanged at a time. If one more is under way, the oldest mean is
waited for. (A strategy of more collectives than this has more chunks under way.) A chunk's buffers
are freed once its mean has moved the parameters."""

BY_GRADIENTS = (
    "From now on gradients are exchanged, with plain error feedback. With an optimizer that "
    "divides by a second moment this costs quality at large CFs: compare with a dense run"
)
REPLACED = (
    "{new} steps parameters of {old}, which was handed over: the steps of {new} are compressed "
    "with all of their momentum, uncorrected. To have the momentum corrected, call detach() before "
    "this step, and attach a new AdaptiveCompressor with the new optimizer"
)
UNSERVED = -1e9
"""The number that a rank adds to the statistic `changed` if its inspection of an optimizer has
found something. The ranks' mean of `changed` is negative in that step."""


class OwnStepSync(EveryStepSync):
    """The synchroniser of parameter space. In a compressed step autograd gets the local gradient
    back, and the ranks exchange the updates after the optimizers' steps. With Adam at int8 and int4
    the ranks exchange gradients, as with SGD."""

    _nonfinite: Flag = False  # some gradient of this rank in this backward is not finite

    def __init__(self, averager: Averager) -> None:
        super().__init__(averager)
        # The error memory of a server (`Means.memory`) cannot hold updates and gradients in turn.
        self.handover.always_updates |= averager.sizes.choice.means.memory is not None
        # On a device: the squared norms of this backward's buckets, summed when it ends.
        self._energies: list[Tensor] = []

    @property
    def handover(self) -> UpdateHandover:
        handover = self.averager.memory.now.handover
        assert isinstance(handover, UpdateHandover)
        return handover

    @property
    def by_updates(self) -> bool:
        """This step exchanges updates, not gradients."""
        cf = self.averager.controller.plan.send
        return self.averager.compresses and self.handover.exchanges_updates(cf)

    # -- a backward --

    def reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        if bucket.index() == 0:
            self.make_up()
            self._nonfinite = False
            self._energies.clear()
            if self.handover.state.uninspected:
                self._agree_on_inspection()
            self.averager.begin(self.alike)
            if self.averager.controller.changed < 0:
                self._agree_on_inspection()
        if not self.by_updates:
            return self._mean(bucket)
        stopwatch = self.averager.controller.stopwatch
        entered = stopwatch.timestamps()
        done = self._own_gradient(bucket)
        stopwatch.hook_left(entered, ())
        return done

    def _agree_on_inspection(self) -> None:
        """The ranks exchange what they found in optimizers that are not torch's (a collective)."""
        averager = self.averager
        if why := self.handover.agree_on_inspection(averager.exchange):
            self._switch_to_gradients(why)
        elif not self.handover.state.uninspected:
            others = (of for of in averager.optimizers if not is_torchs_own(of))
            averager.warn_once(unmeasured(others))

    def _switch_to_gradients(self, why: str) -> None:
        """Exchange gradients from now on. RuntimeError if a script asked for memory="updates"."""
        averager, controller = self.averager, self.averager.controller
        if averager.settings.memory.options.kind == "updates":
            raise RuntimeError(f"memory='updates' does not go with this optimizer: {why}")
        controller.note(f"{why}. {BY_GRADIENTS}")
        if averager.compresses:  # the plan of this step may have been made already
            self.handover.begin_step(averager.exchange, controller.plan.send)

    def _own_gradient(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """A future of the local gradients of a bucket, whose norm is added to the statistics. Some
        gradients are replaced by the ranks' mean: those that only DDP can average, and those of
        parameters that no optimizer passed to `attach` steps."""
        buffer, of = bucket.buffer(), bucket.parameters()
        if is_left_to_ddp(buffer, of):
            return self.averager.exchange.mean_as_ddp(buffer)
        averager, tally = self.averager, self.averager.controller.tally
        energy, scale = squared_norm(buffer), loss_scale(averager.scaler, buffer.device)
        sums = averager.controller.plan.accumulate and averager.controller.plan.local_sum
        if isinstance(energy, Tensor) and not sums:
            self._energies.append(energy)
        else:
            self._nonfinite = either(self._nonfinite, _not_finite(buffer, energy))
            self._add_energy(torch.as_tensor(energy, device=tally.vector.device))
        left = self.handover.without_optimizer(of)
        if not (sums or left or self.handover.state.residuals_hold_gradients):
            return done_with(buffer)
        parameters = [averager.parameters.find(p) for p in of]
        pieces = buffer.split([p.numel for p in parameters])
        if sums:
            for parameter, piece in zip(parameters, pieces, strict=True):
                own = piece if scale is None else piece / scale
                averager.requested.sums.add(parameter, own, self._nonfinite)
        if self.handover.state.residuals_hold_gradients:
            self.handover.add_residuals(parameters, pieces, scale)
        return self._mean_of(buffer, [pieces[i] for i in left]) if left else done_with(buffer)

    def _add_energy(self, energy: Tensor) -> None:
        """Add a squared norm (0-dim) of gradients to the statistics, without the loss scale."""
        scale = loss_scale(self.averager.scaler, energy.device)
        energy = energy if scale is None else energy / scale.square()
        self.averager.controller.tally.at("grad").add_(energy)

    def _mean_of(self, buffer: Tensor, pieces: Sequence[Tensor]) -> Future[Tensor]:
        """Replace these pieces of `buffer` by the ranks' dense mean: a future of `buffer`."""
        exchange = self.averager.exchange
        flat = torch.cat([*pieces]).div_(exchange.world_size)
        exchange.count_floats(flat.numel())

        def finish(future: Future[Tensor]) -> Tensor:
            for piece, mean in zip(pieces, future.value().split([*map(len, pieces)]), strict=True):
                piece.copy_(mean)
            return buffer

        return exchange.total(flat).then(finish)

    def end_backward(self, last: Future[Tensor]) -> Future[Tensor]:
        """In a step that exchanges updates the ranks agree whether some gradient is not finite. If
        so, all ranks get NaN in the last bucket, and a script or a `GradScaler` acts in the same
        way on all ranks."""
        averager, controller = self.averager, self.averager.controller
        if not self.by_updates:
            return super().end_backward(last)
        entered, stream = controller.stopwatch.timestamps(), averager.pipeline.stream
        if self._energies:
            energy = torch.stack(self._energies).sum()
            self._add_energy(energy)
            self._nonfinite = either(self._nonfinite, ~(energy < inf))
            self._energies.clear()
        flag, self._nonfinite = self._nonfinite, False
        controller.tally.at("nonfinite").add_(flag)
        self.handover.backward_ends(controller.plan.send)
        nonfinite = averager.exchange.any_rank(flag, averager.parameters.device)
        any_nonfinite: Flag = False

        def waited() -> None:
            stream.backward_waited()
            controller.stopwatch.backward_waited()
            self.handover.mark_nonfinite(any_nonfinite)

        averager.watch.backward_ends(None, False, waited)

        def finish(future: Future[Tensor]) -> Tensor:
            nonlocal any_nonfinite
            # On a device the current stream has waited for the collective of the flags. By
            # `last.wait()` the stream also waits for the last bucket. (After `collect_all` it would
            # have waited for neither.)
            sum_of_flags, gradients = future.value(), last.wait()
            flag = any_nonfinite = kernels_for(sum_of_flags).flag(sum_of_flags[0] > 0)
            fill_if(flag, gradients._values() if gradients.is_sparse else gradients, nan)
            stream.keep(sum_of_flags, flag)
            return gradients

        controller.stopwatch.hook_left(entered, ())
        return nonfinite.then(finish)

    # -- a step --

    def forward_begins(self) -> None:
        self.make_up()

    def step_begins(self, optimizer: Optimizer) -> None:
        self.handover.step_begins(optimizer)

    def before_step(self, optimizer: Optimizer, groups: Groups) -> Groups | None:
        if not self.averager.watch.ours:  # gradients of a backward outside DDP
            self.handover.steps.was_exchanged = False
        if old := self.handover.replaced_by(optimizer):
            new = type(optimizer).__name__
            self.averager.warn_once(REPLACED.format(new=new, old=old))
        return self.handover.before_step(optimizer, groups)

    def after_step(self, optimizer: Optimizer) -> None:
        if self.handover.after_step(optimizer):
            self.averager.watch.note_change(UNSERVED)
        steps = self.handover.steps
        if steps.pending and steps.all_stepped:
            self.make_up()

    def make_up(self) -> None:
        """Exchange the updates of the optimizers' steps, and move the parameters by the mean. Does
        nothing if no exchange is pending.

        Every rank makes one such exchange for each compressed backward. A rank whose script leaves
        the step out makes the exchange before its next forward, because other ranks may have
        stepped."""
        handover, averager, controller = self.handover, self.averager, self.averager.controller
        steps = handover.steps
        steps.forget_raised()
        if not steps.pending:
            return
        averager.check_whole()
        steps.release()
        stopwatch, tally, cfs = controller.stopwatch, controller.tally, controller.cfs
        entered, stream = stopwatch.timestamps(), averager.pipeline.stream
        on_stream = stream.hook_call(last=True)
        with stopwatch.held_up(), on_stream, averager.noting_failure():
            energy_of_gradients = tally.at("grad").clone()
            tally.at("stepped").fill_(float(steps.all_stepped))
            on_mean = None if controller.plan.local_sum else averager.listeners()[0]
            step = Step(controller.step, cfs, tally, on_mean, updates=True)
            strategy = averager.strategy
            sparse = averager.sizes.granularity.compressor.at(cfs.send).selects
            under_way: deque[tuple[Chunk, Destination | None, Future[Tensor]]] = deque()
            arrivals: list[Span] = []
            # With more than `most` chunks under way, the oldest has issued all its collectives.
            most = max(UNDER_WAY, strategy.collectives(averager.exchange.world_size))
            for i, chunk in enumerate(handover.chunks):
                work, energy = handover.outgoing(chunk)
                to = handover.destination(chunk) if sparse and on_mean is None else None
                args = chunk.parameters, strategy, i, to, energy
                under_way.append((chunk, to, averager.reducer.compressed(step, work, *args)))
                # A rank that has not stepped applies means after `end_step` only: it learns from
                # the statistics whether another rank has stepped.
                if len(under_way) > most and steps.any_stepped:
                    arrivals.append(self._apply_mean(*under_way.popleft()))
            averager.pipeline.finish()
            tally.at("grad").copy_(energy_of_gradients)  # the reducer has added those of updates
            controller.end_step(averager.watch.take_found())
            arrivals += [self._apply_mean(*each) for each in under_way]
        # Backward's stream has waited for the hook's stream, which has waited for all callbacks.
        stream.backward_waited()
        handover.exchanged()
        averager.warn_once(handover.lost)
        stopwatch.decoded(drain(averager.pipeline.decoded))
        stopwatch.hook_left(entered, drain(averager.pipeline.waits), arrivals)

    def _apply_mean(self, chunk: Chunk, to: Destination | None, done: Future[Tensor]) -> Span:
        """Wait for a chunk's mean update, and move the chunk's parameters by it. Returns the span
        of the wait."""
        averager, controller = self.averager, self.averager.controller
        began = controller.stopwatch.timestamps()
        mean = done.wait()
        arrived = controller.stopwatch.timestamps()
        averager.pipeline.stream.waited_for(done)
        self.handover.apply(chunk, mean if to is None else None, controller.ranks_that_stepped)
        return began, arrived

    # -- between steps --

    @property
    def owes(self) -> bool:
        return self.handover.steps.pending

    def abandon(self) -> None:
        super().abandon()
        self._nonfinite = False
        self.handover.abandon()

    def unite(self) -> Sequence[Optimizer] | None:
        self.make_up()
        differed = self.handover.agree(self.averager.exchange)
        return self.handover.optimizers if differed else None

    def stop(self) -> None:
        self.make_up()
        unite_gradients([*self.averager.parameters.values()], self.averager.exchange)


def _not_finite(x: Tensor, energy: Scalar) -> Flag:
    """Whether `x` has an element that is not finite. energy: the squared norm of `x`."""
    if isinstance(energy, Tensor):
        return ~energy.isfinite()
    return not isfinite(energy) and not all_finite(x)
