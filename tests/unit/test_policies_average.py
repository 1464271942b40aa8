"""The bias-corrected mean of ratios, and its weight."""

from __future__ import annotations

import json
from math import inf, isnan, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.estimators import Average, weight_for

weights = st.floats(0.01, 0.5)
terms = st.tuples(st.floats(0, 1e6), st.floats(1e-3, 1e6))


@given(weight=weights, values=st.lists(terms, min_size=1, max_size=30))
def test_average_is_the_ratio_of_bias_corrected_means(weight, values):
    def corrected(numbers):
        n = len(numbers)
        total = sum(weight * (1 - weight) ** (n - 1 - i) * x for i, x in enumerate(numbers))
        return total / (1 - (1 - weight) ** n)

    average = Average(weight)
    for top, bottom in values:
        average.add(top, bottom)
    tops, bottoms = zip(*values, strict=True)
    assert average.value == pytest.approx(corrected(tops) / corrected(bottoms), rel=1e-9)
    assert average.count == len(values)


def test_average_is_of_means_not_of_ratios():
    average = Average(0.5)
    average.add(1, 1)
    average.add(1, 9)  # the mean of the two ratios would weigh 1 and 1/9 alike
    assert average.value == pytest.approx((0.25 * 1 + 0.5 * 1) / (0.25 * 1 + 0.5 * 9))


@pytest.mark.parametrize(
    "skipped", [(nan, 1), (1, nan), (inf, 1), (-inf, 1), (1, inf), (1, 0), (1, -1)]
)
def test_average_skips_what_it_cannot_use(skipped):
    average = Average(0.1)
    average.add(*skipped)
    assert average.count == 0
    assert isnan(average.value)
    average.add(3, 4)
    average.add(*skipped)
    assert average.value == pytest.approx(0.75)


def test_an_average_is_saved():
    average = Average(0.1)
    for value in (1.0, 2.0, 5.0):
        average.add(value)
    copy = Average(0.1)
    copy.load_state_dict(json.loads(json.dumps(average.state_dict())))
    for one in (average, copy):
        one.add(7.0)
    assert (copy.value, copy.count) == (average.value, 4)


@pytest.mark.parametrize(("ranks", "weight"), [(2, 0.02), (32, 0.32), (50, 0.5), (400, 0.5)])
def test_weight_grows_with_the_ranks(ranks, weight):
    assert weight_for(ranks) == weight
