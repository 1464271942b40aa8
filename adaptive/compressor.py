"""`AdaptiveCompressor`: what a training script imports, attaches to its DDP model, and forgets."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from adaptive.agreement import check_model
from adaptive.config import (
    GRANULARITIES,
    Settings,
    check_cf_range,
    check_choice,
    check_clock,
    check_debug,
    check_dense_below,
    check_flag,
    check_link,
    check_optimizer,
    check_policy,
    check_positive,
    check_scaler,
    check_share,
    default_policy,
    make_base,
)
from adaptive.exchange.link import LinkSpec
from adaptive.exchange.strategies import check_exchange
from adaptive.hook import Attachment, DDPHook, HookRung, adaptive_hook, check_hooks
from adaptive.memory.model_memory import MemoryChoice
from adaptive.session import Session
from adaptive.statistics.shadow import SHARE
from adaptive.summary import Summary
from adaptive.timeline.records import Timeline, make_timeline
from compressors import Compressor
from policies import DENSE, Policy, make_policy

if TYPE_CHECKING:
    from torch.amp import GradScaler

_STATE_VERSION = 8


class AdaptiveCompressor:
    """Compresses the gradient exchange of a DDP model, by a factor that it chooses as it goes.

    All ranks must make it alike. Only `base` and `cf_range` are positional.

    base: name of a compressor ("topk", "randomk", "none") or a `Compressor`. One that cannot
        compress ("none") sends dense, whatever the policy. A sparsifier's name may say how the kept
        values travel ("topk+fp32" as they are); if it does not, and errors are fed back, they are
        rounded to 4 bits ("topk+int4").
    cf_range: smallest and largest compression factor (CF) besides dense, floats >= 1.
    policy: "goodput", "gravac", "accordion", "fixed" (which stays at cf_range[0]), ..., or a
        `Policy`. None (default): "goodput" for a base that keeps the largest elements (topk and
        the threshold sparsifiers) without hooks, "gravac" otherwise.
    granularity: "layer" compresses tensor by tensor (the papers' way), "bucket" all tensors of a
        DDP bucket as one. "auto" (default): "bucket" for a base that keeps the largest elements
        (topk, dgc, redsync, sidco, threshold), unless the policy gives layers CFs of their own,
        else "layer". While DDP may yet cut its buckets anew, in the first backward after `attach`
        (with `static_graph` in the first two), it is tensor by tensor.
    dense_below: tensors of fewer elements than this are sent uncompressed.
    exchange: how the ranks' payloads become the mean. "all_reduce" (compressors whose payloads
        can be summed), "all_gather", "sharded" (compressed twice; bytes do not grow with the
        number of ranks), "shared_indices" (sparsifiers: one rank chooses for all). "auto": the
        fastest by a cost model of the network, which is measured when there is a choice.
    hooks: existing DDP communication hooks (or a `HookRung`: hook, state, gain), by the CF at
        which the policy finds them; bytes are counted as dense / CF. Our residual is off while one
        is in use, and is sent before, by a dense step.
    memory: what becomes of what is not sent. "residual": error feedback. "momentum": momentum
        correction (DGC, section 3), for SGD with momentum. "none": it is lost. "auto" (default):
        "momentum" if `attach` is handed an SGD optimizer with momentum, else "residual", or
        "none" for an unbiased compressor.
    momentum: for memory="momentum" without an optimizer, whose own momentum must then be 0.
    momentum_lag: the share of the momentum's lag m / (1 - m), in (0, 1], that velocities keep while
        gradients are compressed, since what waits in a residual is late already; every gradient
        still adds up to the same. 1 is DGC's momentum correction. None: the compressor's own (1.2 /
        CF^(1/3) for those that keep the largest elements, but for dgc; 1 for all others).
    masking: momentum factor masking: from which CF on the velocity of what is sent is cleared
        (True: at every CF above 1; False: never; None: always for dgc, never for others). Never
        at CF 1.
    clip_norm: clip each parameter's local gradient to this norm / sqrt(world size) before it is
        accumulated (DGC, section 3.2, per parameter, since buckets leave before the last is there).
    shadow_sample: of a policy that looks at what every CF would keep in steady state, the share of
        the elements that it is told from, in (0, 1], but at least 16,384 of a bucket and 1,024 of
        a tensor. More tells more of large CFs, and costs more time and memory.
    samples_per_step: samples of all workers in a step; throughput is then samples/s, not steps/s.
    timeline: a `Timeline` or several; rank 0 writes.
    link: emulate a slow link, e.g. "100mbit" or "100mbit,5ms" (for demonstrations).
    clock: seconds, monotonic; throughput steers the policy, so tests and replays inject one.
    process_group: of the model whose hook is registered without `attach` or `bind`; None: the
        default group.
    debug: check that the ranks are still replicas: their plans in every step, their parameters in
        every so many (True: 100); RuntimeError on all ranks names the first parameter and rank
        that differ. Costs a small blocking collective a step. None: as the environment variable
        ADAPTIVE_DEBUG says (a number of steps; 1: as True).
    checksum: send a checksum of 4 bytes behind each payload of a bucket (behind each shard of it
        where it is sharded), so that bytes changed on the way are found before they are decoded:
        CorruptPayload (out of backward, as a RuntimeError that names it, the bucket and the rank
        the payload came from) on each rank that receives them, in that step. That rank goes no
        further, so that the others fail when it ends, or at the group's timeout. Covered is what
        is gathered, scattered or broadcast: "all_gather", both rounds of "sharded", the index list
        of "shared_indices". A sum has no checksum: "all_reduce" (dense steps, randomk, half
        precision, powersgd, sketch), the values of "shared_indices", foreign hooks and the
        statistics are not covered. Of compressing and decoding on two ranks it costs 0.1% (top-k
        at CF 100) to 15% (int8) more.

    ValueError or TypeError names the argument, its value and what is accepted.
    """

    hook = staticmethod(adaptive_hook)

    def __init__(
        self,
        base: str | Compressor = "topk",
        cf_range: tuple[float, float] = (10, 1000),
        *,
        policy: str | Policy | None = None,
        granularity: str = "auto",
        dense_below: int = 0,
        exchange: str = "auto",
        hooks: Mapping[float, HookRung | DDPHook] | None = None,
        memory: str = "auto",
        momentum: float | None = None,
        momentum_lag: float | None = None,
        masking: bool | float | None = None,
        clip_norm: float | None = None,
        shadow_sample: float = SHARE,
        samples_per_step: float | None = None,
        timeline: Timeline | Sequence[Timeline] | None = None,
        link: str | LinkSpec | None = None,
        clock: Callable[[], float] = time.perf_counter,
        process_group: dist.ProcessGroup | None = None,
        debug: bool | int | None = None,
        checksum: bool = False,
    ) -> None:
        compressor, rungs = make_base(base, memory, exchange), check_hooks(hooks)
        chosen = make_policy(default_policy(compressor, rungs) if policy is None else policy)
        self._settings = Settings(
            base=compressor,
            granularity=check_choice("granularity", granularity, GRANULARITIES),
            dense_below=check_dense_below(dense_below, compressor),
            exchange=check_exchange(exchange, compressor),
            hooks=rungs,
            cf_range=check_cf_range(cf_range),
            policy=check_policy(chosen, compressor, granularity, rungs),
            memory=MemoryChoice(compressor, memory, momentum, momentum_lag, masking),
            clip_norm=check_positive("clip_norm", clip_norm),
            shadow_sample=check_share("shadow_sample", shadow_sample),
            samples_per_step=check_positive("samples_per_step", samples_per_step),
            timeline=make_timeline(timeline),
            link=check_link(link),
            clock=check_clock(clock),
            debug=check_debug(debug),
            checksum=check_flag("checksum", checksum),
        )
        self._group = process_group
        self._session: Session | None = None
        self._model: DistributedDataParallel | None = None

    # -- attaching ---------------------------------------------------------------------------

    def attach(
        self,
        model: DistributedDataParallel,
        *,
        optimizer: Optimizer | None = None,
        scaler: GradScaler | None = None,
    ) -> AdaptiveCompressor:
        """Register the hook on `model`, on every rank, before the first backward (a collective).

        optimizer: lets Accordion see the learning rate, and an SGD's momentum move into the
            memory; `p.grad` then holds velocity, which clipping and logging must know.
        scaler: the `GradScaler` in use; the residual is then kept in unscaled units.
        Returns self. TypeError if `model` is not DDP; RuntimeError if it is attached already, has
        another hook, or the ranks disagree.
        """
        check_model(model)
        attachment = Attachment.of(model)
        self.bind(model, optimizer=optimizer, scaler=scaler)
        if attachment is None:
            Attachment(self).register(model)
        elif (before := attachment.compressor) is not self:
            if before is not None and before._session is not None:
                self._running().adopt(before._session)
            attachment.compressor = self
        return self

    def bind(
        self,
        model: DistributedDataParallel,
        *,
        optimizer: Optimizer | None = None,
        scaler: GradScaler | None = None,
    ) -> AdaptiveCompressor:
        """Learn the model's parameters (a collective), without registering the hook: for whoever
        calls `model.register_comm_hook(compressor, adaptive_hook)` afterwards."""
        check_model(model)
        check_optimizer(optimizer)
        check_scaler(scaler)
        session = self._session
        if self._model is not None:
            raise RuntimeError("the compressor is attached to a model already; detach() it first")
        if session is not None and session.model is None:
            raise RuntimeError("bind(model) must come before the first backward")
        if session is not None and session.model is model:
            session.attach_again(optimizer, scaler)
        else:
            self._session = Session(self._settings, model.process_group, model, optimizer, scaler)
        self._model = model
        return self

    def detach(self) -> None:
        """Take the compressor off, on every rank (a collective with momentum correction).

        The exchange is dense until something is attached again. What the residual holds is sent
        with the next step; velocities go back into the optimizer."""
        if self._model is None or self._session is None:
            raise RuntimeError("the compressor is not attached to a model: nothing to detach")
        self._session.detach()
        self._model = None

    @property
    def detached(self) -> bool:
        """True unless it is attached or bound to a model."""
        return self._model is None

    # -- what it does ------------------------------------------------------------------------

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
    def layer_cfs(self) -> dict[str, float]:
        """The CFs in use of the layers (by parameter name) that have another than `cf`."""
        return dict(self._session.controller.cfs.sent_layers) if self._session else {}

    def summary(self) -> Summary:
        """What was sent so far; prints as a table."""
        return self._running().controller.summary()

    def explain(self) -> str:
        """The present state in words and numbers: the CF and why, and what would make it move."""
        return self._running().controller.explain()

    def flush(self) -> None:
        """Take in the last step's statistics, which otherwise come with the next step's start. On
        every rank."""
        self._running().controller.flush()

    def discard(self) -> None:
        """Call this instead of `optimizer.step()` where the gradients of a backward are thrown
        away (a loss spike): nothing of them may come with later steps, so all that the memory
        holds is forgotten, what waited from steps before included. On every rank; no collective."""
        self._running().discard()

    def close(self) -> None:
        """At the end of training: take in the last step and close the timeline. Steps after this
        are no longer recorded."""
        if self._session is not None:
            self._session.controller.close()
        else:
            self._settings.timeline.close()

    def reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """The hook's work for one bucket; returns a future of the mean gradient."""
        if self._session is None:
            # Hook registered without bind(): parameters are known by identity only.
            self._session = Session(self._settings, self._group or _default_group())
        return self._session.reduce(bucket)

    # -- state -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """This rank's state, by parameter name: policy, averages, residuals, books. Take it on
        every rank, between steps; each rank loads its own.

        DDP orders its buckets anew after the first backward (with `static_graph` after the second),
        which changes the order of summation, and what is compressed as one: for bit-identical
        resumption run as many throwaway backwards before `load_state_dict` (as `runs train
        --resume` does)."""
        return {"version": _STATE_VERSION, **self._named("state_dict").state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from this rank's `state_dict()`; same model, settings, number of ranks
        (`reshard_states` makes states for another number).

        ValueError, with nothing changed, if the state does not fit or is damaged: a key or a
        parameter is missing or unknown, a value has another type or shape, a number is not finite.
        An injected clock must go on
        from where it stood; the real one does not, and the interval is not timed."""
        session = self._named("load_state_dict")
        if not isinstance(state, Mapping):
            raise ValueError(f"state: must be a state_dict() of ours, got {type(state).__name__}")
        version = state.get("version")
        if not isinstance(version, int) or version != _STATE_VERSION:
            raise ValueError(f"state: version is {version!r}, expected {_STATE_VERSION}")
        same_clock = self._settings.clock is not time.perf_counter
        session.load_state_dict(state, same_clock)

    def _named(self, what: str) -> Session:
        if self._session is None or self._session.model is None:
            raise RuntimeError(
                f"{what} keys its contents by parameter name, which needs the model: "
                f"attach(model) or bind(model) first"
            )
        return self._session

    def _running(self) -> Session:
        if self._session is None:
            raise RuntimeError("the compressor is not attached to a model: attach(model) first")
        return self._session


def _default_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError(
            "the default process group is not initialised: call "
            "torch.distributed.init_process_group first"
        )
    return group
