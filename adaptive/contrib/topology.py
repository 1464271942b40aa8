"""Gossip's topologies: each rank's neighbours and their weights.

A topology is a doubly stochastic matrix W, or several matrices used in turn. The new parameters of
rank i are the sum over j of W[i][j] times the parameters of rank j. The spectral gap says how fast
ranks converge to their mean: each round leaves at most 1 - gap of their distance from the mean
(Lian and others 2017, assumption 1.3; for a matrix that is not symmetric with the largest singular
value instead of the eigenvalue).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import isqrt
from typing import Any, Literal, get_args

import torch
from torch import Tensor

TopologyName = Literal["ring", "torus", "exponential", "one_peer", "complete"]
TOPOLOGIES: tuple[TopologyName, ...] = get_args(TopologyName)
TOLERANCE = 1e-6
"""The largest distance from 1 of a row or column sum of a user's matrix, perhaps float32."""

NO_GAP = 1e-9


class Topology:
    """A topology of a fixed number of ranks.

    name: for messages. rounds: the matrices, used in turn, float64, (ranks, ranks)."""

    def __init__(self, name: str, rounds: Sequence[Tensor]) -> None:
        self.name, self.rounds = name, list(rounds)
        self.ranks = len(self.rounds[0])

    def sources(self, step: int, rank: int) -> dict[int, float]:
        """The weights, by rank, of the ranks that send to `rank` in a step, and its own weight."""
        row = self.rounds[step % len(self.rounds)][rank].tolist()
        return {j: weight for j, weight in enumerate(row) if weight or j == rank}

    def receivers(self, step: int, rank: int) -> list[int]:
        """The ranks to which `rank` sends in a step."""
        column = self.rounds[step % len(self.rounds)][:, rank].tolist()
        return [i for i, weight in enumerate(column) if weight and i != rank]

    @cached_property
    def messages(self) -> float:
        """Number of messages that a rank sends in a step: the average over ranks and rounds."""
        off = [(each != 0).sum() - (each.diagonal() != 0).sum() for each in self.rounds]
        return float(sum(off)) / (self.ranks * len(self.rounds))

    @cached_property
    def spectral_gap(self) -> float:
        """The spectral gap of a round, in [0, 1]; for several matrices 1 - the geometric mean of
        the shares of the distance that they leave."""
        product = torch.eye(self.ranks, dtype=torch.float64, device="cpu")
        for each in self.rounds:
            product = each @ product
        distance = product - 1 / self.ranks
        left = float(torch.linalg.matrix_norm(distance, 2)) ** (1 / len(self.rounds))
        return min(1.0, max(0.0, 1 - left))

    def check(self) -> None:
        """ValueError unless every rank's parameters reach all others."""
        if self.ranks > 1 and self.spectral_gap < NO_GAP:
            raise ValueError(
                "topology must bring all ranks together: its spectral gap is 0 (some ranks are "
                "never reached, or only by turns)"
            )

    def __str__(self) -> str:
        return (
            f"{self.name} of {self.ranks} ranks, {self.messages:.3g} messages a rank, "
            f"spectral gap {self.spectral_gap:.4g}"
        )


def check_matrices(given: Any) -> Tensor:
    """A user's matrix or matrices, in float64, (rounds, ranks, ranks). ValueError unless they are
    doubly stochastic, TypeError for a value that is no matrix of numbers."""
    if isinstance(given, Tensor) and given.dim() == 3:
        given = [*given]
    several = isinstance(given, list | tuple) and given and isinstance(given[0], Tensor)
    matrices = [check_matrix(each) for each in (given if several else [given])]
    if any(each.shape != matrices[0].shape for each in matrices):
        sizes = ", ".join(str(tuple(each.shape)) for each in matrices)
        raise ValueError(f"topology must be matrices of one size, got {sizes}")
    return torch.stack(matrices)


def check_matrix(given: Any) -> Tensor:
    """A user's matrix, in float64. ValueError unless it is doubly stochastic, TypeError if it is no
    matrix of numbers."""
    try:
        w = torch.as_tensor(given, dtype=torch.float64, device="cpu").detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"topology must be one of {', '.join(TOPOLOGIES)} or a square matrix of numbers, got "
            f"{given!r:.80}"
        ) from error
    if w.dim() != 2 or w.shape[0] != w.shape[1] or not len(w):
        raise ValueError(f"topology must be a square matrix, got shape {tuple(w.shape)}")
    sums = torch.cat([w.sum(0), w.sum(1)])
    off = float((sums - 1).abs().max()) if bool(w.isfinite().all()) else float("nan")
    if not (off <= TOLERANCE and bool((w >= 0).all())):
        raise ValueError(
            f"topology must be doubly stochastic: no weight below 0, and rows and columns that add "
            f"up to 1; smallest weight {float(w.min()):g}, sums from {float(sums.min()):g} to "
            f"{float(sums.max()):g}"
        )
    return w


def named(name: str, ranks: int) -> Topology:
    """One of TOPOLOGIES. Each rank gives itself and each of its neighbours the same weight."""
    everyone = range(ranks)
    powers = [1 << k for k in range((ranks - 1).bit_length())]
    rounds: list[list[set[int]]]
    if name == "ring":
        rounds = [[{i - 1, i + 1} for i in everyone]]
    elif name == "torus":
        rounds = [[_on_torus(i, ranks) for i in everyone]]
    elif name == "exponential":
        rounds = [[{i - power for power in powers} for i in everyone]]
    elif name == "one_peer":
        rounds = [[{i - power} for i in everyone] for power in powers] or [[set()]]
    else:
        rounds = [[set(everyone) for _ in everyone]]
    return Topology(name, [_even(sources, ranks) for sources in rounds])


def _on_torus(i: int, ranks: int) -> set[int]:
    """The neighbours of rank i on the squarest torus of `ranks` ranks (a ring if it is prime)."""
    height = next(each for each in range(isqrt(ranks), 0, -1) if ranks % each == 0)
    width = ranks // height
    row, column = divmod(i, width)
    return {
        *(row * width + (column + side) % width for side in (-1, 1)),
        *((row + side) % height * width + column for side in (-1, 1)),
    }


def _even(sources: Sequence[set[int]], ranks: int) -> Tensor:
    w = torch.zeros(ranks, ranks, dtype=torch.float64, device="cpu")
    for i, of_one in enumerate(sources):
        all_of = {i, *(j % ranks for j in of_one)}
        w[i, sorted(all_of)] = 1 / len(all_of)
    return w
