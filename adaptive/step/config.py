"""The user's settings: their defaults, their checks, and their description for a comparison of the
ranks.

Errors name the argument, its value and what is accepted.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, Literal, get_args

import torch

from adaptive.exchange.bucket import Granularity
from adaptive.exchange.options import ExchangeOptions
from adaptive.exchange.strategies import Strategy
from adaptive.memory.model_memory import MemoryChoice
from adaptive.network.link import Network
from adaptive.step.synchronisation import Synchronisation
from adaptive.timeline.sinks import SafeTimeline
from compressors import Compressor, Ladder, make_compressor
from compressors.base import Spec
from compressors.quantizers import Quantizer
from compressors.sparsifier import Sparsifier
from policies import DENSE, Accordion, Fixed, Goodput, Policy, Schedule, Warmup, checks
from policies.words import rung_named

GranularityName = Literal["auto", "layer", "bucket"]
GRANULARITIES: tuple[GranularityName, ...] = get_args(GranularityName)

DEFAULTS: Mapping[str, Any] = {
    "base": "topk",
    "cf_range": (10.0, 1000.0),
    "memory": "auto",
    "granularity": "auto",
}
"""Defaults of `AdaptiveCompressor`, for arguments that neither the user nor the policy sets."""

DEBUG_EVERY = 100
"""Steps between two comparisons of the ranks' parameters with debug=True."""

RUNGS = {2.0: "bf16", 4.0: "int8", 8.0: "int4"}
"""The default compressors below cf_range, by CF, for a network that is only a little too slow. They
lose next to nothing."""

VALUES = "int4"
"""The default coding of a sparsifier's values: with error feedback it is as good as fp32. At CF 100
a kept element takes 13 bits instead of 41, with its index (docs/research/results.md)."""


def make_base(base: str | Compressor, memory: Any) -> Compressor:
    """The compressor called `base`, or `base` itself if it is a compressor. A sparsifier named
    without a "+" sends its values in 4 bits, unless rounding errors would be lost (memory "none").
    docs/research/results.md has the comparison.

    ValueError for an unknown name, TypeError for a value of another type."""
    compressor = make_compressor(base)
    names_no_coding = isinstance(base, str) and "+" not in base
    if names_no_coding and memory != "none" and isinstance(compressor, Sparsifier):
        compressor = compressor.coded(VALUES)
    return compressor


def default_policy(base: Compressor) -> str:
    """The policy for `policy=None`: "goodput" for sparsifiers, because their progress at each CF is
    known, else "gravac". docs/research/results.md has the comparison."""
    return "goodput" if isinstance(base.at(inf), Sparsifier) else "gravac"


def with_ladder(
    base: Compressor, policy: Policy, exchange: str | Strategy, memory: str, low: float
) -> Compressor:
    """`base`, or a `Ladder`: RUNGS below `low` (the smallest CF of cf_range), and `base` above.

    Policy "goodput" gets the ladder if `base` is a sparsifier with error feedback, and payloads are
    not summed on the wire. ValueError for a user's ladder that does not go with the other
    arguments."""
    sends_payloads = exchange != "all_reduce"
    fits = isinstance(base.at(inf), Sparsifier) and not policy.layerwise and sends_payloads
    fits = fits and memory != "none"
    if not isinstance(base, Ladder):
        rungs = {cf: name for cf, name in RUNGS.items() if cf < low}
        return Ladder(rungs, base) if fits and rungs and isinstance(policy, Goodput) else base
    if not fits:
        raise ValueError(
            f"base={base!r}: a ladder needs a sparsifier above, a policy with one CF for all "
            f"layers, a memory, and another exchange than 'all_reduce'; got policy "
            f"{policy.name!r}, memory {memory!r}, exchange {exchange!r}"
        )
    for cf in base.rungs:
        if cf >= low:
            raise ValueError(
                f"base={base!r}: a rung must be below the smallest of cf_range, {low:g}; got CF "
                f"{cf:g}"
            )
    return base


def below_range(base: Compressor) -> str:
    """The rungs of a ladder in words; "" without a ladder. Rungs are candidates beside dense and
    cf_range."""
    rungs = base.rungs if isinstance(base, Ladder) else {}
    return ", ".join(rung_named(rung.name, cf) for cf, rung in rungs.items())


