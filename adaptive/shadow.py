"""The shadow ladder: what every CF would keep in steady state, without sending any of them.

A candidate's error-fed gain, measured while a smaller CF is in use, is optimistic: the residual
that the candidate would leave has not built up. So on a fixed strided sample of each gradient a
residual of its own is kept for every CF of the ladder, as if that CF had been sent all along. Costs
a small top-k a CF and a step, and a sample-sized residual a CF.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adaptive.bucket import Bucket, Part
from adaptive.largest import largest
from adaptive.layer_statistics import LayerStatistics
from adaptive.momentum import MomentumRule
from adaptive.residual import NoMemory, Slot
from adaptive.signal import Signal, Trace
from adaptive.tally import Tally
from compressors import Compressor, Sparsifier
from compressors.base import kept
from compressors.norms import Array, on_numpy

WHOLE = 1024
"""Elements up to which a tensor is its own sample."""

SHARE = 64
"""Of larger tensors, one element in this many (at least WHOLE)."""


@dataclass(eq=False)
class Shadow:
    """One parameter's sample. residual: (CFs, sample elements). velocity: as much, with momentum
    only, since masking makes it differ from CF to CF."""

    residual: Array
    velocity: Array | None = None


class _Sample:
    """How a parameter is sampled. weight: elements that a sampled one stands for. wanted: how many
    of them each CF keeps. above: where to look for these first; speed, not state."""

    def __init__(self, numel: int, cfs: Sequence[float]) -> None:
        self.stride = max(1, numel // max(WHOLE, numel // SHARE))
        size = -(-numel // self.stride)
        self.weight = numel / size  # large tensors are sampled more thinly
        self.wanted = [max(1, round(kept(numel, cf) * size / numel)) for cf in cfs]
        self.above = np.zeros(len(cfs))


class ShadowLadder:
    """Keeps the largest, whatever the rule of the sparsifier that it stands for. cfs: ascending.

    memory: the one in use, whose momentum and masking the shadow follows. signal: find the products
    that signal gain is made of as well (adaptive/signal.py); they are of plain error feedback, so
    that the shadow then leaves momentum out. layers: told of each layer, if somebody asks.
    """

    def __init__(
        self,
        cfs: Sequence[float],
        memory: NoMemory,
        signal: bool = False,
        layers: LayerStatistics | None = None,
    ) -> None:
        self.cfs = tuple(cfs)
        self.signal = Signal(len(self.cfs)) if signal else None
        self._memory = memory
        self._layers = layers
        self._shadows: dict[Slot, Shadow] = {}
        self._samples: dict[Slot, _Sample] = {}
        self._masked = np.array([memory.masks(cf) for cf in self.cfs])

    @staticmethod
    def suits(compressor: Compressor) -> bool:
        """Whether steady-state gains can be told for this compressor."""
        return isinstance(compressor, Sparsifier)

    def step(self, bucket: Bucket, tally: Tally) -> None:
        """Take in a bucket's local gradients; add what each CF keeps and loses to the tally. The
        gradients are left as they are. A bucket that is not finite is passed over."""
        if bucket.finite:
            for part in bucket.parts:
                if part.grad.numel() and not part.held:
                    self._step(part, tally)

    def state_dict(self) -> dict[str, Any]:
        """By parameter name: residual and velocity of the sample, and the trace of signal gain."""
        return {slot.name: self._state(slot, held) for slot, held in self._shadows.items()}

    def _state(self, slot: Slot, held: Shadow) -> dict[str, Any]:
        trace = None if self.signal is None else self.signal.traces.get(slot)
        return {"shadow": _tensors(held)} | ({} if trace is None else {"trace": _tensors(trace)})

    def load_state_dict(self, state: Mapping[str, Any], by_name: Mapping[str, Slot]) -> None:
        """Go on from a `state_dict()`."""
        slots = {by_name[name]: held for name, held in state.items()}
        self._shadows = {s: Shadow(**_arrays(held["shadow"])) for s, held in slots.items()}
        if self.signal is not None:
            traced = {s: held["trace"] for s, held in slots.items() if "trace" in held}
            self.signal.traces = {s: Trace(**_arrays(trace)) for s, trace in traced.items()}

    def _step(self, part: Part, tally: Tally) -> None:
        how = self._samples.get(part.slot)
        if how is None:
            how = self._samples[part.slot] = _Sample(part.grad.numel(), self.cfs)
        sample = _sampled(part.grad, how.stride)
        shadow = self._shadows.get(part.slot)
        fresh = shadow is None
        if shadow is None:
            shadow = self._shadows[part.slot] = self._begin(part.slot, sample, how.stride)
            fresh = shadow.velocity is None
        rule = self._rule(part.slot)
        _accumulate(shadow, sample, rule, fresh)
        a = shadow.residual
        sent = largest(a, how.wanted, how.above)
        total, weight = _energies(a), how.weight
        if self.signal is not None:
            self.signal.multiply(part.slot, sample, weight, tally)
            kept_now = np.where(sent, a, 0)
            self.signal.keep(part.slot, sample, kept_now)
            self.signal.peers.add(part.slot, part.key.step, sample, kept_now, weight)
        np.copyto(a, 0, where=sent)
        lost = _energies(a)
        if shadow.velocity is not None and self._masked.any():
            shadow.velocity[sent & self._masked[:, None]] = 0
        totals, errors = (weight * total).tolist(), (weight * lost).tolist()
        for i in range(len(self.cfs)):
            tally.shadow_total[i] += totals[i]
            tally.shadow_error[i] += errors[i]
        if self._layers is not None:
            self._layers.add_levels(part.slot, errors, totals)

    def _rule(self, slot: Slot) -> MomentumRule | None:
        """How the shadow accumulates; None: by plain error feedback."""
        return None if self.signal is not None else self._memory.rule(slot)

    def _begin(self, slot: Slot, sample: Array, stride: int) -> Shadow:
        shadow = Shadow(np.zeros((len(self.cfs), sample.size), sample.dtype))
        if slot.velocity is not None and self._rule(slot) is not None:  # taken over
            shadow.velocity = shadow.residual + _sampled(slot.velocity, stride)
        return shadow


def _tensors(kept: Shadow | Trace) -> dict[str, Tensor]:
    return {k: torch.from_numpy(v.copy()) for k, v in vars(kept).items() if v is not None}


def _arrays(state: Mapping[str, Tensor]) -> dict[str, Array]:
    return {k: v.numpy().copy() for k, v in state.items()}


def _sampled(grad: Tensor, stride: int) -> Array:
    sample = grad.detach()[::stride]
    return sample.numpy() if on_numpy(sample) else sample.float().cpu().numpy()


def _accumulate(shadow: Shadow, g: Array, rule: MomentumRule | None, fresh: bool) -> None:
    """The residuals become the error-fed gradients, by the memory's own rule."""
    if rule is None or not rule.momentum:
        shadow.residual += g
        return
    if shadow.velocity is None:
        shadow.velocity = np.zeros_like(shadow.residual)
    u = shadow.velocity
    if fresh:  # SGD does not dampen the first step
        u += g
    else:
        u *= rule.momentum
        u += (1 - rule.dampening) * g
    if rule.nesterov:
        shadow.residual += rule.momentum * u
        shadow.residual += g
    else:
        shadow.residual += u


def _energies(rows: Array) -> Array:
    """Squared norm of each row, in double."""
    return np.einsum("ij,ij->i", rows, rows, dtype=np.float64)
