"""The candidate CFs between two ends."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.base import MAX_RUNGS, make_ladder


@pytest.mark.parametrize(
    ("cf_range", "scaling", "step_size", "rungs"),
    [
        ((10.0, 1000.0), "exponential", 2, (10, 20, 40, 160, 1000)),
        ((10.0, 1000.0), "geometric", 2, (10, 20, 40, 80, 160, 320, 640, 1000)),
        ((1.5, 1000.0), "exponential", 2, (1.5, 3, 6, 24, 384, 1000)),
        ((1.5, 24.0), "geometric", 2, (1.5, 3, 6, 12, 24)),
        ((10.0, 1000.0), "exponential", 10, (10, 100, 1000)),
        ((10.0, 1000.0), "geometric", 10, (10, 100, 1000)),
        ((10.0, 15.0), "exponential", 2, (10, 15)),
        ((10.0, 1000.0), "exponential", 1e200, (10, 1000)),
        ((1000.0, 1004.0), "geometric", 1.002, (1000, 1002, 1004)),
        ((64.0, 64.0), "exponential", 2, (64,)),
        ((64.0, 64.0), "geometric", 2, (64,)),
    ],
)
def test_ladders(cf_range, scaling, step_size, rungs):
    assert make_ladder(cf_range, scaling, step_size) == rungs


@settings(max_examples=40)
@given(
    st.tuples(st.floats(1, 1e4), st.floats(1, 1e4)).map(sorted),
    st.sampled_from(["exponential", "geometric"]),
    st.floats(1.02, 50),
)
def test_every_ladder_climbs_from_one_end_to_the_other(cf_range, scaling, step_size):
    rungs = make_ladder(tuple(cf_range), scaling, step_size)
    assert rungs[0] == cf_range[0]
    assert rungs[-1] == cf_range[1]
    assert list(rungs) == sorted(set(rungs))
    assert len(rungs) <= MAX_RUNGS + 1


@pytest.mark.parametrize("scaling", ["exponential", "geometric"])
def test_a_step_size_too_near_1(scaling):
    with pytest.raises(ValueError, match=r"step_size=1\.0001: .*larger step"):
        make_ladder((10.0, 1000.0), scaling, 1.0001)
