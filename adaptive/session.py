"""A compressor at work on one model: what is known only once the model and its group are."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from math import nan, sqrt
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from adaptive.agreement import agree, compare_replicas
from adaptive.bucket import Granularity
from adaptive.config import Settings, whole_buckets
from adaptive.controller import TOO_SMALL, Controller
from adaptive.delay import DelayedAveraging, KeptByParameters
from adaptive.exchange.choice import ExchangeChoice
from adaptive.exchange.collectives import Exchange, drain
from adaptive.exchange.link import EmulatedLink, measure_link
from adaptive.exchange.pipeline import HookStream, Pipeline, done_with
from adaptive.exchange.topology import GossipChoice
from adaptive.gossip import Gossip
from adaptive.hook import send_through
from adaptive.local_steps import AUTO_IS_ONE, CHOICES, LocalSteps, check_local_state
from adaptive.memory.error_feedback import Residual
from adaptive.memory.handover import describe, learning_rate, loss_scale
from adaptive.memory.model_memory import ModelMemory
from adaptive.memory.momentum import SGDMomentum
from adaptive.memory.updates import UpdateMemory
from adaptive.pace import DenseTimer
from adaptive.parameters import ModelParameters, local, travel_as_they_are
from adaptive.reducer import Reducer, Step
from adaptive.sizes import Sizes, make_header, start_policy
from adaptive.state import SavedPart, check_like, check_state, load_parts, undone_on_error
from adaptive.statistics.requested import RequestedStatistics
from adaptive.statistics.timing import Stopwatch, Timestamps
from adaptive.step_watch import (
    CHANGED,
    FALLEN_BACK,
    OTHER_OPTIMIZER,
    UNSCALED,
    Groups,
    StepWatch,
)
from adaptive.summary import Summary
from adaptive.timeline.recorder import Recorder
from adaptive.uniting import Agreed, averaged
from compressors.base import CorruptPayload
from compressors.kernels import all_finite, squared_norm
from compressors.kernels.blocks import Flag, either, fill_if, is_host
from policies import DENSE
from policies import state as saved
from policies.step_time import overlapped

if TYPE_CHECKING:
    from adaptive.integrations.fsdp import ShardedReplica

log = logging.getLogger("adaptive")

BROADCASTS = (
    "DDP sends the model's buffers (batch norm's statistics?) in every forward, local steps or not:"
    " DDP(model, broadcast_buffers=False)"
)

JOIN = (
    "DDP's join() is not supported: a rank that has no more inputs takes part in DDP's collectives "
    "only, and compression needs others, too. Give all ranks as many batches (DistributedSampler, "
    "drop_last=True), and leave join() out"
)

SMALL = 0.01
"""Of a dense step's bytes, what statistics may be."""


ATTACHED: weakref.WeakSet[Session] = weakref.WeakSet()
"""Sessions that compress, until they are detached."""


