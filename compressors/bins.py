"""AdaComp's rule on a CPU: in one pass over blocks that fit the cache, as in `selection`.

Where the rule sends more than k elements, many more as a rule, the k largest of them are wanted.
So that not all of them are gathered first, a few bins tell a magnitude that somewhat more than k
will reach. Should they mislead, a second pass gathers all: the result never depends on the guess.
"""

from __future__ import annotations

import numpy as np

from compressors.collected import Collected
from compressors.norms import BLOCK, Array, block_norm, trusted
from compressors.ranking import rank_bounds, rank_value
from compressors.selection import Selection, select

_SAMPLE = 1 << 16  # elements looked at, at most, to guess a magnitude
_SPARE = 33  # one in so many bins, at most: a larger sample costs more than it saves
_SHORT = 24  # elements; bins so short are faster gone through column by column
_PLAIN_BELOW = 1 << 14  # elements; under this a guess costs more than it saves


def select_bins(x: Array, size: int, k: int, add: Array | None = None) -> Selection:
    """The elements x_i of flat `x`, in bins of `size` <= BLOCK, with |x_i + latest_i| at or above
    the bin's maximum of |x|, but no zeros; of more than `k` the `k` largest |x_i|; of none the
    largest of all.

    add: the latest gradient, added to `x` in place first; None: `x` itself is."""
    with np.errstate(all="ignore"):
        guess = _guess(x, size, k, add)
        collected, total = _gather(x, size, k, guess, add, add)
        if guess and collected.count < k:
            collected, total = _gather(x, size, k, 0.0, add, None)
        if not collected.count:
            return select(x, min(k, 1))
        return Selection(*collected.largest(), trusted(total, x))


def _guess(x: Array, size: int, k: int, add: Array | None) -> float:
    """A magnitude that somewhat more than `k` of what the rule sends should reach; 0: unknown."""
    bins = x.size // size
    if x.size < _PLAIN_BELOW or bins == 0:
        return 0.0
    some = slice(None, None, max(_SPARE, x.size // _SAMPLE | 1))
    rows = x[: bins * size].reshape(bins, size)[some]
    latest = rows
    if add is not None:
        latest = add[: bins * size].reshape(bins, size)[some]
        rows = rows + latest
    magnitude = np.abs(rows)
    sent = magnitude[np.abs(rows + latest) >= magnitude.max(axis=1, keepdims=True)]
    rank = rank_bounds(rows.size, k / x.size)[1]
    return float(rank_value(sent, rank)) if rank <= sent.size else 0.0


def _gather(
    x: Array, size: int, k: int, threshold: float, latest: Array | None, add: Array | None
) -> tuple[Collected, float]:
    """One pass: what the rule sends, as far as it reaches `threshold`, and ||x||^2."""
    collected = Collected(k, x.dtype.type(threshold))
    if not threshold:
        collected.wanted = np.greater  # no zeros
    step = BLOCK // size * size
    scratch, mask = np.empty(step, x.dtype), np.empty(step, np.bool_)
    total = 0.0
    for start in range(0, x.size, step):
        block = x[start : start + step]
        now = block if latest is None else latest[start : start + step]
        if add is not None:
            np.add(block, now, out=block)
        total += block_norm(block)
        magnitude = np.abs(block, out=scratch[: block.size])
        above = collected.wanted(magnitude, collected.threshold, out=mask[: block.size])
        peaks = _peaks(magnitude, size)
        if collected.threshold:  # few are left to look at
            found = np.flatnonzero(above)
            soft = np.abs(block.take(found) + now.take(found))
            found = found[soft >= peaks.take(found // size)]
        else:
            soft = np.abs(np.add(block, now, out=magnitude), out=magnitude)
            sent = np.greater_equal(soft, np.repeat(peaks, size)[: block.size])
            found = np.flatnonzero(np.logical_and(sent, above, out=above))
        if found.size:
            collected.extend((found + start).astype(np.int32), block.take(found))
    return collected, total


def _peaks(magnitude: Array, size: int) -> Array:
    """The maximum of each bin; the last bin may be shorter."""
    whole = magnitude.size // size
    if size > _SHORT or not whole:
        return np.maximum.reduceat(magnitude, np.arange(0, magnitude.size, size))
    rows = magnitude[: whole * size].reshape(whole, size)
    peaks = rows[:, 0].copy()
    for column in range(1, size):
        np.maximum(peaks, rows[:, column], out=peaks)
    rest = magnitude[whole * size :]
    return np.append(peaks, rest.max()) if rest.size else peaks
