"""DDP communication hooks: ours, and existing ones as fixed rungs of the ladder next to it.

A hook can never be unregistered, so what ours does is decided by its state, which can change.

A foreign hook shows neither what it kept nor what it lost. So its gain is unknown, our residual is
off while it is in use, and what the residual held is sent first, by one dense step.

No `from __future__ import annotations` here: DDP compares the annotations of a hook with the
classes themselves, and rejects strings.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from adaptive.agreement import PYTHON_REDUCER
from adaptive.exchange.collectives import Exchange
from adaptive.replicas import Attached

DDPHook = Callable[[Any, dist.GradBucket], Future[Tensor]]


def adaptive_hook(
    state: "Attachment", bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Exchange one bucket compressed, as `AdaptiveCompressor.attach` registers it.

    Returns a future of the mean gradient, shape (elements of the bucket,). RuntimeError if DDP
    hands over no bucket."""
    if isinstance(bucket, tuple):  # a gradient and its parameter
        raise RuntimeError(PYTHON_REDUCER)
    return state.reduce(bucket)


@dataclass(eq=False)
class Attachment:
    """The hook's state on one model. Copies and pickles of the model leave the compressor
    behind."""

    compressor: Attached | None = None

    def reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        if self.compressor is None:
            raise RuntimeError("this copy of the model has no compressor: attach one")
        return self.compressor.reduce(bucket)

    def __reduce__(self) -> "tuple[type[Attachment], tuple[()]]":
        return Attachment, ()

    @staticmethod
    def of(model: DistributedDataParallel) -> "Attachment | None":
        """The model's, if it has one. RuntimeError if nothing can be attached to the model now."""
        found: Attachment | None = getattr(model, "_adaptive_attachment", None)
        if found and found.compressor and not found.compressor.detached:
            raise RuntimeError("model is attached already; detach() its compressor first")
        if found is None and model._comm_hooks:
            name = getattr(model._comm_hooks[0][0], "__name__", "?")
            raise RuntimeError(f"model has a communication hook already ({name}); DDP takes one")
        return found

    def register(self, model: DistributedDataParallel) -> None:
        """The model's from now on."""
        object.__setattr__(model, "_adaptive_attachment", self)  # past nn.Module's own
        model.register_comm_hook(self, adaptive_hook)


@dataclass(frozen=True)
class HookRung:
    """An existing DDP communication hook as a rung of the ladder.

    hook, state: as for `register_comm_hook`; the hook must return the mean gradient.
    gain: what a policy that decides on gains shall take its gain for, in (0, 1]; None: unknown, so
        that only a policy that asks for this CF by name sends it.
    """

    hook: DDPHook
    state: Any = None
    gain: float | None = None

    def __str__(self) -> str:
        name = getattr(self.hook, "__qualname__", type(self.hook).__name__)
        return f"{getattr(self.hook, '__module__', '')}.{name}, gain {self.gain}"


def check_hooks(hooks: Any) -> dict[float, HookRung]:
    """By CF. ValueError or TypeError unless `hooks` maps CFs above 1 to hooks, or is None."""
    if not isinstance(hooks, Mapping | None):
        raise TypeError(f"hooks must map compression factors to hooks, got {hooks!r}")
    rungs = {}
    for cf, hook in (hooks or {}).items():
        if isinstance(cf, bool) or not isinstance(cf, (int, float)) or not isfinite(cf) or cf <= 1:
            raise ValueError(f"hooks must have finite CFs > 1 as keys, got {cf!r}")
        rung = hook if isinstance(hook, HookRung) else HookRung(hook)
        if not callable(rung.hook):
            raise TypeError(f"hooks[{cf:g}] must be a communication hook, got {rung.hook!r}")
        if rung.gain is not None and not 0 < rung.gain <= 1:
            raise ValueError(f"hooks[{cf:g}]: gain must be in (0, 1] or None, got {rung.gain!r}")
        rungs[float(cf)] = rung
    return rungs


def send_through(
    rung: HookRung,
    cf: float,
    bucket: dist.GradBucket,
    scale: Tensor | None,
    exchange: Exchange,
    work: Tensor,
) -> Future[Tensor]:
    """What a foreign hook at `cf` makes of `work`, the bucket's gradients or a wider copy of them.
    It gets them times the loss `scale`, as from DDP, so that none underflows."""
    buffer = bucket.buffer()
    if scale is not None:
        work.mul_(scale)
    if work.data_ptr() != buffer.data_ptr():
        buffer.copy_(work)
    done = exchange.count_reduced(rung.hook(rung.state, bucket), buffer, cf)

    def unscaled(future: Future[Tensor]) -> Tensor:
        value: Any = future.value()
        mean: Tensor = value[0] if isinstance(value, list) else value
        if mean.data_ptr() != work.data_ptr():
            mean = work.copy_(mean)
        return mean if scale is None else mean.div_(scale)

    return done.then(unscaled)
