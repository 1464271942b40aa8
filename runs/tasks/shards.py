"""Which items a rank sees in a step: a pure function, so that resuming needs no loader state."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class Shards:
    """Shuffles `items` anew each epoch and deals them out to the ranks, `batch_size` a step.

    Within an epoch no item is dealt twice, to any rank; the items that do not fill a last step
    for all ranks are left out (others each epoch). Steps count from 0 and never end.
    """

    def __init__(self, items: int, batch_size: int, seed: int) -> None:
        self.items = items
        self.batch_size = batch_size
        self.seed = seed
        self._shuffled: tuple[int, NDArray[np.int64]] | None = None  # the last epoch used

    def steps_per_epoch(self, world_size: int) -> int:
        """Steps in which every rank gets a full batch; ValueError if there is not even one."""
        if world_size < 1:
            raise ValueError(f"world_size={world_size} must be >= 1")
        steps = self.items // (self.batch_size * world_size)
        if steps < 1:
            raise ValueError(
                f"batch_size={self.batch_size} x {world_size} workers needs more than the "
                f"{self.items} training items there are; use a smaller batch_size"
            )
        return steps

    def indices(self, step: int, rank: int, world_size: int) -> tuple[int, NDArray[np.int64]]:
        """The epoch of `step`, and the `batch_size` item numbers of this rank in it."""
        steps = self.steps_per_epoch(world_size)
        if step < 0:
            raise ValueError(f"step={step} must be >= 0")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank} must be from 0 to world_size - 1 = {world_size - 1}")
        epoch, place = divmod(step, steps)
        start = (place * world_size + rank) * self.batch_size
        return epoch, self._order(epoch)[start : start + self.batch_size]

    def _order(self, epoch: int) -> NDArray[np.int64]:
        if self._shuffled is None or self._shuffled[0] != epoch:
            order = np.random.default_rng((self.seed, epoch)).permutation(self.items)
            self._shuffled = (epoch, order)
        return self._shuffled[1]
