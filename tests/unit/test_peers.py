"""Sketches whose products are, in the mean, those of the vectors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptive.parameters import ModelParameter
from adaptive.statistics.signal import SHIFTS, WIDTH, Peers
from adaptive.statistics.vector import Tally


def parameter(name: str, numel: int) -> ModelParameter:
    return ModelParameter(name, torch.nn.Parameter(torch.zeros(numel)))


def crossed(ranks: list[list], step: int, weight: float = 1.0) -> tuple[float, float]:
    """(<c, g>, <g, g>) of different ranks, by sketch. ranks: (parameter, g, c) of each."""
    peers = [Peers(1) for _ in ranks]
    for each, parts in zip(peers, ranks, strict=True):
        for where, g, kept in parts:
            each.add(where, step, g, kept[None], weight)
    total = np.sum([each.sketch() for each in peers], axis=0).tolist()
    tallies = [Tally(ladder=(10.0,)) for _ in ranks]
    for each, tally in zip(peers, tallies, strict=True):
        each.receive(total)
        each.settle(tally)
    return sum(t.peers[0] for t in tallies), sum(t.peers_total for t in tallies)


@pytest.mark.parametrize("numel", [10, WIDTH, 3 * WIDTH + 7])
def test_the_mean_over_the_signs_is_the_product(numel: int) -> None:
    draw = np.random.default_rng(0)
    parameters = [parameter("a", numel), parameter("b", 5)]
    ranks = [
        [
            (s, draw.normal(size=s.tensor.numel()), draw.normal(size=s.tensor.numel()))
            for s in parameters
        ]
        for _ in range(3)
    ]
    found = np.mean([crossed(ranks, step, weight=4.0) for step in range(SHIFTS)], axis=0)
    pairs = [(i, j) for i in range(3) for j in range(3) if i != j]
    kept = sum(a[2] @ b[1] for i, j in pairs for a, b in zip(ranks[i], ranks[j], strict=True))
    grad = sum(a[1] @ b[1] for i, j in pairs for a, b in zip(ranks[i], ranks[j], strict=True))
    sizes = 3 * 4.0 * numel / np.sqrt(WIDTH * SHIFTS)  # a standard deviation, roughly
    assert found == pytest.approx((4.0 * kept, 4.0 * grad), abs=5 * sizes)


@settings(max_examples=30)
@given(numel=st.integers(1, 3 * WIDTH), step=st.integers(0, 10**6), at=st.integers(0, 10**6))
def test_a_vector_of_one_element_is_exact(numel: int, step: int, at: int) -> None:
    one = np.zeros(numel)
    one[at % numel] = 3.0
    where = parameter("a", numel)
    ranks = [[(where, one, one)], [(where, one, 0 * one)]]
    assert crossed(ranks, step) == pytest.approx((9.0, 18.0))


def test_nothing_is_told_of_a_first_step_and_a_state_goes_on() -> None:
    peers, tally = Peers(2), Tally(ladder=(10.0, 20.0))
    peers.settle(tally)
    assert (tally.peers, tally.peers_total) == ([0.0, 0.0], 0.0)
    g = np.arange(600.0)
    peers.add(parameter("a", 600), 0, g, np.stack([g, g / 2]), 1.0)
    peers.receive([2 * value for value in peers.sketch()])
    other = Peers(2)
    other.load_state_dict(peers.state_dict())
    tallies = [Tally(ladder=(10.0, 20.0)) for _ in range(2)]
    peers.settle(tallies[0])
    other.settle(tallies[1])
    assert tallies[0].peers == tallies[1].peers
    assert tallies[0].peers[0] == pytest.approx(2 * tallies[0].peers[1])
    assert tallies[0].peers_total == pytest.approx(tallies[0].peers[0])
