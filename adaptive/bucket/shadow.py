"""The shadow ladder: the gain of every CF in steady state, without sending any of them.

A candidate's error-fed gain, measured while a smaller CF is in use, is optimistic: the residual
that the candidate would leave has not built up. So every CF of the ladder has a residual of its own
on a fixed strided sample of each gradient, as if that CF had been sent all along. Costs a small
top-k for each CF and step.
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
from adaptive.model.state import check_like
from adaptive.statistics.samples import (
    Sections,
    energies,
    largest,
    products,
    sampled,
    split_at_once,
)
from adaptive.statistics.signal import Peers
from adaptive.statistics.vector import Tally
from compressors.base import kept
from compressors.kernels import kernels_for
from compressors.kernels.blocks import Flag
from policies import state as saved

WHOLE = 1024
"""Elements up to which a tensor is its own sample."""

WHOLE_BUCKET = 16384
"""Elements up to which a bucket that is compressed as one is its own sample."""

SHARE = 1 / 64
"""The share of the elements of larger tensors that is sampled, but at least as many as above."""

MOST = 32768
"""Elements of a sample, at most. CF 1000 keeps 32 of them."""


class ShadowGroup:
    """The state of the samples of a bucket's parameters, one behind the other.

    arrays: "residual" (CFs, elements); "velocity" (CFs, elements) with momentum correction; "sent"
    (1 + CFs, elements) for signal gain, the last step's gradient and what each CF sent of it.
    places: each parameter's columns. strides: distance of each parameter's sampled elements.

    together: the parameters of each section, in order; a section is compressed as one.
    """

    def __init__(
        self,
        together: Sequence[Sequence[ModelParameter]],
        strides: Mapping[ModelParameter, int],
        cfs: Sequence[float],
    ) -> None:
        self.together = together
        self.parameters = tuple(chain.from_iterable(together))
        self.strides = [strides[parameter] for parameter in self.parameters]
        first = self.parameters[0]
        self._device, self._dtype = first.tensor.device, first.dtype
        self.places: dict[ModelParameter, slice] = {}
        sizes, wanted, weights, end = [], [], [], 0
        for section in together:
            start, numel = end, sum(parameter.local.numel() for parameter in section)
            for parameter in section:
                begin, end = end, end - (-parameter.local.numel() // strides[parameter])
                self.places[parameter] = slice(begin, end)
            size = end - start
            sizes.append(size)
            wanted.append([max(1, round(kept(numel, cf) * size / numel)) for cf in cfs])
            weights.append(numel / size)  # what is large is sampled more thinly
        self._size = end
        self.sections = Sections(sizes, wanted, weights, self._device)
        self.above = np.zeros((len(sizes), len(cfs)))  # see `largest`
        self.arrays: dict[str, Tensor] = {}

    def of(self, parameter: ModelParameter) -> dict[str, Tensor]:
        """The columns of one parameter, as views."""
        place = self.places[parameter]
        return {name: array[:, place] for name, array in self.arrays.items()}

    def take_over(self, parameter: ModelParameter, arrays: Mapping[str, Tensor]) -> None:
        """Copy the columns of one parameter from another group or a saved state."""
        for name, array in arrays.items():
            self.array(name, len(array))[:, self.places[parameter]] = array

    def array(self, name: str, rows: int) -> Tensor:
        """The array of this name, (rows, elements); zeros at first."""
        if name not in self.arrays:
            shape = rows, self._size
            self.arrays[name] = torch.zeros(shape, dtype=self._dtype, device=self._device)
        return self.arrays[name]

    def undo(self, before: Mapping[str, Tensor], nonfinite: Flag) -> None:
        """Restore the arrays of `before` where `nonfinite`, a flag on a device, is set."""
        for name, array in self.arrays.items():
            old = before[name] if name in before else torch.zeros_like(array)
            self.arrays[name] = torch.where(torch.as_tensor(nonfinite), old, array)


@dataclass(eq=False)
class ShadowLadder:
    """Each CF's residual on a sample of each gradient, and its gain in each step.

    The ladder keeps the largest elements, whatever the rule of the sparsifier in use.

    cfs: ascending. memory: the memory in use, whose momentum and masking the shadow follows. With
    `signal` the shadow follows plain error feedback, and also finds the products of signal gain
    (signal.py). whole_buckets: the parameters of a bucket are compressed as one. share: the share
    of the elements of large tensors that is sampled. most: elements of a sample.
    """

    cfs: tuple[float, ...]
    memory: NoMemory
    signal: bool = False
    whole_buckets: bool = False
    share: float = SHARE
    most: int = MOST
    _group_of: dict[ModelParameter, ShadowGroup] = field(default_factory=dict)
    _strides: dict[ModelParameter, int] = field(default_factory=dict)
    _moving: set[ModelParameter] = field(default_factory=set)  # with a velocity in the shadow

    def __post_init__(self) -> None:
        self.peers = Peers(len(self.cfs)) if self.signal else None
        masks = [cf >= self.memory.masking for cf in self.cfs]
        self._masked = torch.tensor(masks)[:, None] if any(masks) else None

    def step(self, bucket: Bucket, tally: Tally) -> None:
        """Take in a bucket's local gradients, and add to the tally what each CF keeps and loses.

        A nonfinite bucket, whose gradients must be zero, changes nothing, with one exception on a
        device: a velocity that would have begun in this step begins in the next one, from zero. A
        parameter that the host knows to be skipped keeps its residual. On a device a skipped
        parameter is one with a gradient of zero, and elements of its residual count as sent."""
        # All parameters, also skipped ones: ranks may skip different ones and must sample alike.
        parts = [part for part in bucket.parts if part.grad.numel()]
        if bucket.nonfinite is True or all(part.skipped is True for part in parts):
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
        """By parameter name: the distance of its sampled elements, and what is kept of them."""
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
        """Go on from a `state_dict()`."""
        self._group_of, self._strides, self._moving = {}, {}, set()
        for name, of_one in state.items():
            parameter, arrays = by_name[name], dict(of_one)
            self._strides[parameter] = int(arrays.pop("stride"))
            group = self._group_of[parameter] = ShadowGroup([[parameter]], self._strides, self.cfs)
            group.take_over(parameter, arrays)
            if "velocity" in arrays:
                self._moving.add(parameter)

    def _step(
        self, group: ShadowGroup, parts: Sequence[Part], bucket: Bucket, tally: Tally
    ) -> None:
        sections = group.sections
        g = sampled(self._gradients(parts, group.strides, bucket.updates), [1] * len(parts))
        skipped = [group.places[part.parameter] for part in parts if part.skipped is True]
        sending = [part.parameter for part in parts if part.skipped is not True]
        a = self._accumulate(group, g, sending)  # (CFs, elements)
        waiting = [a[:, place].clone() for place in skipped]
        for place in skipped:
            a[:, place] = 0
        split = split_at_once(a, sections)
        sent = split[0] if split else largest(a, sections, group.above)
        for place in skipped:
            sent[:, place] = False
        total = split[1][1] if split else energies(a, sections)
        # A residual that is not finite, after finite but huge gradients, would stay so.
        overflown = ~(total.amax(0) < inf)  # (sections,)
        left_out = overflown | bucket.nonfinite
        all_fit = kernels_for(a).look(lambda: not overflown.any(), False)  # as the host can see
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
        for place, residual in zip(skipped, waiting, strict=True):
            a[:, place] = residual
        velocity = group.arrays.get("velocity")
        if velocity is not None and self._masked is not None:
            self._masked = self._masked.to(velocity.device, non_blocking=True)
            velocity.masked_fill_(sent & self._masked, 0)
        if not all_fit:
            levels.masked_fill_(left_out, 0)
            for array in group.arrays.values():
                array.masked_fill_(sections.spread(overflown), 0)
        error, all_of_it = (levels @ sections.weights).unbind()
        tally.at("shadow_error").add_(error)
        tally.at("shadow_total").add_(all_of_it)

    def _gradients(
        self, parts: Sequence[Part], strides: Sequence[int], updates: bool
    ) -> Sequence[Tensor]:
        """The sample of each part's gradient, or of the update that the memory makes of it."""
        samples = [part.grad[::stride] for part, stride in zip(parts, strides, strict=True)]
        if updates:
            return samples
        return self.memory.handover.preview([part.parameter for part in parts], samples, strides)

    def _choose_stride(self, parameters: Sequence[ModelParameter]) -> None:
        """Give all parameters of a section one stride, the first time that they are seen. The state
        of samples with another stride (from a state saved tensor by tensor) is dropped."""
        known = {self._strides.get(parameter) for parameter in parameters}
        if len(known) <= 1 and None not in known:
            return
        numel = sum(parameter.local.numel() for parameter in parameters)
        least = WHOLE_BUCKET if self.whole_buckets else WHOLE
        stride = max(1, numel // max(least, min(self.most, int(numel * self.share))))
        for parameter in parameters:
            if self._strides.get(parameter) != stride:
                self._group_of.pop(parameter, None)
                self._moving.discard(parameter)
            self._strides[parameter] = stride

    def _group(self, together: Sequence[Sequence[ModelParameter]]) -> ShadowGroup:
        """The group of these sections, made of others' columns where DDP has cut other buckets."""
        parameters = [*chain.from_iterable(together)]
        before = {parameter: self._group_of.get(parameter) for parameter in parameters}
        group = before[parameters[0]]
        if group is None or group.together != together or {*before.values()} != {group}:
            group = ShadowGroup(together, self._strides, self.cfs)
            for parameter, old in before.items():
                if old is not None:
                    group.take_over(parameter, old.of(parameter))
                self._group_of[parameter] = group
        return group

    def _accumulate(
        self, group: ShadowGroup, g: Tensor, sending: Collection[ModelParameter]
    ) -> Tensor:
        """Add the gradients to the residuals by the memory's rule, with signal gain by plain error
        feedback. Parameters that do not send have zeros in g, and their residuals stay."""
        a = group.array("residual", len(self.cfs))
        plain = self.peers is not None
        rules = {p: () if plain else self._rules(p) for p in sending}
        if not any(rules.values()):
            return a.add_(g)
        u = group.array("velocity", len(self.cfs))
        moves = {
            p: (each, bool(each) and self._begins(p, u[:, group.places[p]]))
            for p, each in rules.items()
        }
        for move, neighbours in groupby(group.parameters, moves.get):
            places = [group.places[p] for p in neighbours]
            place = slice(places[0].start, places[-1].stop)
            if move is None:
                continue
            if move[0]:
                _move(a[:, place], u[:, place], g[place], *move)
            else:
                a[:, place] += g[place]
        return a

    def _rules(self, parameter: ModelParameter) -> tuple[MomentumRule, ...]:
        """Of each CF, if there is momentum."""
        found = (self.memory.momentum(parameter, cf) for cf in self.cfs)
        return tuple(each[0] for each in found if each is not None)

    def _begins(self, parameter: ModelParameter, velocities: Tensor) -> bool:
        """Whether one parameter's velocities (CFs, elements) begin with this step, and not with the
        memory's, which is sampled when they are new."""
        if parameter in self._moving:
            return False
        self._moving.add(parameter)
        if not parameter.started or parameter.velocity is None:
            return True
        moves = [self.memory.momentum(parameter, cf) for cf in self.cfs]
        factors = torch.tensor([each[1] if each else 1.0 for each in moves], dtype=torch.float64)
        velocity = sampled([parameter.velocity], [self._strides[parameter]])
        velocities.copy_(factors.to(velocity.device)[:, None] * velocity)
        return False


def check_shadow(state: Mapping[str, Any], by_name: Mapping[str, ModelParameter], cfs: int) -> None:
    """ValueError unless it is a `ShadowLadder.state_dict()` of these parameters and so many CFs."""
    check_like("shadow", state, dict.fromkeys(by_name, Mapping))
    for name, of_one in state.items():
        size = -(-by_name[name].local.numel() // saved.read(of_one, "stride", int))
        dtype = saved.read(of_one, "residual", Tensor).dtype
        saved.require(dtype in (torch.float32, torch.float64), f"shadow of {name!r} is of {dtype}")
        rows = torch.empty(1 + cfs, size, dtype=dtype, device="meta")
        like = {"stride": int, "residual": rows[1:], "velocity": rows[1:], "sent": rows}
        check_like(f"shadow of {name!r}", of_one, like)


def _move(a: Tensor, u: Tensor, g: Tensor, rules: tuple[MomentumRule, ...], first: bool) -> None:
    """Move residuals and velocities of one parameter or several, (CFs, elements), in place. rules:
    of each CF. first: the velocities begin, and SGD does not dampen its first step."""
    momentum, gain, share = _factors(rules, first, u.dtype, u.device)
    u *= momentum
    u += share * g
    if rules[0].nesterov:
        a += momentum * u
        a += gain * g
    else:
        a += u


@lru_cache(maxsize=32)  # so that they need not be copied to the device in every step
def _factors(
    rules: tuple[MomentumRule, ...], first: bool, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """For each CF, (CFs, 1): what the velocity is multiplied by, the gain of the gradient that
    Nesterov's momentum sends ahead, and the share of it that the velocity takes in."""
    factors = torch.tensor([[[rule.momentum], [rule.gain]] for rule in rules], dtype=dtype)
    momentum, gain = factors.to(device, non_blocking=True).unbind(1)
    return momentum, gain, gain if first else (1 - rules[0].dampening) * gain
