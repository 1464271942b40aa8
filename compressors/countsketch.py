"""Count sketches: a table of signed sums from which the large elements can be read off.

Charikar, Chen, Farach-Colton, "Finding Frequent Items in Data Streams" (ICALP 2002). Every row of
the table adds each element, with a sign, to one of its columns; sign and column are hashes of the
position. An element's estimate is the median over the rows of its sign times the sum it went into.
The sketch of a sum is the sum of the sketches.

Element i goes to h = a i + b mod 2^64, of which the upper half picks one of 2 x columns: pairwise
independent for i < 2^32 (Dietzfelbinger 1996). The second half of those counts negative, so neither
direction ever computes a sign. All in blocks that fit the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from compressors.norms import BLOCK, Array
from compressors.ranking import largest

_HALF = np.uint64(32)


class CountSketch:
    """The hashes of `numel` elements into `rows` x `columns` sums; rows is odd.

    identity: seeds the hashes; the same on every rank."""

    def __init__(self, numel: int, rows: int, columns: int, identity: object) -> None:
        self.numel = numel
        self.rows = rows
        self.columns = columns
        self._hashes = [self._hash(identity, row) for row in range(rows)]

    def table(self, x: Array) -> Array:
        """The sketch (rows x columns) of flat `x`."""
        sums = np.zeros((self.rows, 2 * self.columns))
        for start, slots in self._blocks():
            block = x[start : start + BLOCK]
            for row, slot in enumerate(slots):
                sums[row] += np.bincount(slot, block, 2 * self.columns)
        return (sums[:, : self.columns] - sums[:, self.columns :]).astype(x.dtype)

    def heaviest(self, table: Array, k: int) -> NDArray[np.int32]:
        """Positions of the `k` largest estimates, the largest first, the lower one first among
        equals; 0 < k <= numel. `table` must be finite."""
        signed = np.concatenate([table, -table], axis=1)
        found = np.empty(0, np.int32)
        values = np.empty(0, table.dtype)
        threshold = -1.0  # until k are held, all are worth holding
        for start, slots in self._blocks():
            estimate = _median([signed[row].take(slot) for row, slot in enumerate(slots)])
            above = np.flatnonzero(np.abs(estimate) > threshold)
            if not above.size:
                continue
            found = np.concatenate([found, (above + start).astype(np.int32)])
            values = np.concatenate([values, estimate.take(above)])
            if found.size > k:
                keep = largest(values, k)
                found, values = found.take(keep), values.take(keep)
                threshold = float(np.abs(values).min())
        return found.take(np.argsort(-np.abs(values), kind="stable"))

    def _blocks(self) -> Iterator[tuple[int, list[NDArray[np.int64]]]]:
        """(first position, for each row the slots of the elements of this block)."""
        size = min(BLOCK, self.numel)
        steps = [a * np.arange(size, dtype=np.uint64) for a, _ in self._hashes]
        scratch = [np.empty(size, np.uint64) for _ in self._hashes]
        for start in range(0, self.numel, BLOCK):
            count = min(BLOCK, self.numel - start)
            slots = []
            for (a, b), step, full in zip(self._hashes, steps, scratch, strict=True):
                offset = np.uint64((int(a) * start + int(b)) % 2**64)
                slot = np.add(step[:count], offset, out=full[:count])
                slot >>= _HALF
                slot *= np.uint64(2 * self.columns)
                slot >>= _HALF
                slots.append(slot.view(np.int64))
            yield start, slots

    @staticmethod
    def _hash(identity: object, row: int) -> tuple[np.uint64, np.uint64]:
        digest = blake2b(repr((identity, row)).encode(), digest_size=16).digest()
        factor = int.from_bytes(digest[:8], "little") | 1
        return np.uint64(factor), np.uint64(int.from_bytes(digest[8:], "little"))


def _median(estimates: list[Array]) -> Array:
    if len(estimates) == 1:
        return estimates[0]
    if len(estimates) == 3:
        a, b, c = estimates
        return np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))
    return np.sort(np.stack(estimates), axis=0)[len(estimates) // 2]
