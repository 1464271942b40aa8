"""Pool adjacent violators."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.estimators import descending

VALUES = st.lists(st.floats(-10, 10), min_size=1, max_size=12)


def test_where_some_rise_they_get_their_mean():
    assert descending([0.9, 0.8, 0.2, 0.3, 0.7, 0.1]) == pytest.approx(
        [0.9, 0.8, 0.4, 0.4, 0.4, 0.1]
    )
    assert descending([1.0, 2.0, 6.0]) == [3.0, 3.0, 3.0]
    assert descending([]) == []


@given(VALUES)
def test_it_never_rises_and_keeps_the_mean(values):
    found = descending(values)
    assert len(found) == len(values)
    assert all(a >= b - 1e-9 for a, b in pairwise(found))
    assert sum(found) == pytest.approx(sum(values), abs=1e-9)


@given(VALUES)
def test_what_falls_stays_as_it_is(values):
    falling = sorted(values, reverse=True)
    assert descending(falling) == falling


@given(VALUES, VALUES)
def test_no_falling_sequence_is_nearer(values, others):
    size = min(len(values), len(others))
    values, falling = values[:size], sorted(others[:size], reverse=True)

    def distance(sequence):
        return sum((a - b) ** 2 for a, b in zip(values, sequence, strict=True))

    assert distance(descending(values)) <= distance(falling) + 1e-9
