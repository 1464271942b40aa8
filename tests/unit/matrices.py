"""Tensors for PowerSGD, and a step of one matrix."""

from __future__ import annotations

import torch

from compressors.base import Key
from tests.unit import samples
from tests.unit.ranks import exchange
from tests.unit.samples import decompressed

SHAPES = ((24, 40), (16, 8, 3, 3), (33,), (50, 30), (1, 7), ())
NUMELS = (960, 1152, 33, 1500, 7, 1)
KEYS = [Key(f"p{i}", 0, shape) for i, shape in enumerate(SHAPES)]
MATRIX = Key("w", 0, (40, 60))


def normal(numel: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return samples.normal(numel, dtype, seed)


def buckets(world: int, seed: int, dtype: torch.dtype = torch.float64):
    """Of each rank, one tensor of each of `SHAPES`, flat."""
    return [
        [normal(n, seed + 7 * w + i, dtype) for i, n in enumerate(NUMELS)] for w in range(world)
    ]


def low_rank(rank: int, seed: int, rows: int = 40, cols: int = 60) -> torch.Tensor:
    """A matrix of this rank, flat."""
    left, right = normal(rows * rank, seed), normal(rank * cols, seed + 1)
    return (left.view(rows, rank) @ right.view(rank, cols)).flatten()


def one(ranks, tensors, cf, key=MATRIX):
    """A step of a bucket of one tensor: every rank's own payload, and the mean decoded."""
    reported, payloads = exchange(ranks, [[t] for t in tensors], cf, [key])
    return [own[0] for own in reported], decompressed(ranks[0], payloads[0][0])
