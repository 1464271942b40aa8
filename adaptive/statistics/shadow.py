"""The shadow ladder: what every CF would keep in steady state, without sending any of them.

A candidate's error-fed gain, measured while a smaller CF is in use, is optimistic: the residual
that the candidate would leave has not built up. So on a fixed strided sample of each gradient a
residual of its own is kept for every CF of the ladder, as if that CF had been sent all along. Costs
a small top-k a CF and a step, and a sample-sized residual a CF.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adaptive.bucket import Bucket, Part
from adaptive.memory.error_feedback import NoMemory
from adaptive.memory.momentum import MomentumRule
from adaptive.parameters import ModelParameter
from adaptive.statistics.layers import LayerStatistics
from adaptive.statistics.signal import Signal
from adaptive.statistics.vector import Tally
from compressors import Compressor, Sparsifier
from compressors.base import kept
from compressors.kernels import Array, on_host

BELOW = 0.8
"""Of the last step's smallest magnitude: what is above it is few, and nearly always enough."""


def largest(a: Array, wanted: Sequence[int], above: Array) -> Array:
    """Of each row of `a` the elements of largest magnitude, as a mask; as many as `wanted` for that
    row, and all that equal the smallest of them.

    above: (rows,), magnitudes above which to look first, zeros to begin with; updated for the next
    step. They save time, and never change what is found.
    """
    magnitude = np.abs(a)
    smallest = np.empty(len(wanted), a.dtype)
    for i, (row, k) in enumerate(zip(magnitude, wanted, strict=True)):
        few = row[row >= float(above[i])]
        if few.size < k:
            few = row.copy()
        few.partition(few.size - k)
        smallest[i] = few[few.size - k]
    np.multiply(smallest, BELOW, out=above)
    return np.asarray(magnitude >= smallest[:, None])


