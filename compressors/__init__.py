"""How to compress one flat gradient tensor, and back. Knows nothing of processes or policies."""

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
)
from compressors.kernels.blocks import Selected
from compressors.ladder import Ladder
from compressors.powersgd import PowerSGD
from compressors.quantizers import BF16, FP16, QSGD, Int4, Int8, Natural, Quantizer
from compressors.randomk import RandomK
from compressors.registry import compressor_names, make_compressor, register
from compressors.rounds import RoundsCompressor
from compressors.signs import OneBit, SignSGD, TernGrad, TwoBit
from compressors.sketch import Sketch
from compressors.sparsifier import Sparsifier, TopK
from compressors.thresholds import DGC, AdaComp, RedSync, SIDCo, Threshold
from compressors.wire.values import Levels, ValueFormat

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
]
