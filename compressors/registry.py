"""The compressors by name."""

from __future__ import annotations

from collections.abc import Callable

from compressors.base import Compressor, NoCompression
from compressors.powersgd import PowerSGD
from compressors.quantizers import BF16, FP16, QSGD, Int4, Int8, Natural
from compressors.randomk import RandomK
from compressors.signs import OneBit, SignSGD, TernGrad, TwoBit
from compressors.sketch import Sketch
from compressors.sparsifier import Sparsifier, TopK
from compressors.thresholds import DGC, AdaComp, RedSync, SIDCo, Threshold
from compressors.wire.values import value_names
from policies import checks

_sparsifiers = (TopK, DGC, Threshold, RedSync, SIDCo, AdaComp, RandomK)
_quantizers = (FP16, BF16, Int8, Int4, QSGD, Natural, OneBit, SignSGD, TernGrad, TwoBit)
_classes = (NoCompression, PowerSGD, Sketch, *_sparsifiers, *_quantizers)
_registry: dict[str, Callable[..., Compressor]] = {each.name: each for each in _classes}


def register(name: str, factory: Callable[..., Compressor]) -> None:
    """Make `name` usable wherever a compressor is chosen by name; `factory`, for example the class,
    is called without arguments. ValueError if the name is taken or has a "+" in it."""
    if name in _registry:
        raise ValueError(f"name must not be registered yet, got {name!r}")
    if "+" in name:
        raise ValueError(f"name must have no '+', which sets values apart; got {name!r}")
    _registry[name] = factory


def compressor_names() -> tuple[str, ...]:
    """The registered names, in alphabetical order."""
    return tuple(sorted(_registry))


def make_compressor(base: str | Compressor) -> Compressor:
    """The compressor called `base`, or `base` itself if it already is one.

    A sparsifier's name may be followed by the format of its values: "topk+bf16", "dgc+int8".
    ValueError for an unknown name, TypeError for anything else."""
    if isinstance(base, Compressor):
        return base
    if not isinstance(base, str):
        raise TypeError(f"base must be a name or a Compressor object, got {base!r}")
    name, plus, values = base.partition("+")
    if name not in _registry:
        names = compressor_names()
        near = checks.nearest(name, names)
        raise ValueError(f"base must be one of {', '.join(names)}; got {base!r}{near}")
    factory = _registry[name]
    if not plus:
        return factory()
    if not (isinstance(factory, type) and issubclass(factory, Sparsifier)):
        raise ValueError(f"base must be a sparsifier to be followed by '+', got {base!r}")
    if values not in value_names():
        raise ValueError(
            f"base must have one of {', '.join(value_names())} after the '+', got {base!r}"
        )
    return factory(values=values)
