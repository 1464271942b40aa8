"""Eight bits a value with a scale for each block of 256 values, as block-wise quantization of
Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (ICLR 2022), with even levels."""

from __future__ import annotations

from compressors.levels import Levels
from compressors.quantizer import Quantizer


class Int8(Quantizer):
    """CF 4: q = x / scale rounded to the nearest, scale = max|x| / 127 over `bucket` values.

    No value is moved by more than its own size, and the largest hardly at all: a contraction, used
    with error feedback.
    """

    name = "int8"

    def __init__(self, bucket: int = 256) -> None:
        self.bucket = bucket
        super().__init__({4.0: Levels(self.name, 8, bucket)})
