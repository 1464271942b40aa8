"""The check that `AdaptiveCompressor(debug=...)` turns on: are the ranks still replicas?

Every decision is taken on statistics that all ranks hold alike, so ranks that differ are a mistake:
of a policy that reads a clock or a random number of its own, of a script that changes one rank's
model, or of ours. Left alone it shows as an error inside a collective, or not at all.
"""

from __future__ import annotations

from collections.abc import Iterable
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from adaptive.residual import Slot
from policies import Plan


class CrossCheck:
    """Compares plans in every step, and parameters in every so many, over the ranks of a group.

    every: steps between two comparisons of parameters.
    """

    def __init__(self, slots: Iterable[Slot], group: dist.ProcessGroup, every: int) -> None:
        self._slots = slots
        self._group = group
        self._every = every

    def check(self, step: int, plan: Plan) -> None:
        """A collective, at the beginning of a step on every rank. RuntimeError on all of them,
        naming what differs and the ranks, unless the plan and the parameters are alike.

        Waits for the ranks, and for the device."""
        said = f"step {step}: {plan}"
        everyone = self._gather([crc32(said.encode())])
        if len(set(everyone)) > 1:
            texts: list[str] = [""] * len(everyone)
            dist.all_gather_object(texts, said, group=self._group)
            rank = next(rank for rank, text in enumerate(texts) if text != texts[0])
            raise RuntimeError(
                f"debug: rank {rank} plans otherwise than rank 0, and must plan alike:\n"
                f"  rank 0: {texts[0]}\n  rank {rank}: {texts[rank]}"
            )
        if step % self._every == 0:
            self._compare_parameters(step)

    def _compare_parameters(self, step: int) -> None:
        slots = list(self._slots)
        everyone = self._gather([_checksum(slot.param) for slot in slots])
        for i, slot in enumerate(slots):
            for rank, theirs in enumerate(everyone):
                if theirs[i] != everyone[0][i]:
                    raise RuntimeError(
                        f"debug: parameter {slot.name!r} of rank {rank} is not that of rank 0 "
                        f"before step {step}; the ranks are replicas no longer"
                    )

    def _gather(self, own: list[int]) -> list[tuple[int, ...]]:
        """What every rank has, rank by rank. own: as many numbers on every rank."""
        device = next((slot.param.device for slot in self._slots), torch.device("cpu"))
        mine = torch.tensor(own, dtype=torch.int64, device=device)
        rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(rows, mine, group=self._group)
        return [tuple(row.tolist()) for row in rows]


def _checksum(tensor: Tensor) -> int:
    plain = tensor.detach().cpu().contiguous().flatten()
    return crc32(plain.view(torch.uint8).numpy().tobytes())
