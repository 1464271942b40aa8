"""The values of `AdaptiveCompressor(memory=)`: options that say where the unsent part of gradients
or updates is kept. Each class checks its own values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from adaptive.memory.rule import MemoryRule
from policies import checks


def _check_dtype(dtype: Any) -> None:
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"dtype must be torch.float32 or torch.bfloat16, got {dtype!r}")


def _check_clip_norm(clip_norm: Any) -> None:
    if clip_norm is not None:
        checks.real("clip_norm", clip_norm, above=0)


@dataclass(frozen=True)
class MemoryOptions:
    """A memory without settings. kind: its name, or "auto". dtype, clip_norm: see `Residual`."""

    kind: str
    dtype: ClassVar[torch.dtype] = torch.float32
    clip_norm: ClassVar[float | None] = None


@dataclass(frozen=True)
class Residual:
    """Error feedback: the part of a gradient that is not sent is added to the next gradient
    (Karimireddy and others 2019).

    dtype: torch.bfloat16 keeps the residual in half the memory, rounded stochastically. Residuals
        of float64 parameters are float64 all the same.
    clip_norm: clip each parameter's local gradient to this norm / sqrt(world size) before it is
        accumulated (DGC: Lin and others 2018, section 3.2, but per parameter, because the first
        buckets are sent before the last gradient exists). None: no clipping.

    ValueError or TypeError for a value that is not accepted."""

    dtype: torch.dtype = torch.float32
    clip_norm: float | None = None
    kind: ClassVar[str] = "residual"

    def __post_init__(self) -> None:
        _check_dtype(self.dtype)
        _check_clip_norm(self.clip_norm)


@dataclass(frozen=True)
class Momentum:
    """Momentum correction (DGC: Lin and others 2018, section 3): ranks accumulate and send
    velocities instead of gradients. Needs torch's SGD with momentum, handed to `attach`.

    share: the momentum share while gradients are compressed, in (0, 1]: a gradient's mean delay in
        the velocity is this share of m / (1 - m) steps (docs/research/defaults.md). 1 is DGC's
        rule; None: the compressor's default.
    masking: momentum factor masking: the CF from which on the velocity of sent elements is cleared
        (True: at every CF above 1; False: never; None: always for dgc, never for others).
    clip_norm: see `Residual`.

    ValueError or TypeError for a value that is not accepted."""

    share: float | None = None
    masking: bool | float | None = None
    clip_norm: float | None = None
    kind: ClassVar[str] = "momentum"
    dtype: ClassVar[torch.dtype] = torch.float32

    def __post_init__(self) -> None:
        if self.share is not None:
            checks.fraction("share", self.share)
        if self.masking is not None and not isinstance(self.masking, bool):
            checks.real("masking", self.masking, least=1)
        _check_clip_norm(self.clip_norm)


@dataclass(frozen=True)
class Updates:
    """Parameter space: each rank's optimizers step with local gradients, and the updates are sent,
    with error feedback. Works with any optimizers handed to `attach` (docs/settings.md).

    dtype: see `Residual`."""

    dtype: torch.dtype = torch.float32
    kind: ClassVar[str] = "updates"
    clip_norm: ClassVar[float | None] = None

    def __post_init__(self) -> None:
        _check_dtype(self.dtype)


MemoryName = Literal["auto", "residual", "momentum", "updates", "none"]

Memory = MemoryOptions | Residual | Momentum | Updates | MemoryRule

NAMED: dict[str, Memory] = {
    "auto": MemoryOptions("auto"),
    "residual": Residual(),
    "momentum": Momentum(),
    "updates": Updates(),
    "none": MemoryOptions("none"),
}

_registered: dict[str, type[MemoryRule]] = {}
"""Users' memory rules, by name."""


def register_memory(name: str, cls: type[MemoryRule]) -> None:
    """Make `name` usable as `AdaptiveCompressor(memory=name)` (docs/own_memory.md).

    cls: a subclass of `MemoryRule` that needs no arguments. (An object with settings can be passed
        itself, without a name: memory=Decayed(0.9).) ValueError if the name is taken, TypeError if
        `cls` is no rule, or lacks a method."""
    checks.new_class(name, cls, MemoryRule, (*NAMED, *_registered))
    _registered[name] = cls


def memory_from(given: Any) -> Memory:
    """The memory options for the argument `AdaptiveCompressor(memory=)`. ValueError for an unknown
    name, TypeError for a value of another type."""
    if isinstance(given, MemoryRule):
        if given.name in NAMED:
            raise ValueError(f"memory={given!r}: its name must not be one of ours, {given.name!r}")
        _check_clip_norm(given.clip_norm)
    if isinstance(given, Memory):
        return given
    if not isinstance(given, str):
        raise TypeError(
            f"memory must be one of {', '.join(map(repr, NAMED))}, or a Residual, Momentum, "
            f"Updates or MemoryRule, got {given!r}"
        )
    if given in _registered:
        return memory_from(_registered[given]())
    checks.one_of("memory", given, (*NAMED, *_registered))
    return NAMED[given]
