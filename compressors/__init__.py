"""How to compress one flat gradient tensor, and back. Knows nothing of processes or policies."""

from __future__ import annotations

from collections.abc import Callable

from compressors.base import Compressor as Compressor
from compressors.base import CorruptPayload as CorruptPayload
from compressors.base import Key as Key
from compressors.base import NoCompression as NoCompression
from compressors.base import Payload as Payload
from compressors.base import check_cf as check_cf
from compressors.base import kept as kept
from compressors.powersgd import PowerSGD as PowerSGD
from compressors.quantizers import BF16 as BF16
from compressors.quantizers import FP16 as FP16
from compressors.quantizers import QSGD as QSGD
from compressors.quantizers import Int8 as Int8
from compressors.quantizers import Natural as Natural
from compressors.randomk import RandomK as RandomK
from compressors.rounds import RoundsCompressor as RoundsCompressor
from compressors.signs import OneBit as OneBit
from compressors.signs import SignSGD as SignSGD
from compressors.signs import TernGrad as TernGrad
from compressors.signs import TwoBit as TwoBit
from compressors.sketch import Sketch as Sketch
from compressors.sparsifier import Sparsifier as Sparsifier
from compressors.sparsifier import TopK as TopK
from compressors.thresholds import DGC as DGC
from compressors.thresholds import AdaComp as AdaComp
from compressors.thresholds import RedSync as RedSync
from compressors.thresholds import SIDCo as SIDCo
from compressors.thresholds import Threshold as Threshold
from compressors.wire.values import ValueFormat as ValueFormat
from compressors.wire.values import value_names

_sparsifiers = (TopK, DGC, Threshold, RedSync, SIDCo, AdaComp, RandomK)
_quantizers = (FP16, BF16, Int8, QSGD, Natural, OneBit, SignSGD, TernGrad, TwoBit)
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
        raise ValueError(f"base must be one of {', '.join(compressor_names())}; got {base!r}")
    factory = _registry[name]
    if not plus:
        return factory()
    if not (isinstance(factory, type) and issubclass(factory, (Sparsifier, RandomK))):
        raise ValueError(f"base must be a sparsifier to be followed by '+', got {base!r}")
    if values not in value_names():
        raise ValueError(
            f"base must have one of {', '.join(value_names())} after the '+', got {base!r}"
        )
    return factory(values=values)
