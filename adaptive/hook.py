"""Existing DDP communication hooks as fixed rungs of the ladder.

A foreign hook shows neither what it kept nor what it lost. So its gain is unknown, our residual is
off while it is in use, and what the residual held is sent first, by one dense step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from adaptive.exchange.collectives import Exchange

DDPHook = Callable[[Any, dist.GradBucket], Future[Tensor]]


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
