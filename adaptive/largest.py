"""The largest elements of each row, row after row and step after step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from compressors.kernels import Array

BELOW = 0.8
"""Of the last step's smallest magnitude: what is above it is few, and nearly always enough."""


def largest(a: Array, wanted: Sequence[int], above: Array) -> Array:
    """Of each row of `a` the elements of largest magnitude, as a mask; as many as `wanted` for that
    row, and all that equal the smallest of them.

    above: (rows,), magnitudes above which to look first, zeros to begin with; updated for the next
    step. They save time, and never change what is found.
    """
    magnitude = np.abs(a)
    smallest = np.empty(len(wanted), a.dtype)
    for i, (row, k) in enumerate(zip(magnitude, wanted, strict=True)):
        few = row[row >= float(above[i])]
        if few.size < k:
            few = row.copy()
        few.partition(few.size - k)
        smallest[i] = few[few.size - k]
    np.multiply(smallest, BELOW, out=above)
    return np.asarray(magnitude >= smallest[:, None])
