"""A short list of the elements that may be among the largest, kept short while it grows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from compressors.norms import BLOCK, Array
from compressors.ranking import largest


class Collected:
    """The elements that may be among the `k` largest, in the order of their indices."""

    def __init__(self, k: int, threshold: float) -> None:
        self.k = k
        self.threshold = threshold
        self.wanted: np.ufunc = np.greater_equal  # how a magnitude must compare to the threshold
        self.count = 0
        self.indices: list[NDArray[np.int32]] = []
        self.values: list[Array] = []

    def extend(self, indices: NDArray[np.int32], values: Array) -> None:
        self.indices.append(indices)
        self.values.append(values)
        self.count += indices.size
        if self.count > 2 * self.k + BLOCK:
            self.prune()

    def prune(self) -> None:
        """Keep the k largest so far. What comes later must exceed the smallest of them."""
        indices, values = self.largest()
        self.indices, self.values, self.count = [indices], [values], self.k
        self.threshold = np.abs(values).min()
        self.wanted = np.greater

    def held(self) -> tuple[NDArray[np.int32], Array]:
        """All that is held, which must be something, in the order of the indices."""
        return np.concatenate(self.indices), np.concatenate(self.values)

    def largest(self) -> tuple[NDArray[np.int32], Array]:
        """The k largest of what is held, or all of it if that is less."""
        indices, values = self.held()
        keep = largest(values, self.k)
        return indices.take(keep), values.take(keep)