class Session:
    """One compressor at work on one model: wires the parts together.

    model: is not kept alive: its hook keeps the session alive. everyone: where a model is sharded,
    all ranks of all replicas, which decide alike; `group` has those that hold the same shard.

    A collective. ValueError, TypeError or RuntimeError on every rank if a rank cannot start or
    the ranks differ.
    """

    def __init__(
        self,
        settings: Settings,
        group: dist.ProcessGroup,
        model: DistributedDataParallel | ShardedReplica,
        optimizers: Sequence[Optimizer] = (),
        scaler: GradScaler | None = None,
        everyone: dist.ProcessGroup | None = None,
    ) -> None:
        self.settings = settings
        self._model = weakref.ref(model)
        # DDP rebuilds its buckets after the first backward, with a static graph after the second.
        self._settling = isinstance(model, DistributedDataParallel) * (1 + model.static_graph)
        link = EmulatedLink(settings.link) if settings.link else None
        self.exchange = Exchange(group, link, everyone)
        world_size, tells = self.exchange.world_size, self.exchange.place == 0
        self._parameters = ModelParameters(model, settings.residual_dtype)
        self.agreed = Agreed(self._parameters)
        self._watch = StepWatch(
            self._parameters, self._step_begins, self._before_step, self._after_step
        )
        self._nonfinite: Flag = False  # gradients of this rank, in the backward under way
        self._memory = ModelMemory(settings.memory, self._parameters, world_size)
        self._gave_up_momentum = False
        self._failed: tuple[int, Exception] | None = None  # the step, and why
        device = self._parameters.device
        timestamps = Timestamps.of(settings.clock, device)
        self._pipeline = Pipeline(timestamps, HookStream(device))
        self._choice = ExchangeChoice(
            settings.base,
            settings.exchange,
            world_size,
            settings.down_cf,
            settings.server_memory,
        )
        as_one = whole_buckets(settings.granularity, settings.base, settings.policy)
        self._granularity = Granularity(settings.base, as_one, settings.dense_below, settings.rungs)
        hooks = settings.hooks.keys()
        self._sizes = Sizes(self._parameters, self._granularity, hooks, self._choice, world_size)
        self._local: LocalSteps | None = None
        self._left: LocalSteps | None = None  # the ranks meet with the next step
        self._gossip: Gossip | None = None
        self._agree(self._prepare, optimizers, scaler)
        if self._choice.measures:
            self._choice.link = measure_link(self.exchange, settings.clock, device)
        if world_size == 1:
            log.warning("world size is 1: there is nobody to send gradients to")
        self.controller = Controller(
            settings.policy,
            self.exchange,
            Stopwatch(timestamps),
            Recorder(settings.timeline, tells, self._header, settings.samples_per_step or 1.0),
            self._requested,
            self._sizes,
            lambda: learning_rate(next(iter(self._optimizers), None)),
            lambda: self._memory.now,
            device,
            self._numbers,
            lambda: self._local is not None,
            DenseTimer(
                self._sizes.wire_bytes,
                world_size,
                settings.overlap,
                settings.clock,
                settings.link,
                lambda: self._choice.link,
            ),
            # What waits for a mean that is under way must not wait for statistics behind it.
            max(0, settings.delay - 1),
        )
        self.controller.take_steps(self._numbers[0])
        every_step = self._local is None and len(self._numbers) == 1
        if settings.may_stay_dense and every_step and not settings.debug:
            self._stay_dense_if_small()
        self._start_watching()

    def _stay_dense_if_small(self) -> None:
        """Dense for good, without measuring anything, if statistics would be more than 1% of the
        bytes of a dense step: the same on every rank."""
        controller = self.controller
        if controller.statistics_nbytes() > SMALL * self._sizes.dense_nbytes():
            controller.too_small = True
            self._memory.release()  # which holds nothing yet
            self._use_memory()
            log.info("%s", TOO_SMALL)

    def _agree(
        self, prepare: Callable[[], str], optimizers: Sequence[Optimizer], scaler: GradScaler | None
    ) -> None:
        """Run `prepare` on every rank, and attach if none fails and all describe the same. A
        collective; the error of a rank is raised on all."""
        self._optimizers, self._scaler = optimizers, scaler
        handed_over = f"optimizer {describe(optimizers)}, scaler={scaler is not None}"
        try:
            agree(lambda: f"{prepare()}\n{handed_over}", self.exchange.everyone)
        except Exception:
            self._memory.release()
            self._optimizers = ()
            raise
        ATTACHED.add(self)
        self._reduce_with(self.settings.clip_norm)
        every, warnings = self.settings.local_steps, []
        if self.settings.gossip is not None:
            self._gossip_from_here(self.settings.gossip)
        elif self._apart_always:
            self._step_apart(int(every))
        else:
            warnings.append(self._memory.warning(optimizers))
        if every == "auto" and self._numbers == (1,):
            warnings.append(AUTO_IS_ONE)
        model = self.model if every != 1 or self.settings.delay or self._gossip else None
        if model and model.broadcast_buffers and any(b.numel() for b in model.module.buffers()):
            warnings.append(BROADCASTS)
        for warning in filter(None, warnings):
            if self.exchange.place == 0 and self._watch.is_new(warning):
                log.warning("%s", warning)

    def _prepare(self) -> str:
        """Start the policy and choose the memory; describes what must be alike on all ranks."""
        settings, base, parameters = self.settings, self.settings.base, self._parameters
        self._check_free()
        for parameter in parameters.values():
            strides = zip(parameter.tensor.stride(), parameter.tensor.shape, strict=True)
            if any(stride == 0 and size > 1 for stride, size in strides):
                raise ValueError(
                    f"model: parameter {parameter.name!r} must have a place in memory for each of "
                    f"its elements, got strides {parameter.tensor.stride()} for shape "
                    f"{tuple(parameter.tensor.shape)}, as expand() makes them: clone() it first"
                )
        self._choose_memory(self._optimizers)
        self._numbers: tuple[int, ...] = (1,)
        if settings.local_steps != "auto":
            self._numbers = (int(settings.local_steps),)
        elif self._memory.now.may_part:
            self._numbers = CHOICES
        neighbours = ""
        if settings.gossip is not None:
            topology = settings.gossip.make(self.exchange.world_size)
            self._choice.messages, neighbours = topology.messages, f"gossip on {topology}"
        context = start_policy(settings, self._sizes, self._memory.now.name, self._numbers)
        self._header = lambda: make_header(settings, self._sizes, context, self._memory.now.name)
        as_one, supported = self._granularity.whole_buckets, self._sizes.supported
        not_shadowed = {DENSE, *settings.hooks, *settings.rungs}
        candidates = {*map(supported, settings.policy.candidates())} - not_shadowed
        self._requested = RequestedStatistics(
            settings.policy, parameters.values(), sorted(candidates), as_one, settings.shadow_sample
        )
        skips = parameters.maybe_unused() or "velocity" in self._memory.now.keeps
        if as_one and not base.keeps_zeros and skips:
            raise ValueError(
                f"granularity must be 'layer' for base {base.shown!r} with momentum correction, "
                f"find_unused_parameters or static_graph: it makes something of the zeros of a "
                f"parameter that sends nothing; got 'bucket'"
            )
        ends = {*map(supported, settings.cf_range)} - {DENSE, *settings.hooks}
        sizes = [p.numel() for p in parameters]
        lines = (
            *settings.describe(self._memory.now.name),
            f"{len(sizes)} parameters of {sum(sizes)} elements: "
            f"{', '.join(str(tuple(p.shape)) for p in parameters)}",
            *filter(None, [neighbours]),
            *(
                f"payload bytes at CF {cf:g}: {[base.payload_nbytes(size, cf) for size in sizes]}"
                for cf in sorted(candidates | ends)
            ),
        )
        return "\n".join(lines)

    def _check_free(self) -> None:
        """RuntimeError if another session compresses some of these parameters, or uses the same
        policy or compressor object."""
        if not self._taken():
            return
        gc.collect()  # the other may be garbage that nobody has found yet
        if taken := self._taken():
            raise RuntimeError(f"{taken} another AdaptiveCompressor: detach() that one first")

    def _taken(self) -> str:
        for other in ATTACHED:
            for tensor, parameter in self._parameters.items():
                if tensor in other._parameters:
                    return f"model: the gradient of parameter {parameter.name!r} is compressed by"
            theirs = other.settings.keeps()
            for each in self.settings.keeps():
                if any(each is another for another in theirs):
                    return f"{each!r}: a policy or compressor works for one model, and this one for"
        return ""

    def _choose_memory(self, optimizers: Sequence[Optimizer]) -> None:
        """ValueError if it does not go with what was asked for."""
        strange = [o for o in optimizers if not self._watch.is_ours(o)]
        if strange and len(self._parameters):
            raise ValueError(
                f"optimizer must be one of the model's parameters, got a "
                f"{type(strange[0]).__name__} with none of those that the ranks exchange"
            )
        every, delay = self.settings.local_steps, self.settings.delay
        name, value, none = ("delay", delay, 0) if delay else ("local_steps", every, 1)
        if value != none:
            self._check_all_compressed(f"{name}={value!r}")
        if self.settings.gossip is not None:
            self._check_gossip(optimizers)
        # With local steps the optimizer sees its rank's own gradients, and keeps its momentum.
        own = self._apart_always or self.settings.gossip is not None
        self._memory.choose(() if own else optimizers)
        self._feeds_back = bool(self._memory.now.keeps)
        if delay and self._feeds_back:
            self._memory.now = KeptByParameters(self._parameters.maybe_unused)
        wanted = self.settings.residual_dtype
        if wanted != torch.float32 and "velocity" in self._memory.now.keeps:
            raise ValueError(
                f"residual_dtype must be torch.float32 with momentum correction, which memory="
                f"'residual' does without; got {wanted}"
            )

    def _check_all_compressed(self, option: str) -> None:
        """ValueError if DDP alone can average some gradients."""
        if names := ", ".join(self._parameters.as_they_are):
            raise ValueError(
                f"{option} does not go with sparse gradients or complex parameters, which DDP "
                f"itself averages in every step: the model has {names}"
            )

    def _check_gossip(self, optimizers: Sequence[Optimizer]) -> None:
        """ValueError unless each rank's own step of one optimizer moves all of the model."""
        if len(optimizers) > 1:
            raise ValueError(
                f"exchange='gossip' needs one optimizer of all parameters, got {len(optimizers)}"
            )
        optimizer = next(iter(optimizers), None)
        self._check_all_compressed("exchange='gossip'")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError(
                "exchange='gossip' does not go with LBFGS, of whose backwards one rank may need "
                "more than another in a step"
            )
        groups = [] if optimizer is None else optimizer.param_groups
        moved = {p for group in groups for p in group["params"]}
        left = [p.name for tensor, p in self._parameters.items() if tensor not in moved]
        if left:
            raise ValueError(
                f"exchange='gossip' needs an optimizer of all parameters, after whose step they "
                f"are sent: attach(model, optimizer=...); got {describe(optimizers)}, without "
                f"{', '.join(left[:3])}{', ...' if len(left) > 3 else ''}"
            )

    def _gossip_from_here(self, choice: GossipChoice) -> None:
        """From here on each rank steps by itself, and exchanges with its neighbours."""
        self._gossip = Gossip(
            self._parameters.values(),
            choice,
            choice.make(self.exchange.world_size),
            self._granularity,
            self.exchange,
        )

    @property
    def _apart_always(self) -> bool:
        """Each rank steps by itself, whatever a policy says."""
        return self.settings.local_steps not in (1, "auto") or self.settings.delay > 0

    def _step_apart(self, every: int) -> LocalSteps:
        """From here on each rank steps by itself, and `every` so many steps they exchange."""
        parameters = list(self._parameters.values())
        if self.settings.delay:
            self._local = DelayedAveraging(parameters, self.settings, self._feeds_back)
        else:
            self._local = LocalSteps(parameters, every, self.settings)
        return self._local

    def _part_or_meet(self) -> None:
        """At the first bucket of a backward, as the ranks have agreed with the last exchange: each
        steps by itself from here on, or they exchange each step again."""
        controller, local = self.controller, self._local
        if len(self._numbers) == 1:
            return
        if controller.local_steps > 1:
            self._end_meeting()
        if controller.local_steps > 1 and local is None:
            memory = self._memory.now
            assert isinstance(memory, UpdateMemory)
            self._step_apart(controller.local_steps).part(memory)
            self._memory.release()
        elif controller.local_steps == 1 and local is not None:
            self._memory.choose(self._optimizers)
            memory = self._memory.now
            assert isinstance(memory, UpdateMemory)
            local.meet(memory)
            self._local, self._left = None, local
            controller.meet()
        else:
            return
        self._use_memory()

    def _end_meeting(self) -> None:
        """The ranks stand alike now, if they were to with the next step."""
        if self._left is not None:
            self._left.conclude()
            self._left = None

    @property
    def _updates(self) -> UpdateMemory | None:
        """The memory, where the ranks' optimizers step by themselves in every step."""
        return memory if isinstance(memory := self._memory.now, UpdateMemory) else None

    def _step_begins(self, optimizer: Optimizer) -> None:
        """See `StepWatch`."""
        if self._updates is not None and self._left is None:
            self._updates.step_begins(optimizer)

    def _before_step(self, optimizer: Optimizer, groups: Groups) -> Groups | None:
        """See `StepWatch`."""
        self.agreed.before_step(optimizer)
        if self._gossip is not None and self._gossip.open and optimizer in self._optimizers:
            self.check_whole()
            stopwatch = self.controller.stopwatch
            entered = stopwatch.timestamps()
            with self._noting_failure(self.controller.step):
                self._gossip.before_step()
            stopwatch.hook_left(entered, [(entered, stopwatch.timestamps())])
        local = self._local or self._left
        if local is not None:
            local.before_step(optimizer)
            if isinstance(local, DelayedAveraging):  # so long the step has waited
                self.controller.stopwatch.bucket_done(drain(self._pipeline.decoded))
        self._left = None  # the ranks have met
        memory = self._memory.now
        if local is None and self._gossip is None and not self._optimizers:
            told = self._memory.not_handed_over(optimizer)
            if told and self.exchange.place == 0 and self._watch.is_new(told):
                log.warning("%s", told)
        if not self._watch.ours and self._updates is None:
            return None  # another DDP's gradients, say, which no memory has changed
        changed = memory.before_step(optimizer, groups)
        if isinstance(memory, SGDMomentum) and memory.foreign:
            self._watch.note_change()
        return changed

    def _after_step(self, optimizer: Optimizer) -> None:
        """See `StepWatch`."""
        if self._gossip is not None and optimizer in self._optimizers:
            self._tell_neighbours()
        updates = self._updates
        if updates is not None:
            updates.after_step(optimizer)
            if updates.pending and updates.all_stepped:
                self._exchange_updates()

    def _exchange_updates(self) -> None:
        """In parameter space: exchange what the optimizers' steps have done, and move all ranks by
        the mean of it. Once for each backward, on every rank: where a step was left out, before
        the next forward, since other ranks may have made theirs."""
        updates, controller = self._updates, self.controller
        if updates is None or not updates.pending:
            return
        self.check_whole()
        stopwatch, tally, cfs = controller.stopwatch, controller.tally, controller.cfs
        entered = stopwatch.timestamps()
        with self._pipeline.stream.hook_call(last=True), self._noting_failure(controller.step):
            grad = tally.at("grad").clone()  # of gradients, not of updates
            tally.at("stepped").fill_(float(updates.all_stepped))
            add = self._requested.sums.add if controller.plan.accumulate else None
            on_mean = None if controller.plan.local_sum else add
            step = Step(controller.step, cfs, tally, on_mean, updates=True)
            strategy = self._choice.pick(
                self._sizes.bucket_nbytes(cfs), self._granularity.by(cfs.send)
            )
            done, last = [], len(updates.chunks) - 1
            for i, chunk in enumerate(updates.chunks):
                work = updates.outgoing(chunk)
                args = chunk.parameters, strategy, i, i == last
                done.append(self._reducer.compressed(step, work, *args))
            tally.at("grad").copy_(grad)
            controller.end_step(self._watch.take_found())
            sent = stopwatch.timestamps()
            for chunk, future in zip(updates.chunks, done, strict=True):
                updates.apply(chunk, future.wait(), controller.ranks_that_stepped)
            updates.exchanged()
        waits = [(sent, stopwatch.timestamps()), *drain(self._pipeline.waits)]
        stopwatch.hook_left(entered, waits)

    def _own_gradient(self, bucket: dist.GradBucket, updates: UpdateMemory) -> Future[Tensor]:
        """In parameter space, the hook's work in a compressed step: autograd gets this rank's own
        gradient back. Parameters that no optimizer handed over steps get the mean.

        If some rank's gradients are not finite, all ranks' are not: what a script or a `GradScaler`
        does then is the same on all ranks."""
        buffer, of, tally = bucket.buffer(), bucket.parameters(), self.controller.tally
        parameters = [self._parameters.find(p) for p in of]
        pieces = buffer.split([p.local.numel() for p in parameters])
        self._nonfinite = either(self._nonfinite, all_finite(buffer) ^ True)
        scale = loss_scale(self._scaler, buffer.device)
        energy = torch.as_tensor(squared_norm(buffer), device=tally.vector.device)
        tally.at("grad").add_(energy if scale is None else energy / scale.square())
        if self.controller.plan.accumulate and self.controller.plan.local_sum:
            for parameter, piece in zip(parameters, pieces, strict=True):
                own = piece if scale is None else piece / scale
                self._requested.sums.add(parameter, own, self._nonfinite)
        done = done_with(buffer)
        if apart := [pieces[i] for i in updates.apart(of)]:
            done = self._mean_apart(buffer, apart)
        if not bucket.is_last():
            return done
        nonfinite = self._end_own_backward(updates)

        def finish(futures: Future[list[Future[Tensor]]]) -> Tensor:
            _, sum_of_flags = (future.value() for future in futures.value())
            flag = bool(sum_of_flags) if is_host(sum_of_flags.device) else sum_of_flags[0] > 0
            fill_if(flag, buffer, nan)
            self._pipeline.stream.keep(sum_of_flags, flag)
            return buffer

        return torch.futures.collect_all([done, nonfinite]).then(finish)

    def _end_own_backward(self, updates: UpdateMemory) -> Future[Tensor]:
        """After the last bucket; a future of whether some rank's gradients are not finite."""
        flag, self._nonfinite = self._nonfinite, False
        self.controller.tally.at("spoiled").add_(torch.as_tensor(flag))
        updates.backward_ends(self.controller.plan.send)
        self._reducer.end_backward()
        self._watch.backward_ends(None, False, self._pipeline.stream.backward_waited)
        return self.exchange.any_rank(flag, self.device)

    def _mean_apart(self, buffer: Tensor, pieces: Sequence[Tensor]) -> Future[Tensor]:
        """The ranks' mean of some pieces of a bucket, uncompressed; a future of the bucket."""
        flat = torch.cat([*pieces]).div_(self.exchange.world_size)
        self.exchange.count_floats(flat.numel())

        def finish(future: Future[Tensor]) -> Tensor:
            for piece, mean in zip(pieces, future.value().split([*map(len, pieces)]), strict=True):
                piece.copy_(mean)
            return buffer

        return self.exchange.all_reduce(flat).then(finish)

    def _tell_neighbours(self) -> None:
        """With gossip, after the step that belongs to the last backward, or where that was left
        out, once: other ranks may have made theirs."""
        gossip, controller = self._gossip, self.controller
        if gossip is None or not gossip.open:
            return
        stopwatch = controller.stopwatch
        entered = stopwatch.timestamps()
        with self._noting_failure(controller.step):
            gossip.after_step(controller.step, controller.cfs, controller.tally)
            sent = stopwatch.timestamps()
            gossip.end_step(controller.cfs.send)
            arrived = stopwatch.timestamps()
            controller.tally.at("grad").fill_(nan)  # nobody looks at gradients
            controller.end_step(self._watch.take_found())
        gossip.open = False
        stopwatch.hook_left(entered, [(sent, arrived)])

    def _make_up_step(self) -> None:
        """If the step after the last backward was left out here: no rank may wait for this one."""
        if self._gossip is not None and self._gossip.open:
            self._gossip.before_step()
            self._tell_neighbours()

    def _gossip_backward(self, bucket: dist.GradBucket, gossip: Gossip) -> Future[Tensor]:
        """The hook's work with gossip: gradients stay what they are."""
        if bucket.index() == 0:
            self._make_up_step()
            self._begin_step()
        if bucket.is_last():
            gossip.open = True
            self._reducer.end_backward()
        return done_with(bucket.buffer())

    def _use_memory(self) -> None:
        """From here on the memory is another one."""
        self._reducer.memory = self._memory.now
        self._requested.follow(self._memory.now)

    def detach(self) -> None:
        """Dense from now on; velocities go back to the optimizer, the residual with the next
        step."""
        self._exchange_updates()
        self._make_up_step()
        self.controller.flush()
        self.controller.forced_dense = True
        ATTACHED.discard(self)
        if self._forward_hook is not None:
            self._forward_hook.remove()
        self._end_meeting()
        if self._local is not None:
            self._local.unite(self.exchange, self._optimizers)
            self._local = None
        if self._gossip is not None and self._optimizers:
            self._gossip.unite(self._optimizers[0])
            self._gossip = None
        self.controller.take_steps(1)
        self._memory.release(self.exchange)
        self._watch.end()
        self._optimizers = ()
        self._reduce_with(clip_norm=None)

    def reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """The hook's work for one bucket; returns a future of the mean gradient. RuntimeError once
        the exchange of an earlier step has failed."""
        self.check_whole()
        model = self.model
        if isinstance(model, DistributedDataParallel) and model._join_config.enable:
            raise RuntimeError(JOIN)
        on_stream = self._pipeline.stream.hook_call(bucket.is_last())
        with on_stream, self._noting_failure(self.controller.step):
            return self._reduce(bucket)

    def reduce_now(self, bucket: dist.GradBucket) -> Tensor:
        """The mean itself, for whoever takes it from the hook's hands, as FSDP does: on a device
        the current stream waits for it. `bucket` is never the last; `end_backward` comes after."""
        done, stopwatch = self.reduce(bucket), self.controller.stopwatch
        with self._pipeline.stream.hook_call(last=True):
            with self._noting_failure(self.controller.step):
                self._pipeline.finish()
            entered = stopwatch.timestamps()
            mean = done.wait()
            self._pipeline.waits.append((entered, stopwatch.timestamps()))
            stopwatch.hook_left(entered, drain(self._pipeline.waits))
        return mean

    def end_backward(self) -> None:
        """After the last `reduce_now` of a backward."""
        self.check_whole()
        if self.controller.too_small:
            self.controller.count_dense_step()
            return
        updates = self._updates
        with self._pipeline.stream.hook_call(last=True), self._noting_failure(self.controller.step):
            if updates is None or not self._sends_updates:
                self._end_step(loss_scale(self._scaler, self._parameters.device))
                return
            nonfinite = self._end_own_backward(updates).wait()
            grads = [local(p.grad) for p in self._parameters if p.grad is not None]
            for grad in grads[-1:]:
                fill_if(bool(nonfinite) if is_host(grad.device) else nonfinite[0] > 0, grad, nan)

    @property
    def _sends_updates(self) -> bool:
        """In parameter space, in a step that is compressed."""
        send = self.controller.plan.send
        return self._updates is not None and send not in (DENSE, *self.settings.hooks)

    def gradients_arrive(self) -> None:
        """A backward begins to write them, where torch's hooks on parameters are not called."""
        self._watch.gradient_arrives()

    @contextmanager
    def _noting_failure(self, step: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._failed = self._failed or (step, error)
            raise

    def check_whole(self) -> None:
        """RuntimeError after an exchange that failed: some ranks may have its mean, others not,
        and what the memory holds may be neither of the step before nor of the step after."""
        if self._failed is not None:
            step, error = self._failed
            raise RuntimeError(
                f"the gradient exchange of step {step} failed, and what the ranks hold may differ "
                f"since: start anew, or load a checkpoint on all ranks ({error})"
            )

    def _reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        controller = self.controller
        if self._gossip is not None:
            return self._gossip_backward(bucket, self._gossip)
        if controller.too_small:
            done = self._mean_as_ddp(bucket)
            if bucket.is_last():
                controller.count_dense_step()
            return done
        if bucket.index() == 0:
            self._exchange_updates()
            self._part_or_meet()
        local = self._local
        delayed = local if isinstance(local, DelayedAveraging) else None
        if local is not None and not local.due:
            if bucket.is_last():
                local.backward_ends()
                self._reducer.end_backward()
                controller.skipped += 1
            return done_with(bucket.buffer())
        if bucket.index() == 0:
            if local is not None:
                local.begin_exchange()
            self._begin_step()
        stopwatch, entered = controller.stopwatch, controller.stopwatch.timestamps()
        buffer, of = bucket.buffer(), bucket.parameters()
        as_it_is = travel_as_they_are(buffer, of)
        updates = self._updates
        if updates is not None and self._sends_updates and not as_it_is:
            done = self._own_gradient(bucket, updates)
            stopwatch.hook_left(entered, ())
            return done
        parameters = [] if as_it_is else [self._parameters.find(p) for p in of]
        scale = loss_scale(self._scaler, buffer.device) if local is None else None
        work = buffer if local is None else local.outer_gradients(bucket.index(), parameters)
        if scale is not None and not as_it_is:  # in float32: unscaled gradients do not underflow
            work = (buffer if buffer.dtype == torch.float64 else buffer.float()).div_(scale)
        plan, cfs = controller.plan, controller.cfs
        add = self._requested.sums.add if plan.accumulate else None
        on_mean, on_local = (None, add) if plan.local_sum else (add, None)
        if delayed is not None:
            delayed.on_mean, on_mean = on_mean, None
        step = Step(controller.step, cfs, controller.tally, on_mean, on_local)
        hook = self.settings.hooks.get(plan.send)
        if as_it_is:
            done = self.exchange.mean_as_it_is(buffer)
            if bucket.is_last():
                self._pipeline.finish()
        elif hook is not None:
            send = partial(send_through, hook, plan.send, bucket, scale, self.exchange)
            done = self._reducer.dense(step, work, parameters, send)
        elif plan.send == DENSE:
            done = self._reducer.dense(step, work, parameters)
        else:
            nbytes = self._sizes.bucket_nbytes(cfs)
            strategy = self._choice.pick(nbytes, self._granularity.by(plan.send))
            strategy = strategy if delayed is None else delayed.remembering(strategy)
            done = self._reducer.compressed(
                step, work, parameters, strategy, bucket.index(), bucket.is_last()
            )
        if bucket.is_last():
            self._end_step(scale)
        stopwatch.hook_left(entered, drain(self._pipeline.waits))
        steps = 1 if local is None else controller.local_steps
        overlap = self.settings.delay or overlapped(self.settings.overlap, steps)

        def finish(future: Future[Tensor]) -> Tensor:
            with self._noting_failure(step.number):
                mean = future.value()
                if local is not None and not overlap:
                    local.arrived(parameters, mean)
                    mean = buffer
                elif scale is not None and not as_it_is:
                    mean = buffer.copy_(mean.mul_(scale))
                if delayed is None:
                    stopwatch.bucket_done(drain(self._pipeline.decoded))
                self._pipeline.stream.keep(work, scale)
                return mean

        if local is None or not overlap:
            return done.then(finish)
        local.under_way(bucket.index(), parameters, done.then(finish), overlap)
        return done_with(buffer)

    def _mean_as_ddp(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """What DDP does without a hook."""
        buffer = bucket.buffer()
        if travel_as_they_are(buffer, bucket.parameters()):
            return self.exchange.mean_as_it_is(buffer)
        self.exchange.count_floats(buffer.numel())
        return self.exchange.all_reduce(buffer.div_(self.exchange.world_size))

    def _begin_step(self) -> None:
        """What comes before the first bucket."""
        controller = self.controller
        controller.begin_step()
        if controller.corrupt:
            raise CorruptPayload(
                "a payload that no compressor can have sent has arrived on some rank: its "
                "bytes were changed on the way (a device finds this out some steps late)"
            )
        if not controller.carrying:
            self._memory.emptied()
        if controller.plan.send in (DENSE, *self.settings.hooks):
            self._memory.now.settle(self.exchange)
        if every := self.settings.debug:
            compared = () if controller.step % every else self._alike()
            compare_replicas(controller.step, controller.plan, compared, self.exchange.group)
            if self.exchange.shards > 1:
                compare_replicas(controller.step, controller.plan, (), self.exchange.everyone)
        # Falling back is decided on an agreed statistic, warnings are each rank's own.
        self._nonfinite = False
        agreed, memory, watch = controller.agreed, self._memory.now, self._watch
        sends_velocities = "velocity" in memory.keeps
        if agreed.changed > 0 and sends_velocities:
            foreign = memory.foreign if isinstance(memory, SGDMomentum) else ""
            controller.note(
                f"{OTHER_OPTIMIZER.format(foreign) if foreign else CHANGED}; {FALLEN_BACK}"
            )
            self._fall_back()
        if agreed.unscaled > 0 and self._scaler is None and watch.is_new(UNSCALED):
            controller.note(UNSCALED)

    def _alike(self) -> Iterable[tuple[str, Tensor]]:
        """What must be the same on all ranks, by parameter name."""
        if self._gossip is not None:
            return ()
        local = self._local or self._left
        values = local.anchors if local is not None else {}
        return ((p.name, values.get(p, p.local)) for p in self._parameters.values())

    def _end_step(self, scale: Tensor | None) -> None:
        """What comes after the last bucket's own collective."""
        controller, watch = self.controller, self._watch
        controller.end_step(watch.take_found())
        self._reducer.end_backward()
        if self._local is not None:  # gradients are the optimizer's, whatever a script does to them
            self._local.backward_ends()
            self._local.every = controller.local_steps
            return
        # After `detach` nobody would compare them.
        compare = bool(self._memory.now.keeps) and not controller.forced_dense
        compare = compare and self._updates is None  # whose gradients are the script's
        watch.backward_ends(scale, compare, self._pipeline.stream.backward_waited)

    def averaged(self) -> AbstractContextManager[None]:
        """The model holds the mean of the ranks' parameters, which with local steps and with gossip
        differ."""
        if self._gossip is not None:
            self._make_up_step()
            self._gossip.settle()
            return averaged(self._gossip.parameters, self.exchange)
        return nullcontext() if self._local is None else self._local.averaged(self.exchange)

    def summary(self) -> Summary:
        """Totals so far."""
        return replace(self.controller.summary(), gossip=self._told_of_gossip())

    def explain(self, detail: bool) -> str:
        """The present state in words."""
        told = self.controller.explain(detail)
        if self._gossip is None:
            return told
        _, *rest = told.splitlines()
        return "\n".join([self.summary().headline, *rest, self._told_of_gossip()])

    def _told_of_gossip(self) -> str:
        """Which it is, and how fast it brings ranks together."""
        gossip = self._gossip
        return "" if gossip is None else f"{gossip.algorithm} on a topology: {gossip.topology}"

    def close(self) -> None:
        """Take in the last step, wait for what is under way, and close the timeline."""
        try:
            if self._local is not None and self._failed is None:
                self._local.wait()
            if self._gossip is not None and self._failed is None:
                self._make_up_step()
                self._gossip.settle()
        finally:
            self.controller.close()

    def discard(self) -> None:
        """Forget what the memory holds: the last backward's gradients are thrown away."""
        self.check_whole()
        if self._local is None:  # else what it holds is of other steps
            self._memory.discard()

    def _fall_back(self) -> None:
        """Plain error feedback, and the optimizer's own momentum, from the next step on."""
        self._gave_up_momentum = True
        self._memory.release()
        self._use_memory()

    def state_dict(self) -> dict[str, Any]:
        """This rank's state by parameter name."""
        self.check_whole()
        self._exchange_updates()
        self._make_up_step()
        self.controller.flush()
        self._memory.now.conclude()
        self._end_meeting()
        parts = self._parts(self._memory.now.name, self._local is not None)
        values = {name: part.save() for name, part in parts.items()}
        return {**self._identity(), "resharded_from": None, **values}

    def _parts(
        self, kind: str, apart: bool, resharded: bool = False, same_clock: bool = True
    ) -> dict[str, SavedPart]:
        """What is saved, in the order in which it is: local steps move what memories hold. Of a
        state that is to be loaded, kind: its memory's name; apart: in it each rank steps by itself;
        resharded: it was made for another number of ranks."""
        base, memory, controller = self.settings.base, self._memory, self.controller
        return {
            "local": self._apart_part(apart),
            "compressor": SavedPart(base.state_dict, base.load_state_dict),
            **self._choice.parts(self.device, resharded),
            "moments": SavedPart(
                memory.moments_state, partial(memory.check_moments, kind=kind), memory.load_moments
            ),
            "memory": SavedPart(
                memory.state_dict, partial(memory.check, kind=kind), memory.load_state_dict
            ),
            **self._requested.parts(self._parameters.values()),
            "controller": SavedPart(
                controller.state_dict, partial(controller.load_state_dict, same_clock=same_clock)
            ),
        }

    def _apart_part(self, apart: bool) -> SavedPart:
        """Of ranks that step by themselves. apart: see `_parts`."""
        if self._gossip is not None:
            gossip = self._gossip
            return SavedPart(gossip.state_dict, gossip.check, gossip.load_state_dict)
        if not self._apart_always and self.settings.local_steps != "auto":
            return SavedPart(dict, lambda state: check_like("local", state, {}))

        def load(state: Mapping[str, Any]) -> None:
            if self._local is not None:
                self._local.load_state_dict(state)
                self._local.every = self.controller.local_steps

        local, parameters = self._local, self._parameters.values()
        nothing = {"backwards": 0, "arrived": {}, "anchors": {}, "moving": {}}
        return SavedPart(
            (lambda: nothing) if local is None else local.state_dict,
            lambda state: check_local_state(state, parameters, apart),
            load,
        )

    def load_state_dict(
        self, state: Mapping[str, Any], same_clock: bool, checking: AbstractContextManager[None]
    ) -> None:
        """Go on from `state_dict()`. ValueError, with nothing changed, if it does not fit.

        checking: entered while that can still be so; what it raises at its end undoes all, too."""
        if self._local is not None:
            self._local.settle()  # or it would change what is loaded
        if self._gossip is not None:
            with suppress(Exception):  # of neighbours that have failed
                self._gossip.settle()
        controller = self.controller
        trials = self.settings.base, controller.policy, controller.dense_timer
        with undone_on_error(trials, controller.loaded_parts()), checking:
            expected, apart = self._expected(state)
            resharded = saved.read(state, "resharded_from", int | None) is not None
            parts = self._parts(expected["memory_kind"], apart, resharded, same_clock)
            check_state(state, expected, parts)
            if resharded:
                controller.policy.rescale()
                controller.dense_timer.rescale()
        self._follow(expected["memory_kind"], apart)
        load_parts(state, parts)
        self._left = self._failed = None

    def _expected(self, state: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
        """What must be the same in this state, and whether each rank steps by itself in it."""
        # That it fell back was told in the run that the state is of, and need not be found again.
        expected, kind = self._identity(), state.get("memory_kind")
        if kind == Residual.name and self._memory.now.may_fall_back:
            expected["memory_kind"] = kind
        elif self._gave_up_momentum and kind == "momentum":
            raise ValueError(
                "state: it is of a run with momentum correction, which this compressor has given "
                "up, since p.grad was changed: attach a new AdaptiveCompressor, and load it there"
            )
        apart = self._local is not None
        if len(self._numbers) > 1 and not self.controller.forced_dense:
            apart = bool(saved.read(state, "local", Mapping).get("anchors"))
            expected["memory_kind"] = Residual.name if apart else UpdateMemory.name
        return expected, apart

    def _follow(self, kind: str, apart: bool) -> None:
        """Go over to the memory, and to the way to step, of a state that is about to be loaded."""
        if apart != (self._local is not None):
            if apart:
                self._memory.release()
                self._step_apart(self.controller.local_steps)
            else:
                self._memory.choose(self._optimizers)
                self._local = None
            self._use_memory()
        elif kind == Residual.name and self._memory.now.may_fall_back:
            self._fall_back()
            if self.exchange.place == 0:
                log.warning("the state is of a run with plain error feedback; %s", FALLEN_BACK)

    @property
    def memory_kind(self) -> str:
        """The name of the memory in use."""
        return self._memory.now.name

    def supported(self, cf: float) -> float:
        """The nearest CF that a step can be at."""
        return self._sizes.supported(cf)

    @property
    def model(self) -> DistributedDataParallel | ShardedReplica | None:
        """None once it is garbage."""
        return self._model()

    @property
    def detached(self) -> bool:
        """`detach` has been called: dense for good."""
        return self.controller.forced_dense

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self._parameters.device

    def unite(self) -> dict[str, Any]:
        """Between steps (a collective, dense): model and optimizer become the same on all ranks, so
        that those of one rank may be saved for all. With updates that is of the optimizer's
        moments, and what waits moves the parameters now; with local steps, a delay and gossip of
        the parameters, too. Returns both (see `Agreed`); nothing where they were the same."""
        self._exchange_updates()
        self._end_meeting()
        optimizers = list(self._optimizers)
        if self._gossip is not None and optimizers:
            self._gossip.unite(optimizers[0])
        elif self._local is not None:
            optimizers = self._local.unite(self.exchange, optimizers)
        elif not self._memory.now.agree(self.exchange):
            return {}
        return self.agreed.state_dict(optimizers)

    def take_up(self, agreed: Mapping[str, Any]) -> None:
        """What `unite` has returned, in the run that the state is of."""
        self.agreed.load_state_dict(agreed, self._optimizers)

    def _identity(self) -> dict[str, Any]:
        """What must be the same when a state is loaded."""
        return {
            "world_size": self.exchange.world_size,
            "rank": self.exchange.rank,
            "base": self.settings.base.name,
            "policy": self.settings.policy.name,
            "memory_kind": self._memory.now.name,
            "local_steps": self.settings.local_steps,
            "parameters": {p.name: list(p.local.shape) for p in self._parameters.values()},
            **self._shard(),
            **({} if self.settings.gossip is None else {"gossip": str(self.settings.gossip)}),
            **({"delay": self.settings.delay} if self.settings.delay else {}),
        }

    def _shard(self) -> dict[str, Any]:
        """Which part of the model is here, if it is not all of it."""
        shards = self.exchange.shards
        return {} if shards == 1 else {"shard": f"{self.exchange.place % shards} of {shards}"}

    def _reduce_with(self, clip_norm: float | None) -> None:
        """From here on with the memory as it is now."""
        if clip_norm is not None:
            clip_norm /= sqrt(self.exchange.world_size)
        self._requested.follow(self._memory.now)
        self._reducer = Reducer(
            self._granularity,
            self._memory.now,
            self.exchange,
            self._pipeline,
            self._requested,
            self._settling,
            clip_norm,
        )

    def _start_watching(self) -> None:
        """What the script does with the gradients, and when the model's forward begins."""
        self._watch.start()
        mark, model = self.controller.stopwatch.forward, self.model
        mark.begins = weakref.WeakMethod(self._exchange_updates)
        self._forward_hook = None if model is None else model.register_forward_pre_hook(mark)
