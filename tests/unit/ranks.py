"""Several ranks' rounds in one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor

from compressors.base import Key, Payload
from compressors.rounds import Rounds, RoundsCompressor
from tests.unit.samples import specs


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
            specs(
                [
                    torch.zeros_like(tensor) if j in (skipped or {}).get(i, ()) else tensor
                    for j, tensor in enumerate(tensors)
                ],
                [cf] * len(tensors),
                keys,
            ),
            len(ranks),
            own.extend,
        )
        for i, (rank, tensors, own) in enumerate(zip(ranks, buckets, reported, strict=True))
    ]
    return reported, lockstep(generators)


def lockstep(ranks: Sequence[Rounds]) -> list[list[Payload]]:
    """Run the rounds of several ranks in one process: what an exchange does, without one.

    Returns what each rank's generator returned, after as many rounds on all of them."""
    handed = [next(rank) for rank in ranks]
    results: list[list[Payload]] = []
    while not results:
        total = torch.stack(handed).sum(0)
        handed = []
        for rank in ranks:
            try:
                handed.append(rank.send(total.clone()))
            except StopIteration as stop:
                results.append(stop.value)
    return results


def same(left: Payload, right: Payload) -> bool:
    """Equal to the bit."""
    return all((a == b).all() for a, b in zip(left.parts, right.parts, strict=True))


simulates = pytest.mark.skipif(
    torch.__version__.startswith("2.6."),
    reason="simulated workers can wait for each other for ever with torch 2.6",
)
"""Of a test that trains on simulated ranks."""
