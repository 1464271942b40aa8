"""What the user chose: its defaults, which of it goes together, and all of it in words.

Errors name the argument, its value and what is accepted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

import torch

from adaptive.exchange.choice import in_one_collective
from adaptive.exchange.link import LinkSpec
from adaptive.exchange.topology import GossipChoice
from adaptive.hook import HookRung
from adaptive.statistics.shadow import SHARE
from adaptive.timeline.recorder import SafeTimeline
from compressors import Compressor, make_compressor
from compressors.rounds import RoundsCompressor
from compressors.sparsifier import Sparsifier
from policies import Fixed, Goodput, Policy, Schedule, Warmup, checks
from policies.base import DeclaredPolicy

if TYPE_CHECKING:
    from adaptive.memory.model_memory import MemoryChoice

GRANULARITIES = ("auto", "layer", "bucket")
MEMORIES = ("auto", "residual", "momentum", "updates", "none")

DEBUG_EVERY = 100
"""Steps between two comparisons of the ranks' parameters with debug=True."""

RUNGS = {2.0: "bf16", 4.0: "int8"}
"""Compressors below the smallest CF of a sparsifier's ladder, if nobody says: for a network that is
only a little too slow. They keep next to everything."""

VALUES = "int4"
"""How a sparsifier's values travel if nobody says: as good as fp32 with error feedback, and a kept
element takes 13 bits at CF 100 instead of 41, its index included (docs/results.md)."""


def make_base(base: str | Compressor, memory: Any) -> Compressor:
    """The compressor called `base`, or `base` itself if it is one. A sparsifier named without a "+"
    sends its values in 4 bits, unless what rounding loses would be lost for good (memory "none").
    docs/results.md has the comparison.

    ValueError for an unknown name, TypeError for anything else."""
    compressor = make_compressor(base)
    says_nothing = isinstance(base, str) and "+" not in base
    if says_nothing and memory != "none" and isinstance(compressor, Sparsifier):
        compressor = compressor.coded(VALUES)
    if isinstance(base, str):
        compressor.shown = base
    return compressor


def default_policy(base: Compressor, hooks: Mapping[float, Any] | None = None) -> str:
    """The policy that nobody has chosen: "goodput" where a shadow ladder tells all gains, else
    "gravac". docs/results.md has the comparison."""
    return "goodput" if isinstance(base, Sparsifier) and not hooks else "gravac"


def make_rungs(
    rungs: Any, base: Compressor, policy: Policy, exchange: str, memory: str, low: float
) -> dict[float, Compressor]:
    """The compressors that `AdaptiveCompressor(rungs=...)` puts below `low`, the smallest CF of
    cf_range, by CF. "auto": RUNGS for policy "goodput", where that can be.

    Their errors must stay in the residual, so they are not summed on the wire. ValueError or
    TypeError if the argument is wrong or does not go with the others."""
    sends_payloads = exchange in ("auto", "all_gather", "sharded", "voted_indices")
    fits = isinstance(base, Sparsifier) and not policy.layerwise and sends_payloads
    fits = fits and memory != "none"
    if isinstance(rungs, str) and rungs == "auto":
        wanted = fits and isinstance(policy, Goodput)
        rungs = {cf: name for cf, name in RUNGS.items() if cf < low} if wanted else {}
    accepted = "'auto', None, or a mapping of CFs to compressors such as {4: 'int8'}"
    require(isinstance(rungs, Mapping | None), "rungs", rungs, accepted)
    if rungs and not fits:
        raise ValueError(
            f"rungs={dict(rungs)!r}: must be empty unless the base is a sparsifier, layers have "
            f"no CFs of their own, memory is not 'none', and exchange is 'auto', 'all_gather', "
            f"'sharded' or 'voted_indices'; got base {base.shown!r}, policy {policy.name!r}, "
            f"memory {memory!r}, exchange {exchange!r}"
        )
    made = {}
    for cf, rung in (rungs or {}).items():
        cf = checks.real("a CF of rungs", cf, above=1)
        compressor = make_compressor(rung)
        keeps = compressor.error_feedback and not isinstance(compressor, RoundsCompressor)
        if cf >= low or not keeps or compressor.supported(cf, 10**6) != cf:
            raise ValueError(
                f"rungs[{cf:g}] must be a compressor with error feedback that can do this CF, "
                f"below the smallest of cf_range, {low:g}; got {compressor.name!r}"
            )
        made[cf] = compressor
    return made


