"""The session: one compressor at work on one model, from `attach` to `close`."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler
from torch.autograd import Variable
from torch.futures import Future
from torch.optim import Optimizer

from adaptive.exchange.choice import ExchangeChoice, measure_link
from adaptive.memory.error_feedback import NoMemory
from adaptive.memory.handover import Groups, describe, learning_rate
from adaptive.memory.model_memory import ModelMemory
from adaptive.memory.step_watch import FALLEN_BACK, StepWatch
from adaptive.model.parameters import ModelParameters, is_left_to_ddp, parameters_of
from adaptive.model.replicas import Exchanging, Replica
from adaptive.model.state import SavedPart, check_state, refusing, swapped
from adaptive.model.uniting import UnitedState
from adaptive.model.wrappers import steps_a_part
from adaptive.network.agreement import agree
from adaptive.network.link import EmulatedLink
from adaptive.network.pace import DenseTimer
from adaptive.network.pipeline import HookStream, Pipeline
from adaptive.network.timing import Stopwatch, Timestamps
from adaptive.statistics.requested import RequestedStatistics
from adaptive.step.averager import Averager
from adaptive.step.config import Settings
from adaptive.step.controller import TOO_SMALL, Controller
from adaptive.step.sizes import Sizes, make_header, start_policy
from adaptive.sync import gradients_or_steps, start
from adaptive.timeline.sinks import Recorder
from adaptive.timeline.summary import Summary
from compressors.base import Spec
from compressors.warm_up import check_users_compressor, warm_up
from policies import DENSE
from policies import state as saved

log = logging.getLogger("adaptive")

BROADCASTS = (
    "DDP sends the model's buffers (batch norm's statistics?) in every forward, local steps or not:"
    " DDP(model, broadcast_buffers=False)"
)

DROPPED = (
    "the compressor is detached after a failed exchange, or a backward that raised: its residuals "
    "are dropped, because parameters and memory may not be the same on all ranks. Load model and "
    "optimizer on all ranks before training goes on"
)

MOVED = (
    "the parameters have moved far between two steps (an earlier checkpoint was loaded?): the "
    "compressor's residuals were made at the old parameters, and are dropped. To keep residuals, "
    "load the compressor's state with the model's: compressor.load_state_dict(...)"
)

SMALL = 0.01
"""The largest size of the statistics, as a share of a dense step's bytes. A model so small that its
statistics are larger stays dense for good, and nothing is measured."""

ATTACHED: weakref.WeakSet[Session] = weakref.WeakSet()
"""The sessions that are not detached."""


class Session:
    """One compressor on one model. The session builds the objects that depend on the model and on
    the ranks, and wires them together.

    replica: keeps the session alive. The session has only a weak reference to the replica.

    The constructor is a collective. ValueError, TypeError or RuntimeError on every rank if some
    rank cannot start, or if the ranks have different settings.
    """

    def __init__(
        self,
        settings: Settings,
        replica: Replica,
        optimizers: Sequence[Optimizer] = (),
        scaler: GradScaler | None = None,
        samples_per_step: float | None = None,
    ) -> None:
        self.settings = settings
        self._samples_per_step = samples_per_step or 1.0
        self._replica = weakref.ref(replica)
        link = EmulatedLink(settings.network.spec) if settings.network.spec else None
        self.exchange = settings.exchange.open(replica, link)
        world_size = self.exchange.world_size
        self._parameters = ModelParameters(replica, settings.memory.options.dtype)
        self._checked: set[tuple[int, ...]] = set()  # buckets, by the ids of their parameters
        self.united = UnitedState(self._parameters)
        self._watch = StepWatch(self._parameters, self)
        self._memory = ModelMemory(settings.memory, self._parameters, world_size)
        way, server = settings.exchange.way, settings.exchange.server
        adapt = self.exchange.adapt
        self._choice = ExchangeChoice(settings.base, way, world_size, server, adapt)
        self._granularity = settings.make_granularity()
        self._sizes = Sizes(self._parameters, self._granularity, self._choice, world_size)
        handed_over = f"optimizer {describe(optimizers)}, scaler={scaler is not None}"
        try:  # an error of one rank is raised on all ranks
            agree(lambda: f"{self._prepare(optimizers)}\n{handed_over}", self.exchange.everyone)
        except Exception:
            self._memory.release()
            raise
        shards = self._choice.may_shard
        warm_up(settings.base, self._compressed_cfs(), world_size, self.device, shards)
        timestamps = Timestamps.of(settings.network.clock, self.device)
        network = settings.network
        # The link's cost serves to choose an exchange, and to model the time of a dense step.
        if self._choice.measures or (network.is_real and world_size > 1):
            self._choice.link = measure_link(self.exchange, network.clock, self.device)
        if world_size == 1:
            log.warning("world size is 1: there is no other rank to send gradients to")
        # The optimizer whose learning rate is reported to the policy.
        self._lr_optimizer = next(iter(optimizers), None)
        self.controller = self._make_controller(timestamps)
        self._averager = Averager(
            settings,
            self.exchange,
            self._parameters,
            optimizers,
            scaler,
            self._memory,
            self._watch,
            Pipeline(timestamps, HookStream(self.device)),
            self._sizes,
            self._requested,
            self.controller,
            replica.settling,
        )
        self._sync = start(self._averager)
        if settings.sync.takes_optimizer and not self.controller.too_small:
            self._averager.warn_once(self._memory.warning(optimizers))
        if settings.sync.lets_ranks_differ and replica.sends_buffers:
            self._averager.warn_once(BROADCASTS)
        momentum, known = self._memory.now.momentum, self._parameters
        self._watch.start([p for p in known if momentum(known[p], DENSE) is not None])
        mark = self.controller.stopwatch.forward
        mark.begins = weakref.WeakMethod(self._forward_begins)
        # This hook runs before FSDP's own hook. It does the exchange that this rank owes, which
        # moves parameters, and FSDP's hook gathers the moved parameters.
        self._forward_hook = replica.model.register_forward_pre_hook(mark, prepend=True)
        ATTACHED.add(self)

    # -- attaching --

    def _prepare(self, optimizers: Sequence[Optimizer]) -> str:
        """Check the arguments of `attach`, choose the memory and start the policy. Returns a
        description of all that must be the same on all ranks."""
        settings, base, parameters = self.settings, self.settings.base, self._parameters
        self._check_free()
        for parameter in parameters.values():
            strides = zip(parameter.tensor.stride(), parameter.tensor.shape, strict=True)
            if any(stride == 0 and size > 1 for stride, size in strides):
                raise ValueError(
                    f"model: parameter {parameter.name!r} must have a place in memory for each of "
                    f"its elements, got strides {parameter.tensor.stride()} for shape "
                    f"{tuple(parameter.tensor.shape)}, the result of expand()? clone() it first"
                )
        self._check_optimizers(optimizers)
        served = optimizers if settings.sync.takes_optimizer else ()
        self._memory.choose(served, settings.sync.keeps_unsent)
        self._choice.messages = settings.sync.messages(self.exchange.world_size)
        local_steps = settings.sync.numbers != (1,)
        self._choice.of_updates = self._memory.now.handover.sends_updates or local_steps
        self._policy, self._context = start_policy(settings, self._sizes, self._memory.now)
        largest = self._sizes.supported(settings.cf_range[1])
        self._choice.check_users_strategy(
            largest, self.exchange.rank, settings.exchange.one_collective
        )
        self._choice.check_sum()
        used = {id(each): each for each in map(base.at, sorted(self._compressed_cfs()))}
        for compressor in used.values():
            fed_back = bool(self._memory.now.keeps)
            check_users_compressor(compressor, largest, self.device, fed_back)
        self._header = lambda: make_header(
            settings, self._sizes, self._context, self._memory.now.name
        )
        self._requested = RequestedStatistics(settings.policy, parameters.values())
        skips = parameters.maybe_unused() or "velocity" in self._memory.now.keeps
        if self._granularity.as_one and not base.keeps_zeros and skips:
            raise ValueError(
                f"granularity must be 'layer' for base {base.name!r} with momentum correction, "
                f"find_unused_parameters or static_graph: it turns the zeros of a parameter that "
                f"sends nothing into other values; got 'bucket'"
            )
        sizes = [p.numel() for p in parameters]
        lines = (
            *settings.describe(self._memory.now.name),
            f"{len(sizes)} parameters of {sum(sizes)} elements: "
            f"{', '.join(str(tuple(p.shape)) for p in parameters)}",
            *(
                f"payload bytes at CF {cf:g}: {[base.nbytes(Spec((size,), cf)) for size in sizes]}"
                for cf in sorted(self._compressed_cfs())
            ),
        )
        return "\n".join(lines)

    def _compressed_cfs(self) -> set[float]:
        """The policy's candidates, the ends of `cf_range` and their means, except dense ones."""
        settings = self.settings
        cfs = {*map(self._sizes.supported, {*settings.policy.candidates(), *settings.cf_range})}
        cfs |= {*map(self._choice.means_cf, cfs)}
        return {cf for cf in cfs if cf != DENSE and not settings.base.at(cf).sent_as_dense}

    def _check_free(self) -> None:
        """RuntimeError if another session compresses some of these parameters, or uses the same
        policy or compressor object."""
        if self._taken():
            gc.collect()  # the other session may be garbage that is not yet collected
        if taken := self._taken():
            raise RuntimeError(f"{taken} another AdaptiveCompressor: detach() that one first")

    def _taken(self) -> str:
        """The beginning of an error message that names what another session uses; "" if no other
        session uses anything of this one."""
        for other in ATTACHED:
            for tensor, parameter in self._parameters.items():
                if tensor in other._parameters:
                    return f"model: the gradient of parameter {parameter.name!r} is compressed by"
            theirs = other.settings.stateful()
            for each in self.settings.stateful():
                if any(each is another for another in theirs):
                    return f"{each!r}: a policy or compressor works for one model, and this one for"
        return ""

    def _check_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """ValueError if an optimizer is of another model, or does not go with `sync`."""
        exchanged = {*self._parameters, *self._parameters.left_to_ddp.values()}
        if len({*map(id, optimizers)}) < len(optimizers):
            names = ", ".join(type(each).__name__ for each in optimizers)
            raise ValueError(f"optimizer must hold each optimizer once, got [{names}]")
        for each in optimizers:
            if exchanged and exchanged.isdisjoint(parameters_of(each)):
                raise ValueError(
                    f"optimizer must be one of the model's parameters, got a "
                    f"{type(each).__name__} with none of the parameters that the ranks exchange. "
                    f"If it steps copies of them (in fp32?), leave it out: attach(model)"
                )
        sync = self.settings.sync
        if sync.lets_ranks_differ and (names := ", ".join(self._parameters.left_to_ddp)):
            raise ValueError(
                f"sync={sync!r} does not go with sparse gradients or complex parameters, which DDP "
                f"itself averages in every step: the model has {names}"
            )
        for each in filter(steps_a_part, optimizers if sync.lets_ranks_differ else ()):
            raise ValueError(
                f"sync={sync!r} does not go with {type(each).__name__}, which would step each "
                f"parameter by the gradient of one rank alone: use the optimizer itself, without it"
            )
        sync.check_optimizers(optimizers, {t: p.name for t, p in self._parameters.items()})

    def _make_controller(self, timestamps: Timestamps) -> Controller:
        settings, writes = self.settings, self.exchange.first
        controller = Controller(
            self._policy,
            self.exchange,
            Stopwatch(timestamps),
            Recorder(settings.timeline, writes, self._header, self._samples_per_step),
            self._requested,
            self._sizes,
            lambda: learning_rate(self._lr_optimizer),
            lambda: self._memory.now,
            self.device,
            self._context,
            DenseTimer(
                self._sizes.wire_bytes,
                self.exchange.world_size,
                settings.network.clock,
                settings.network.spec,
                lambda: self._choice.link,
            ),
        )
        controller.take_steps(settings.sync.numbers[0])
        controller.delay = settings.sync.delays[0]
        may_stay_dense = settings.may_stay_dense and not settings.sync.lets_ranks_differ
        least = SMALL * self._sizes.dense_nbytes()  # the same on every rank
        if may_stay_dense and not settings.debug and controller.statistics_nbytes() > least:
            controller.too_small = True
            self._memory.release()  # nothing is lost: the memory is empty
            self._memory.now = NoMemory(self._parameters.maybe_unused)
            log.info("%s", TOO_SMALL)
        return controller

    # -- a step --

    def exchanging(self) -> Exchanging:
        """The object that gets the replica's buckets."""
        receiver: Exchanging = self.exchange.receiver_for(self, self._averager.replica_calls)
        return receiver

    def reduce(self, bucket: dist.GradBucket, at_once: bool = False) -> Future[Tensor]:
        """See `Exchanging`. RuntimeError if an earlier exchange has failed, or an earlier backward
        has not ended."""
        averager = self._averager
        if bucket.index() == 0:
            averager.check_whole()
        of = bucket.parameters()
        if (ids := tuple(map(id, of))) not in self._checked:
            # Local steps and gossip do not look the parameters of a bucket up: the ranks' values of
            # a parameter that is unknown here would diverge in silence.
            for p in () if is_left_to_ddp(bucket.buffer(), of) else of:
                self._parameters.find(p)
            self._checked.add(ids)
        if at_once:
            self._watch.gradients_arrive(of)
        with averager.replica_calls(waits=at_once):
            done = self._sync.reduce(bucket)
            if at_once:
                averager.wait(done)
        averager.in_backward = True
        return done

    def end_backward(self, last: Future[Tensor]) -> Future[Tensor]:
        """See `Exchanging`."""
        averager, engine = self._averager, Variable._execution_engine
        with averager.replica_calls(waits=True):
            done = self._sync.end_backward(last)
            averager.reducer.end_backward()
        # After this call DDP queues its own callback, which writes the means to the gradients. A
        # callback that is queued by a callback runs after DDP's.
        engine.queue_callback(lambda: engine.queue_callback(averager.backward_ended))
        return done

    def _forward_begins(self) -> None:
        if self._watch.moved_far() and self._sync.start_over():
            self._averager.warn_once(MOVED)
        owed = self._sync.owes
        self._sync.forward_begins()
        if owed:
            self._parameters.moved()

    def step_begins(self, optimizer: Optimizer) -> None:
        """See the listener of `StepWatch`, as for `before_step` and `after_step`."""
        self._sync.step_begins(optimizer)

    def before_step(self, optimizer: Optimizer, groups: Groups) -> Groups | None:
        self.united.before_step(optimizer)
        if self._lr_optimizer is not None and optimizer is not self._lr_optimizer:
            first = next(parameters_of(self._lr_optimizer), None)
            if any(p is first for p in optimizer.param_groups[0]["params"]):
                self._lr_optimizer = optimizer  # the script has replaced the former optimizer
        return self._sync.before_step(optimizer, groups)

    def after_step(self, optimizer: Optimizer) -> None:
        self._sync.after_step(optimizer)

    # -- between steps --

    def detach(self) -> None:
        """Make all later steps dense. Velocities go back to the optimizer (a collective), and the
        next step sends the residuals. After a failed exchange, or a backward that raised, `detach`
        drops the residuals, and is no collective."""
        averager = self._averager
        if averager.whole:
            with averager.noting_failure():
                self._sync.make_up()
                self.controller.flush()
                self._sync.stop()
                self.controller.take_steps(1)
                self._memory.release(self.exchange)
        else:
            log.warning("%s", DROPPED)
            self.abandon()
            self._memory.discard()
            # A memory of updates stays, because the next step needs its optimizer-state sync.
            if not self._memory.now.handover.sends_updates:
                self._memory.release()
            self.controller.take_steps(1)
        self.controller.forced_dense = True
        self.leave()
        averager.optimizers = ()
        averager.reduce_with(clip_norm=None)
        if not self.controller.too_small:
            self._sync = gradients_or_steps(averager)

    def abandon(self) -> None:
        """Drop the exchanges under way, also a failed one, and keep the memory. Afterwards this
        rank can load a state, detach or close. No collective."""
        self._averager.abandon()
        self._sync.abandon()

    def leave(self) -> None:
        """Remove all hooks of this session, so that another session may compress the parameters."""
        ATTACHED.discard(self)
        self._forward_hook.remove()
        self._watch.end()

    def averaged(self) -> AbstractContextManager[None]:
        """A context in which the model holds the mean of the ranks' parameters."""
        self._averager.check_whole()
        self.make_up()
        context = self._sync.averaged()
        self._we_moved()  # means that were under way have landed
        return context

    def _we_moved(self) -> None:
        """This library may just have moved the parameters, between a step and the next forward."""
        self._watch.we_move()
        self._parameters.moved()

    def make_up(self) -> None:
        """Do the exchange of the last backward, if this rank has left its optimizer step out. Other
        ranks may have done this exchange already, so it comes before any other collective."""
        if self._averager.whole:
            self._sync.make_up()
            self._we_moved()

    @contextmanager
    def loading(self) -> Iterator[None]:
        """A context in which a state is loaded. If this rank owes an exchange, the rank does the
        exchange first (a collective then). The script may have loaded parameters and optimizer
        states before. These stay as loaded, unless the compressor's state is refused: then the
        exchange has moved the parameters."""
        parameters, loaded = [p.local for p in self._parameters.values()], []
        if self._averager.whole and self._sync.owes:
            loaded = [p.detach().clone() for p in parameters]
            self._memory.now.handover.forget_moments()
            self._sync.make_up()
        yield
        if loaded:
            with torch.no_grad():
                torch._foreach_copy_(parameters, loaded)

    def summary(self) -> Summary:
        """Totals so far."""
        totals, caveat = self.controller.summary(), self.settings.sync.caveat
        return replace(totals, sync=self._sync.describe(), caveat=caveat)

    def explain(self, detail: bool) -> str:
        """The present state in words."""
        text, more = self.controller.explain(detail), self._sync.describe()
        if not more:
            return text
        _, *rest = text.splitlines()
        return "\n".join([self.summary().headline, *rest, more])

    def close(self) -> None:
        """Do the exchange that this rank owes, if any (a collective then), wait for exchanges under
        way, record the last step, and close the timeline."""
        averager = self._averager
        try:
            if averager.whole:
                with averager.noting_failure():
                    self._sync.make_up()
                    self._sync.wait()
        finally:
            if not averager.whole:
                averager.pipeline.abandon()
                self.controller.abandon()
            self.controller.close()

    def discard(self) -> None:
        """Empty the memory, because the script drops the gradients of the last backward."""
        self._averager.check_whole()
        self._sync.discard()

    def check_whole(self) -> None:
        """See `Averager.check_whole`."""
        self._averager.check_whole()

    def unite(self) -> dict[str, Any]:
        """Make model and optimizers the same on all ranks, between steps (a dense collective).
        Those of one rank may then be saved for all ranks. Returns the state of both
        (`UnitedState`); {} if model and optimizers were the same before."""
        optimizers = self._sync.unite()
        self._we_moved()
        return {} if optimizers is None else self.united.state_dict(optimizers)

    def load_united(self, united: Mapping[str, Any]) -> None:
        """Load the result of `unite` that was saved with a state."""
        self.united.load_state_dict(united, self._averager.optimizers)

    # -- saved --

    def state_dict(self) -> dict[str, Any]:
        """This rank's state by parameter name."""
        self._averager.check_whole()
        self._sync.make_up()
        self.controller.flush()
        values = {name: part.save() for name, part in self._parts(self._memory.now.name).items()}
        self._we_moved()
        return {**self._identity(), "resharded_from": None, **values}

    def _parts(
        self, kind: str, resharded: bool = False, same_clock: bool = True
    ) -> dict[str, SavedPart]:
        """The saved parts by name, in the order of saving. The synchroniser comes first, because
        saving it may change the memory. kind: the memory's name in the state. resharded: the state
        to be loaded was converted from another number of ranks."""
        base, sync, controller = self.settings.base, self._sync, self.controller
        watch = self._watch
        return {
            "sync": SavedPart(sync.state_dict, sync.check, sync.load_state_dict),
            "compressor": swapped(base),
            **self._choice.parts(self.device, resharded),
            **self._memory.parts(kind),
            "sum": self._requested.part(self._parameters.values()),
            "watch": SavedPart(watch.state_dict, watch.check, watch.load_state_dict),
            "controller": swapped(controller, same_clock=same_clock, resharded=resharded),
        }

    def load_state_dict(
        self, state: Mapping[str, Any], same_clock: bool, checking: AbstractContextManager[None]
    ) -> None:
        """Go on from `state_dict()`. ValueError, with nothing changed, if the state does not fit.

        checking: the context in which the state is checked, before anything changes."""
        averager, controller = self._averager, self.controller
        if averager.whole:
            with suppress(Exception):  # `abandon` drops a failed exchange below
                self._sync.wait()
        else:
            averager.pipeline.abandon()  # late callbacks must not change loaded tensors
        with refusing(), checking:
            expected = self._identity()
            # `kind_of` accepts a state of a run that has fallen back to plain error feedback.
            kind = expected["memory_kind"] = self._memory.kind_of(state.get("memory_kind"))
            resharded = saved.read(state, "resharded_from", int | None) is not None
            parts = self._parts(kind, resharded, same_clock)
            check_state(state, expected, parts)
        if self._memory.falls_back_to(kind):
            averager.fall_back()
            if self.exchange.first:
                log.warning("the state is of a run with plain error feedback; %s", FALLEN_BACK)
        self.abandon()
        # A tensor that is loaded on the hook's stream belongs to this stream. A new layout may free
        # the tensor while kernels of the hook's stream still read it. The allocator then gives the
        # memory to no other stream.
        with averager.noting_failure(), averager.pipeline.stream.hook_call(last=True):
            for name, part in parts.items():
                part.load(state[name])
            controller.stopwatch.go_on(state["controller"]["saved_at"])

    def _identity(self) -> dict[str, Any]:
        """The entries of a state that must be equal in the session that loads it."""
        shards = self.exchange.shards
        return {
            "world_size": self.exchange.world_size,
            "rank": self.exchange.rank,
            "base": self.settings.base.name,
            "policy": self.settings.policy.name,
            "memory_kind": self._memory.now.name,
            "synchronisation": repr(self.settings.sync),
            "tied_to_ranks": self.settings.sync.tied_to_ranks or self.settings.memory.tied_to_ranks,
            "parameters": {p.name: list(p.local.shape) for p in self._parameters.values()},
            # The rank's part of the model, if the model is sharded.
            **({} if shards == 1 else {"shard": f"{self.exchange.place % shards} of {shards}"}),
        }

    # -- properties --

    @property
    def memory_kind(self) -> str:
        """The name of the memory in use."""
        return self._memory.now.name

    def supported(self, cf: float) -> float:
        """The CF of a step that is nearest to `cf`."""
        return self._sizes.supported(cf)

    @property
    def replica(self) -> Replica | None:
        """The replica; None once it is garbage."""
        return self._replica()

    @property
    def detached(self) -> bool:
        """Whether `detach` was called: all later steps are dense."""
        return self.controller.forced_dense

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return self._parameters.device
