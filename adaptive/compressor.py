"""`AdaptiveCompressor`: what a training script imports, attaches to its DDP model, and forgets."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from math import sqrt
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from adaptive.agreement import check_agreement
from adaptive.controller import Controller
from adaptive.exchange import Exchange
from adaptive.handover import MomentumHandover, has_momentum
from adaptive.hook import adaptive_hook
from adaptive.link import EmulatedLink, LinkSpec
from adaptive.momentum import MomentumMemory, MomentumRule
from adaptive.options import (
    MEMORIES,
    check_cf_range,
    check_choice,
    check_masking,
    check_momentum,
    check_positive,
)
from adaptive.reduce import BucketReducer
from adaptive.residual import NoMemory, Residual, Slot
from adaptive.summary import Summary
from adaptive.timeline import Timeline, make_timeline
from compressors import Compressor, make_compressor
from compressors.norms import squared_norm
from policies import DENSE, Context, Fixed, Policy, make_policy

if TYPE_CHECKING:
    from torch.amp import GradScaler

log = logging.getLogger("adaptive")

_STATE_VERSION = 1


class _Attachment:
    """The hook's state on one DDP model. A hook can never be unregistered, so what is attached
    changes here."""

    def __init__(self, compressor: AdaptiveCompressor) -> None:
        self.compressor = compressor

    def reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        return self.compressor.reduce(bucket)


class AdaptiveCompressor:
    """Compresses the gradient exchange of a DDP model, by a factor that it chooses as it goes.

    All ranks must make it alike. Only `base` and `cf_range` are positional.

    base: name of a compressor ("topk", "randomk", "none") or a `Compressor`.
    cf_range: smallest and largest compression factor (CF) besides dense, floats >= 1.
    policy: "gravac", "accordion", "fixed" (which stays at cf_range[0]), or a `Policy`.
    memory: what becomes of what is not sent. "residual": error feedback. "momentum": momentum
        correction (DGC, section 3), for SGD with momentum. "none": it is lost. "auto" (default):
        "momentum" if `attach` is handed an SGD optimizer with momentum, else "residual", or
        "none" for an unbiased compressor.
    momentum: for memory="momentum" without an optimizer, whose own momentum must then be 0.
    masking: momentum factor masking: from which CF on the velocity of what is sent is cleared
        (True: at every CF above 1; False: never). Never at CF 1.
    clip_norm: clip each parameter's local gradient to this norm / sqrt(world size) before it is
        accumulated (DGC, section 3.2, per parameter, since buckets leave before the last is there).
    samples_per_step: samples of all workers in a step; throughput is then samples/s, not steps/s.
    timeline: a `Timeline` or several; rank 0 writes.
    link: emulate a slow link, e.g. "100mbit" or "100mbit,5ms" (for demonstrations).
    clock: seconds, monotonic; throughput steers the policy, so tests and replays inject one.

    ValueError or TypeError names the argument, its value and what is accepted.
    """

    hook = staticmethod(adaptive_hook)

    def __init__(
        self,
        base: str | Compressor = "topk",
        cf_range: tuple[float, float] = (10, 1000),
        *,
        policy: str | Policy = "gravac",
        memory: str = "auto",
        momentum: float | None = None,
        masking: bool | float = 32.0,
        clip_norm: float | None = None,
        samples_per_step: float | None = None,
        timeline: Timeline | Sequence[Timeline] | None = None,
        link: str | LinkSpec | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.base = make_compressor(base)
        self.cf_range = check_cf_range(cf_range)
        self.policy = make_policy(policy)
        self.memory_kind = check_choice("memory", memory, MEMORIES)
        self._momentum = check_momentum(momentum)
        self._masking = check_masking(masking)
        self._clip_norm = check_positive("clip_norm", clip_norm)
        self._samples_per_step = check_positive("samples_per_step", samples_per_step)
        self._timeline = make_timeline(timeline)
        self._link = LinkSpec.parse(link) if isinstance(link, str) else link
        self._clock = clock
        self._check_memory()

        self._model: DistributedDataParallel | None = None
        self._slots: dict[Tensor, Slot] = {}
        self._optimizer: Optimizer | None = None
        self._scaler: GradScaler | None = None
        self._handover: MomentumHandover | None = None
        self._memory: NoMemory = NoMemory()
        self._exchange: Exchange | None = None
        self._controller: Controller | None = None
        self._reducer: BucketReducer | None = None
        self._sum: dict[Slot, Tensor] = {}

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
        if not isinstance(model, DistributedDataParallel):
            raise TypeError(
                f"model must be a DistributedDataParallel module, got {type(model).__name__}; wrap "
                f"it first: attach(DistributedDataParallel(model))"
            )
        attachment = getattr(model, "_adaptive_attachment", None)
        if self._model is not None or (attachment and not attachment.compressor.detached):
            raise RuntimeError("model is attached already; detach() the compressor first")
        if attachment is None and model._comm_hooks:
            name = model._comm_hooks[0][0].__name__
            raise RuntimeError(f"model has a communication hook already ({name}); DDP takes one")
        self.bind(model, optimizer=optimizer, scaler=scaler)
        if attachment is None:
            attachment = _Attachment(self)
            object.__setattr__(model, "_adaptive_attachment", attachment)  # past nn.Module's own
            model.register_comm_hook(attachment, adaptive_hook)
        else:
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
        calls `model.register_comm_hook(compressor, compressor.hook)`."""
        resumed = self._model is model or (self._controller is not None and self._same_model(model))
        self._optimizer, self._scaler = optimizer, scaler
        if not resumed:
            names = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
            self._slots = {p: Slot(n.removeprefix("module."), p) for n, p in names}
            self._start(model.process_group)
        self._model = model
        self._hand_over()
        assert self._controller is not None
        self._controller.forced_dense = False
        return self

    def detach(self) -> None:
        """Take the compressor off, on every rank (a collective with momentum correction).

        The exchange is dense until something is attached again. What the residual holds is sent
        with the next step; velocities go back into the optimizer."""
        if self._model is None or self._controller is None:
            raise RuntimeError("the compressor is not attached to a model")
        self._controller.flush()
        self._controller.forced_dense = True
        if self._handover is not None:
            self._return_velocities(self._handover)
            self._handover.release()
            self._handover = None
            self._set_memory(Residual())
        self._model = None

    @property
    def detached(self) -> bool:
        """True unless it is attached or bound to a model."""
        return self._model is None

    # -- what it does ------------------------------------------------------------------------

    @property
    def cf(self) -> float:
        """The compression factor in use; 1 is dense."""
        return self._controller.cf if self._controller else DENSE

    def summary(self) -> Summary:
        """What was sent so far; prints as a table."""
        return self._running().summary()

    def flush(self) -> None:
        """Take in the last step's statistics, which otherwise come with the next step's start."""
        self._running().flush()

    def close(self) -> None:
        """At the end of training: take in the last step and close the timeline."""
        if self._controller is not None:
            self._controller.flush()
        self._timeline.close()

    def reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """The hook's work for one bucket; returns a future of the mean gradient."""
        if self._controller is None:
            # Hook registered without bind(): parameters are known by identity only.
            self._start(_default_group())
            self._set_memory(self._make_memory(None))
        controller, reducer = self._running(), self._reducer
        assert reducer is not None
        if bucket.index() == 0:
            controller.begin_step()
        entered = controller.now()
        buffer = bucket.buffer()
        slots = [self._slot(p) for p in bucket.parameters()]
        scale = self._loss_scale(buffer)
        if scale is not None:
            buffer.div_(scale)
        plan, tally = controller.plan, controller.tally
        on_mean = self._add_to_sum if plan.accumulate else None
        if plan.send == DENSE:
            done = reducer.dense(buffer, slots, controller.step, tally, on_mean)
        else:
            done = reducer.compressed(buffer, slots, plan.send, controller.step, tally, on_mean)
        if bucket.is_last():
            controller.end_step()
        controller.hook_left(entered)

        def finish(future: Future[Tensor]) -> Tensor:
            mean = future.value()
            if scale is not None:
                mean.mul_(scale)
            controller.bucket_done()
            return mean

        return done.then(finish)

    # -- state -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """This rank's state, by parameter name: policy, averages, residuals, books. Take it on
        every rank, between steps; each rank loads its own.

        DDP orders its buckets anew after the first backward, which changes the order of
        summation: for bit-identical resumption run one throwaway backward before
        `load_state_dict` (as `runs train --resume` does)."""
        self._need_model("state_dict")
        assert self._exchange is not None
        memory = {slot.name: self._memory.state_dict(slot) for slot in self._slots.values()}
        return {
            "version": _STATE_VERSION,
            "world_size": self._exchange.world_size,
            "rank": self._exchange.rank,
            "memory_kind": self._memory.name,
            "memory": {name: state for name, state in memory.items() if state},
            "sum": {slot.name: total.clone() for slot, total in self._sum.items()},
            "controller": self._running().state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from this rank's `state_dict()`; same model, settings, number of ranks.

        ValueError if the state does not fit."""
        self._need_model("load_state_dict")
        assert self._exchange is not None
        for what, ours in (
            ("version", _STATE_VERSION),
            ("world_size", self._exchange.world_size),
            ("rank", self._exchange.rank),
            ("memory_kind", self._memory.name),
        ):
            if state[what] != ours:
                raise ValueError(f"state: {what} is {state[what]!r}, expected {ours!r}")
        by_name = {slot.name: slot for slot in self._slots.values()}
        unknown = sorted(set(state["memory"]) - set(by_name))
        if unknown:
            raise ValueError(f"state: the model has no parameters {', '.join(unknown)}")
        for name, slot in by_name.items():
            self._memory.load_state_dict(slot, state["memory"].get(name, {}))
        self._sum = {by_name[name]: total.clone() for name, total in state["sum"].items()}
        self._running().load_state_dict(
            state["controller"], same_clock=self._clock is not time.perf_counter
        )

    # -- inside ------------------------------------------------------------------------------

    def _check_memory(self) -> None:
        if self.memory_kind == "residual" and not self.base.error_feedback:
            raise ValueError(
                f"memory must be 'none' or 'auto' for base {self.base.name!r} as configured: it is "
                f"unbiased, and feeding its scaled-up error back diverges; got 'residual'"
            )
        if self._momentum is not None and self.memory_kind != "momentum":
            raise ValueError(
                f"momentum is for memory='momentum', got momentum={self._momentum!r} with "
                f"memory={self.memory_kind!r}"
            )

    def _start(self, group: dist.ProcessGroup) -> None:
        """Set everything up for one process group, and check that all ranks did so alike."""
        link = EmulatedLink(self._link) if self._link else None
        self._exchange = Exchange(group, link)
        world_size = self._exchange.world_size
        sizes = [p.numel() for p in self._slots]
        low, high = (self.base.supported(cf, max(sizes, default=1)) for cf in self.cf_range)
        if high == DENSE:
            self.policy = Fixed(cf=DENSE)
        self.policy.start(Context((low, high), world_size))
        settings = (
            f"base={self.base.name!r}, cf_range={self.cf_range}, policy={self.policy.name!r} "
            f"{self.policy.state_dict()}, "
            f"memory={self.memory_kind!r}, momentum={self._momentum}, masking={self._masking}, "
            f"clip_norm={self._clip_norm}, parameters={len(sizes)} of {sum(sizes)} elements"
        )
        check_agreement(settings, self.base, sorted({low, high}), sizes, group)
        if world_size == 1 and self._exchange.rank == 0:
            log.warning("world size is 1: there is nobody to send gradients to")
        self._controller = Controller(
            self.policy,
            self._exchange,
            self._timeline,
            self._clock,
            lambda: sum(p.numel() for p in self._slots),
            self._floats_at,
            self._samples_per_step,
        )
        self._controller.sum_reader = self._read_sum
        self._controller.lr = self._learning_rate

    def _hand_over(self) -> None:
        """Choose the memory now that the optimizer is known, and take its momentum over."""
        if not isinstance(self._optimizer, SGD) or not has_momentum(self._optimizer):
            self._set_memory(self._make_memory(None))
            return
        if self.memory_kind == "momentum" and self._momentum is not None:
            raise ValueError(
                f"momentum must be None when an optimizer with momentum is handed over: its own "
                f"setting is used; got momentum={self._momentum!r}"
            )
        if self.memory_kind in ("residual", "none") or not self.base.error_feedback:
            self._set_memory(self._make_memory(None))
            return
        assert self._model is not None
        own: set[Tensor] = set(self._model.parameters())
        self._handover = MomentumHandover(self._optimizer, self._slots, own)
        self._set_memory(self._make_memory(self._handover))

    def _make_memory(self, handover: MomentumHandover | None) -> NoMemory:
        if not self.base.error_feedback:
            return NoMemory()
        if handover is not None:
            return MomentumMemory(
                handover.rule, handover.has_buffer, self._masking, self._maybe_unused
            )
        if self.memory_kind == "momentum":
            if self._momentum is None:
                raise ValueError(
                    "momentum must be given for memory='momentum' when no SGD optimizer with "
                    "momentum is handed over: AdaptiveCompressor(memory='momentum', momentum=0.9) "
                    "or attach(model, optimizer=optimizer)"
                )
            rule = MomentumRule(self._momentum)
            return MomentumMemory(
                lambda _: rule, lambda _: False, self._masking, self._maybe_unused
            )
        return NoMemory() if self.memory_kind == "none" else Residual()

    def _set_memory(self, memory: NoMemory) -> None:
        assert self._exchange is not None
        self._memory = memory
        clip = self._clip_norm
        if clip is not None:
            clip /= sqrt(self._exchange.world_size)
        self._reducer = BucketReducer(self.base, memory, self._exchange, clip)

    def _return_velocities(self, handover: MomentumHandover) -> None:
        """The ranks' mean velocities go where SGD keeps its own."""
        assert self._exchange is not None
        for slot in self._slots.values():
            if slot.residual is not None:  # from velocities to a gradient that adds up to them
                slot.residual.mul_(1 - handover.rule(slot).momentum)
            velocity = slot.velocity if slot.velocity is not None else slot.zeros()
            mean = self._exchange.all_reduce(velocity / self._exchange.world_size).wait()
            if slot.started:
                handover.give_back(slot, mean)
            slot.velocity, slot.started, slot.fresh = None, False, False
        self._exchange.take_traffic()

    def _slot(self, param: Tensor) -> Slot:
        slot = self._slots.get(param)
        if slot is None:
            if self._model is not None:
                raise RuntimeError("the bucket holds a parameter that the bound model has not")
            slot = self._slots[param] = Slot(f"parameter{len(self._slots)}", param)
        return slot

    def _floats_at(self, cf: float) -> float:
        if cf == DENSE:
            return float(sum(p.numel() for p in self._slots))
        return sum(self.base.floats(p.numel(), cf) for p in self._slots)

    def _add_to_sum(self, slot: Slot, mean: Tensor) -> None:
        total = self._sum.get(slot)
        if total is None:
            total = self._sum[slot] = slot.zeros()
        total.add_(mean)

    def _read_sum(self) -> float:
        """Norm of the sum of the decoded means since the last reading; a new sum begins."""
        energy = 0.0
        for total in self._sum.values():
            energy += squared_norm(total)
            total.zero_()
        return sqrt(energy)

    def _learning_rate(self) -> float:
        return float(self._optimizer.param_groups[0]["lr"]) if self._optimizer else float("nan")

    def _loss_scale(self, buffer: Tensor) -> Tensor | None:
        """The loss scale as a tensor, never read on the host; None without an active scaler."""
        if self._scaler is None or not self._scaler.is_enabled():
            return None
        one = torch.ones((), dtype=torch.float32, device=buffer.device)
        return self._scaler.scale(one).to(buffer.dtype)

    def _maybe_unused(self) -> bool:
        model = self._model
        return model is None or model.find_unused_parameters or model.static_graph

    def _same_model(self, model: DistributedDataParallel) -> bool:
        return set(self._slots) == {p for p in model.parameters() if p.requires_grad}

    def _need_model(self, what: str) -> None:
        if self._model is None:
            raise RuntimeError(
                f"{what} keys its contents by parameter name, which needs the model: "
                f"attach(model) or bind(model) first"
            )

    def _running(self) -> Controller:
        if self._controller is None:
            raise RuntimeError("the compressor is not attached to a model: attach(model) first")
        return self._controller


def _default_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError(
            "the default process group is not initialised: call "
            "torch.distributed.init_process_group first"
        )
    return group
