"""Measurements that only some policies ask for: the shadow ladder, and the sum of gradients.

The shadow ladder measures the steady-state gain of every CF, without sending at any of them. The
error-fed gain of a candidate CF is too high while a smaller CF is sent: the residual that the
candidate would leave has not built up. So the shadow ladder keeps one residual for each CF, on a
fixed strided sample of each gradient, as if that CF had been sent from the first step on. The cost
is a small top-k for each CF and step.

Accordion asks for the norm of the sum of the decoded mean gradients over an interval, of the whole
model or of each layer (parameter). Ranks agree on the norms only in the steps whose plan reads
them: with many layers they are more bytes than a step at a large CF sends.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, groupby
from math import inf
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adaptive.bucket.bucket import Bucket, Part
from adaptive.memory.error_feedback import MomentumRule, NoMemory
from adaptive.model.parameters import ModelParameter
from adaptive.model.state import SavedPart, check_like, flat_tensors
from adaptive.statistics.signal import (
    Peers,
    Sections,
    energies,
    largest,
    products,
    sampled,
    split_at_once,
)
from adaptive.statistics.vector import Tally
from compressors.base import kept
from compressors.kernels import kernels_for, squared_norm
from compressors.kernels.blocks import Flag, Scalar, zeros_if
from policies import Policy
from policies import state as saved

WHOLE = 1024
"""A tensor of at most this many elements is its own sample."""

WHOLE_BUCKET = 16384
"""A bucket of at most this many elements that is compressed as one tensor is its own sample."""

SHARE = 1 / 64
"""The sampled share of a larger tensor's elements; a sample has WHOLE or WHOLE_BUCKET at least."""

MOST = 32768
"""The largest number of elements of a sample. CF 1000 keeps 32 of them."""


