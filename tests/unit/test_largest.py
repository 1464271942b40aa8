"""The largest elements of rows: where one looks first never changes what is found."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from adaptive.statistics.shadow import largest


@given(
    arrays(np.float32, (3, 20), elements=st.floats(-4, 4, width=32)),
    st.lists(st.integers(1, 20), min_size=3, max_size=3),
    arrays(np.float32, 3, elements=st.floats(0, 5, width=32)),
)
def test_as_sorting_says(a: np.ndarray, wanted: list[int], above: np.ndarray) -> None:
    before = a.copy()
    found = largest(a, wanted, above)
    assert np.array_equal(a, before)
    for row, k, mask in zip(np.abs(a), wanted, found, strict=True):
        assert np.array_equal(mask, row >= np.sort(row)[-k])


def test_it_looks_where_the_last_smallest_was() -> None:
    above = np.zeros(1, np.float32)
    largest(np.array([[1.0, -5.0, 3.0]], np.float32), [2], above)
    assert 0 < above[0] < 3
