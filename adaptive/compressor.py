"""`AdaptiveCompressor`: what a training script imports, attaches to its DDP model, and forgets."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from adaptive import checkpoint as forms
from adaptive.agreement import agree, check_model
from adaptive.config import (
    GRANULARITIES,
    Settings,
    check_local_steps,
    debug_interval,
    default_policy,
    make_base,
    make_rungs,
    no_memory,
    positive,
    require,
)
from adaptive.exchange.choice import check_exchange
from adaptive.exchange.link import LinkSpec
from adaptive.exchange.topology import choose_gossip
from adaptive.hook import Attachment, DDPHook, HookRung, check_hooks
from adaptive.local_steps import OUTER_LR, OUTER_MOMENTUM
from adaptive.memory.model_memory import MemoryChoice
from adaptive.session import Session
from adaptive.statistics.shadow import SHARE
from adaptive.summary import Summary
from adaptive.timeline.recorder import SafeTimeline, Sink
from adaptive.wrappers import Unwrapped, unwrap
from compressors import Compressor
from policies import DENSE, Policy, checks, make_policy
from policies.base import counted_steps
from policies.words import named

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from adaptive.integrations.fsdp import ShardedReplica


class AdaptiveCompressor:
    """Compresses the gradient exchange of a DDP model, by a factor that it chooses as it goes.

    All ranks must make it alike. Only `base` and `cf_range` are positional. docs/settings.md says
    when to touch an argument.

    base: name of a compressor ("topk", "randomk", "none") or a `Compressor`. A sparsifier's name
        may say how the kept values travel ("topk+fp32" as they are); if it does not, and errors are
        fed back, they are rounded to 4 bits ("topk+int4"). "none" sends dense.
    cf_range: smallest and largest compression factor (CF) besides dense, floats >= 1.
    policy: "goodput", "gravac", "accordion", "fixed" (which stays at cf_range[0]), ..., or a
        `Policy`. None: "goodput" for a base that keeps the largest elements (topk and the threshold
        sparsifiers) without hooks, "gravac" otherwise; a model whose gradients are too few for the
        statistics (more than 1% of dense's bytes) then stays dense, and nothing is measured.
    granularity: "layer" compresses tensor by tensor (the papers' way), "bucket" all tensors of a
        DDP bucket as one, once DDP has cut its buckets for good. "auto": "bucket" for a base that
        keeps the largest elements, unless the policy gives layers CFs of their own.
    dense_below: tensors of fewer elements than this are sent uncompressed.
    exchange: how the ranks' payloads become the mean. "all_reduce" (payloads that can be summed),
        "all_gather", "sharded" (compressed twice; bytes do not grow with the number of ranks),
        "voted_indices" (sparsifiers: each rank proposes 1/N of the indices for all).
        "gossip": there is no mean, each rank steps by itself and exchanges parameters with its
        neighbours (docs/gossip.md); with policy "fixed" (the default then), "schedule" or "warmup",
        and an optimizer of all parameters handed over. "auto": the fastest by a cost model of the
        network, measured when there is a choice.
    down_cf: with exchange="sharded", the CF at which means travel back to all ranks, where that is
        not the CF at which gradients come: 1 compresses on the way up only.
    topology: of gossip, who the neighbours are: "ring" (None), "torus", "exponential" (1, 2, 4, ...
        ranks away), "one_peer" (one of these by turns), "complete", or a doubly stochastic matrix.
    gossip: how: "d-psgd" (base "none"), "dcd-psgd" (compresses differences; unbiased bases),
        "deepsqueeze" (feeds errors back), "choco-sgd" (differences from a replica) or "naive" (does
        not converge: for comparison). "auto": by the base "d-psgd", "dcd-psgd" or "choco-sgd".
    consensus_step: of "deepsqueeze" and "choco-sgd", by how much of the weighted difference a rank
        moves, in (0, 1]: the larger the CF, the smaller. None: 2 / CF and 5 / CF, at most 1.
    server_memory: with exchange="sharded", what compressing a mean loses waits by itself, for the
        next mean, as in DoubleSqueeze's server (docs/delay.md), until the compressor is detached.
        False: in the residual of the rank that has compressed it.
    hooks: existing DDP communication hooks or `HookRung`s, by the CF at which the policy finds
        them. While one is in use there is no error feedback; a dense step sends the residual first.
    rungs: other compressors, by CF below cf_range, beside dense: {4: "int8"}. What they round stays
        in the residual. "auto": {2: "bf16", 4: "int8"} with policy "goodput" and a sparsifier with
        error feedback, for a network that is only a little too slow. None: none.
    memory: "residual" feeds back errors. "momentum": momentum correction (DGC, section 3), for SGD
        with momentum. "updates": what the step of each rank's optimizer has done is fed back and
        sent, with any optimizers that `attach` is handed. "none": what is not sent is lost. "auto":
        by what `attach` is handed "momentum" for torch's SGD with momentum, "residual" for one
        without or nothing, else "updates"; "none" for an unbiased compressor.
    residual_dtype: torch.bfloat16 keeps the residual in half the memory, rounded at random; not
        with momentum correction. Of float64 parameters it is in float64 all the same.
    momentum_lag: the share of the momentum's lag m / (1 - m), in (0, 1], that is kept while
        gradients are compressed (docs/defaults.md), with momentum correction only. 1 is DGC's rule;
        None: the compressor's own.
    masking: momentum factor masking: from which CF on the velocity of what is sent is cleared
        (True: at every CF above 1; False: never; None: always for dgc, never for others). With
        momentum correction only.
    clip_norm: clip each parameter's local gradient to this norm / sqrt(world size) before it is
        accumulated (DGC, section 3.2, but per parameter: buckets leave before the last is there).
        Not where updates or parameters are exchanged.
    shadow_sample: share of the elements, in (0, 1], from which the shadow ladder tells gains; at
        least 16,384 of a bucket and 1,024 of a tensor.
    samples_per_step: samples of all workers in a step; throughput is then samples/s, not steps/s.
    timeline: a `Timeline`, a function `log(numbers, step)`, or several; rank 0 writes.
    local_steps: H > 1 lets each rank take H steps by itself, with any optimizer of torch's, between
        two exchanges, which are of what the ranks have come to since the last (DiLoCo): H times
        fewer bytes again. A step of the policy and of the timeline is then a round of H. "auto":
        the policy ("goodput") chooses H, from 1 to 32, as it chooses the CF; with memory "updates",
        and else 1.
    outer_lr, outer_momentum: with local steps, of the outer step, SGD with Nesterov momentum, which
        moves all ranks by the mean of that.
    overlap: with local steps, how many of them may pass while an exchange is under way, fewer than
        H: the link is busy while the ranks compute (Streaming DiLoCo), for one more copy of the
        parameters. None: half of H. 0: backward waits for the exchange that it begins.
    delay: D > 0 lets each rank take its own step t at once, with any optimizer of torch's; the mean
        of what the ranks have done in it takes the place of that before step t + D. Up to D
        exchanges are under way while the ranks compute, which hides latency (docs/delay.md), for
        2 D + 1 copies of the parameters.
    link: emulate a slow link, e.g. "100mbit" or "100mbit,5ms" (for demonstrations).
    clock: seconds, monotonic; throughput steers the policy, so tests and replays inject one.
    debug: compare the ranks' plans in every step (a small blocking collective), their parameters
        in every so many (True: 100); RuntimeError on all ranks names the first parameter and rank
        that differ. None: as the environment variable ADAPTIVE_DEBUG says.
    checkpoint: what `state_dict()` gives. "rank": each rank its own state, to save and load by
        itself. "gathered": rank 0 the states of all ranks, for frameworks that write what rank 0
        has, and hand it to every rank. "auto": "gathered" where `attach` is handed what Accelerate
        or Fabric have wrapped, else "rank".

    A setting that nothing would look at, beside the others, is refused here, or by `attach` where
    that depends on the optimizer. Only base="none" takes any: a run is switched to dense by it.
    ValueError or TypeError names the argument, its value and what is accepted.
    """

    def __init__(
        self,
        base: str | Compressor = "topk",
        cf_range: tuple[float, float] = (10, 1000),
        *,
        policy: str | Policy | None = None,
        granularity: str = "auto",
        dense_below: int = 0,
        exchange: str = "auto",
        down_cf: float | None = None,
        topology: str | Tensor | Sequence[Sequence[float]] | None = None,
        gossip: str | None = None,
        consensus_step: float | None = None,
        server_memory: bool = False,
        hooks: Mapping[float, HookRung | DDPHook] | None = None,
        rungs: Mapping[float, str | Compressor] | str | None = "auto",
        memory: str = "auto",
        residual_dtype: torch.dtype = torch.float32,
        momentum_lag: float | None = None,
        masking: bool | float | None = None,
        clip_norm: float | None = None,
        shadow_sample: float = SHARE,
        samples_per_step: float | None = None,
        local_steps: int | str = 1,
        outer_lr: float = OUTER_LR,
        outer_momentum: float = OUTER_MOMENTUM,
        overlap: int | None = None,
        delay: int = 0,
        timeline: Sink | Sequence[Sink] | None = None,
        link: str | LinkSpec | None = None,
        clock: Callable[[], float] = time.perf_counter,
        debug: bool | int | None = None,
        checkpoint: str = "auto",
    ) -> None:
        compressor, foreign = make_base(base, memory), check_hooks(hooks)
        exchange = check_exchange(exchange, compressor)
        neighbours = choose_gossip(compressor, exchange, topology, gossip, consensus_step)
        if neighbours is not None:
            memory = no_memory(memory)
        unnamed = policy is None and neighbours is None
        if policy is None:
            policy = default_policy(compressor, foreign) if neighbours is None else "fixed"
        policy = make_policy(policy)
        cf_range = checks.cf_range(cf_range)
        below = make_rungs(rungs, compressor, policy, exchange, memory, cf_range[0])
        spec = LinkSpec.parse(link) if isinstance(link, str) else link
        accepted = "a rate such as '100mbit', a LinkSpec or None"
        require(isinstance(spec, LinkSpec | None), "link", link, accepted)
        require(callable(clock), "clock", clock, "a function that returns seconds")
        clip_norm = positive("clip_norm", clip_norm)
        self._settings = Settings(
            base=compressor,
            granularity=checks.one_of("granularity", granularity, GRANULARITIES),
            dense_below=checks.whole("dense_below", dense_below, least=0),
            exchange=exchange,
            down_cf=None if down_cf is None else checks.real("down_cf", down_cf, least=1),
            server_memory=checks.flag("server_memory", server_memory),
            hooks=foreign,
            rungs=below,
            cf_range=cf_range,
            policy=policy,
            may_stay_dense=unnamed,
            memory=MemoryChoice(compressor, below, memory, momentum_lag, masking, clip_norm),
            residual_dtype=residual_dtype,
            clip_norm=clip_norm,
            shadow_sample=checks.fraction("shadow_sample", shadow_sample),
            samples_per_step=positive("samples_per_step", samples_per_step),
            local_steps=check_local_steps(local_steps),
            outer_lr=checks.real("outer_lr", outer_lr, above=0),
            outer_momentum=checks.real("outer_momentum", outer_momentum, least=0),
            overlap=None if overlap is None else checks.whole("overlap", overlap, least=0),
            delay=checks.whole("delay", delay, least=0),
            timeline=SafeTimeline(timeline),
            link=spec,
            clock=clock,
            debug=debug_interval(debug),
            gossip=neighbours,
        )
        self._form = checks.one_of("checkpoint", checkpoint, forms.FORMS)
        self._session: Session | None = None
        self._framework_form = "rank"  # of a state, as the script's framework needs it

    def attach(
        self,
        model: nn.Module,
        *,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        scaler: GradScaler | None = None,
    ) -> AdaptiveCompressor:
        """Register the hook on `model`, on every rank, before the first backward (a collective).
        Sparse gradients and complex parameters are exchanged as DDP does without a hook.

        model: `DistributedDataParallel`, or what `torch.compile` or Fabric have made of it.
        optimizer: the optimizer of the model, or all of them. In compressed steps each rank's
            optimizer then steps by this rank's own gradients, and what the step has done is
            compressed and averaged (see `memory`). With an SGD's momentum, gradients are averaged,
            and `p.grad` holds velocity, which clipping and logging must know. A wrapper that has
            the optimizer as its `.optimizer` will do.
        scaler: the `GradScaler` in use; the residual is then kept in unscaled units. None: that of
            Accelerate's optimizer, if it has one.
        Returns self. TypeError if `model` is not DDP; RuntimeError if it is attached already, has
        another hook, or the ranks disagree.
        """
        inside = unwrap(model, optimizer)
        ddp = check_model(inside.model, inside.model is not model)
        attachment: Attachment | None = None

        def check() -> None:
            nonlocal attachment
            attachment = Attachment.of(ddp)

        self._start(ddp, ddp.process_group, inside, scaler, check=check)
        if attachment is None:
            Attachment(self).register(ddp)
        else:
            attachment.compressor = self
        return self

    def attach_fsdp(
        self,
        root: nn.Module,
        mesh: DeviceMesh,
        *,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        scaler: GradScaler | None = None,
    ) -> AdaptiveCompressor:
        """Compress what the replicas of a sharded model exchange, on every rank, before the first
        backward (a collective): docs/fsdp.md.

        root: the outermost module that `torch.distributed.fsdp.fully_shard` was called on, as all
            of them with `mesh[<the second dimension's name>]`: torch shards inside a replica.
        mesh: of two dimensions, (replicas, shards). Parameters and buffers of the first replica are
            broadcast to the others.
        optimizer, scaler: see `attach`.
        Returns self. TypeError if `root` is not such a module; ValueError for another mesh, or
        settings that do not go with it; RuntimeError if it is attached already or the ranks differ.
        """
        from adaptive.integrations.fsdp import ShardedReplica

        inside = unwrap(root, optimizer)
        replica = ShardedReplica.of(inside.model, mesh, self._settings)
        of, everyone = replica.process_group, replica.everyone
        self._start(replica, of, inside, scaler, everyone, check=replica.check_free)
        replica.start()
        replica.compressor = self
        return self

    def _start(
        self,
        model: DistributedDataParallel | ShardedReplica,
        group: dist.ProcessGroup,
        inside: Unwrapped,
        scaler: GradScaler | None,
        everyone: dist.ProcessGroup | None = None,
        check: Callable[[], object] = lambda: None,
    ) -> None:
        """inside: with the optimizer. everyone: see `Session`. check: raises what is wrong with the
        model on this rank, which all are told of."""
        optimizers = inside.optimizers
        scaler = inside.scaler if scaler is None else scaler

        def check_arguments() -> str:
            check()
            for each in optimizers:
                accepted = "a torch.optim.Optimizer, several of them, or None"
                require(isinstance(each, Optimizer), "optimizer", each, accepted)
            scales = scaler is None or (hasattr(scaler, "scale") and hasattr(scaler, "is_enabled"))
            require(scales, "scaler", scaler, "a torch.amp.GradScaler or None")
            if self._session is not None:
                raise RuntimeError(
                    "the compressor has been attached to a model already: make a new "
                    "AdaptiveCompressor for each model, and after detach()"
                )
            return ""

        agree(check_arguments, group if everyone is None else everyone)
        self._session = Session(self._settings, group, model, optimizers, scaler, everyone)
        self._framework_form = "gathered" if inside.by_framework else "rank"

    def detach(self) -> None:
        """Take the compressor off for good, on every rank (a collective with an optimizer).

        The exchange is dense from now on, unless another compressor is attached. The next step
        sends what the residual holds (with updates that is taken off the parameters now); of a
        model that takes no further step, or has another compressor by then, it is lost. Velocities
        and moments go back into the optimizer. With local steps or gossip all ranks go on from
        their mean."""
        if self._session is None or self.detached:
            raise RuntimeError("the compressor is not attached to a model: nothing to detach")
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
        return (
            f"AdaptiveCompressor(base={chosen.base.shown!r}, cf_range=({low:g}, {high:g}), "
            f"policy={chosen.policy!r}, memory={self.memory!r}; {now})"
        )

    def summary(self) -> Summary:
        """What was sent so far; prints as a headline and a table."""
        return self._running().summary()

    def explain(self, detail: bool = False) -> str:
        """The present state in words: whether compression is worth it here, and the CF and why.
        detail: and the numbers of the policy's rule."""
        return self._running().explain(detail)

    def flush(self) -> None:
        """Take in the last step's statistics, which otherwise come with the next step's start. On
        every rank."""
        self._running().controller.flush()

    def averaged(self) -> AbstractContextManager[None]:
        """A context in which the model holds the mean of the ranks' parameters, for evaluation and
        for saving. With local steps and gossip they differ, and it is a collective, as large as a
        dense step; else the model holds it anyway."""
        return self._running().averaged()

    def discard(self) -> None:
        """Call this instead of `optimizer.step()` where the gradients of a backward are thrown
        away (a loss spike). The memory forgets all that it holds, what was left of steps before
        included (with updates the optimizer's moments, too, which have seen the spike). On every
        rank; no collective."""
        self._running().discard()

    def close(self) -> None:
        """At the end of training: take in the last step and close the timeline. Steps after this
        are no longer recorded."""
        if self._session is not None:
            self._session.close()
        else:
            self._settings.timeline.close()

    def reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """The hook's work for one bucket; returns a future of the mean gradient."""
        return self._running().reduce(bucket)

    def state_dict(self, checkpoint: str | None = None) -> dict[str, Any]:
        """What is to be saved, in the form that `checkpoint=` says, here or in the constructor:
        policy, statistics, residuals, totals, by parameter name. Take it on every rank, between
        steps. With "gathered" it is a collective, and holds something on rank 0 only.

        With updates the optimizer's moments are each rank's own while gradients are compressed.
        With local steps, a delay and gossip the parameters are, too. With "rank" each rank has to
        save its own model and optimizer. With "gathered" the ranks agree on both first, by dense
        exchanges, and rank 0's are enough: all ranks train on from there, and so does a run that
        resumes.

        A run that resumes does so to rounding: DDP orders its buckets anew after the first backward
        (with `static_graph` after the second), which changes the order of summation, and what is
        compressed as one. To the bit it does so if as many throwaway backwards come before
        `load_state_dict` (as `runs train --resume` does)."""
        form = self._form if checkpoint is None else checkpoint
        form = checks.one_of("checkpoint", form, forms.FORMS)
        return forms.save(self._running(), self._framework_form if form == "auto" else form)

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
        same_clock = self._settings.clock is not time.perf_counter
        forms.load(self._running(), state, same_clock)

    def _running(self) -> Session:
        if self._session is None:
            raise RuntimeError("the compressor knows no model: attach(model) first")
        return self._session
