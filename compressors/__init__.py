"""Compressors of one flat gradient tensor. They do not depend on process groups or policies."""

from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from compressors.base import (
    Compressor,
    InvalidPayload,
    Key,
    NoCompression,
    Payload,
    Spec,
    any_nonfinite,
    check_cf,
    kept,
    split_rows,
)
from compressors.kernels.blocks import Selected
from compressors.ladder import Ladder
from compressors.powersgd import PowerSGD
from compressors.quantizers import BF16, FP16, QSGD, Int4, Int8, Quantizer
from compressors.randomk import RandomK
from compressors.registry import compressor_names, make_compressor, register
from compressors.registry import load as _load
from compressors.rounds import RoundsCompressor
from compressors.signs import OneBit, SignSGD, TernGrad, TwoBit
from compressors.sparsifier import Sparsifier, TopK
from compressors.thresholds import DGC, RedSync, Threshold
from compressors.wire.values import Levels, ValueFormat

if _TYPE_CHECKING:
    from compressors.contrib.adacomp import AdaComp
    from compressors.contrib.natural import Natural
    from compressors.contrib.sidco import SIDCo
    from compressors.contrib.sketch import Sketch

__all__ = [
    "BF16",
    "DGC",
    "FP16",
    "QSGD",
    "AdaComp",
    "Compressor",
    "Int4",
    "Int8",
    "InvalidPayload",
    "Key",
    "Ladder",
    "Levels",
    "Natural",
    "NoCompression",
    "OneBit",
    "Payload",
    "PowerSGD",
    "Quantizer",
    "RandomK",
    "RedSync",
    "RoundsCompressor",
    "SIDCo",
    "Selected",
    "SignSGD",
    "Sketch",
    "Sparsifier",
    "Spec",
    "TernGrad",
    "Threshold",
    "TopK",
    "TwoBit",
    "ValueFormat",
    "any_nonfinite",
    "check_cf",
    "compressor_names",
    "kept",
    "make_compressor",
    "register",
    "split_rows",
]


def __getattr__(name: str) -> _Any:
    """Import the classes of `compressors.contrib` at their first use."""
    return _load(name)
