"""What the user chose, checked: every error of the front door.

Errors name the argument, its value and what is accepted. What was chosen is also put in words, to
be compared among the ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from adaptive.exchange.link import LinkSpec
from adaptive.hook import HookRung
from adaptive.statistics.shadow import ShadowLadder
from adaptive.timeline.records import SafeTimeline
from compressors import Compressor, make_compressor
from compressors.sparsifier import Sparsifier
from policies import Policy

if TYPE_CHECKING:
    from adaptive.memory.model_memory import MemoryChoice

GRANULARITIES = ("auto", "layer", "bucket")
MEMORIES = ("auto", "residual", "momentum", "none")

DEBUG_EVERY = 100
"""Steps between two comparisons of the ranks' parameters with debug=True."""

VALUES = "int4"
"""How a sparsifier's values travel if nobody says: as good as fp32 with error feedback, and a kept
element takes 13 bits at CF 100 instead of 41, its index included (docs/results.md)."""


def is_number(value: Any) -> bool:
    """True for a finite real number, numpy's included; a bool is none."""
    return isinstance(value, Real) and not isinstance(value, bool) and isfinite(value)


def check_cf_range(cf_range: Any) -> tuple[float, float]:
    """(smallest, largest) as floats. ValueError unless 1 <= smallest <= largest, finite."""
    pair = tuple(cf_range) if isinstance(cf_range, Sequence) else ()
    if len(pair) == 2 and all(is_number(cf) for cf in pair):
        low, high = float(pair[0]), float(pair[1])
        if 1 <= low <= high:
            return low, high
    raise ValueError(
        f"cf_range must be two finite numbers (low, high) with 1 <= low <= high, got {cf_range!r}"
    )


def check_choice(argument: str, value: Any, accepted: Sequence[str]) -> str:
    """`value` if it is one of `accepted`; ValueError otherwise."""
    if value not in accepted:
        raise ValueError(f"{argument} must be one of {', '.join(accepted)}; got {value!r}")
    return value


def check_positive(argument: str, value: Any) -> float | None:
    """`value` as a float, or None; ValueError unless it is a finite number > 0."""
    if value is None:
        return None
    if not is_number(value) or value <= 0:
        raise ValueError(f"{argument} must be a finite number > 0 or None, got {value!r}")
    return float(value)


