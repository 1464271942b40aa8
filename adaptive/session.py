"""A compressor at work on one model: what is known only once the model and its group are."""

from __future__ import annotations

import logging
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
from torch.utils.hooks import RemovableHandle

from adaptive.agreement import agree, compare_replicas
from adaptive.bucket import Granularity
from adaptive.bucket_order import BucketOrder
from adaptive.config import Settings, whole_buckets
from adaptive.controller import Controller
from adaptive.delay import DelayedAveraging, KeptByParameters
from adaptive.exchange.choice import ExchangeChoice
from adaptive.exchange.collectives import Exchange, drain
from adaptive.exchange.link import EmulatedLink, LinkCost, measure_link
from adaptive.exchange.pipeline import HookStream, Pipeline, done_with
from adaptive.exchange.topology import GossipChoice
from adaptive.gossip import Gossip
from adaptive.headline import DenseTimer
from adaptive.hook import send_through
from adaptive.kept_apart import KeptApart
from adaptive.local_steps import AUTO_IS_ONE, CHOICES, LocalSteps
from adaptive.memory.error_feedback import Residual
from adaptive.memory.handover import describe, learning_rate, loss_scale
from adaptive.memory.model_memory import ModelMemory
from adaptive.memory.updates import UpdateMemory, UpdateScales
from adaptive.parameters import ModelParameters, travel_as_they_are
from adaptive.reducer import Reducer, Step
from adaptive.sizes import Sizes, make_header, start_policy
from adaptive.state import check_state, undone_on_error
from adaptive.statistics.requested import RequestedStatistics
from adaptive.statistics.timing import Stopwatch, Timestamps
from adaptive.step_watch import CHANGED, FALLEN_BACK, THROWN_AWAY, UNSCALED, UNSTEPPED, StepWatch
from adaptive.summary import Summary
from adaptive.timeline.records import Recorder
from adaptive.uniting import averaged, unite, unite_moments
from compressors.base import CorruptPayload
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

OTHER_ORDER = (
    "DDP orders its buckets anew after the first backward, and sums may then be in another order, "
    "and other tensors compressed together, than in the run that is resumed: not to the bit"
)


