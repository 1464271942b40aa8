"""Thinning out for the dashboard: nothing that happened is lost without a trace."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from runs.dashboard.thin import Switch, changes, evenly, held, held_within, longest, marks

CFS = st.sampled_from([1.0, 10.0, 20.0, 100.0])


@st.composite
def histories(draw: st.DrawFn) -> list[float]:
    """The CF of each step of a run."""
    stretches = draw(st.lists(st.tuples(CFS, st.integers(1, 9)), min_size=1, max_size=40))
    return [cf for cf, steps in stretches for _ in range(steps)]


def _switches(history: list[float]) -> list[Switch]:
    pairs = enumerate(pairwise(history), start=1)
    return [Switch(step, a, b, f"why {step}") for step, (a, b) in pairs if a != b]


@given(histories(), st.integers(0, 1000))
def test_the_band_is_exact_however_few_steps_tensorboard_kept(
    history: list[float], seed: int
) -> None:
    kept = np.random.default_rng(seed).random(len(history)) < 0.3
    kept[-1] = True  # TensorBoard keeps the last, and not always the first
    steps = np.flatnonzero(kept).astype(float)
    at, to = changes(steps, np.array(history)[kept], _switches(history))
    first = int(at[0])
    assert held(at, to, np.arange(first, len(history), dtype=float)).tolist() == history[first:]
    switches = _switches(history)
    assert not switches or first < switches[0].step
    assert np.all(to[1:] != to[:-1])


@given(histories(), st.integers(1, 30))
def test_many_pieces_become_few_with_the_cf_that_was_used_most(
    history: list[float], bins: int
) -> None:
    at, to = changes(np.arange(len(history), dtype=float), np.array(history), [])
    few_at, few_to = longest(at, to, len(history), bins)
    if len(at) <= bins:
        assert few_at.tolist() == at.tolist()
        return
    assert len(few_at) <= bins
    fine = 64  # points of a step
    points = (np.arange(len(history) * fine) + 0.5) / fine
    edges = np.linspace(0, len(history), bins + 1)
    for low, high in pairwise(edges):
        inside = points[(points > low) & (points < high)]
        used = held(at, to, inside)
        shown = held(few_at, few_to, inside)[0]
        most = max(np.sum(used == cf) for cf in set(history))
        assert np.sum(used == shown) >= most - 2  # to within the points


@given(histories(), st.integers(1, 30))
def test_marks_count_every_switch(history: list[float], bins: int) -> None:
    switches = _switches(history)
    shown = marks(switches, 0, len(history), bins)
    assert len(shown) <= bins
    assert sum(1 + mark.others for mark in shown) == len(switches)
    assert {mark.reason for mark in shown} <= {switch.reason for switch in switches}
    assert [mark.step for mark in shown] == sorted(mark.step for mark in shown)


def test_a_move_is_shown_before_a_judgement() -> None:
    switches = [Switch(1, 10, 10, "stays"), Switch(2, 10, 20, "up"), Switch(3, 20, 20, "stays")]
    assert marks(switches, 0, 4, 1) == [Switch(2, 10, 20, "up", others=2)]


@given(st.integers(1, 500), st.integers(2, 50))
def test_evenly_keeps_both_ends(count: int, most: int) -> None:
    index = evenly(count, most)
    assert len(index) <= most
    assert (index[0], index[-1]) == (0, count - 1)
    assert np.all(np.diff(index) > 0)


def test_a_value_of_another_cf_is_not_held() -> None:
    at, values = np.array([0.0, 5.0]), np.array([0.1, 0.5])
    steps, since = np.array([3.0, 6.0, 9.0]), np.array([0.0, 0.0, 8.0])
    assert held(at, values, np.array([-1.0, 0.0]))[1] == 0.1
    np.testing.assert_array_equal(held_within(at, values, steps, since), [0.1, 0.5, np.nan])
