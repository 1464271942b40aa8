"""Sketches whose products are, in the mean, those of the vectors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptive.model.parameters import ModelParameter
from adaptive.statistics.signal import SHIFTS, WIDTH, Peers, Sections
from tests.unit.device_path import device_path
from tests.unit.ladder_tally import make_tally


def parameter(name: str, numel: int) -> ModelParameter:
    return ModelParameter(name, torch.nn.Parameter(torch.zeros(numel)))


def take_in(peers: Peers, where: ModelParameter, step: int, rows: np.ndarray, weight: float):
    sections = Sections([rows.shape[1]], [[1] * (len(rows) - 1)], [weight], torch.device("cpu"))
    peers.add(where, step, torch.from_numpy(rows), sections)


def crossed(ranks: list[list], step: int, weight: float = 1.0) -> tuple[float, float]:
    """(<c, g>, <g, g>) of different ranks, by sketch. ranks: (parameter, g, c) of each."""
    peers = [Peers(1) for _ in ranks]
    for each, parts in zip(peers, ranks, strict=True):
        for where, g, kept in parts:
            take_in(each, where, step, np.stack([g, kept]), weight)
    tallies = [make_tally(1) for _ in ranks]
    sketches = [each.end_step(tally) for each, tally in zip(peers, tallies, strict=True)]
    total = sum(tally.at("sketch") for tally in tallies)
    for each, own, tally in zip(peers, sketches, tallies, strict=True):
        each.receive(own, total)
        each.begin_step(tally)
    told = [[float(t.at(name)) for t in tallies] for name in ("peers", "peers_total")]
    return sum(told[0]), sum(told[1])


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
    peers, tally = Peers(2), make_tally(2)
    peers.begin_step(tally)
    assert not tally.at("peers").any()
    assert not tally.at("peers_total").any()
    g = np.arange(600.0)
    take_in(peers, parameter("a", 600), 0, np.stack([g, g, g / 2]), 1.0)
    own = peers.end_step(tally)
    peers.receive(own, 2 * own[0])
    other = Peers(2)
    other.load_state_dict(peers.state_dict())
    tallies = [make_tally(2) for _ in range(2)]
    peers.begin_step(tallies[0])
    other.begin_step(tallies[1])
    assert torch.equal(tallies[0].at("peers"), tallies[1].at("peers"))
    whole, half = tallies[0].at("peers").tolist()
    assert whole == pytest.approx(2 * half)
    assert float(tallies[0].at("peers_total")) == pytest.approx(whole)


def test_a_device_draws_the_same_signs() -> None:
    rows = np.random.default_rng(0).normal(size=(3, 700)).astype("f")
    host, device = Peers(2), Peers(2)
    for step in (0, 1, 5):
        take_in(host, parameter("a", 700), step, rows, 4.0)
        with device_path():
            take_in(device, parameter("a", 700), step, rows, 4.0)
    torch.testing.assert_close(
        *(each.end_step(make_tally(2)) for each in (host, device)), rtol=1e-5, atol=1e-5
    )
