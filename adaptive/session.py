"""A compressor at work on one model: what is known only once the model and its group are.

Made as a whole or not at all, on every rank alike.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import nan, sqrt
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from adaptive.agreement import agree, describe_sizes
from adaptive.bucket import Grain
from adaptive.controller import Controller
from adaptive.exchange import Exchange
from adaptive.exchanges.choice import ExchangeChoice, LinkCost, measure_link
from adaptive.exchanges.pipeline import Pipeline
from adaptive.foreign import HookRung, send_through
from adaptive.gradient_sum import GradientSum
from adaptive.handover import MomentumHandover
from adaptive.layer_statistics import LayerStatistics
from adaptive.link import EmulatedLink, LinkSpec
from adaptive.memory import MemoryChoice
from adaptive.options import check_layerwise
from adaptive.peers import Peers
from adaptive.reduce import BucketReducer
from adaptive.residual import NoMemory, Residual, Slot
from adaptive.shadow import ShadowLadder
from adaptive.sizes import Sizes
from adaptive.state import check_state
from adaptive.timeline import Header, Timeline
from adaptive.timing import ForwardMark
from compressors import Compressor
from policies import DENSE, Context, Fixed, Policy

if TYPE_CHECKING:
    from torch.amp import GradScaler

log = logging.getLogger("adaptive")


@dataclass
class Settings:
    """What the user chose, checked."""

    base: Compressor
    granularity: str
    dense_below: int
    exchange: str
    hooks: dict[float, HookRung]
    cf_range: tuple[float, float]
    policy: Policy
    memory: MemoryChoice
    clip_norm: float | None
    samples_per_step: float | None
    timeline: Timeline
    link: LinkSpec | None
    clock: Callable[[], float]


class Session:
    """model: None when the hook was registered without one; parameters then have no names.

    A collective. ValueError, TypeError or RuntimeError on every rank if a rank cannot start or
    the ranks differ.
    """

    def __init__(
        self,
        settings: Settings,
        group: dist.ProcessGroup,
        model: DistributedDataParallel | None = None,
        optimizer: Optimizer | None = None,
        scaler: GradScaler | None = None,
    ) -> None:
        self.settings = settings
        self.model = model
        self.slots = _slots(model)
        self.exchange = Exchange(group, EmulatedLink(settings.link) if settings.link else None)
        self._optimizer, self._scaler = optimizer, scaler
        self._handover: MomentumHandover | None = None
        self._sum = GradientSum()
        self._pipeline = Pipeline(settings.clock)
        self._ways = ExchangeChoice(settings.base, settings.exchange, self.exchange.world_size)
        self._grain = Grain(settings.base, settings.granularity == "bucket", settings.dense_below)
        self._sizes = Sizes(
            self.slots,
            settings.base,
            settings.dense_below,
            settings.hooks.keys(),
            self._ways,
            self.exchange.world_size,
            named=model is not None,
        )
        try:
            agree(self._prepare, group)
        except Exception:
            self._unhook()
            raise
        if self._ways.measures:
            self._ways.link = measure_link(self.exchange, settings.clock, self._device())
        if self.exchange.world_size == 1:
            log.warning("world size is 1: there is nobody to send gradients to")
        self.controller = Controller(
            settings.policy,
            self.exchange,
            settings.timeline,
            settings.clock,
            self._sizes.numel,
            self._sizes.floats,
            settings.samples_per_step,
            frozenset(settings.hooks),
        )
        self.controller.sums = self._sum
        self.controller.layers = self._layers
        self.controller.lr = self._learning_rate
        self.controller.by_energy = self._ways.by_energy
        self.controller.ladder = self._shadow.cfs if self._shadow else ()
        self.controller.header = self._header
        self._forward = ForwardMark(settings.clock)
        self.controller.forward_began = self._forward.take
        self._watch_forward()
        self.controller.peers = self._peers

    def _prepare(self) -> str:
        """Start the policy and choose the memory; describes what must be alike on all ranks."""
        settings, base = self.settings, self.settings.base
        sizes = [p.numel() for p in self.slots]
        low, high = settings.cf_range
        ends = tuple(self._sizes.supported(cf) for cf in settings.cf_range)
        if ends[1] == DENSE < high and not settings.hooks:  # a base that cannot compress
            settings.policy = Fixed(cf=DENSE)
            low = high = DENSE
        outside = [cf for cf in settings.hooks if not low <= cf <= high]
        if outside:
            raise ValueError(
                f"hooks must have CFs inside cf_range ({low:g}, {high:g}), got {outside[0]:g}"
            )
        assumed = {cf: rung.gain for cf, rung in settings.hooks.items() if rung.gain is not None}
        self._layer_numels = self._sizes.layers() if settings.granularity == "layer" else {}
        check_layerwise(settings.policy, base, self._layer_numels, settings.hooks)
        self._cf_range = (min(low, *ends), max(high, *ends))
        settings.policy.start(
            Context(
                self._cf_range,
                self.exchange.world_size,
                self._sizes.supported,
                assumed,
                frozenset(settings.hooks.keys() - assumed.keys()),
                self._sizes.wire_bytes,
                self._layer_numels,
                self._sizes.layer_nbytes,
            )
        )
        self._choose_memory()
        if settings.granularity == "bucket" and not base.keeps_zeros and self._maybe_unused():
            raise ValueError(
                f"granularity must be 'layer' for base {base.name!r} on a model with parameters "
                f"that a step may not use (find_unused_parameters, static_graph): it makes "
                f"something of their zeros; got 'bucket'"
            )
        sent = {*ends, *map(self._sizes.supported, settings.policy.candidates())}
        cfs = sorted(sent - {DENSE, *settings.hooks})
        lines = (
            f"base={base.name!r} {_plain_settings(base)}",
            f"granularity={settings.granularity!r}, dense_below={settings.dense_below}, "
            f"exchange={settings.exchange!r}, "
            f"hooks={ {cf: str(rung) for cf, rung in sorted(settings.hooks.items())} }",
            f"cf_range={settings.cf_range}",
            f"policy={settings.policy.name!r} {settings.policy.state_dict()}",
            f"{settings.memory}, chosen {self.memory.name!r}, clip_norm={settings.clip_norm}",
            f"optimizer {_optimizer_settings(self._optimizer)}, scaler={self._scaler is not None}",
            f"{len(sizes)} parameters of {sum(sizes)} elements: "
            f"{', '.join(str(tuple(p.shape)) for p in self.slots)}",
            describe_sizes(base, cfs, sizes),
        )
        return "\n".join(lines)

    def _header(self) -> Header:
        policy, sizes = self.settings.policy, self._sizes
        cfs = sorted({DENSE, *self._cf_range, *self.settings.cf_range, *policy.candidates()})
        supported = {cf: sizes.supported(cf) for cf in cfs}
        state = policy.state_dict()
        return Header(
            policy=policy.name,
            settings=state.get("settings", {}),
            cf_range=self._cf_range,
            world_size=self.exchange.world_size,
            base=self.settings.base.name,
            memory=self.memory.name,
            numel=sizes.numel(),
            dense_bytes=self.controller.dense_wire_bytes,
            supported=supported,
            wire_bytes={cf: sizes.wire_bytes(cf) for cf in supported.values()},
            layers={
                slot.name: tuple(slot.param.shape)
                for slot in self.slots.values()
                if slot.name in self._layer_numels
            },
        )

    def attach_again(self, optimizer: Optimizer | None, scaler: GradScaler | None) -> None:
        """Compress again after `detach`, from where it stood."""
        self._optimizer, self._scaler = optimizer, scaler
        self._choose_memory()
        self._watch_forward()
        self.controller.forced_dense = False

    def adopt(self, other: Session) -> None:
        """Take over what another, detached session on the same model still holds."""
        self.controller.owing = other.memory.keeps_residual and not self.memory.keeps_residual
        self.controller.carrying = other.memory.keeps_residual
        for p, slot in self.slots.items():
            theirs = other.slots.get(p)
            if theirs is not None and theirs.filled:
                slot.residual, slot.filled = theirs.residual, True
                theirs.residual, theirs.filled = None, False
                if self._handover is not None:
                    self._handover.to_velocity(slot)

    def detach(self) -> None:
        """Dense from now on; velocities go back to the optimizer, the residual with the next
        step."""
        self.controller.flush()
        self.controller.forced_dense = True
        if self._forward_hook is not None:
            self._forward_hook.remove()
        if self._handover is not None:
            self._handover.give_back(self.exchange)
            self._unhook()
        for slot in self.slots.values():
            slot.velocity, slot.started, slot.fresh = None, False, False
        self._optimizer = None
        keeps = Residual if self.memory.keeps_residual else NoMemory
        self._set_memory(keeps(self._maybe_unused), clip_norm=None)

    def reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """The hook's work for one bucket; returns a future of the mean gradient."""
        controller = self.controller
        if bucket.index() == 0:
            controller.begin_step()
            if self._handover is not None and self._scaler is None:
                self._handover.expect_step()
        entered = controller.now()
        buffer = bucket.buffer()
        slots = [self._slot(p) for p in bucket.parameters()]
        rung = self.settings.hooks.get(controller.plan.send)
        scale = self._loss_scale(buffer.device)
        work = buffer
        if scale is not None:  # in float32, where unscaled gradients do not underflow
            work = (buffer if buffer.dtype == torch.float64 else buffer.float()).div_(scale)
        plan, cfs, tally = controller.plan, controller.cfs, controller.tally
        on_mean = self._sum.add if plan.accumulate else None
        if plan.send == DENSE:
            done = self._reducer.dense(work, slots, controller.step, cfs, tally, on_mean)
        elif rung is not None:
            send = partial(send_through, rung, plan.send, bucket, scale, self.exchange)
            done = self._reducer.dense(work, slots, controller.step, cfs, tally, on_mean, send)
        else:
            done = self._reducer.compressed(
                work,
                slots,
                controller.step,
                cfs,
                tally,
                on_mean,
                self._ways.pick(self._sizes.bucket_nbytes(cfs)),
                controller.leader,
                bucket.index(),
                bucket.is_last(),
            )
        if bucket.is_last():
            controller.end_step(buffer.device)
        controller.hook_left(entered, self._pipeline.take_waited())

        def finish(future: Future[Tensor]) -> Tensor:
            mean = future.value()
            if scale is not None:
                mean = buffer.copy_(mean.mul_(scale))
            controller.bucket_done(self._pipeline.take_decoded())
            return mean

        return done.then(finish)

    def state_dict(self) -> dict[str, Any]:
        """This rank's state by parameter name."""
        memory = {slot.name: self.memory.state_dict(slot) for slot in self.slots.values()}
        return {
            **self._identity(),
            "compressor": self.settings.base.state_dict(),
            "link": list(vars(self._ways.link).values()),
            "memory": {name: state for name, state in memory.items() if state},
            "shadow": self._shadow.state_dict() if self._shadow else {},
            "sum": self._sum.state_dict(),
            "controller": self.controller.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], same_clock: bool) -> None:
        """Go on from `state_dict()`. ValueError, with nothing changed, if it does not fit."""
        by_name = {slot.name: slot for slot in self.slots.values()}
        check_state(state, self._identity(), by_name)
        before = self.settings.base.state_dict()
        self.settings.base.load_state_dict(state["compressor"])
        try:
            self.controller.load_state_dict(state["controller"], same_clock)
        except Exception:
            self.settings.base.load_state_dict(before)
            raise
        self._ways.link = LinkCost(*state["link"])
        for name, slot in by_name.items():
            self.memory.load_state_dict(slot, state["memory"].get(name, {}))
        self._sum.load_state_dict(state["sum"], by_name)
        if self._shadow is not None:
            self._shadow.load_state_dict(state["shadow"], by_name)

    def _identity(self) -> dict[str, Any]:
        """What must be the same when a state is loaded."""
        return {
            "world_size": self.exchange.world_size,
            "rank": self.exchange.rank,
            "base": self.settings.base.name,
            "policy": self.settings.policy.name,
            "memory_kind": self.memory.name,
        }

    def _choose_memory(self) -> None:
        """The memory, now that the optimizer is known; takes its momentum over."""
        choice = self.settings.memory
        if choice.takes_over(self._optimizer):
            own: set[Tensor] = set(self.model.parameters()) if self.model else set(self.slots)
            self._handover = MomentumHandover(self._optimizer, self.slots, own)
            for slot in self.slots.values():
                self._handover.to_velocity(slot)
        self._set_memory(choice.make(self._handover, self._maybe_unused), self.settings.clip_norm)

    def _set_memory(self, memory: NoMemory, clip_norm: float | None) -> None:
        self.memory = memory
        if clip_norm is not None:
            clip_norm /= sqrt(self.exchange.world_size)
        self._shadow = self._make_shadow(memory)
        self._layers = self._make_layers()
        if self._shadow is not None:
            self._shadow.layers = self._layers
        self._reducer = BucketReducer(self._grain, memory, self.exchange, self._pipeline, clip_norm)
        self._reducer.shadow = self._shadow
        self._reducer.layers = self._layers

    def _make_shadow(self, memory: NoMemory) -> ShadowLadder | None:
        """For a policy that asks for it. ValueError if the base has no steady state to show."""
        policy, base = self.settings.policy, self.settings.base
        if not policy.shadow:
            return None
        if not ShadowLadder.suits(base):
            raise ValueError(
                f"policy {policy.name!r} with gain {policy.gain!r} needs a base that keeps the "
                f"largest elements (topk, dgc, redsync, sidco, threshold, adacomp), got "
                f"base={base.name!r}"
            )
        cfs = sorted(
            {*map(self._sizes.supported, policy.candidates())} - {DENSE, *self.settings.hooks}
        )
        return ShadowLadder(base, cfs, memory, signal=policy.gain == "signal")

    def _peers(self) -> Peers | None:
        signal = None if self._shadow is None else self._shadow.signal
        return None if signal is None else signal.peers

    def _make_layers(self) -> LayerStatistics | None:
        """For a policy that asks for them."""
        if not self.settings.policy.layerwise:
            return None
        ladder = self._shadow.cfs if self._shadow else ()
        return LayerStatistics(self.slots.values(), ladder)

    def _watch_forward(self) -> None:
        self._forward_hook = (
            None if self.model is None else self.model.register_forward_pre_hook(self._forward)
        )

    def _unhook(self) -> None:
        if self._handover is not None:
            self._handover.unhook()
            self._handover = None

    def _slot(self, param: Tensor) -> Slot:
        slot = self.slots.get(param)
        if slot is None:
            if self.model is not None:
                raise RuntimeError(
                    "the bucket holds a parameter that the bound model has not: one compressor "
                    "serves one model"
                )
            slot = self.slots[param] = Slot(f"parameter{len(self.slots)}", param)
        return slot

    def _device(self) -> torch.device:
        return next((p.device for p in self.slots), torch.device("cpu"))

    def _learning_rate(self) -> float:
        return float(self._optimizer.param_groups[0]["lr"]) if self._optimizer else nan

    def _loss_scale(self, device: torch.device) -> Tensor | None:
        """The loss scale as a tensor, never read on the host; None without an active scaler."""
        if self._scaler is None or not self._scaler.is_enabled():
            return None
        return self._scaler.scale(torch.ones((), device=device))

    def _maybe_unused(self) -> bool:
        model = self.model
        return model is None or model.find_unused_parameters or model.static_graph


def _slots(model: DistributedDataParallel | None) -> dict[Tensor, Slot]:
    """A slot for each parameter that DDP reduces."""
    if model is None:
        return {}
    ignored = model.parameters_to_ignore
    named = model.module.named_parameters()
    # DDP looks parameters of the outermost module up as ".name", and so never ignores those.
    return {
        p: Slot(n, p)
        for n, p in named
        if p.requires_grad and (n if "." in n else f".{n}") not in ignored
    }


def _plain_settings(base: Compressor) -> dict[str, Any]:
    """A compressor's own settings, as far as they can be compared as text."""
    plain = (bool, int, float, str, type(None))
    return {
        name: value if isinstance(value, plain) else value.name
        for name, value in sorted(vars(base).items())
        if isinstance(value, plain) or isinstance(getattr(value, "name", None), str)
    }


def _optimizer_settings(optimizer: Optimizer | None) -> str:
    if optimizer is None:
        return "none"
    momenta = [group.get("momentum") for group in optimizer.param_groups]
    return f"{type(optimizer).__name__} with momentum {momenta}"
