"""`AdaptiveCompressor`: what a training script imports, attaches to its DDP model, and forgets."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from adaptive import contrib
from adaptive.exchange.choice import ExchangeName, ParameterServer, measure_link
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
from adaptive.session import checkpoint as forms
from adaptive.session.session import Session
from adaptive.settings.config import (
    GRANULARITIES,
    USUAL,
    GranularityName,
    Settings,
    below_range,
    debug_interval,
    default_policy,
    make_base,
    require,
    with_ladder,
)
from adaptive.settings.sizes import latency_of
from adaptive.settings.synchronisation import LATE, EveryStep, LocalSteps, Synchronisation
from adaptive.timeline.sinks import SafeTimeline, Sink
from adaptive.timeline.summary import Summary
from compressors import Compressor
from policies import DENSE, Policy, PolicyName, checks, make_policy
from policies.base import counted_steps
from policies.words import named

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


log = logging.getLogger("adaptive")

STAYS = (
    "sync='auto': a message takes {} ms on this network. The ranks exchange in every step all the "
    "same, since they cannot step by themselves: that takes DDP, and optimizers of torch's other "
    "than SGD, handed over to attach(). sync=Delayed(2) or LocalSteps(4) would hide the latency"
)


class AdaptiveCompressor:
    """Compresses the gradient exchange of a DDP model, by a factor that it chooses as it goes.

    All ranks must make it alike. Only `base` and `cf_range` are positional. docs/settings.md says
    when to touch an argument.

    base: name of a compressor ("topk", "randomk", "none") or a `Compressor`. None: "topk". A
        sparsifier's name may say how the kept values travel ("topk+fp32" as they are); if it does
        not, and errors are fed back, they are rounded to 4 bits. "none" sends dense. With policy
        "goodput" a sparsifier becomes `Ladder({2: "bf16", 4: "int8", 8: "int4"}, base)`: three more
        CFs, below cf_range, for a network that is only a little too slow. Give a `Ladder` for
        others, or for none: `Ladder({}, "topk+int4")`.
    cf_range: smallest and largest compression factor (CF) besides dense, floats >= 1. None:
        (10, 1000).
    policy: "goodput", "gravac", "accordion", "fixed" (which stays at cf_range[0]), ..., or a
        `Policy`. None: "goodput" for a base that keeps the largest elements (topk and the threshold
        sparsifiers) without hooks, "gravac" otherwise; a model whose gradients are too few for the
        statistics (more than 1% of dense's bytes) then stays dense, and nothing is measured.
        A policy may bring base, cf_range, memory and granularity along, for where these are None:
        `GraVAC.paper()` and `Accordion.paper()` (by name "gravac-paper" and "accordion-paper")
        bring those of their papers.
    sync: how the ranks keep their models together. `LocalSteps(10)`: each rank takes 10 steps by
        itself between two exchanges. `Delayed(2)`: the mean of a step comes two steps later.
        `Gossip("ring")`: each rank exchanges with its neighbours only. None: in every step, of
        gradients or of what the optimizers' steps have done (see `memory`). "auto": as
        `LocalSteps("auto")` where a message takes 40 ms or more, and beside other optimizers than
        SGD; else as None.
    memory: what becomes of what is not sent. "residual": it is fed back. "momentum": momentum
        correction (DGC), for SGD with momentum. "updates": what the step of each rank's optimizer
        has done is fed back and sent, with any optimizers that `attach` is handed. "none": it is
        lost. Or with settings a `Residual`, `Momentum` or `Updates`. A registered name, or a
        `MemoryRule`: one of your own (docs/own_memory.md). None or "auto": "none" for an
        unbiased compressor; else by what `attach` is handed "momentum" for torch's SGD with
        momentum, "residual" for one without or nothing, and "updates" for others.
    exchange: how the ranks' payloads become the mean. "all_reduce" (payloads that can be summed),
        "all_gather", "sharded" (compressed twice; bytes do not grow with the number of ranks) or
        with settings a `ParameterServer`, "voted_indices" (sparsifiers: each rank proposes 1/N of
        the indices for all). "auto": the fastest by a cost model of the network, which is measured
        when there is a choice. A registered name, or a `Strategy`: one of your own
        (docs/own_exchange.md). `TwoLevel()`: dense inside a node, and one of these between nodes;
        "auto" takes it where torchrun has started several nodes of several ranks each.
    granularity: "layer" compresses tensor by tensor (the papers' way), "bucket" all tensors of a
        DDP bucket as one, once DDP has cut its buckets for good. None or "auto": "bucket" for a
        base that keeps the largest elements, unless the policy gives layers CFs of their own.
    dense_below: tensors of fewer elements than this are sent uncompressed.
    hooks: existing DDP communication hooks or `HookRung`s, by the CF at which the policy finds
        them. A hook's step is a dense one to all else: it takes what the residual holds along, and
        what the hook loses is not fed back.
    timeline: a `Timeline`, a function `log(numbers, step)`, or several; rank 0 writes.
    network: emulate a slow link, as "100mbit" or "100mbit,5ms" (for demonstrations), or a `Network`
        with a clock of your own.
    debug: compare the ranks' plans in every step (a small blocking collective), their parameters
        in every so many (True: 100); RuntimeError on all ranks names the first parameter and rank
        that differ. None: as the environment variable ADAPTIVE_DEBUG says.

    A setting that nothing would look at, beside the others, is refused here, or by `attach` where
    that depends on the optimizer. Only base="none" takes any: a run is switched to dense by it.
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
        unnamed = policy is None
        made = None if policy is None else make_policy(policy)
        usual = {**USUAL, **({} if made is None else made.compression)}
        base = usual["base"] if base is None else base
        cf_range = checks.cf_range(usual["cf_range"] if cf_range is None else cf_range)
        memory = usual["memory"] if memory is None else memory
        granularity = usual["granularity"] if granularity is None else granularity
        accepted = "'auto', LocalSteps(...), Delayed(...), Gossip(...) or None"
        by_name = isinstance(sync, str) and sync == "auto"
        known = by_name or isinstance(sync, Synchronisation | None)
        require(known, "sync", sync, accepted)
        timelines = SafeTimeline(timeline)

        def settings(sync: Synchronisation) -> Settings:
            remembered = memory_from(memory)
            compressor = make_base(base, remembered.kind)
            remembered = sync.memory_of(remembered)
            sync = sync.for_base(compressor)
            ways, policy = ExchangeOptions.of(exchange, compressor), made
            if policy is None:
                chosen = "gravac" if hooks else default_policy(compressor)
                policy = make_policy(sync.default_policy or chosen)
            compressor = with_ladder(compressor, policy, ways.way, remembered.kind, cf_range[0])
            if hooks is not None:
                with_hooks = contrib.load("with_hooks")
                compressor = with_hooks(compressor, hooks, cf_range, policy, sync, ways.server)
            return Settings(
                base=compressor,
                granularity=checks.one_of("granularity", granularity, GRANULARITIES),
                dense_below=checks.whole("dense_below", dense_below, least=0),
                exchange=ways,
                cf_range=cf_range,
                policy=policy,
                may_stay_dense=unnamed,
                sync=sync,
                memory=MemoryChoice(compressor, remembered),
                timeline=timelines,
                network=network_from(network),
                debug=debug_interval(debug),
            )

        usual_sync = sync if isinstance(sync, Synchronisation) else EveryStep()
        self._settings = settings(usual_sync)
        self._if_late = settings(LocalSteps("auto")) if by_name else None
        self._session: Session | None = None
        self._framework_form = "rank"  # of a state, as the script's framework needs it

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

        model: `DistributedDataParallel`, or what `torch.compile` or Fabric have made of it.
        optimizer: the optimizer of the model, or all of them. In compressed steps each rank's
            optimizer then steps by this rank's own gradients, and what the step has done is
            compressed and averaged (see `memory`). Beside Adam, int8 and int4 send gradients all
            the same. With an SGD's momentum, gradients are averaged, and `p.grad` holds velocity,
            which clipping and logging must know. A wrapper that has the optimizer as its
            `.optimizer` will do.
        scaler: the `GradScaler` in use; the residual is then kept in unscaled units. None: that of
            Accelerate's optimizer, if it has one.
        samples_per_step: samples of all workers in a step; throughput is then told in samples/s,
            not steps/s.
        Returns self. TypeError if `model` is not DDP; RuntimeError if it is attached already, has
        another hook, or the ranks disagree.
        """
        inside = unwrap(model, optimizer)
        replica = DDPReplica.of(inside.model, inside.model is not model)
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
        """Compress what the replicas of a sharded model exchange, on every rank, before the first
        backward (a collective): docs/fsdp.md.

        root: the outermost module that `torch.distributed.fsdp.fully_shard` was called on, as all
            of them with `mesh[<the second dimension's name>]`: torch shards inside a replica.
        mesh: of two dimensions, (replicas, shards). Parameters and buffers of the first replica are
            broadcast to the others.
        optimizer, scaler, samples_per_step: see `attach`.
        Returns self. TypeError if `root` is not such a module; ValueError for another mesh, or
        settings that do not go with it; RuntimeError if it is attached already or the ranks differ.
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
        """inside: with the optimizer. Returns self."""
        optimizers = inside.optimizers
        scaler = inside.scaler if scaler is None else scaler

        def check_arguments() -> str:
            replica.check_free()
            for each in optimizers:
                accepted = "a torch.optim.Optimizer, several of them, or None"
                if isinstance(each, LRScheduler):
                    accepted = "an optimizer, and this is a scheduler: hand its .optimizer over"
                require(isinstance(each, Optimizer), "optimizer", each, accepted)
            scales = scaler is None or (hasattr(scaler, "scale") and hasattr(scaler, "is_enabled"))
            require(scales, "scaler", scaler, "a torch.amp.GradScaler or None")
            if samples_per_step is not None:
                checks.real("samples_per_step", samples_per_step, above=0)
            if self._session is not None:
                raise RuntimeError(
                    "the compressor has been attached to a model already: make a new "
                    "AdaptiveCompressor for each model, and after detach()"
                )
            # Which collectives follow depends on these two.
            by_latency = "sync='auto'" if self._if_late is not None else "sync not 'auto'"
            return f"{by_latency}, {self._settings.network.describe()}"

        device = next((p.device for p in inside.model.parameters()), torch.device("cpu"))
        with on_device(device):
            wait_for_all(replica.everyone, "attach() must be called on every rank")
            agree(check_arguments, replica.everyone)
            settings = self._settings
            if self._if_late is not None and self._is_late(replica, optimizers):
                settings = self._if_late
            session = Session(settings, replica, optimizers, scaler, samples_per_step)
            try:
                replica.start(session.exchanging())
            except BaseException:
                session.leave()
                raise
        self._session, self._settings = session, settings
        self._framework_form = "gathered" if inside.by_framework else "rank"
        return self

    def _is_late(self, replica: Replica, optimizers: Sequence[Optimizer]) -> bool:
        """A message takes so long that ranks should step by themselves, if their optimizers can (a
        collective)."""
        network, exchange, measured = self._settings.network, Exchange(replica.group), LinkCost()
        if network.is_real:
            devices = (p.device for _, p in replica.parameters())
            device = next(devices, torch.device("cpu"))
            measured = measure_link(exchange, network.clock, device)
        latency = latency_of(network, measured)
        if latency < LATE:
            return False
        serves = replica.everyone is replica.group
        if serves and self._settings.memory.takes_updates(optimizers):
            return True
        if exchange.first:
            log.warning("%s", STAYS.format(round(1000 * latency)))
        return False

    def detach(self) -> None:
        """Take the compressor off for good, on every rank (a collective with an optimizer).

        The exchange is dense from now on, unless another compressor is attached. The next step
        sends what the residual holds (updates are taken off the parameters now); of a model that
        takes no further step, or has another compressor by then, it is lost. Velocities and moments
        go back into the optimizer. With local steps or gossip all ranks go on from their mean.

        After a failed exchange, or an exception in a backward, it is no collective, and drops what
        waits: load model and optimizer on all ranks before training goes on."""
        if self._session is None or self.detached:
            raise RuntimeError("the compressor is not attached to a model: nothing to detach")
        with on_device(self._session.device):
            self._session.detach()

    @property
    def detached(self) -> bool:
        """True unless it is attached to a model."""
        return self._session is None or self._session.detached

    @property
    def base(self) -> Compressor:
        """The compressor that is wrapped."""
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
        """What becomes of what is not sent: "residual", "momentum", "updates" or "none", as it is
        now; "auto" while that is not settled."""
        return self._session.memory_kind if self._session else self._settings.memory.kind

    @property
    def layer_cfs(self) -> dict[str, float]:
        """The CFs in use of the layers (by parameter name) that have another than `cf`."""
        return dict(self._session.controller.cfs.layers) if self._session else {}

    def __repr__(self) -> str:
        """What was chosen, and how far it is."""
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
        """What was sent so far; prints as a headline and a table."""
        return self.running().summary()

    def explain(self, detail: bool = False) -> str:
        """The present state in words: whether compression is worth it here, the CF and why, and
        candidates below cf_range. detail: and the numbers of the policy's rule."""
        told, rungs = self.running().explain(detail), below_range(self._settings.base)
        low, high = self._settings.cf_range
        below = f"\ncandidates: dense, {rungs}, and CF {low:g} to {high:g}" if rungs else ""
        return told + below

    def flush(self) -> None:
        """Take in the last step's statistics, which otherwise come with the next step's start. On
        every rank."""
        self.running().controller.flush()

    def averaged(self) -> AbstractContextManager[None]:
        """A context in which the model holds the mean of the ranks' parameters, for evaluation and
        for saving. With local steps and gossip they differ, and it is a collective, as large as a
        dense step; else the model holds it anyway."""
        return self.running().averaged()

    def discard(self) -> None:
        """Call this instead of `optimizer.step()` where the gradients of a backward are thrown
        away (a loss spike). The memory forgets all that it holds, what was left of steps before
        and an SGD's momentum included. In parameter space, at CF 10 and above, nothing of such a
        backward waits: there it is enough to leave the step out. On every rank; no collective."""
        self.running().discard()

    def close(self) -> None:
        """At the end of training, on every rank: make up for a last step that this rank has left
        out, wait for what is under way, take in the last step, and close the timeline. Steps after
        this are no longer recorded."""
        if self._session is not None:
            with on_device(self._session.device):
                self._session.close()
        else:
            self._settings.timeline.close()

    def state_dict(self, checkpoint: forms.FormName = "auto") -> dict[str, Any]:
        """What is to be saved, on every rank, between steps: policy, statistics, residuals, totals,
        by parameter name.

        checkpoint: "rank": each rank its own state, to save and load by itself. "gathered": rank 0
        the states of all ranks, for frameworks that write what rank 0 has, and hand it to every
        rank; a collective. "auto": "gathered" where `attach` was handed what Accelerate or Fabric
        have wrapped, else "rank". ValueError for another one.

        The optimizer's moments are each rank's own while updates are exchanged.
        With local steps, a delay and gossip the parameters are, too. With "rank" each rank has to
        save its own model and optimizer. With "gathered" the ranks agree on both first, by dense
        exchanges, and rank 0's are enough: all ranks train on from there, and so does a run that
        resumes.

        A run that resumes does so to rounding: DDP orders its buckets anew after the first backward
        (with `static_graph` after the second), which changes the order of summation, and what is
        compressed as one. To the bit it does so if as many throwaway backwards come before
        `load_state_dict` (as `runs train --resume` does)."""
        form = checks.one_of("checkpoint", checkpoint, forms.FORMS)
        session = self.running()
        with on_device(session.device):
            return forms.save(session, self._framework_form if form == "auto" else form)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict()` of any form, on every rank (a collective): from this rank's
        own, or from what rank 0 has gathered, which may be of another number of ranks
        (`reshard_states` makes states of the other form for another number). Same model and
        settings. Load the model and the optimizer first: what the ranks had agreed on of both when
        all their states were gathered is in the state, and takes their place.

        ValueError on all ranks, with nothing changed, if some rank's does not fit or is damaged: a
        key or a parameter is missing or unknown, a value has another type or shape, a number is not
        finite. An injected clock must go on from where it stood; the real one does not, and the
        interval is not timed."""
        same_clock = self._settings.network.clock is not time.perf_counter
        session = self.running()
        with on_device(session.device):
            forms.load(session, state, same_clock)

    def running(self) -> Session:
        """The session at work. RuntimeError before `attach`."""
        if self._session is None:
            raise RuntimeError("the compressor knows no model: attach(model) first")
        return self._session


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """A context in which a CUDA device is the current one, from where torch sends objects among
    ranks. A script that gives DDP its `device_ids` may have left the first device current."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
