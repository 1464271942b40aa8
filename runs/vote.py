"""What the ranks agree on once a step: whether to stop, and the mean loss."""

from __future__ import annotations

import torch
import torch.distributed as dist


class Vote:
    """A tiny all-reduce that is under way while backward runs.

    All ranks see the same, so all of them stop after the same step.
    group: to vote in; None: one of its own, so that no exchange stands in the way.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._own = group is None
        self._group = group or dist.new_group(backend="gloo")
        self._ballot = torch.zeros(2, dtype=torch.float64)
        self._work: dist.Work | None = None

    def cast(self, loss: float, stop: bool) -> None:
        """Start the all-reduce of this rank's loss and wish."""
        self._ballot = torch.tensor([loss, stop], dtype=torch.float64)
        self._work = dist.all_reduce(self._ballot, group=self._group, async_op=True)

    def count(self) -> tuple[float, bool]:
        """The mean loss, and whether any rank was asked to stop."""
        assert self._work is not None
        self._work.wait()
        loss, wishes = self._ballot.tolist()
        return loss / dist.get_world_size(), wishes > 0

    def close(self) -> None:
        """Give its own group's threads and sockets back; on all ranks."""
        if self._own:
            dist.destroy_process_group(self._group)