def whole_buckets(granularity: str, base: Compressor, policy: Policy) -> bool:
    """Whether the tensors of a bucket are compressed as one tensor.

    "auto" does so if the compressor can compare elements of different layers: the largest elements
    of the bucket are sent. At CF 20 and 100 this avoids most of the loss that compression causes in
    an image model (docs/research/results.md). Quantizers code all tensors of a bucket at once, with
    scales for each tensor unless `granularity` is "bucket"."""
    if granularity == "bucket":
        return True
    if policy.layerwise:
        return False
    above = base.at(inf)
    if isinstance(above, Quantizer):
        return not above.one_by_one
    if granularity == "layer":
        return _by_segments(base)
    return isinstance(above, Sparsifier) and above.comparable


def _by_segments(base: Compressor) -> bool:
    """Whether `base` compresses all tensors of a bucket at once, each by itself: it selects from
    each, or has scales for each."""
    return all(
        each.by_segments
        if isinstance(each, Sparsifier)
        else isinstance(each, Quantizer) and not each.one_by_one
        for each in (base.at(inf), *base.rungs.values())
    )


def _compresses(base: Compressor) -> bool:
    """Whether `base` compresses. A base that does not gets a dense policy (`start_policy`)."""
    return base.nearest(Spec((10**6,), 100.0)) > 1


def debug_interval(debug: Any) -> int:
    """Steps between two comparisons of the ranks' parameters, 0 for none. debug: True stands for
    `DEBUG_EVERY`, None for the value of the environment variable ADAPTIVE_DEBUG."""
    argument, value = "debug", debug
    if debug is None:
        argument, text = "ADAPTIVE_DEBUG", os.environ.get("ADAPTIVE_DEBUG", "")
        value = int(text) if text.isdecimal() else text or 0
        value = True if value == 1 else value
    if isinstance(value, bool):
        return DEBUG_EVERY if value else 0
    return checks.whole(argument, value, least=0)


def require_type(condition: bool, argument: str, value: object, accepted: str) -> None:
    """TypeError, naming the argument, its value and the accepted values, unless `condition`."""
    if not condition:
        raise TypeError(f"{argument} must be {accepted}, got {value!r:.80}")