class Session:
    """One compressor at work on one model: wires the parts together.

    model: None when the hook was registered without one; parameters then have no names. everyone:
    where a model is sharded, all ranks of all replicas, which decide alike; `group` has those that
    hold the same shard.

    A collective. ValueError, TypeError or RuntimeError on every rank if a rank cannot start or
    the ranks differ.
    """

    def __init__(
        self,
        settings: Settings,
        group: dist.ProcessGroup,
        model: DistributedDataParallel | ShardedReplica | None = None,
        optimizer: Optimizer | None = None,
        scaler: GradScaler | None = None,
        everyone: dist.ProcessGroup | None = None,
    ) -> None:
        self.settings = settings
        self.model = model
        link = EmulatedLink(settings.link) if settings.link else None
        self.exchange = Exchange(group, link, everyone)
        world_size, tells = self.exchange.world_size, self.exchange.place == 0
        self._parameters = ModelParameters(model, settings.residual_dtype)
        of_ddp = model if isinstance(model, DistributedDataParallel) else None
        self.order = BucketOrder(of_ddp, self._parameters)
        self._watch = StepWatch(self._parameters, self._before_step, self._after_step)
        self._memory = ModelMemory(settings.memory, self._parameters, world_size, self._watch)
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
        self._loading: RemovableHandle | None = None
        self._agree(self._prepare, optimizer, scaler)
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
            lambda: learning_rate(self._optimizer),
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
        self._start_watching()

    def _agree(
        self, prepare: Callable[[], str], optimizer: Optimizer | None, scaler: GradScaler | None
    ) -> None:
        """Run `prepare` on every rank, and attach if none fails and all describe the same. A
        collective; the error of a rank is raised on all."""
        self._optimizer, self._scaler = optimizer, scaler
        handed_over = f"optimizer {describe(optimizer)}, scaler={scaler is not None}"
        try:
            agree(lambda: f"{prepare()}\n{handed_over}", self.exchange.everyone)
        except Exception:
            self._memory.release()
            self._optimizer = None
            self.settings.release()
            raise
        self._reduce_with(self.settings.clip_norm)
        every, warnings = self.settings.local_steps, []
        if self.settings.gossip is not None:
            self._gossip_from_here(self.settings.gossip)
        elif self._apart_always:
            self._step_apart(int(every))
        else:
            warnings.append(self._memory.warning(optimizer))
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
        settings.claim()
        self._choose_memory(self._optimizer)
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

    def _choose_memory(self, optimizer: Optimizer | None) -> None:
        """ValueError if it does not go with what was asked for."""
        every, delay = self.settings.local_steps, self.settings.delay
        name, value, none = ("delay", delay, 0) if delay else ("local_steps", every, 1)
        if value != none and self.model is None:
            raise ValueError(f"{name}={value!r} needs the model: attach(model) or bind(model)")
        if value != none:
            self._check_all_compressed(f"{name}={value!r}")
        if self.settings.gossip is not None:
            self._check_gossip(optimizer)
        # With local steps the optimizer sees its rank's own gradients, and keeps its momentum.
        own = self._apart_always or self.settings.gossip is not None
        self._memory.choose(None if own else optimizer)
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

    def _check_gossip(self, optimizer: Optimizer | None) -> None:
        """ValueError unless each rank's own step of this optimizer moves all of the model."""
        if self.model is None:
            raise ValueError("exchange='gossip' needs the model: attach(model, optimizer=...)")
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
                f"are sent: attach(model, optimizer=...); got {describe(optimizer)}, without "
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
            self._memory.choose(self._optimizer)
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

    def _before_step(self, optimizer: Optimizer, under_way: bool) -> None:
        """See `StepWatch`."""
        if self._gossip is not None and self._gossip.open and optimizer is self._optimizer:
            self._check_whole()
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
        if self._left is not None and under_way:
            self._memory.now.join(optimizer)
        self._left = None  # the ranks have met

    def _after_step(self, optimizer: Optimizer) -> None:
        """See `StepWatch`."""
        if optimizer is self._optimizer:
            self._tell_neighbours()

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

    def _gossip_backward(self, bucket: dist.GradBucket, gossip: Gossip) -> Future[Tensor]:
        """The hook's work with gossip: gradients stay what they are."""
        if bucket.index() == 0:
            if gossip.open:  # its step was left out: no rank may wait for this one
                gossip.before_step()
                self._tell_neighbours()
            self._begin_step()
        if bucket.is_last():
            gossip.open = True
            self._reducer.end_backward()
        return done_with(bucket.buffer())

    def _use_memory(self) -> None:
        """From here on the memory is another one."""
        self._reducer.memory = self._memory.now
        self._requested.follow(self._memory.now)

    def attach_again(self, optimizer: Optimizer | None, scaler: GradScaler | None) -> None:
        """Compress again after `detach`, from where it stood. A collective; the error of a rank
        that cannot is raised on all, and it is as it was."""

        def prepare() -> str:
            self.settings.claim(again=True)
            self._choose_memory(optimizer)
            if len(self._numbers) > 1 and not self._memory.now.may_part:
                raise ValueError(
                    f"optimizer must be one as before, got {describe(optimizer)}: {AUTO_IS_ONE}"
                )
            return ""

        self._agree(prepare, optimizer, scaler)
        self._gave_up_momentum = False
        self.controller.take_steps(self._numbers[0])
        self._start_watching()
        self.controller.forced_dense = False

    def adopt(self, other: Session) -> None:
        """Take over what another, detached session on the same model still holds."""
        if other._failed is not None:
            log.warning("what the compressor before holds is forgotten: its last exchange failed")
            return
        theirs, ours = bool(other._memory.now.keeps), bool(self._memory.now.keeps)
        updates = self._memory.now.scales is not None  # the residual is one of gradients
        if self._gossip is not None:
            log.warning("what the compressor before holds is forgotten: gossip has no residual")
            return
        self.controller.residual_first = theirs and (not ours or updates)
        self.controller.carrying = theirs
        self._memory.adopt(other._memory)

    def detach(self) -> None:
        """Dense from now on; velocities go back to the optimizer, the residual with the next
        step."""
        self._put_back_no_more()
        self.controller.flush()
        self.controller.forced_dense = True
        self.settings.release()
        if self._forward_hook is not None:
            self._forward_hook.remove()
        self._end_meeting()
        if self._local is not None:
            self._local.end(self.exchange, self._optimizer)
            self._local = None
        if self._gossip is not None and self._optimizer is not None:
            self._gossip.settle()
            parameters = self._gossip.parameters
            unite(parameters, self.exchange)
            unite_moments(parameters, [self._optimizer], self.exchange)
            self._gossip = None
        self.controller.take_steps(1)
        self._memory.release(self.exchange)
        self._watch.end()
        self._optimizer = None
        self._reduce_with(clip_norm=None)

    def reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """The hook's work for one bucket; returns a future of the mean gradient. RuntimeError once
        the exchange of an earlier step has failed."""
        if self.order.passing:
            return done_with(bucket.buffer())
        self._check_whole()
        if isinstance(self.model, DistributedDataParallel) and self.model._join_config.enable:
            raise RuntimeError(JOIN)
        self.order.see(bucket)
        self._put_back_no_more()
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
        self._check_whole()
        with self._pipeline.stream.hook_call(last=True), self._noting_failure(self.controller.step):
            self._end_step(loss_scale(self._scaler, self._parameters.device))

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

    def _check_whole(self) -> None:
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
        if bucket.index() == 0:
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
        agreed, memory, watch = controller.agreed, self._memory.now, self._watch
        sends_velocities = "velocity" in memory.keeps
        if agreed.changed > 0 and sends_velocities:
            if not memory.may_fall_back:
                raise RuntimeError(f"{CHANGED}: clip by AdaptiveCompressor(clip_norm=...) instead")
            controller.note(f"{CHANGED}; {FALLEN_BACK}")
            self._fall_back()
        if agreed.unscaled > 0 and self._scaler is None and watch.is_new(UNSCALED):
            controller.note(UNSCALED)
        twice = watch.unstepped and (sends_velocities or memory.scales is not None)
        watch.warn(twice, UNSTEPPED, controller.step - 1, controller.was_spoiled)

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
        watch.backward_ends(scale, compare, self._pipeline.stream.backward_waited)
        kept = watch.thrown_away and self._memory.holds_something()
        watch.warn(kept, THROWN_AWAY, controller.step - 2, controller.was_spoiled)

    def averaged(self) -> AbstractContextManager[None]:
        """The model holds the mean of the ranks' parameters, which with local steps and with gossip
        differ."""
        if self._gossip is not None:
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
                self._gossip.settle()
        finally:
            self.controller.close()

    def discard(self) -> None:
        """Forget what the memory holds: the last backward's gradients are thrown away."""
        self._check_whole()
        if self._local is None:  # else what it holds is of other steps
            self._memory.discard()
        self._watch.discarded()

    def _fall_back(self) -> None:
        """Plain error feedback, and the optimizer's own momentum, from the next step on."""
        self._gave_up_momentum = True
        self._memory.release()
        self._use_memory()

    def state_dict(self) -> dict[str, Any]:
        """This rank's state by parameter name."""
        self._check_whole()
        self.controller.flush()
        self._memory.now.conclude()
        self._end_meeting()
        local: dict[str, Any] = {}
        if self._local is not None:  # before what an exchange that is under way changes
            local = self._local.state_dict()
        elif self._gossip is not None:
            local = self._gossip.state_dict()
        elif self.settings.local_steps == "auto":
            local = {"backwards": 0, "arrived": {}, "anchors": {}, "moving": {}}
        return {
            **self._identity(),
            "resharded_from": None,
            "compressor": self.settings.base.state_dict(),
            "link": list(vars(self._choice.link).values()),
            "server": {name: kept.clone() for name, kept in (self._choice.server or {}).items()},
            "memory": self._memory.state_dict(),
            "scales": scales.state_dict() if (scales := self._memory.now.scales) else {},
            "local": local,
            **self._requested.state_dict(),
            "controller": self.controller.state_dict(),
        }

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
        by_name, base = self._parameters.by_name(), self.settings.base
        controller, requested, expected = self.controller, self._requested, self._identity()
        loaded = [*controller.loaded_parts(), *filter(None, requested.parts().values())]
        with undone_on_error((base, controller.policy), loaded), checking:
            # It was told in the run that the state is of, and need not be found out again.
            kind = state.get("memory_kind")
            has_fallen_back = kind == Residual.name and self._memory.now.may_fall_back
            if has_fallen_back:
                expected["memory_kind"] = Residual.name
            elif self._gave_up_momentum and kind == "momentum":
                raise ValueError(
                    "state: it is of a run with momentum correction, which this compressor has "
                    "given up, since p.grad was changed: attach a new AdaptiveCompressor, and load "
                    "it there"
                )
            apart, local = self._local is not None, saved.read(state, "local", Mapping)
            if len(self._numbers) > 1 and not controller.forced_dense:
                apart = bool(local.get("anchors"))
                expected["memory_kind"] = Residual.name if apart else UpdateMemory.name
            scales = UpdateScales() if expected["memory_kind"] == UpdateMemory.name else None
            check_state(state, expected, by_name, len(requested.ladder))
            saved.together(
                apart == bool(local.get("anchors")),
                "it is of ranks that step by themselves: attach before loading it",
            )
            base.load_state_dict(saved.read(state, "compressor", Mapping))
            if scales is not None:
                scales.load_state_dict(saved.read(state, "scales", Mapping))
            controller.load_state_dict(saved.read(state, "controller", Mapping), same_clock)
            if state["resharded_from"] is not None:
                controller.policy.rescale()
            requested.load_state_dict(state, by_name)
        if apart != (self._local is not None):
            if apart:
                self._memory.release()
                self._step_apart(controller.local_steps)
            else:
                self._memory.choose(self._optimizer)
                self._local = None
            self._use_memory()
        if scales is not None:
            self._memory.now.scales = scales
        if has_fallen_back:
            self._fall_back()
            if self.exchange.place == 0:
                log.warning("the state is of a run with plain error feedback; %s", FALLEN_BACK)
        requested.load_state_dict(state, by_name)  # again: with another memory it has begun anew
        if state["link"] is not None:
            self._choice.link = LinkCost(*state["link"])
        if self._choice.server is not None:
            self._choice.server.clear()
            self._choice.server.update(
                {name: kept.to(self.device) for name, kept in state["server"].items()}
            )
        self._memory.load_state_dict(state["memory"])
        if self._local is not None:
            self._local.load_state_dict(state["local"])
            self._local.every = controller.local_steps
        if self._gossip is not None:
            self._gossip.load_state_dict(state["local"])
        self._left = self._failed = None

    @property
    def memory_kind(self) -> str:
        """The name of the memory in use."""
        return self._memory.now.name

    def supported(self, cf: float) -> float:
        """The nearest CF that a step can be at."""
        return self._sizes.supported(cf)

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self._parameters.device

    def put_back(self, kept_apart: Mapping[str, Any]) -> None:
        """What was `kept_apart`, now and until the first backward, whatever the script loads."""
        self._put_back_no_more()
        here = self.kept_apart()
        here.load_state_dict(kept_apart)
        self._loading = here.put_back_after_loading(kept_apart)

    def order_buckets(self, names: Sequence[str]) -> None:
        """As those of a run that is resumed, unless a backward has come already."""
        if not self.order.settled:
            self.order.repeat(names)
            if self.order.settled:
                self._reducer.end_backward()
            elif self.exchange.rank == 0:
                log.info("%s", OTHER_ORDER)

    def _put_back_no_more(self) -> None:
        if self._loading is not None:
            self._loading.remove()
            self._loading = None

    def kept_apart(self) -> KeptApart:
        """What else is this rank's own now, though frameworks save it as if all ranks had it."""
        scales = self._memory.now.scales
        apart = self._local is not None or self._gossip is not None
        differs = apart or (isinstance(scales, UpdateScales) and scales.differ)
        optimizer = self._optimizer if differs else None
        return KeptApart(self._parameters, optimizer, apart)

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
        # DDP rebuilds its buckets after the first backward, with a static graph after the second.
        settling = 2 if self.model is not None and self.model.static_graph else 1
        settling *= isinstance(self.model, DistributedDataParallel) or self.model is None
        self._reducer = Reducer(
            self._granularity,
            self._memory.now,
            self.exchange,
            self._pipeline,
            self._requested,
            settling,
            clip_norm,
        )

    def _start_watching(self) -> None:
        """What the script does with the gradients, and when the model's forward begins."""
        self._watch.start()
        mark, model = self.controller.stopwatch.forward, self.model
        self._forward_hook = None if model is None else model.register_forward_pre_hook(mark)