class ShadowGroup:
    """Arrays over the samples of all parameters, one after the other: residual (CFs, elements), and
    where they are wanted velocity (CFs, elements), the last step's grad (elements,) and what was
    kept of it, sent (CFs, elements).

    parameters: in order. strides: of each one's sample. weight: elements that a sampled one stands
    for. wanted: sampled elements that each CF keeps. above: where to look for these first; speed,
    not state.
    """

    def __init__(
        self, parameters: Sequence[ModelParameter], strides: Sequence[int], cfs: Sequence[float]
    ) -> None:
        self.parameters, self.strides = tuple(parameters), tuple(strides)
        sizes = [
            -(-parameter.tensor.numel() // stride)
            for parameter, stride in zip(parameters, strides, strict=True)
        ]
        ends = np.cumsum([0, *sizes]).tolist()
        self._places = {
            parameter: slice(a, b)
            for parameter, a, b in zip(parameters, ends[:-1], ends[1:], strict=True)
        }
        self.size = ends[-1]
        numel = sum(parameter.tensor.numel() for parameter in parameters)
        self.weight = numel / self.size  # what is large is sampled more thinly
        self.wanted = [max(1, round(kept(numel, cf) * self.size / numel)) for cf in cfs]
        self.above = np.zeros(len(cfs))
        self.arrays: dict[str, Array] = {}

    def place(self, parameter: ModelParameter) -> slice:
        """Where a parameter's sample is among the elements."""
        return self._places[parameter]

    def of(self, parameter: ModelParameter) -> dict[str, Array]:
        """What is kept of one parameter, as views."""
        place = self._places[parameter]
        return {name: array[..., place] for name, array in self.arrays.items()}

    def take_over(self, parameter: ModelParameter, arrays: Mapping[str, Array]) -> None:
        """Go on from what was kept of a parameter before, in another group."""
        for name, array in arrays.items():
            if name not in self.arrays:
                self.arrays[name] = np.zeros((*array.shape[:-1], self.size), array.dtype)
            self.arrays[name][..., self._places[parameter]] = array

    def restart(self) -> None:
        """Nothing is kept any more."""
        for array in self.arrays.values():
            array.fill(0)

    def array(self, name: str, rows: int, dtype: np.dtype[np.floating]) -> Array:
        """(rows, elements), zeros if it was not there."""
        if name not in self.arrays:
            self.arrays[name] = np.zeros((rows, self.size), dtype)
        return self.arrays[name]


WHOLE = 1024
"""Elements up to which a tensor is its own sample."""

WHOLE_BUCKET = 16384
"""The same, of a bucket that is compressed as one."""

SHARE = 1 / 64
"""Of what is larger, this part of the elements (at least as many as of the above)."""


class ShadowLadder:
    """Keeps the largest, whatever the rule of the sparsifier that it stands for. cfs: ascending.

    memory: the one in use, whose momentum and masking the shadow follows. signal: find the products
    that signal gain is made of as well (signal.py); they are of plain error feedback, so that the
    shadow then leaves momentum out. layers: told of each layer, if somebody asks. joined:
    the parameters of a bucket are compressed as one. share: of the elements of what is large.
    """

    def __init__(
        self,
        cfs: Sequence[float],
        memory: NoMemory,
        signal: bool = False,
        layers: LayerStatistics | None = None,
        joined: bool = False,
        share: float = SHARE,
    ) -> None:
        self.cfs = tuple(cfs)
        self.signal = Signal(len(self.cfs)) if signal else None
        self._memory = memory
        self._layers = layers
        self._joined = joined
        self._share = share
        self._groups: dict[tuple[ModelParameter, ...], ShadowGroup] = {}
        self._group_of: dict[ModelParameter, ShadowGroup] = {}
        self._strides: dict[ModelParameter, int] = {}
        self._moving: set[ModelParameter] = set()  # that have a velocity here
        self._masked = np.array([memory.masks(cf) for cf in self.cfs])

    @staticmethod
    def suits(compressor: Compressor) -> bool:
        """Whether steady-state gains can be told for this compressor."""
        return isinstance(compressor, Sparsifier)

    def step(self, bucket: Bucket, tally: Tally) -> None:
        """Take in a bucket's local gradients; add what each CF keeps and loses to the tally. The
        gradients are left as they are. A bucket that is not finite is passed over."""
        if bucket.poisoned is True:
            return
        # Held ones, too: which they are may differ between ranks, and what is sampled must not.
        parts = [part for part in bucket.parts if part.grad.numel()]
        singly = [[part] for part in parts]
        together = [parts] if self._joined else singly
        for alike in together:
            self._choose_stride([part.parameter for part in alike])
        if bucket.early:  # even those to be joined later on are compressed one by one
            together = singly
        for each in together:
            if not all(part.skipped for part in each):
                self._step(each, tally)

    def state_dict(self) -> dict[str, Any]:
        """By parameter name: the distance of its sampled elements, and what is kept of them."""
        return {
            parameter.name: {"stride": self._strides[parameter], **_tensors(group.of(parameter))}
            for parameter, group in self._group_of.items()
        }

    def load_state_dict(
        self, state: Mapping[str, Any], by_name: Mapping[str, ModelParameter]
    ) -> None:
        """Go on from a `state_dict()`."""
        self._groups, self._group_of, self._strides, self._moving = {}, {}, {}, set()
        for name, held in state.items():
            parameter, arrays = by_name[name], dict(held)
            self._strides[parameter] = int(arrays.pop("stride"))
            group = self._group_of[parameter] = ShadowGroup(
                [parameter], [self._strides[parameter]], self.cfs
            )
            group.take_over(parameter, {k: v.numpy() for k, v in arrays.items()})
            if "velocity" in arrays:
                self._moving.add(parameter)

    def _step(self, parts: Sequence[Part], tally: Tally) -> None:
        group = self._group([part.parameter for part in parts])
        samples = [_sampled(p.grad, n) for p, n in zip(parts, group.strides, strict=True)]
        g = samples[0] if len(samples) == 1 else np.concatenate(samples)
        held = [group.place(part.parameter) for part in parts if part.skipped]
        a = self._accumulate(group, g, [part.parameter for part in parts if not part.skipped])
        waiting = [a[:, place].copy() for place in held]
        for place in held:
            a[:, place] = 0
        sent = largest(a, group.wanted, group.above)
        for place in held:
            sent[:, place] = False
        total, weight = _energies(a), group.weight
        if not np.isfinite(total).all():  # of finite, but huge gradients: it would stay so
            group.restart()
            return
        if self.signal is not None:
            self.signal.step(group, parts[0].key.step, g, np.where(sent, a, 0), tally)
        np.copyto(a, 0, where=sent)
        lost = _energies(a)
        for place, residual in zip(held, waiting, strict=True):
            a[:, place] = residual
        velocity = group.arrays.get("velocity")
        if velocity is not None and self._masked.any():
            velocity[sent & self._masked[:, None]] = 0
        totals, errors = (weight * total).tolist(), (weight * lost).tolist()
        tally.at("shadow_total").add_(torch.tensor(totals, dtype=torch.float64))
        tally.at("shadow_error").add_(torch.tensor(errors, dtype=torch.float64))
        if self._layers is not None and not self._joined:
            self._layers.add_levels(parts[0].parameter, errors, totals)

    def _choose_stride(self, parameters: Sequence[ModelParameter]) -> None:
        """The same for samples that are looked at together, from the first time on. What was kept
        of samples with strides of their own (in a state that is of tensor by tensor) is let go."""
        known = {self._strides.get(parameter) for parameter in parameters}
        if len(known) <= 1 and None not in known:
            return
        numel = sum(parameter.tensor.numel() for parameter in parameters)
        least = WHOLE_BUCKET if self._joined else WHOLE
        stride = max(1, numel // max(least, int(numel * self._share)))
        now = set(parameters)
        self._groups = {s: g for s, g in self._groups.items() if now.isdisjoint(s)}
        for parameter in parameters:
            if self._strides.get(parameter) != stride:
                self._group_of.pop(parameter, None)
                self._moving.discard(parameter)
            self._strides[parameter] = stride

    def _group(self, parameters: Sequence[ModelParameter]) -> ShadowGroup:
        """Of these parameters in this order; buckets are cut anew after the first step."""
        group = self._groups.get(tuple(parameters))
        if group is None:
            group = ShadowGroup(
                parameters, [self._strides[parameter] for parameter in parameters], self.cfs
            )
            for parameter in parameters:
                if parameter in self._group_of:
                    group.take_over(parameter, self._group_of[parameter].of(parameter))
                self._group_of[parameter] = group
            now = set(parameters)
            self._groups = {s: g for s, g in self._groups.items() if now.isdisjoint(s)}
            self._groups[group.parameters] = group
        return group

    def _accumulate(self, group: ShadowGroup, g: Array, sending: Sequence[ModelParameter]) -> Array:
        """The residuals become the error-fed gradients, by the memory's own rule. Those of
        parameters that do not send stay what they are: they have zeros in g."""
        a = group.array("residual", len(self.cfs), g.dtype)
        rules = {parameter: self._rules(parameter) for parameter in sending}
        if not any(rules.values()):
            a += g
            return a
        u = group.array("velocity", len(self.cfs), g.dtype)
        for parameter, each in rules.items():
            place = group.place(parameter)
            if not each:
                a[:, place] += g[place]
            else:
                first = parameter not in self._moving
                if first and parameter.velocity is not None:
                    factors = np.array(self._memory.entering(parameter, self.cfs))
                    u[:, place] = np.outer(
                        factors, _sampled(parameter.velocity, self._strides[parameter])
                    )
                    first = False
                self._moving.add(parameter)
                _add(a[:, place], u[:, place], g[place], each, first)
        return a

    def _rules(self, parameter: ModelParameter) -> Sequence[MomentumRule]:
        """How the shadow accumulates, for each CF; none: by plain error feedback."""
        return () if self.signal is not None else self._memory.rules(parameter, self.cfs)


def _tensors(arrays: Mapping[str, Array]) -> dict[str, Tensor]:
    return {k: torch.from_numpy(v.copy()) for k, v in arrays.items()}


def _sampled(grad: Tensor, stride: int) -> Array:
    sample = grad.detach()[::stride]
    return sample.numpy() if on_host(sample) else sample.float().cpu().numpy()


def _add(a: Array, u: Array, g: Array, rules: Sequence[MomentumRule], first: bool) -> None:
    """Residuals and velocities of one parameter, (CFs, elements), in place. first: SGD does not
    dampen its first step."""
    momentum = np.array([[rule.momentum] for rule in rules], a.dtype)
    gain = np.array([[rule.gain] for rule in rules], a.dtype)
    u *= momentum
    u += gain * g if first else (1 - rules[0].dampening) * gain * g
    if rules[0].nesterov:
        a += momentum * u
        a += gain * g
    else:
        a += u


def _energies(rows: Array) -> Array:
    """Squared norm of each row, in double."""
    return np.einsum("ij,ij->i", rows, rows, dtype=np.float64)
