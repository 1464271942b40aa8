"""Averages."""

from __future__ import annotations

import json
from math import inf, nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import DENSE
from policies.candidates import Averages


def test_averages_by_cf_begin_when_they_are_fed():
    averages = Averages(0.5)
    averages.add(10.0, 0.8)
    averages.add(20.0, nan)
    assert [averages.steps(cf) for cf in (10.0, 20.0, 40.0)] == [1, 0, 0]
    assert averages[10.0] == 0.8
    averages.keep_only([20.0])
    assert averages.steps(10.0) == 0


weights = st.floats(0.01, 0.5)
terms = st.tuples(st.floats(0, 1e6), st.floats(1e-3, 1e6))


@settings(max_examples=30)
@given(weight=weights, values=st.lists(terms, min_size=1, max_size=30))
def test_average_is_the_ratio_of_bias_corrected_means(weight, values):
    def corrected(numbers):
        n = len(numbers)
        total = sum(weight * (1 - weight) ** (n - 1 - i) * x for i, x in enumerate(numbers))
        return total / (1 - (1 - weight) ** n)

    average = Averages(weight)
    for top, bottom in values:
        average.add(DENSE, top, bottom)
    tops, bottoms = zip(*values, strict=True)
    assert average[DENSE] == pytest.approx(corrected(tops) / corrected(bottoms), rel=1e-9)
    assert average.steps(DENSE) == len(values)


def test_average_is_of_means_not_of_ratios():
    average = Averages(0.5)
    average.add(DENSE, 1, 1)
    average.add(DENSE, 1, 9)  # the mean of the two ratios would weigh 1 and 1/9 alike
    assert average[DENSE] == pytest.approx((0.25 * 1 + 0.5 * 1) / (0.25 * 1 + 0.5 * 9))


@pytest.mark.parametrize(
    "skipped", [(nan, 1), (1, nan), (inf, 1), (-inf, 1), (1, inf), (1, 0), (1, -1)]
)
def test_average_skips_what_it_cannot_use(skipped):
    average = Averages(0.1)
    average.add(DENSE, *skipped)
    assert average.steps(DENSE) == 0
    average.add(DENSE, 3, 4)
    average.add(DENSE, *skipped)
    assert average[DENSE] == pytest.approx(0.75)


def test_an_average_is_saved():
    average = Averages(0.1)
    for value in (1.0, 2.0, 5.0):
        average.add(DENSE, value)
    copy = Averages(0.1)
    copy.load_state_dict(json.loads(json.dumps(average.state_dict())))
    for one in (average, copy):
        one.add(DENSE, 7.0)
    assert (copy[DENSE], copy.steps(DENSE)) == (average[DENSE], 4)