def whole_buckets(granularity: str, base: Compressor, policy: Policy) -> bool:
    """Whether the tensors of a bucket are compressed as one. "auto": where the largest elements of
    all can be told, since each layer then gets its share of them: at CF 20 and 100 that saves most
    of what compression costs an image model (docs/results.md)."""
    if granularity != "auto":
        return granularity == "bucket"
    return isinstance(base, Sparsifier) and base.comparable and not policy.layerwise


def debug_interval(debug: Any) -> int:
    """Steps between two comparisons of the ranks' parameters, 0 for none: True is `DEBUG_EVERY`,
    None what the environment variable ADAPTIVE_DEBUG says."""
    argument, value = "debug", debug
    if debug is None:
        argument, text = "ADAPTIVE_DEBUG", os.environ.get("ADAPTIVE_DEBUG", "")
        value = int(text) if text.isdecimal() else text or 0
        value = True if value == 1 else value
    if isinstance(value, bool):
        return DEBUG_EVERY if value else 0
    return checks.whole(argument, value, least=0)


def check_local_steps(value: Any) -> int | str:
    """`value`, a whole number >= 1 or "auto"."""
    if isinstance(value, str) and value != "auto":
        raise ValueError(f"local_steps={value!r}: must be a whole number >= 1 or 'auto'")
    return value if value == "auto" else checks.whole("local_steps", value, least=1)


def no_memory(memory: Any) -> str:
    """The memory with gossip. ValueError unless "auto" or "none" was asked for."""
    if checks.one_of("memory", memory, MEMORIES) not in ("auto", "none"):
        raise ValueError(
            f"memory must be 'auto' or 'none' with exchange='gossip', whose algorithms say what "
            f"becomes of what is not sent (gossip=...); got {memory!r}"
        )
    return "none"


def positive(argument: str, value: float | None) -> float | None:
    """`value`, a finite number > 0, or None."""
    return None if value is None else checks.real(argument, value, above=0)


def require(condition: bool, argument: str, value: object, accepted: str) -> None:
    """TypeError that names an argument, its value and what is accepted, unless it is that."""
    if not condition:
        raise TypeError(f"{argument} must be {accepted}, got {value!r}")


