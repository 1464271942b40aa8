"""`AdaptiveCompressor`: the class that a training script imports and attaches to its DDP model."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy, deepcopy
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from adaptive.exchange.choice import ExchangeName, ParameterServer, measure_latency
from adaptive.exchange.options import ExchangeOptions
from adaptive.exchange.strategies import Strategy
from adaptive.exchange.two_level import TwoLevel
from adaptive.memory.model_memory import MemoryChoice
from adaptive.memory.options import Memory, MemoryName, memory_from
from adaptive.model.replicas import DDPReplica, Replica
from adaptive.model.wrappers import Unwrapped, unwrap
from adaptive.network.agreement import agree, wait_for_all
from adaptive.network.collectives import Exchange
from adaptive.network.link import LinkCost, LinkSpec, Network, network_from
from adaptive.on_import import load_optional
from adaptive.session import checkpoint as forms
from adaptive.session.session import Session
from adaptive.step.config import (
    DEFAULTS,
    GRANULARITIES,
    GranularityName,
    Settings,
    below_range,
    debug_interval,
    default_policy,
    make_base,
    require_type,
    with_ladder,
)
from adaptive.step.sizes import latency_of
from adaptive.step.synchronisation import HIGH_LATENCY, EveryStep, LocalSteps, Synchronisation
from adaptive.timeline.sinks import SafeTimeline, Sink
from adaptive.timeline.summary import Summary
from compressors import Compressor
from policies import DENSE, Policy, PolicyName, checks, make_policy
from policies.base import counted_steps
from policies.words import named

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


log = logging.getLogger("adaptive")

NO_LOCAL_STEPS = (
    "sync='auto': a message takes {} ms on this network. The ranks exchange in every step all the "
    "same, because local steps of sync='auto' need DDP, and optimizers other than SGD, handed over "
    "to attach(). sync=Delayed(2) or LocalSteps(4) would hide the latency"
)


class AdaptiveCompressor:
    """Compresses the gradient exchange of a DDP model, and chooses the compression factor (CF)
    during training.

    All ranks must pass the same arguments. Only `base` and `cf_range` are positional.
    docs/settings.md says when to change an argument.

    base: name of a compressor ("topk", "randomk", "none") or a `Compressor`. None: "topk". A
        sparsifier's name may say how the kept values are coded ("topk+fp32": uncoded); if it does
        not, and there is error feedback, values are rounded to 4 bits. "none" sends dense. With
        policy "goodput" a sparsifier becomes `Ladder({2: "bf16", 4: "int8", 8: "int4"}, base)`:
        three more CFs, below cf_range, for a network that is only a little too slow. Pass a
        `Ladder` for other ones, or for none: `Ladder({}, "topk+int4")`.
    cf_range: smallest and largest CF besides dense, floats >= 1. None: (10, 1000).
    policy: "goodput", "gravac", "accordion", "fixed" (which stays at cf_range[0]), ..., or a
        `Policy`. None: "goodput" for a base that keeps the largest elements (topk and the threshold
        sparsifiers) without hooks, "fixed" with gossip, else "gravac". With None, a model stays
        dense, and nothing is measured, if statistics would be more than 1% of a dense step's bytes.
        A policy may have its own defaults of base, cf_range, memory and granularity. They are used
        where these arguments are None. `GraVAC.paper()` and `Accordion.paper()` (by name
        "gravac-paper" and "accordion-paper") have the defaults of their papers.
    sync: how the ranks keep their models together. `LocalSteps(10)`: each rank takes 10 local steps
        between two exchanges. `Delayed(2)`: the mean of a step arrives two steps later.
        `Gossip("ring")`: each rank exchanges with its neighbours only. None: the ranks exchange in
        every step, gradients or the updates of the optimizers (see `memory`). "auto": as
        `LocalSteps("auto")` if a message takes 40 ms or more and the optimizer is not SGD; else as
        None.
    memory: where the part that was not sent is kept. "residual": error feedback. "momentum":
        momentum correction (DGC), for SGD with momentum. "updates": each rank's optimizer steps
        with local gradients, and its updates are sent, with error feedback (for any optimizers
        handed to `attach`). "none": the part is lost. Or with settings a `Residual`, `Momentum` or
        `Updates`; or your own memory: a registered name, or a `MemoryRule` (docs/own_memory.md).
        None or "auto": "none" for an unbiased compressor; else, by the optimizers handed to
        `attach`: "momentum" for torch's SGD with momentum, "residual" for SGD without momentum or
        no optimizer, "updates" for all others.
    exchange: how the ranks' payloads become the mean. "all_reduce" (payloads that can be summed),
        "all_gather", "sharded" (compressed twice; bytes do not grow with the number of ranks) or
        with settings a `ParameterServer`, "voted_indices" (sparsifiers: each rank proposes 1/N of
        the indices for all). "auto": "all_gather" for a sparsifier's gradients among up to 8 ranks;
        else the fastest one by a cost model of the network, which is measured if there is a choice
        (docs/compressors.md). Or your own exchange: a registered name, or a `Strategy`
        (docs/own_exchange.md). `TwoLevel()`: dense inside a node, and one of these between nodes;
        "auto" uses it if torchrun has started several nodes of several ranks each.
    granularity: "layer" compresses tensor by tensor, as in the papers; "bucket" compresses all
        tensors of a DDP bucket as one, once DDP no longer rebuilds its buckets. None or "auto":
        "bucket" for a base that keeps the largest elements, unless the policy chooses a CF for each
        layer.
    dense_below: tensors of fewer elements than this are sent uncompressed.
    hooks: existing DDP communication hooks or `HookRung`s, by the CF at which the policy chooses
        them. A step with a hook counts as dense: it sends the residuals along, and the hook's own
        compression error is not fed back.
    timeline: a `Timeline`, a function `log(numbers, step)`, or several; rank 0 writes.
    network: a slow link to emulate, "100mbit" or "100mbit,5ms" (for demonstrations), or a `Network`
        with a clock of your own.
    debug: a number N of steps: the ranks' plans are compared in every step (a small blocking
        collective), and their parameters in every Nth step. RuntimeError on all ranks names the
        first different parameter, and the rank. True: 100. None: the environment variable
        ADAPTIVE_DEBUG decides.

    A setting that would have no effect beside the others is refused here, or by `attach` if its
    effect depends on the optimizer. Only base="none" accepts any setting: it switches a run to
    dense.
    ValueError or TypeError names the argument, its value and what is accepted.
    """

    def __init__(
        self,
        base: str | Compressor | None = None,
        cf_range: tuple[float, float] | None = None,
        *,
        policy: PolicyName | Policy | None = None,
        sync: Literal["auto"] | Synchronisation | None = None,
        memory: MemoryName | str | Memory | None = None,
        exchange: ExchangeName | str | Strategy | ParameterServer | TwoLevel = "auto",
        granularity: GranularityName | None = None,
        dense_below: int = 0,
        hooks: Mapping[float, Any] | None = None,
        timeline: Sink | Sequence[Sink] | None = None,
        network: str | LinkSpec | Network | None = None,
        debug: bool | int | None = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name != "self"}
        self._given = {name: _unused(value) for name, value in given.items()}
        named_policy = None if policy is None else make_policy(policy)
        defaults = {**DEFAULTS, **({} if named_policy is None else named_policy.compression)}
        base = defaults["base"] if base is None else base
        cf_range = checks.cf_range(defaults["cf_range"] if cf_range is None else cf_range)
        memory = defaults["memory"] if memory is None else memory
        granularity = defaults["granularity"] if granularity is None else granularity
        accepted = "'auto', LocalSteps(...), Delayed(...), Gossip(...) or None"
        is_auto = isinstance(sync, str) and sync == "auto"
        is_accepted = is_auto or isinstance(sync, Synchronisation | None)
        require_type(is_accepted, "sync", sync, accepted)
        timelines = SafeTimeline(timeline)

        def settings(sync: Synchronisation) -> Settings:
            memory_options = memory_from(memory)
            compressor = make_base(base, memory_options.kind)
            memory_options = sync.memory_of(memory_options)
            sync = sync.for_base(compressor)
            exchange_options, policy = ExchangeOptions.of(exchange, compressor), named_policy
            if policy is None:
                by_base = "gravac" if hooks else default_policy(compressor)
                policy = make_policy(sync.default_policy or by_base)
            compressor = with_ladder(
                compressor, policy, exchange_options.way, memory_options.kind, cf_range[0]
            )
            if hooks is not None:
                with_hooks = load_optional("with_hooks")
                compressor = with_hooks(
                    compressor, hooks, cf_range, policy, sync, exchange_options.server
                )
            return Settings(
                base=compressor,
                granularity=checks.one_of("granularity", granularity, GRANULARITIES),
                dense_below=checks.whole("dense_below", dense_below, least=0),
                exchange=exchange_options,
                cf_range=cf_range,
                policy=policy,
                may_stay_dense=named_policy is None,
                sync=sync,
                memory=MemoryChoice(compressor, memory_options),
                timeline=timelines,
                network=network_from(network),
                debug=debug_interval(debug),
            )

        self._settings = settings(sync if isinstance(sync, Synchronisation) else EveryStep())
        self._at_high_latency = settings(LocalSteps("auto")) if is_auto else None
        self._session: Session | None = None
        self._framework_form = "rank"  # the form of saved states that the framework needs

    def attach(
        self,
        model: nn.Module,
        *,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        scaler: GradScaler | None = None,
        samples_per_step: float | None = None,
    ) -> AdaptiveCompressor:
        """Register the hook on `model`, on every rank, before the first backward (a collective).
        Sparse gradients and complex parameters are exchanged as DDP does without a hook.

        model: a `DistributedDataParallel` model, also inside a wrapper of `torch.compile` or
            Fabric.
        optimizer: the optimizer of the model, or all its optimizers. In compressed steps each
            rank's optimizer then steps with local gradients, and the updates are compressed and
            averaged (see `memory`). With Adam, int8 and int4 send gradients all the same. With
            SGD's momentum, gradients are averaged, and `p.grad` holds velocities, which clipping
            and logging must know. A wrapper with the optimizer as its `.optimizer` is accepted.
        scaler: the `GradScaler` in use; the residual is then kept in unscaled units. None: that of
            Accelerate's optimizer, if it has one.
        samples_per_step: samples of all workers in a step; throughput is then reported in
            samples/s, not steps/s.
        Returns self. TypeError if `model` is not DDP; RuntimeError if this compressor was attached
        before, if the model has another hook or compressor, or if the ranks have different
        settings.
        """
        inside = unwrap(model, optimizer)
        replica = DDPReplica.of(inside.model, inside.model is not model, inside.by_framework)
        return self._start(replica, inside, scaler, samples_per_step)

    def attach_fsdp(
        self,
        root: nn.Module,
        mesh: DeviceMesh,
        *,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        scaler: GradScaler | None = None,
        samples_per_step: float | None = None,
    ) -> AdaptiveCompressor:
        """Compress the exchange between the replicas of a sharded model: docs/fsdp.md. Called on
        every rank, before the first backward (a collective).

        root: the outermost module that `torch.distributed.fsdp.fully_shard` was called on. All
            these calls must be with `mesh[<the second dimension's name>]`: torch shards inside a
            replica.
        mesh: of two dimensions, (replicas, shards). Parameters and buffers of the first replica are
            broadcast to the others.
        optimizer, scaler, samples_per_step: see `attach`.
        Returns self. TypeError if `root` is not such a module; ValueError for another mesh, or for
        settings that do not go with FSDP; RuntimeError if this compressor was attached before, if
        the model has another one, or if the ranks have different settings.
        """
        from adaptive.fsdp import ShardedReplica

        inside = unwrap(root, optimizer)
        replica = ShardedReplica.of(inside.model, mesh, self._settings)
        return self._start(replica, inside, scaler, samples_per_step)

    def _start(
        self,
        replica: Replica,
        inside: Unwrapped,
        scaler: GradScaler | None,
        samples_per_step: float | None,
    ) -> AdaptiveCompressor:
        """Start a session on a replica. inside: its model and optimizers. Returns self."""
        optimizers = inside.optimizers
        scaler = inside.scaler if scaler is None else scaler

        def check_arguments() -> str:
            replica.check_free()
            for each in optimizers:
                accepted = "a torch.optim.Optimizer, several of them, or None"
                if isinstance(each, LRScheduler):
                    accepted = "an optimizer, and this is a scheduler: hand its .optimizer over"
                require_type(isinstance(each, Optimizer), "optimizer", each, accepted)
            scales = not isinstance(scaler, type) and hasattr(scaler, "scale")
            scales = scaler is None or (scales and hasattr(scaler, "is_enabled"))
            require_type(scales, "scaler", scaler, "a torch.amp.GradScaler or None")
            if samples_per_step is not None:
                checks.real("samples_per_step", samples_per_step, above=0)
            if self._session is not None:
                raise RuntimeError(
                    "the compressor has been attached to a model already: make a new "
                    "AdaptiveCompressor for each model, and after detach()"
                )
            # The following collectives depend on these two settings.
            by_latency = "sync='auto'" if self._at_high_latency else "sync not 'auto'"
            return f"{by_latency}, {self._settings.network.describe()}"

        device = next((p.device for p in inside.model.parameters()), torch.device("cpu"))
        with on_device(device):
            wait_for_all(replica.everyone, "attach() must be called on every rank")
            agree(check_arguments, replica.everyone)
            settings = self._settings
            if self._at_high_latency and self._needs_local_steps(replica, optimizers):
                settings = self._at_high_latency
            settings = copy(settings)  # a session changes them by its model, and may not start
            session = Session(settings, replica, optimizers, scaler, samples_per_step)
            try:
                replica.start(session.exchanging())
            except BaseException:
                session.leave()
                raise
        self._session, self._settings = session, settings
        self._framework_form = "gathered" if inside.by_framework else "rank"
        return self

    def _needs_local_steps(self, replica: Replica, optimizers: Sequence[Optimizer]) -> bool:
        """Whether the network's latency is high, and the optimizers can make local steps (a
        collective)."""
        network, measured = self._settings.network, LinkCost()
        exchange = Exchange(replica.group, everyone=replica.everyone)
        if network.is_real:
            devices = (p.device for _, p in replica.parameters())
            device = next(devices, torch.device("cpu"))
            measured = LinkCost(measure_latency(exchange, network.clock, device))
        latency = latency_of(network, measured)
        if latency < HIGH_LATENCY:
            return False
        unsharded = replica.everyone is replica.group
        if unsharded and self._settings.memory.takes_updates(optimizers):
            return True
        if exchange.first:
            log.warning("%s", NO_LOCAL_STEPS.format(round(1000 * latency)))
        return False

    def detach(self) -> None:
        """Detach the compressor for good, on every rank (a collective if `attach` got an
        optimizer).

        The exchange is dense from now on, unless another compressor is attached. The next step
        sends the residuals of gradients; residuals of updates move the parameters now. Residuals of
        gradients are lost if the model takes no further step, or has another compressor by then.
        Velocities and moments go back into the optimizer. With local steps or gossip all ranks go
        on from the mean of their parameters. Between a backward and its `optimizer.step()` the
        gradients become the ranks' mean.

        After a failed exchange, or an exception in a backward, `detach` is no collective, and drops
        the residuals: load model and optimizer on all ranks before training goes on."""
        if self._session is None or self.detached:
            raise RuntimeError("the compressor is not attached to a model: nothing to detach")
        with on_device(self._session.device):
            self._session.detach()

    @property
    def detached(self) -> bool:
        """True unless the compressor is attached to a model."""
        return self._session is None or self._session.detached

    @property
    def base(self) -> Compressor:
        """The base compressor."""
        return self._settings.base

    @property
    def policy(self) -> Policy:
        """The policy that chooses the CF."""
        return self._settings.policy

    @property
    def cf(self) -> float:
        """The compression factor in use; 1 is dense."""
        return self._session.controller.cf if self._session else DENSE

    @property
    def memory(self) -> str:
        """The name of the memory in use: "residual", "momentum", "updates", "none" or a user's;
        before `attach` the name that was asked for, perhaps "auto"."""
        return self._session.memory_kind if self._session else self._settings.memory.kind

    @property
    def layer_cfs(self) -> dict[str, float]:
        """By parameter name, the CF of each layer that sends at another CF than `cf`."""
        return dict(self._session.controller.cfs.layers) if self._session else {}

    def __repr__(self) -> str:
        """The settings, the present CF, and the number of steps."""
        chosen, now = self._settings, "not attached"
        if self._session is not None:
            controller, ranks = self._session.controller, self._session.exchange.ranks
            now = f"{named(self.cf)} after {counted_steps(controller.step)} on {ranks} ranks"
            now = f"detached, {now}" if self.detached else now
        low, high = chosen.cf_range
        rungs = below_range(chosen.base)
        below = f" and below it {rungs}" if rungs else ""
        return (
            f"AdaptiveCompressor(base={chosen.base.name!r}, cf_range=({low:g}, {high:g}){below}, "
            f"policy={chosen.policy!r}, memory={self.memory!r}; {now})"
        )

    def summary(self) -> Summary:
        """Totals so far, such as bytes sent; prints as a headline and a table."""
        return self.running().summary()

    def explain(self, detail: bool = False) -> str:
        """The present state in words: whether compression pays, the CF and why, and candidates
        below cf_range. detail: also the numbers of the policy's rule."""
        text, rungs = self.running().explain(detail), below_range(self._settings.base)
        low, high = self._settings.cf_range
        below = f"\ncandidates: dense, {rungs}, and CF {low:g} to {high:g}" if rungs else ""
        return text + below

    def flush(self) -> None:
        """Read the last step's statistics now; otherwise the next step's start reads them. Called
        on every rank."""
        self.running().controller.flush()

    def averaged(self) -> AbstractContextManager[None]:
        """A context in which the model holds the mean of the ranks' parameters, for evaluation and
        for saving. With local steps, a delay or gossip, entering the context is a collective, as
        large as a dense step. Otherwise all ranks have the same parameters anyway."""
        session = self.running()
        with on_device(session.device):
            return session.averaged()

    def discard(self) -> None:
        """Empty the memory, residuals of earlier steps and an SGD's momentum included. Called on
        every rank, in place of `optimizer.step()`, if the script drops the gradients of a backward
        (after a loss spike). No collective. In parameter space, at CF 10 and above, such a backward
        leaves nothing in the memory: leaving the step out is enough."""
        self.running().discard()

    def close(self) -> None:
        """End the run: wait for exchanges under way, record the last step, and close the timeline.
        Called on every rank, after training. If this rank has left out the step of its last
        backward, it does that step's exchange first. Later steps are not recorded."""
        if self._session is not None:
            with on_device(self._session.device):
                self._session.close()
        else:
            self._settings.timeline.close()

    def state_dict(self, checkpoint: forms.FormName = "auto") -> dict[str, Any]:
        """The state to save, on every rank, between steps: policy, statistics, residuals (by
        parameter name), totals.

        checkpoint: "rank": each rank gets its own state, which it saves and loads itself.
        "gathered": rank 0 gets the states of all ranks (a collective), for frameworks that save
        only rank 0's state, and load it on every rank. "auto": "gathered" if `attach` got a model
        or optimizer wrapped by Accelerate or Fabric, else "rank". ValueError for another value.

        While updates are exchanged, ranks have different moments in their optimizers; with local
        steps, a delay or gossip also different parameters. With "rank" each rank must then save its
        own model and optimizer. With "gathered" the ranks first agree on model and optimizer, by
        dense exchanges, so that rank 0's are enough: all ranks train on from them, and so does a
        resumed run.

        A resumed run equals an uninterrupted one up to rounding: DDP rebuilds its buckets after the
        first backward (with `static_graph` after the second), which changes the order of summation,
        and the tensors that are compressed as one. The run is the same bit by bit if as many
        discarded backwards come before `load_state_dict` (as in `runs train --resume`).

        Saving waits for the statistics of the last steps. So on a device, and with a delay, the
        policy's next decision may come one step sooner, in this run and in a resumed run alike."""
        form = checks.one_of("checkpoint", checkpoint, forms.FORMS)
        session = self.running()
        with on_device(session.device):
            return forms.save(session, self._framework_form if form == "auto" else form)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a `state_dict()` of any form, on every rank (a collective): this rank's own state,
        or the gathered state of rank 0, which may be of another number of ranks. (`reshard_states`
        converts states of form "rank" to another number of ranks.) Model and settings must be the
        same as in the saved run. Load the model and the optimizer first: a gathered state contains
        the agreed parameters and moments, which replace them.

        ValueError on all ranks, with nothing changed, if some rank's state does not fit or is
        damaged: a key or a parameter is missing or unknown, a value has another type or shape, a
        number is not finite. An injected clock must go on from its saved time. With the real clock,
        the time since saving counts for no step."""
        same_clock = self._settings.network.clock is not time.perf_counter
        session = self.running()
        with on_device(session.device):
            forms.load(session, state, same_clock)

    def __getstate__(self) -> dict[str, Any]:
        """A copy is as if it had been made with the same arguments: it is attached to no model."""
        given = {name: _unused(value) for name, value in self._given.items()}
        return {**vars(self), **vars(AdaptiveCompressor(**given))}

    def running(self) -> Session:
        """The session. RuntimeError before `attach`."""
        if self._session is None:
            raise RuntimeError("the compressor knows no model: attach(model) first")
        return self._session


@contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """A context in which a CUDA device is the current one, and in which tensors are made that later
    steps can write. torch gathers objects on the current device: in a script that passes
    `device_ids` to DDP, that may still be the first device. Scripts save under
    `torch.inference_mode()`, whose new tensors are for reading only."""
    there = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with there, torch.inference_mode(False):
        yield


def _unused(value: Any) -> Any:
    """A copy of a policy or compressor that works for no model yet, since one works for one model;
    anything else, and what cannot be copied, as it is."""
    try:
        return deepcopy(value) if isinstance(value, Policy | Compressor) else value
    except Exception:
        return value
