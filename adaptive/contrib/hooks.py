"""Existing DDP communication hooks as fixed rungs of the ladder.

A DDP hook does not show its compression error. So its gain is unknown unless the script gives an
assumed gain. A step with a hook counts as a dense step: it sends the residuals along, and the
hook's compression error goes to no residual.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from adaptive.exchange.choice import ParameterServer
from adaptive.network.collectives import Exchange
from adaptive.step.synchronisation import Synchronisation
from compressors.base import Compressor, Payload, Spec
from policies import Policy

DDPHook = Callable[[Any, dist.GradBucket], Future[Tensor]]


@dataclass(frozen=True)
class HookRung:
    """An existing DDP communication hook as a rung of the ladder.

    hook, state: as for `register_comm_hook`; the hook must return the mean gradient.
    gain: the assumed gain, in (0, 1], for policies that decide by gains. None: unknown; then only a
        policy whose arguments name this CF sends it.
    """

    hook: DDPHook
    state: Any = None
    gain: float | None = None

    def __str__(self) -> str:
        name = getattr(self.hook, "__qualname__", type(self.hook).__name__)
        return f"{getattr(self.hook, '__module__', '')}.{name}, gain {self.gain}"


class HookCompressor(Compressor):
    """A DDP hook as a compressor that exchanges gradients itself (`SendsItself`)."""

    name = "hook"
    sent_as_dense = True

    def __init__(self, rung: HookRung, cf: float) -> None:
        self._rung, self._cf = rung, cf

    def send(
        self, bucket: dist.GradBucket, work: Tensor, scale: Tensor | None, exchange: Exchange
    ) -> Future[Tensor]:
        """See `SendsItself`. The hook gets gradients times the loss scale, as from DDP, so that
        they do not underflow."""
        buffer = bucket.buffer()
        if scale is not None:
            work.mul_(scale)
        if work.data_ptr() != buffer.data_ptr():
            buffer.copy_(work)
        done = self._rung.hook(self._rung.state, bucket)
        done = exchange.count_reduced(done, buffer, self._cf)

        def unscaled(future: Future[Tensor]) -> Tensor:
            value: Any = future.value()
            mean: Tensor = value[0] if isinstance(value, list) else value
            if mean.data_ptr() != work.data_ptr():
                mean = work.copy_(mean)
            return mean if scale is None else mean.div_(scale)

        return done.then(unscaled)

    def nbytes(self, spec: Spec) -> int:
        """Bytes that a hook at this CF would hand to an all-reduce."""
        return round(spec.numel * spec.dtype.itemsize / self._cf)

    def compress(self, x: Tensor, spec: Spec, add: Tensor | None = None) -> Payload:
        raise NotImplementedError("a hook makes no payloads")

    def add_to(self, out: Tensor, payload: Payload, scale: float = 1.0) -> None:
        raise NotImplementedError("a hook makes no payloads")

    def read(self, data: Tensor, spec: Spec) -> list[Payload]:
        raise NotImplementedError("a hook makes no payloads")

    def __repr__(self) -> str:
        return str(self._rung)


def with_hooks(
    base: Compressor,
    hooks: Any,
    cf_range: tuple[float, float],
    policy: Policy,
    sync: Synchronisation,
    server: ParameterServer,
) -> Compressor:
    """A copy of `base` with the hooks at their CFs. ValueError or TypeError unless `hooks` maps CFs
    inside `cf_range` to hooks, and goes with the other arguments."""
    if not isinstance(hooks, Mapping):
        raise TypeError(f"hooks must map compression factors to hooks, got {hooks!r}")
    rungs, (low, high) = {}, cf_range
    for cf, hook in hooks.items():
        if isinstance(cf, bool) or not isinstance(cf, (int, float)) or not isfinite(cf) or cf <= 1:
            raise ValueError(f"hooks must have finite CFs > 1 as keys, got {cf!r}")
        rung = hook if isinstance(hook, HookRung) else HookRung(hook)
        if not callable(rung.hook):
            raise TypeError(f"hooks[{cf:g}] must be a communication hook, got {rung.hook!r}")
        if rung.gain is not None and not 0 < rung.gain <= 1:
            raise ValueError(f"hooks[{cf:g}]: gain must be in (0, 1] or None, got {rung.gain!r}")
        if not low <= cf <= high:
            raise ValueError(f"hooks must have CFs inside cf_range ({low:g}, {high:g}), got {cf:g}")
        rungs[float(cf)] = rung
    why = ""
    if server.down_cf in ("auto", *rungs):
        why = f"exchange={server!r}, which compresses means at other CFs"
    elif sync.lets_ranks_differ:
        why = f"sync={sync!r}, which exchanges no gradients"
    elif policy.layerwise:
        why = f"policy {policy.name!r}, which chooses a CF for each layer"
    if rungs and why:
        raise ValueError(f"hooks must be empty with {why}; got CF {min(rungs):g}")
    base = deepcopy(base)
    exchanging = {cf: HookCompressor(rung, cf) for cf, rung in rungs.items()}
    base.rungs = {**base.rungs, **exchanging}
    gains = {cf: rung.gain for cf, rung in rungs.items() if rung.gain is not None}
    base.known_gains = {**base.known_gains, **gains}
    return base
