"""The registry of compressors by name."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from importlib import import_module
from typing import Any

from compressors.base import Compressor, NoCompression
from compressors.powersgd import PowerSGD
from compressors.quantizers import BF16, FP16, QSGD, Int4, Int8
from compressors.randomk import RandomK
from compressors.signs import OneBit, SignSGD, TernGrad, TwoBit
from compressors.sparsifier import Sparsifier, TopK
from compressors.thresholds import DGC, RedSync, Threshold
from compressors.wire.values import value_names

_sparsifiers = (TopK, DGC, Threshold, RedSync, RandomK)
_quantizers = (FP16, BF16, Int8, Int4, QSGD, OneBit, SignSGD, TernGrad, TwoBit)
_classes = (NoCompression, PowerSGD, *_sparsifiers, *_quantizers)
_registry: dict[str, Callable[..., Compressor]] = {each.name: each for each in _classes}

CONTRIB = {"adacomp": "AdaComp", "natural": "Natural", "sidco": "SIDCo", "sketch": "Sketch"}
"""Compressors that are imported at their first use: by name, the class. The name is also the name
of the module in `compressors.contrib`."""


def load(kind: str) -> Any:
    """A class of `CONTRIB`. AttributeError if there is none of this name."""
    for name, each in CONTRIB.items():
        if each == kind:
            return getattr(import_module(f"compressors.contrib.{name}"), kind)
    raise AttributeError(f"module 'compressors' has no attribute {kind!r}")


def register(name: str, factory: Callable[..., Compressor]) -> None:
    """Make `name` usable wherever a compressor is chosen by name; `factory`, for example the class,
    is called without arguments. ValueError if the name is taken or has a "+" in it."""
    if name in _registry or name in CONTRIB:
        raise ValueError(f"name must not be registered yet, got {name!r}")
    if "+" in name:
        raise ValueError(f"name must have no '+', which sets values apart; got {name!r}")
    _registry[name] = factory


def compressor_names() -> tuple[str, ...]:
    """The registered names, in alphabetical order."""
    return tuple(sorted((*_registry, *CONTRIB)))


def make_compressor(base: str | Compressor) -> Compressor:
    """The compressor called `base`, or `base` itself if it already is one.

    A sparsifier's name may be followed by the format of its values: "topk+bf16", "dgc+int8".
    ValueError for an unknown name, TypeError for anything else."""
    if isinstance(base, Compressor):
        return base
    if not isinstance(base, str):
        raise TypeError(f"base must be a name or a Compressor object, got {base!r}")
    name, plus, values = base.partition("+")
    if name not in compressor_names():
        names = compressor_names()
        near = [
            f"; did you mean {each!r}?" for each in get_close_matches(name.lower(), names, 1, 0.75)
        ]
        raise ValueError(f"base must be one of {', '.join(names)}; got {base!r}{''.join(near)}")
    factory = load(CONTRIB[name]) if name in CONTRIB else _registry[name]
    if not plus:
        return factory()
    if not (isinstance(factory, type) and issubclass(factory, Sparsifier)):
        raise ValueError(f"base must be a sparsifier to be followed by '+', got {base!r}")
    if values not in value_names():
        raise ValueError(
            f"base must have one of {', '.join(value_names())} after the '+', got {base!r}"
        )
    return factory(values=values)