class ShadowGroup:
    """The shadow state of one bucket's parameters, with the parameters' samples as columns.

    arrays: "residual" (CFs, elements); "velocity" (CFs, elements) with momentum correction; "sent"
    (1 + CFs, elements) for signal gain: the last step's gradient, and what each CF kept of it.
    places: the columns of each parameter. strides: the distance of each parameter's samples.

    by_section: the parameters of each section, in order; a section is compressed as one tensor.
    """

    def __init__(
        self,
        by_section: Sequence[Sequence[ModelParameter]],
        strides: Mapping[ModelParameter, int],
        cfs: Sequence[float],
    ) -> None:
        self.by_section = by_section
        self.parameters = tuple(chain.from_iterable(by_section))
        self.strides = [strides[parameter] for parameter in self.parameters]
        first = self.parameters[0]
        self._device, self._dtype = first.tensor.device, first.dtype
        self.places: dict[ModelParameter, slice] = {}
        sizes, wanted, weights, end = [], [], [], 0
        for section in by_section:
            start, numel = end, sum(parameter.local.numel() for parameter in section)
            for parameter in section:
                begin, end = end, end - (-parameter.local.numel() // strides[parameter])
                self.places[parameter] = slice(begin, end)
            size = end - start
            sizes.append(size)
            wanted.append([max(1, round(kept(numel, cf) * size / numel)) for cf in cfs])
            weights.append(numel / size)  # each sampled element stands for so many
        self._size = end
        self.sections = Sections(sizes, wanted, weights, self._device)
        self.above = np.zeros((len(sizes), len(cfs)))  # see `largest`
        self.arrays: dict[str, Tensor] = {}

    def of(self, parameter: ModelParameter) -> dict[str, Tensor]:
        """The columns of one parameter in each array (views)."""
        place = self.places[parameter]
        return {name: array[:, place] for name, array in self.arrays.items()}

    def take_over(self, parameter: ModelParameter, arrays: Mapping[str, Tensor]) -> None:
        """Copy the columns of one parameter from another group or a saved state."""
        for name, array in arrays.items():
            self.array(name, len(array))[:, self.places[parameter]] = array

    def array(self, name: str, rows: int) -> Tensor:
        """The array of this name, (rows, elements). A new array holds zeros."""
        if name not in self.arrays:
            shape = rows, self._size
            self.arrays[name] = torch.zeros(shape, dtype=self._dtype, device=self._device)
        return self.arrays[name]

    def undo(self, before: Mapping[str, Tensor], nonfinite: Flag) -> None:
        """Restore the arrays of `before` if `nonfinite`, a flag on the device, is set."""
        for name, array in self.arrays.items():
            old = before[name] if name in before else torch.zeros_like(array)
            self.arrays[name] = torch.where(torch.as_tensor(nonfinite), old, array)


@dataclass(eq=False)
class ShadowLadder:
    """The residual of each CF on a sample of each gradient, and the gain of each CF in each step.

    The shadow ladder selects by top-k, whatever rule the sparsifier in use selects by.

    cfs: ascending. memory: the memory in use; the shadow has the same momentum and masking. signal:
    the shadow has plain error feedback instead, and also computes the products of signal gain
    (signal.py). whole_buckets: the parameters of a bucket are compressed as one tensor. share: the
    sampled share of a large tensor's elements. most: the largest number of elements of a sample.
    """

    cfs: tuple[float, ...]
    memory: NoMemory
    signal: bool = False
    whole_buckets: bool = False
    share: float = SHARE
    most: int = MOST
    _group_of: dict[ModelParameter, ShadowGroup] = field(default_factory=dict)
    _strides: dict[ModelParameter, int] = field(default_factory=dict)
    _with_velocity: set[ModelParameter] = field(default_factory=set)  # in the shadow

    def __post_init__(self) -> None:
        self.peers = Peers(len(self.cfs)) if self.signal else None
        masks = [cf >= self.memory.masking for cf in self.cfs]
        self._masked = torch.tensor(masks)[:, None] if any(masks) else None

    def step(self, bucket: Bucket, tally: Tally) -> None:
        """Compress a bucket's local gradients at each CF in the shadow, and add the energies that
        are sent and lost to the tally.

        A nonfinite bucket, whose gradients are zero, changes nothing, with one exception on a
        device: a velocity that would start in this step starts in the next one, from zero.
        A parameter that the host knows to be skipped keeps its residual. Only a device knows some
        parameters to be skipped: these have a zero gradient, and their residual may be sent."""
        # Skipped parameters are sampled, too: ranks may skip different ones and must sample alike.
        parts = [part for part in bucket.parts if part.start < part.stop]
        if bucket.nonfinite is True or all(bucket.skipped.get(p.parameter) is True for p in parts):
            return
        singly = [[part.parameter] for part in parts]
        as_one = [[part.parameter for part in parts]]
        for section in as_one if self.whole_buckets else singly:
            self._choose_stride(section)
        group = self._group(as_one if bucket.whole else singly)
        before = {}
        if bucket.nonfinite is not False:  # "sent" is replaced, the others are written to
            before = {n: x if n == "sent" else x.clone() for n, x in group.arrays.items()}
        self._step(group, parts, bucket, tally)
        if bucket.nonfinite is not False:
            group.undo(before, bucket.nonfinite)

    def state_dict(self) -> dict[str, Any]:
        """For each parameter name: the stride of the sample, and the sample's arrays."""
        return {
            parameter.name: {
                "stride": self._strides[parameter],
                **{name: array.clone() for name, array in group.of(parameter).items()},
            }
            for parameter, group in self._group_of.items()
        }

    def load_state_dict(
        self, state: Mapping[str, Any], by_name: Mapping[str, ModelParameter]
    ) -> None:
        """Replace the state by that of a `state_dict()`."""
        self._group_of, self._strides, self._with_velocity = {}, {}, set()
        for name, of_one in state.items():
            parameter, arrays = by_name[name], dict(of_one)
            self._strides[parameter] = int(arrays.pop("stride"))
            group = self._group_of[parameter] = ShadowGroup([[parameter]], self._strides, self.cfs)
            group.take_over(parameter, arrays)
            if "velocity" in arrays:
                self._with_velocity.add(parameter)

    def _step(
        self, group: ShadowGroup, parts: Sequence[Part], bucket: Bucket, tally: Tally
    ) -> None:
        sections = group.sections
        g = sampled(self._gradients(parts, group.strides, bucket), [1] * len(parts))
        skip = {parameter for parameter, flag in bucket.skipped.items() if flag is True}
        skipped = [group.places[part.parameter] for part in parts if part.parameter in skip]
        sending = [part.parameter for part in parts if part.parameter not in skip]
        a = self._accumulate(group, g, sending)  # (CFs, elements)
        kept_back = [a[:, place].clone() for place in skipped]
        for place in skipped:
            a[:, place] = 0
        split = split_at_once(a, sections)
        sent = split[0] if split else largest(a, sections, group.above)
        for place in skipped:
            sent[:, place] = False
        total = split[1][1] if split else energies(a, sections)
        # Huge but finite gradients can make a residual non-finite, which is then set to zero.
        overflown = ~(total.amax(0) < inf)  # (sections,)
        left_out = overflown | bucket.nonfinite
        all_fit = kernels_for(a).look(lambda: not overflown.any(), False)  # a device: False
        if self.peers is not None:
            rows = torch.cat((g[None], a * sent))
            if not all_fit:
                rows.masked_fill_(sections.spread(left_out), 0)
            if "sent" in group.arrays:
                found = products(group.arrays["sent"], g, sections)
                tally.at("signal_total").add_(found[:1])
                tally.at("signal").add_(found[1:])
            group.arrays["sent"] = rows
            self.peers.add(group.parameters[0], bucket.key.step, rows, sections)
        a.masked_fill_(sent, 0)
        levels = split[1] if split else torch.stack((energies(a, sections), total))
        for place, residual in zip(skipped, kept_back, strict=True):
            a[:, place] = residual
        velocity = group.arrays.get("velocity")
        if velocity is not None and self._masked is not None:
            self._masked = self._masked.to(velocity.device, non_blocking=True)
            velocity.masked_fill_(sent & self._masked, 0)
        if not all_fit:
            levels.masked_fill_(left_out, 0)
            for array in group.arrays.values():
                array.masked_fill_(sections.spread(overflown), 0)
        error, total = (levels @ sections.weights).unbind()
        tally.at("shadow_error").add_(error)
        tally.at("shadow_total").add_(total)

    def _gradients(
        self, parts: Sequence[Part], strides: Sequence[int], bucket: Bucket
    ) -> Sequence[Tensor]:
        """The sample of each part's gradient, or of the update that the memory makes from it."""
        pairs = zip(parts, strides, strict=True)
        samples = [bucket.work[part.start : part.stop : stride] for part, stride in pairs]
        if bucket.updates:
            return samples
        return self.memory.handover.preview([part.parameter for part in parts], samples, strides)

    def _choose_stride(self, parameters: Sequence[ModelParameter]) -> None:
        """Give all parameters of a new section one stride. A parameter can have another stride from
        a state that was saved with a section for each tensor: then its shadow state is dropped."""
        known = {self._strides.get(parameter) for parameter in parameters}
        if len(known) <= 1 and None not in known:
            return
        numel = sum(parameter.local.numel() for parameter in parameters)
        least = WHOLE_BUCKET if self.whole_buckets else WHOLE
        stride = max(1, numel // max(least, min(self.most, int(numel * self.share))))
        for parameter in parameters:
            if self._strides.get(parameter) != stride:
                self._group_of.pop(parameter, None)
                self._with_velocity.discard(parameter)
            self._strides[parameter] = stride

    def _group(self, by_section: Sequence[Sequence[ModelParameter]]) -> ShadowGroup:
        """The group of these sections. If DDP has rebuilt its buckets, a new group is made, with
        the parameters' columns of the old groups."""
        parameters = [*chain.from_iterable(by_section)]
        before = {parameter: self._group_of.get(parameter) for parameter in parameters}
        group = before[parameters[0]]
        if group is None or group.by_section != by_section or {*before.values()} != {group}:
            group = ShadowGroup(by_section, self._strides, self.cfs)
            for parameter, old in before.items():
                if old is not None:
                    group.take_over(parameter, old.of(parameter))
                self._group_of[parameter] = group
        return group

    def _accumulate(
        self, group: ShadowGroup, g: Tensor, sending: Collection[ModelParameter]
    ) -> Tensor:
        """Add the gradients g (elements,) to the residuals of each CF, by the rule of the memory;
        with `signal` by plain error feedback. Parameters that are not `sending` have zeros in g,
        and their residuals do not change. Returns the residuals (CFs, elements)."""
        a = group.array("residual", len(self.cfs))
        plain = self.peers is not None
        rules = {p: () if plain else self._rules(p) for p in sending}
        if not any(rules.values()):
            return a.add_(g)
        u = group.array("velocity", len(self.cfs))
        updates = {
            p: (each, bool(each) and self._is_first(p, u[:, group.places[p]]))
            for p, each in rules.items()
        }
        for update, neighbours in groupby(group.parameters, updates.get):
            places = [group.places[p] for p in neighbours]
            place = slice(places[0].start, places[-1].stop)
            if update is None:
                continue
            if update[0]:
                _momentum_step(a[:, place], u[:, place], g[place], *update)
            else:
                a[:, place] += g[place]
        return a

    def _rules(self, parameter: ModelParameter) -> tuple[MomentumRule, ...]:
        """The momentum rule of each CF; () without momentum."""
        found = (self.memory.momentum(parameter, cf) for cf in self.cfs)
        return tuple(each[0] for each in found if each is not None)

    def _is_first(self, parameter: ModelParameter, velocities: Tensor) -> bool:
        """Whether this is the first step of the shadow's velocities (CFs, elements) of a parameter.
        If the memory has a velocity of the parameter already, the shadow copies a sample of it, and
        this is not the first step."""
        if parameter in self._with_velocity:
            return False
        self._with_velocity.add(parameter)
        if not parameter.started or parameter.velocity is None:
            return True
        moves = [self.memory.momentum(parameter, cf) for cf in self.cfs]
        factors = torch.tensor([each[1] if each else 1.0 for each in moves], dtype=torch.float64)
        velocity = sampled([parameter.velocity], [self._strides[parameter]])
        velocities.copy_(factors.to(velocity.device)[:, None] * velocity)
        return False


def check_shadow(state: Mapping[str, Any], by_name: Mapping[str, ModelParameter], cfs: int) -> None:
    """ValueError unless `state` is a `ShadowLadder.state_dict()` of these parameters and CFs."""
    check_like("shadow", state, dict.fromkeys(by_name, Mapping))
    for name, of_one in state.items():
        size = -(-by_name[name].local.numel() // saved.read(of_one, "stride", int))
        dtype = saved.read(of_one, "residual", Tensor).dtype
        saved.require(dtype in (torch.float32, torch.float64), f"shadow of {name!r} is of {dtype}")
        rows = torch.empty(1 + cfs, size, dtype=dtype, device="meta")
        like = {"stride": int, "residual": rows[1:], "velocity": rows[1:], "sent": rows}
        check_like(f"shadow of {name!r}", of_one, like)


def _momentum_step(
    a: Tensor, u: Tensor, g: Tensor, rules: tuple[MomentumRule, ...], first: bool
) -> None:
    """Momentum correction: add gradients g (elements,) to the velocities u and these to the
    residuals a, both (CFs, elements) and in place. rules: one for each CF. first: the first step of
    the velocities, in which SGD applies no dampening."""
    momentum, gain, share = _factors(rules, first, u.dtype, u.device)
    u *= momentum
    u += share * g
    if rules[0].nesterov:
        a += momentum * u
        a += gain * g
    else:
        a += u


@lru_cache(maxsize=32)  # so that the factors are not copied to the device in every step
def _factors(
    rules: tuple[MomentumRule, ...], first: bool, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Three factors for each CF, each (CFs, 1): of the old velocity; of the gradient that Nesterov
    momentum adds to the residual; of the gradient that is added to the velocity."""
    factors = torch.tensor([[[rule.momentum], [rule.gain]] for rule in rules], dtype=dtype)
    momentum, gain = factors.to(device, non_blocking=True).unbind(1)
    return momentum, gain, gain if first else (1 - rules[0].dampening) * gain


class GradientSum:
    """The sum of each parameter's mean gradients over several steps, the same on all ranks: a
    gradient-sized tensor for each parameter, made at the first `add`."""

    def __init__(self) -> None:
        self._totals: dict[ModelParameter, Tensor] = {}

    def add(self, parameter: ModelParameter, mean: Tensor, nonfinite: Flag) -> None:
        """Add a step's mean gradient of one parameter (flat), unless it is `nonfinite`."""
        if nonfinite is True:
            return
        total = self._totals.get(parameter)
        if total is None:
            total = self._totals[parameter] = parameter.zeros()
        total.add_(zeros_if(nonfinite, mean))

    def read(self) -> tuple[Tensor, dict[ModelParameter, Tensor]]:
        """The norm of the sum, 0-dim and in double, and each parameter's norm; begins a new sum."""
        total_energy: Scalar = 0.0
        norms = {}
        # Means arrive in an order that differs from run to run.
        for parameter, total in sorted(self._totals.items(), key=lambda item: item[0].name):
            energy = torch.as_tensor(squared_norm(total), dtype=torch.float64)
            norms[parameter] = energy.sqrt()
            total_energy = total_energy + energy
            total.zero_()
        return torch.as_tensor(total_energy, dtype=torch.float64).sqrt(), norms

    def state_dict(self) -> dict[str, Tensor]:
        return {parameter.name: total.clone() for parameter, total in self._totals.items()}

    def load_state_dict(
        self, state: Mapping[str, Tensor], by_name: Mapping[str, ModelParameter]
    ) -> None:
        self._totals = {by_name[n]: by_name[n].zeros().copy_(t) for n, t in state.items()}


class RequestedStatistics:
    """The measurements that the policy in use asks for.

    cfs, whole_buckets: of the shadow ladder, see `ShadowLadder`.
    """

    def __init__(
        self,
        policy: Policy,
        parameters: Collection[ModelParameter],
        cfs: Sequence[float],
        whole_buckets: bool,
    ) -> None:
        self.ladder = tuple(cfs) if policy.shadow else ()
        """CFs of the shadow ladder; empty without one."""
        self._shadow: ShadowLadder | None = None
        self.layers = tuple(parameters) if policy.layerwise else ()
        """The layers whose norms are read, in the same order on every rank."""
        self._policy = policy
        self._options = (policy.gain == "signal", whole_buckets)
        self.sums = GradientSum()

    def follow(self, memory: NoMemory) -> None:
        """Begin the shadow ladder, which accumulates gradients by this memory's rule."""
        if self.ladder:
            self._shadow = ShadowLadder(self.ladder, memory, *self._options)

    @property
    def peers(self) -> Peers | None:
        """The products with other ranks' gradients; None without signal gain."""
        return None if self._shadow is None else self._shadow.peers

    def observe(self, bucket: Bucket, tally: Tally) -> None:
        """Take in a bucket's local gradients. Those that are not finite are zero."""
        if self._shadow is not None and tally.ladder:
            self._shadow.step(bucket, tally)
        if tally.measures:
            tally.at("measured").add_(self._policy.measure(bucket.work))

    def parts(self, parameters: Collection[ModelParameter]) -> dict[str, SavedPart]:
        """The parts of a saved state, between two steps; empty where a measurement is not asked
        for. (A fallback of the memory replaces the ladder between a check and the loading.)"""
        by_name, flat = {p.name: p for p in parameters}, flat_tensors(parameters)

        def peers() -> dict[str, Tensor]:
            return {} if self.peers is None else self.peers.state_dict()

        def load_shadow(state: Mapping[str, Any]) -> None:
            if self._shadow is not None:
                self._shadow.load_state_dict(state, by_name)

        def load_peers(state: Mapping[str, Any]) -> None:
            if self.peers is not None:
                self.peers.load_state_dict(state)

        return {
            "shadow": SavedPart(
                lambda: self._shadow.state_dict() if self._shadow else {},
                lambda state: check_shadow(state, by_name if self.ladder else {}, len(self.ladder)),
                load_shadow,
            ),
            "sum": SavedPart(
                self.sums.state_dict,
                lambda state: check_like("sum", state, flat, finite=False),
                lambda state: self.sums.load_state_dict(state, by_name),
            ),
            "peers": SavedPart(
                peers, lambda state: check_like("peers", state, peers(), complete=True), load_peers
            ),
        }