def check_dense_below(value: Any, base: Compressor) -> int:
    """`value`, a number of elements; ValueError unless it is whole, >= 0, and fits `base`."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 0:
        raise ValueError(f"dense_below must be a whole number of elements >= 0, got {value!r}")
    if value and _in_half_precision(base):
        raise ValueError(
            f"dense_below must be 0 for base {base.name!r}, whose payloads are summed in half "
            f"precision; got {value!r}"
        )
    return int(value)


def make_base(base: str | Compressor, memory: Any, exchange: Any) -> Compressor:
    """The compressor called `base`, or `base` itself if it is one. A sparsifier named without a "+"
    sends its values in 4 bits, unless what rounding loses would be lost for good (memory "none") or
    the ranks' values are summed on the wire (shared indices). docs/results.md has the comparison.

    ValueError for an unknown name, TypeError for anything else."""
    compressor = make_compressor(base)
    says_nothing = isinstance(base, str) and "+" not in base
    may_round = memory != "none" and not str(exchange).startswith("shared_indices")
    if says_nothing and may_round and isinstance(compressor, Sparsifier):
        return compressor.coded(VALUES)
    return compressor


def default_policy(base: Compressor, hooks: Mapping[float, Any] | None = None) -> str:
    """The policy that nobody has chosen: "goodput" where a shadow ladder tells all gains, else
    "gravac". docs/results.md has the comparison."""
    return "goodput" if ShadowLadder.suits(base) and not hooks else "gravac"


def joins(granularity: str, base: Compressor, policy: Policy) -> bool:
    """Whether the tensors of a bucket are compressed as one. "auto": where the largest elements of
    all can be told, since each layer then gets its share of them: at CF 20 and 100 that saves most
    of what compression costs an image model (docs/results.md)."""
    if granularity != "auto":
        return granularity == "bucket"
    return isinstance(base, Sparsifier) and base.comparable and not policy.layerwise


def check_policy(
    policy: Policy, base: Compressor, granularity: str, hooks: Mapping[float, Any]
) -> Policy:
    """`policy`; ValueError if what it measures or sends cannot be had with the rest."""
    compresses = base.supported(100.0, 10**6) > 1  # if not, a dense policy takes its place
    if policy.shadow and compresses and not ShadowLadder.suits(base):
        raise ValueError(
            f"policy {policy.name!r} with gain {policy.gain!r} needs a base that keeps the "
            f"largest elements (topk, dgc, redsync, sidco, threshold, adacomp), got "
            f"base={base.name!r}"
        )
    if not policy.layerwise:
        return policy
    why = f"policy {policy.name!r}, which gives layers CFs of their own"
    if granularity == "bucket":
        raise ValueError(f"granularity must be 'layer' or 'auto' with {why}; got {granularity!r}")
    if hooks:
        raise ValueError(f"hooks must be empty with {why}; got CF {min(hooks):g}")
    if _in_half_precision(base):
        raise ValueError(
            f"base must not be summed in half precision with {why}; got base={base.name!r}"
        )
    return policy


def check_layerwise(policy: Policy, layers: Mapping[str, int]) -> None:
    """ValueError if the policy wants CFs layer by layer and the model gives it none. layers: that
    may have one of their own."""
    if policy.layerwise and not layers:
        raise ValueError(
            f"policy {policy.name!r} gives layers CFs of their own: it needs attach(model), and "
            f"layers that are not below dense_below"
        )


def check_momentum(value: Any) -> float | None:
    """`value` as a float, or None; ValueError unless it is in (0, 1)."""
    if value is None:
        return None
    if not is_number(value) or not 0 < value < 1:
        raise ValueError(f"momentum must be a number in (0, 1) or None, got {value!r}")
    return float(value)


def check_share(name: str, value: Any) -> float:
    """`value` as a float; ValueError, naming the argument, unless it is in (0, 1]."""
    if not is_number(value) or not 0 < value <= 1:
        raise ValueError(f"{name} must be a number in (0, 1], got {value!r}")
    return float(value)


def check_masking(value: Any, default: float) -> float:
    """The smallest CF at which velocities are masked: True is every CF above 1, False none."""
    if value is None:
        return default
    if isinstance(value, bool):
        return 1.0 if value else float("inf")
    if is_number(value) and value >= 1:
        return float(value)
    raise ValueError(
        f"masking must be True, False, None or a CF >= 1 from which to mask, got {value!r}"
    )


def check_link(link: Any) -> LinkSpec | None:
    """A `LinkSpec` from itself or from text, or None; TypeError for anything else."""
    if isinstance(link, str):
        return LinkSpec.parse(link)
    if link is None or isinstance(link, LinkSpec):
        return link
    raise TypeError(f"link must be a rate such as '100mbit', a LinkSpec or None, got {link!r}")


def check_clock(clock: Any) -> Callable[[], float]:
    """`clock` if it can be called; TypeError otherwise."""
    if not callable(clock):
        raise TypeError(f"clock must be a function that returns seconds, got {clock!r}")
    return clock


def check_debug(debug: Any) -> int:
    """Steps between two comparisons of the ranks' parameters, 0 for none: True is `DEBUG_EVERY`,
    None what the environment variable ADAPTIVE_DEBUG says. ValueError for anything else."""
    argument, value = "debug", debug
    if debug is None:
        argument, text = "ADAPTIVE_DEBUG", os.environ.get("ADAPTIVE_DEBUG", "")
        value = int(text) if text.isdecimal() else text or 0
        value = True if value == 1 else value
    if value is True:
        return DEBUG_EVERY
    if not isinstance(value, Integral) or value < 0:
        raise ValueError(
            f"{argument} must be True, False or a number of steps >= 0 after which parameters are "
            f"compared, got {value!r}"
        )
    return int(value)


def check_flag(argument: str, value: Any) -> bool:
    """`value` if it is True or False; ValueError otherwise."""
    if not isinstance(value, bool):
        raise ValueError(f"{argument} must be True or False, got {value!r}")
    return value


def check_optimizer(optimizer: Any) -> None:
    """TypeError unless it is a torch optimizer or None."""
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer or None, got {optimizer!r}")


def _in_half_precision(base: Compressor) -> bool:
    """Its payloads are summed so: nothing else can travel with them."""
    return base.linear and base.wire_dtype(torch.float32) != torch.float32


def check_scaler(scaler: Any) -> None:
    """TypeError unless it scales a loss as a GradScaler does, or is None."""
    if scaler is not None and not (hasattr(scaler, "scale") and hasattr(scaler, "is_enabled")):
        raise TypeError(f"scaler must be a torch.amp.GradScaler or None, got {scaler!r}")


@dataclass
class Settings:
    """Of an `AdaptiveCompressor`, which says what they mean."""

    base: Compressor
    granularity: str
    dense_below: int
    exchange: str
    hooks: dict[float, HookRung]
    cf_range: tuple[float, float]
    policy: Policy
    memory: MemoryChoice
    clip_norm: float | None
    shadow_sample: float
    samples_per_step: float | None
    timeline: SafeTimeline
    link: LinkSpec | None
    clock: Callable[[], float]
    debug: int
    checksum: bool

    def describe(self, memory: str) -> tuple[str, ...]:
        """What must be alike on all ranks, in readable lines. memory: the one chosen."""
        return (
            f"base={self.base.name!r} {_plain_settings(self.base)}",
            f"granularity={self.granularity!r}, dense_below={self.dense_below}, "
            f"exchange={self.exchange!r}, "
            f"hooks={ {cf: str(rung) for cf, rung in sorted(self.hooks.items())} }",
            f"cf_range={self.cf_range}, shadow_sample={self.shadow_sample:g}",
            f"policy={self.policy.name!r} {self.policy.state_dict()}",
            f"{self.memory}, chosen {memory!r}, clip_norm={self.clip_norm}",
            f"debug={self.debug}, checksum={self.checksum}",
        )


def _plain_settings(base: Compressor) -> dict[str, Any]:
    """A compressor's own settings, as far as they can be compared as text."""
    plain = (bool, int, float, str, type(None))
    return {
        name: value if isinstance(value, plain) else value.name
        for name, value in sorted(vars(base).items())
        if isinstance(value, plain) or isinstance(getattr(value, "name", None), str)
    }
