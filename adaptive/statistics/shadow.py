"""The shadow ladder: what every CF would keep in steady state, without sending any of them.

A candidate's error-fed gain, measured while a smaller CF is in use, is optimistic: the residual
that the candidate would leave has not built up. So every CF of the ladder has a residual of its own
on a fixed strided sample of each gradient, as if that CF had been sent all along. Costs a small
top-k a CF and a step.
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

from adaptive.bucket import Bucket, Part
from adaptive.memory.error_feedback import NoMemory
from adaptive.memory.momentum import MomentumRule
from adaptive.parameters import ModelParameter
from adaptive.state import check_like
from adaptive.statistics.samples import (
    Sections,
    clear,
    energies,
    largest,
    products,
    sampled,
    split_at_once,
)
from adaptive.statistics.signal import Peers
from adaptive.statistics.vector import Tally
from compressors.base import kept
from compressors.kernels.blocks import Flag, is_host, on_host
from policies import state as saved

WHOLE = 1024
"""Elements up to which a tensor is its own sample."""

WHOLE_BUCKET = 16384
"""The same, of a bucket that is compressed as one."""

SHARE = 1 / 64
"""Of what is larger, this part of the elements (at least as many as of the above)."""


class ShadowGroup:
    """What is kept of the samples of several parameters, one after the other: residual (CFs,
    elements), where it is wanted velocity (CFs, elements), and for signal gain the last step's
    gradient and what each CF sent of it, sent (1 + CFs, elements).

    together: the parameters of each section, in order: what is compressed as one. strides: of each
    one's sample. above: where the largest are looked for first; speed, not state.
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
        self._device = first.tensor.device
        self._dtype = first.dtype if is_host(self._device) else torch.float32
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
        self.above = np.zeros(len(cfs))
        self.arrays: dict[str, Tensor] = {}

    def of(self, parameter: ModelParameter) -> dict[str, Tensor]:
        """What is kept of one parameter, as views."""
        place = self.places[parameter]
        return {name: array[:, place] for name, array in self.arrays.items()}

    def take_over(self, parameter: ModelParameter, arrays: Mapping[str, Tensor]) -> None:
        """Go on from what was kept of a parameter before, in another group or in a state."""
        for name, array in arrays.items():
            self.array(name, len(array))[:, self.places[parameter]] = array

    def array(self, name: str, rows: int) -> Tensor:
        """(rows, elements), zeros if it was not there."""
        if name not in self.arrays:
            shape = rows, self._size
            self.arrays[name] = torch.zeros(shape, dtype=self._dtype, device=self._device)
        return self.arrays[name]

    def settle(self, before: Mapping[str, Tensor], poisoned: Flag, overflown: Tensor) -> None:
        """On a device, after a step: all is as it was `before` if the step is poisoned, and of the
        elements that are `overflown` nothing is kept any more."""
        for name, array in self.arrays.items():
            array.masked_fill_(overflown, 0)
            if isinstance(poisoned, Tensor):
                old = before[name] if name in before else torch.zeros_like(array)
                self.arrays[name] = torch.where(poisoned, old, array)


