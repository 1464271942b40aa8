"""Several ranks' rounds in one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from compressors.base import Key, Payload
from compressors.rounds import RoundsCompressor, lockstep


def exchange(
    ranks: Sequence[RoundsCompressor],
    buckets: Sequence[Sequence[Tensor]],
    cf: float,
    keys: Sequence[Key],
    skipped: Mapping[int, Sequence[int]] | None = None,
) -> tuple[list[list[Payload]], list[list[Payload]]]:
    """One step of every rank: (what each reported, what each got back). skipped: by rank, the
    positions of the tensors of which it sends nothing."""
    reported: list[list[Payload]] = [[] for _ in ranks]
    generators = [
        rank.rounds(
            [
                torch.zeros_like(tensor) if j in (skipped or {}).get(i, ()) else tensor
                for j, tensor in enumerate(tensors)
            ],
            [cf] * len(tensors),
            keys,
            len(ranks),
            own.extend,
        )
        for i, (rank, tensors, own) in enumerate(zip(ranks, buckets, reported, strict=True))
    ]
    return reported, lockstep(generators)


def same(left: Payload, right: Payload) -> bool:
    """Equal to the bit."""
    return all((a == b).all() for a, b in zip(left.parts, right.parts, strict=True))