@dataclass
class Settings:
    """The checked arguments of an `AdaptiveCompressor`, which says what they mean.

    debug: steps between two comparisons of the ranks' parameters, 0 for none. gossip: None unless
    exchange is "gossip". may_stay_dense: nobody has named a policy.
    ValueError if they do not go together."""

    base: Compressor
    granularity: str
    dense_below: int
    exchange: str
    down_cf: float | None
    server_memory: bool
    hooks: dict[float, HookRung]
    rungs: dict[float, Compressor]
    cf_range: tuple[float, float]
    policy: Policy
    may_stay_dense: bool
    memory: MemoryChoice
    residual_dtype: torch.dtype
    clip_norm: float | None
    shadow_sample: float
    samples_per_step: float | None
    local_steps: int | str
    outer_lr: float
    outer_momentum: float
    overlap: int | None
    delay: int
    timeline: SafeTimeline
    link: LinkSpec | None
    clock: Callable[[], float]
    debug: int
    gossip: GossipChoice | None = None

    def __post_init__(self) -> None:
        base, policy = self.base, self.policy
        # Nothing else can travel with payloads that are summed in half precision.
        in_half_precision = base.linear and base.wire_dtype(torch.float32) != torch.float32
        if self.dense_below and in_half_precision:
            raise ValueError(
                f"dense_below must be 0 for base {base.shown!r}, whose payloads are summed in half "
                f"precision; got {self.dense_below}"
            )
        compresses = base.supported(100.0, 10**6) > 1  # if not, a dense policy takes its place
        if policy.shadow and compresses and not isinstance(base, Sparsifier):
            raise ValueError(
                f"policy {policy.name!r} with gain {policy.gain!r} needs a base that keeps the "
                f"largest elements (topk, dgc, redsync, sidco, threshold, adacomp), got "
                f"base={base.shown!r}"
            )
        if self.down_cf is not None and self.exchange != "sharded":
            raise ValueError(
                f"down_cf must be None unless exchange is 'sharded', whose means it compresses; "
                f"got {self.down_cf:g} with exchange={self.exchange!r}"
            )
        if self.server_memory and self.exchange != "sharded":
            raise ValueError(
                f"server_memory must be False unless exchange is 'sharded', which compresses "
                f"means; got True with exchange={self.exchange!r}"
            )
        if self.outer_momentum >= 1:
            raise ValueError(f"outer_momentum={self.outer_momentum!r}: must be in [0, 1)")
        most = inf if self.local_steps == "auto" else self.local_steps
        if self.overlap and self.overlap >= float(most):
            raise ValueError(
                f"overlap={self.overlap}: must be less than local_steps={self.local_steps}"
            )
        if self.gossip is not None:
            self._check_gossip()
        if self.local_steps != 1 or self.delay:
            self._check_local_steps()
        if base.name != "none":  # which switches compression off, whatever else is set
            self._check_used()
        if self.delay:
            self.exchange = in_one_collective(self.exchange, base)
        if self.residual_dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(
                f"residual_dtype must be torch.float32 or torch.bfloat16, got "
                f"{self.residual_dtype!r}"
            )
        if policy.layerwise:
            why = f"policy {policy.name!r}, which gives layers CFs of their own"
            if self.granularity == "bucket":
                raise ValueError(f"granularity must be 'layer' or 'auto' with {why}; got 'bucket'")
            if self.hooks:
                raise ValueError(f"hooks must be empty with {why}; got CF {min(self.hooks):g}")
            if in_half_precision:
                raise ValueError(
                    f"base must not be summed in half precision with {why}; got base={base.shown!r}"
                )

    def keeps(self) -> list[Policy | Compressor]:
        """Whatever keeps what it learns of a model."""
        return [*_policies_in(self.policy), self.base, *self.rungs.values()]

    def _check_local_steps(self) -> None:
        """ValueError for whatever makes sense of gradients only."""
        wrong = {
            "hooks": (self.hooks, "empty"),
            "clip_norm": (self.clip_norm, "None (clip p.grad instead)"),
            "residual_dtype": (self.residual_dtype != torch.float32, "torch.float32"),
            "memory": (self.memory.kind in ("momentum", "updates"), "'auto', 'residual' or 'none'"),
        }
        if self.local_steps != "auto":
            self.memory.refuse_momentum_settings(
                f"local_steps={self.local_steps!r} and delay={self.delay}"
            )
        if self.local_steps == "auto":
            wrong["memory"] = (self.memory.kind not in ("auto", "updates"), "'auto' or 'updates'")
            if not self.policy.chooses_local_steps:
                raise ValueError(
                    f"local_steps must be a whole number with policy {self.policy.name!r}, which "
                    f"does not choose it as 'goodput' does; got 'auto'"
                )
        if self.delay:
            for name, only in {"local_steps": 1, "outer_lr": 1, "outer_momentum": 0}.items():
                wrong[name] = (getattr(self, name) != only, str(only))
            wrong["overlap"] = (self.overlap is not None, "None")
        of = f"delay={self.delay}" if self.delay else f"local_steps={self.local_steps!r}"
        for name, (given, accepted) in wrong.items():
            if given:
                got = self.memory.kind if name == "memory" else getattr(self, name)
                told = f"{name} must be {accepted} with {of}"
                raise ValueError(f"{told}: what is exchanged are no gradients; got {got!r}")

    def _check_used(self) -> None:
        """ValueError for a setting that nothing in this run would look at."""
        compresses = self.base.supported(100.0, 10**6) > 1
        feeds_back = self.base.error_feedback and self.memory.kind != "none"
        keeps = f"a memory of what is not sent, got memory={self.memory.kind!r}"
        keeps += f" with base={self.base.shown!r}"
        if self.local_steps == 1:
            each_step = "local_steps of 2 or more (or 'auto'), got local_steps=1"
            self._refuse("outer_lr", self.outer_lr != 1, each_step)
            self._refuse("outer_momentum", self.outer_momentum != 0, each_step)
            self._refuse("overlap", self.overlap is not None, each_step)
        if not self.policy.shadow:
            told = f"a policy that asks for the shadow ladder, got policy={self.policy.name!r}"
            told += f" with gain {self.policy.gain!r}"
            self._refuse("shadow_sample", self.shadow_sample != SHARE, told)
        if not feeds_back:
            self._refuse("residual_dtype", self.residual_dtype != torch.float32, keeps)
        if not compresses:
            told = f"a base that compresses, got base={self.base.shown!r}"
            self._refuse("down_cf", self.down_cf is not None, told)
            self._refuse("server_memory", self.server_memory, told)
        if self.down_cf == 1:
            told = "means that are compressed, got down_cf=1"
            self._refuse("server_memory", self.server_memory, told)

    def _refuse(self, name: str, given: bool, needed: str) -> None:
        if given:
            raise ValueError(f"{name}={getattr(self, name)!r}: needs {needed}")

    def _check_gossip(self) -> None:
        """ValueError for whatever needs a mean, or gains that are of gradients."""
        wrong = {
            "hooks": (self.hooks, "empty"),
            "clip_norm": (self.clip_norm, "None (clip p.grad instead)"),
            "residual_dtype": (self.residual_dtype != torch.float32, "torch.float32"),
            "local_steps": (self.local_steps != 1, "1"),
            "delay": (self.delay, "0"),
        }
        for name, (given, accepted) in wrong.items():
            if given:
                raise ValueError(
                    f"{name} must be {accepted} with exchange='gossip', which sends parameters to "
                    f"neighbours and no gradients; got {getattr(self, name)!r}"
                )
        compresses = self.base.supported(100.0, 10**6) > 1  # if not, a dense policy takes its place
        for policy in _policies_in(self.policy):
            own = not isinstance(policy, DeclaredPolicy)  # of the user
            follows = (own or isinstance(policy, Fixed | Schedule | Warmup)) and not policy.shadow
            if policy.layerwise or (compresses and not follows):
                raise ValueError(
                    f"policy must be 'fixed', 'schedule' or 'warmup', with a gain other than "
                    f"'signal', with exchange='gossip': gains of parameters tell nothing of the "
                    f"quality of training; got {policy.name!r} with gain {policy.gain!r}"
                )

    def describe(self, memory: str) -> tuple[str, ...]:
        """What must be alike on all ranks, in readable lines. memory: the one chosen."""
        plain = (bool, int, float, str, type(None))
        of_base = {
            name: value if isinstance(value, plain) else value.name
            for name, value in sorted(vars(self.base).items())
            if name != "_shown"
            and (isinstance(value, plain) or isinstance(getattr(value, "name", None), str))
        }
        hooks = {cf: str(rung) for cf, rung in sorted(self.hooks.items())}
        rungs = {cf: rung.name for cf, rung in sorted(self.rungs.items())}
        as_they_are = "granularity dense_below exchange down_cf server_memory cf_range"
        as_they_are += " shadow_sample clip_norm local_steps outer_lr outer_momentum overlap delay"
        as_they_are += " debug residual_dtype"
        return (
            f"base={self.base.name!r} {of_base}",
            f"hooks={hooks}, rungs={rungs}",
            f"policy={self.policy.name!r} {self.policy.state_dict()}",
            f"{self.memory}, chosen {memory!r}",
            f"gossip={self.gossip}",
            *(f"{name}={getattr(self, name)!r}" for name in as_they_are.split()),
        )


def _policies_in(policy: Policy) -> list[Policy]:
    """A policy, and those that it asks."""
    found = [policy]
    for each in found:  # which grows
        inner = [value for value in vars(each).values() if isinstance(value, Policy)]
        found += [value for value in inner if all(value is not known for known in found)]
    return found