@dataclass(eq=False)
class ShadowLadder:
    """The residual of every CF on a sample of each gradient, and what they tell of each step.

    It keeps the largest elements, whatever the rule of the sparsifier that it stands for.

    cfs: ascending. memory: the one in use, whose momentum and masking the shadow follows; not with
    `signal`, which also finds the products that signal gain is made of (signal.py), of plain error
    feedback. whole_buckets: the parameters of a bucket are compressed as one. share: of the
    elements of what is large.
    """

    cfs: tuple[float, ...]
    memory: NoMemory
    signal: bool = False
    whole_buckets: bool = False
    share: float = SHARE
    _group_of: dict[ModelParameter, ShadowGroup] = field(default_factory=dict)
    _strides: dict[ModelParameter, int] = field(default_factory=dict)
    _moving: set[ModelParameter] = field(default_factory=set)  # that have a velocity here

    def __post_init__(self) -> None:
        self.peers = Peers(len(self.cfs)) if self.signal else None
        masks = [self.memory.masks(cf) for cf in self.cfs]
        self._masked = torch.tensor(masks)[:, None] if any(masks) else None

    def step(self, bucket: Bucket, tally: Tally) -> None:
        """Take in a bucket's local gradients, which in a poisoned bucket must be zero; add what
        each CF keeps and loses to the tally.

        On the host a poisoned bucket is passed over, and a parameter that is skipped keeps its
        residual. On a device, where the host knows of neither, masks see to it that a poisoned
        bucket changes nothing, but that a velocity that would have begun in this step (with the
        memory's, or undampened) begins in the next one from zero; and a skipped parameter is one
        with a gradient of zero, so that elements of its residual count as sent."""
        if bucket.poisoned is True:
            return
        # Skipped ones, too: which they are may differ between ranks, and what is sampled must not.
        parts = [part for part in bucket.parts if part.grad.numel()]
        singly = [[part] for part in parts]
        for section in [parts] if self.whole_buckets else singly:
            self._choose_stride([part.parameter for part in section])
        together = [parts] if bucket.whole else singly
        if on_host(bucket.work):
            for section in together:
                if not all(part.skipped is True for part in section):
                    self._step([section], bucket, tally)
        elif parts:
            self._step(together, bucket, tally)

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

    def _step(self, together: Sequence[Sequence[Part]], bucket: Bucket, tally: Tally) -> None:
        """One group's step. together: the parts of each of its sections: a single one on the
        host."""
        group = self._group([[part.parameter for part in section] for section in together])
        parts, sections = [*chain.from_iterable(together)], group.sections
        g = sampled(self._gradients(parts, group.strides, bucket.updates), [1] * len(parts))
        host = on_host(g)
        arrays = {} if host else group.arrays  # "sent" is replaced, not written to
        before = {name: x if name == "sent" else x.clone() for name, x in arrays.items()}
        skipped = [group.places[part.parameter] for part in parts if part.skipped is True]
        sending = [part.parameter for part in parts if part.skipped is not True]
        a = self._accumulate(group, g, sending)
        waiting = [a[:, place].clone() for place in skipped]
        for place in skipped:
            a[:, place] = 0
        split = split_at_once(a, sections)
        sent = split[0] if split else largest(a, sections, group.above)
        for place in skipped:
            sent[:, place] = False
        total = split[1][1] if split else energies(a, sections)
        # Not finite, of finite, but huge gradients: it would stay so.
        if not host:
            overflown = ~(total.amax(0) < inf)
            left_out = overflown | bucket.poisoned
        elif not np.isfinite(total.numpy()).all():
            for array in group.arrays.values():
                array.zero_()
            return
        if self.peers is not None:
            rows = torch.cat((g[None], a * sent))
            if not host:
                rows.masked_fill_(sections.spread(left_out), 0)
            if "sent" in group.arrays:
                found = products(group.arrays["sent"], g, sections)
                tally.at("signal_total").add_(found[:1])
                tally.at("signal").add_(found[1:])
            group.arrays["sent"] = rows
            self.peers.add(group.parameters[0], bucket.key.step, rows, sections)
        clear(a, sent)
        levels = split[1] if split else torch.stack((energies(a, sections), total))
        for place, residual in zip(skipped, waiting, strict=True):
            a[:, place] = residual
        velocity = group.arrays.get("velocity")
        if velocity is not None and self._masked is not None:
            self._masked = self._masked.to(velocity.device)
            clear(velocity, sent & self._masked)
        if not host:
            levels.masked_fill_(left_out, 0)
            group.settle(before, bucket.poisoned, sections.spread(overflown))
        error, all_of_it = (levels @ sections.weights).unbind()
        tally.at("shadow_error").add_(error)
        tally.at("shadow_total").add_(all_of_it)

    def _gradients(
        self, parts: Sequence[Part], strides: Sequence[int], updates: bool
    ) -> Sequence[Tensor]:
        """The sample of each part's gradient, or of the update that would be made of it."""
        samples = [part.grad[::stride] for part, stride in zip(parts, strides, strict=True)]
        if updates:
            return samples
        return self.memory.preview([part.parameter for part in parts], samples, strides)

    def _choose_stride(self, parameters: Sequence[ModelParameter]) -> None:
        """The same for samples that are looked at together, from the first time on. What was kept
        of samples with strides of their own (in a state that is of tensor by tensor) is let go."""
        known = {self._strides.get(parameter) for parameter in parameters}
        if len(known) <= 1 and None not in known:
            return
        numel = sum(parameter.local.numel() for parameter in parameters)
        least = WHOLE_BUCKET if self.whole_buckets else WHOLE
        stride = max(1, numel // max(least, int(numel * self.share)))
        for parameter in parameters:
            if self._strides.get(parameter) != stride:
                self._group_of.pop(parameter, None)
                self._moving.discard(parameter)
            self._strides[parameter] = stride

    def _group(self, together: Sequence[Sequence[ModelParameter]]) -> ShadowGroup:
        """Of these sections in this order; buckets are cut anew after the first step."""
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
        """The residuals become the error-fed gradients, by the memory's own rule (with signal gain
        by plain error feedback). Those of parameters that do not send have zeros in g, and stay."""
        a = group.array("residual", len(self.cfs))
        plain = self.peers is not None
        rules = {p: () if plain else tuple(self.memory.rules(p, self.cfs)) for p in sending}
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

    def _begins(self, parameter: ModelParameter, velocities: Tensor) -> bool:
        """Whether one parameter's velocities (CFs, elements) begin with this step, and not with the
        memory's, which is sampled when they are new."""
        if parameter in self._moving:
            return False
        self._moving.add(parameter)
        if not parameter.started or parameter.velocity is None:
            return True
        factors = torch.tensor(self.memory.entering(parameter, self.cfs), dtype=torch.float64)
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
