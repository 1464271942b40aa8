"""How the indices of kept elements travel: several formats, the smallest of which is used."""

from __future__ import annotations

from functools import lru_cache
from math import lgamma, log

from compressors.indices.base import IndexFormat
from compressors.indices.bitmap import Bitmap
from compressors.indices.blocks16 import Blocks16
from compressors.indices.offsets32 import Offsets32
from compressors.indices.split import Split

__all__ = [
    "FORMATS",
    "Bitmap",
    "Blocks16",
    "IndexFormat",
    "Offsets32",
    "Split",
    "bound_nbytes",
    "choose_format",
]

_LOW = (8, 16, 24, *(bits for bits in range(1, 31) if bits % 8))  # whole bytes are faster

FORMATS: tuple[IndexFormat, ...] = (Offsets32(), Blocks16(), *map(Split, _LOW), Bitmap())
"""Every format, the faster ones first."""


@lru_cache(maxsize=1 << 14)
def choose_format(numel: int, capacity: int) -> IndexFormat:
    """The format with the fewest bytes for at most `capacity` of `numel` elements.

    Of equally small ones the first of `FORMATS`. A pure function, alike on all ranks."""
    return min(FORMATS, key=lambda form: form.nbytes(numel, capacity))


def bound_nbytes(numel: int, k: int) -> float:
    """Bytes that no format can beat on average: log2 of the number of ways to choose `k` of
    `numel` elements, divided by 8."""
    ways = lgamma(numel + 1) - lgamma(k + 1) - lgamma(numel - k + 1)
    return ways / log(2) / 8