@dataclass
class Settings:
    """The checked arguments of an `AdaptiveCompressor`, whose docstring explains them.

    debug: steps between two comparisons of the ranks' parameters, 0 for none. may_stay_dense: the
    user has not named a policy. ValueError if settings do not go together."""

    base: Compressor
    granularity: str
    dense_below: int
    exchange: ExchangeOptions
    cf_range: tuple[float, float]
    policy: Policy
    may_stay_dense: bool
    memory: MemoryChoice
    sync: Synchronisation
    timeline: SafeTimeline
    network: Network
    debug: int

    def __post_init__(self) -> None:
        base, policy = self.base, self.policy
        # Payloads that are summed in half precision cannot be sent together with fp32 tensors.
        in_half_precision = base.sums and base.sum_dtype is not None
        if self.dense_below and in_half_precision:
            raise ValueError(
                f"dense_below must be 0 for base {base.name!r}, whose payloads are summed in half "
                f"precision; got {self.dense_below}"
            )
        compresses = _compresses(base)
        if policy.needs_sparsifier and compresses and not isinstance(base.at(inf), Sparsifier):
            raise ValueError(
                f"policy {policy.name!r} needs a base that keeps the largest elements (topk, dgc, "
                f"redsync, sidco, threshold, adacomp), because it assumes their progress at each "
                f"CF; got base={base.name!r}"
            )
        self._check_sync()
        if base.name != "none":  # "none" switches compression off, whatever else is set
            self._check_used()
        if policy.layerwise:
            why = f"policy {policy.name!r}, which chooses a CF for each layer"
            if self.granularity == "bucket":
                raise ValueError(f"granularity must be 'layer' or 'auto' with {why}; got 'bucket'")
            if in_half_precision:
                raise ValueError(
                    f"base must not be summed in half precision with {why}; got base={base.name!r}"
                )

    def make_granularity(self) -> Granularity:
        """How buckets are cut into the units that are compressed as one tensor. The tensors of a
        quantizer's unit have scales of their own, unless the user asks for granularity "bucket";
        those of a sparsifier's unit keep elements of their own with granularity "layer"."""
        whole = whole_buckets(self.granularity, self.base, self.policy)
        by_layer = self.granularity == "layer" or isinstance(self.base, Quantizer)
        segments = by_layer and self.granularity != "bucket" and _by_segments(self.base)
        return Granularity(self.base, whole, self.dense_below, whole and segments)

    def stateful(self) -> list[Policy | Compressor]:
        """The objects that hold the state of one model: no two sessions may share them."""
        compressors = self.base, self.base.at(inf), *self.base.rungs.values()
        return [*_policies_in(self.policy), *compressors]

    def _check_sync(self) -> None:
        """ValueError for settings that do not go with `sync`."""
        sync, base = self.sync, self.base
        argument = f"sync={sync!r}"
        beside = argument, sync.among_all, sync.one_collective
        self.exchange = self.exchange.beside(*beside, base)
        memory = self.memory.options
        of_gradients = memory.clip_norm is not None or memory.dtype != torch.float32
        if of_gradients and sync.lets_ranks_differ:
            raise ValueError(
                f"memory must have no clip_norm (clip p.grad instead) and dtype torch.float32 with "
                f"{argument}, which exchanges no gradients; got {memory!r}"
            )
        if len(sync.numbers) > 1 and not self.policy.chooses_local_steps:
            raise ValueError(
                f"{argument}: steps must be a whole number with policy {self.policy.name!r}, which "
                f"does not choose it as 'goodput' does"
            )
        if len(sync.delays) > 1 and not self.policy.chooses_delay:
            raise ValueError(
                f"{argument}: steps must be one whole number with policy {self.policy.name!r}, "
                f"which does not choose it"
            )
        for policy in _policies_in(self.policy):
            sync.check_policy(policy, _compresses(base))

    def _check_used(self) -> None:
        """ValueError for a setting that would have no effect in this run."""
        compresses = _compresses(self.base)
        memory = self.memory.options
        if not self.base.feeds_back and memory.dtype != torch.float32:
            raise ValueError(
                f"memory={memory!r}: dtype needs a base whose errors are fed back, got "
                f"base={self.base.name!r}"
            )
        self._check_named_cfs()
        policies = _policies_in(self.policy)
        by_norms = self.policy.layerwise or any(isinstance(each, Accordion) for each in policies)
        self.exchange.check_used(
            self.base.name,
            compresses,
            repr(self.sync) if len(self.sync.numbers) > 1 else "",
            self.policy.name if by_norms else "",
        )

    def _check_named_cfs(self) -> None:
        """ValueError for a CF that the policy's arguments name and that no step can send. Checked
        without a model."""
        low, high = self.cf_range
        policy = self.policy.then if isinstance(self.policy, Warmup) else self.policy
        named: dict[str, float] = {}
        if isinstance(policy, Fixed) and policy.cf is not None:
            named = {"cf": policy.cf}
        elif isinstance(policy, Schedule):
            named = {f"pieces[{step}]": cf for step, cf in policy.pieces.items()}
        for name, cf in named.items() if isinstance(self.base.at(inf), Sparsifier) else ():
            others = self.base.known_gains.keys()
            if not low <= cf <= high and cf not in (DENSE, *others):
                below = "".join(f" or {each:g}" for each in others)
                raise ValueError(
                    f"policy={policy!r}: {name}={cf:g} must be 1 (dense) or inside cf_range "
                    f"({low:g}, {high:g}){below}; cf_range=({cf:g}, {cf:g}) would contain it"
                )

    def describe(self, memory: str) -> tuple[str, ...]:
        """The settings that must be the same on all ranks, in readable lines. memory: the chosen
        memory's name."""
        rungs = dict(sorted(self.base.rungs.items()))
        others = "granularity dense_below exchange cf_range sync debug"
        return (
            f"base={self.base!r}",
            f"rungs={rungs}",
            f"policy={self.policy.name!r} {self.policy.state_dict()}",
            f"{self.memory}, chosen {memory!r}",
            *(f"{name}={getattr(self, name)!r}" for name in others.split()),
            self.network.describe(),
            "a policy chosen by the library" if self.may_stay_dense else "a policy chosen by name",
        )


def _policies_in(policy: Policy) -> list[Policy]:
    """A policy, and all policies inside it."""
    found = [policy]
    for each in found:  # the list grows during the loop
        inner = [value for value in vars(each).values() if isinstance(value, Policy)]
        found += [value for value in inner if all(value is not known for known in found)]
    return found
