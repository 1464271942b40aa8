"""Averages, ratios of means with their doubt, and falling sequences."""

from __future__ import annotations

import json
from itertools import pairwise
from math import inf, nan, sqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import DENSE
from policies.averages import Averages
from policies.signal_gain import CLEAR, LEAST, LOST, WEIGHT, MeanRatio, descending


def test_averages_by_cf_begin_when_they_are_fed():
    averages = Averages(0.5)
    averages.add(10.0, 0.8)
    averages.add(20.0, nan)
    assert (averages.value(10.0), averages.value(20.0), averages.value(40.0)) == (0.8, None, None)
    averages.keep_only([10.0, 40.0])
    assert averages.cfs() == [10.0]


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
    assert average.value(DENSE) == pytest.approx(corrected(tops) / corrected(bottoms), rel=1e-9)
    assert average.steps(DENSE) == len(values)


def test_average_is_of_means_not_of_ratios():
    average = Averages(0.5)
    average.add(DENSE, 1, 1)
    average.add(DENSE, 1, 9)  # the mean of the two ratios would weigh 1 and 1/9 alike
    assert average.value(DENSE) == pytest.approx((0.25 * 1 + 0.5 * 1) / (0.25 * 1 + 0.5 * 9))


@pytest.mark.parametrize(
    "skipped", [(nan, 1), (1, nan), (inf, 1), (-inf, 1), (1, inf), (1, 0), (1, -1)]
)
def test_average_skips_what_it_cannot_use(skipped):
    average = Averages(0.1)
    average.add(DENSE, *skipped)
    assert average.steps(DENSE) == 0
    assert average.value(DENSE) is None
    average.add(DENSE, 3, 4)
    average.add(DENSE, *skipped)
    assert average.value(DENSE) == pytest.approx(0.75)


def test_an_average_is_saved():
    average = Averages(0.1)
    for value in (1.0, 2.0, 5.0):
        average.add(DENSE, value)
    copy = Averages(0.1)
    copy.load_state_dict(json.loads(json.dumps(average.state_dict())))
    for one in (average, copy):
        one.add(DENSE, 7.0)
    assert (copy.value(DENSE), copy.steps(DENSE)) == (average.value(DENSE), 4)


# Falling sequences


VALUES = st.lists(st.floats(-10, 10), min_size=1, max_size=12)


def test_where_some_rise_they_get_their_mean():
    assert descending([0.9, 0.8, 0.2, 0.3, 0.7, 0.1]) == pytest.approx(
        [0.9, 0.8, 0.4, 0.4, 0.4, 0.1]
    )
    assert descending([1.0, 2.0, 6.0]) == [3.0, 3.0, 3.0]
    assert descending([]) == []


@settings(max_examples=30)
@given(VALUES)
def test_it_never_rises_and_keeps_the_mean(values):
    found = descending(values)
    assert len(found) == len(values)
    assert all(a >= b - 1e-9 for a, b in pairwise(found))
    assert sum(found) == pytest.approx(sum(values), abs=1e-9)


@settings(max_examples=30)
@given(VALUES)
def test_what_falls_stays_as_it_is(values):
    falling = sorted(values, reverse=True)
    assert descending(falling) == falling


@settings(max_examples=30)
@given(VALUES, VALUES)
def test_no_falling_sequence_is_nearer(values, others):
    size = min(len(values), len(others))
    values, falling = values[:size], sorted(others[:size], reverse=True)

    def distance(sequence):
        return sum((a - b) ** 2 for a, b in zip(values, sequence, strict=True))

    assert distance(descending(values)) <= distance(falling) + 1e-9


# Ratios of means


products = st.lists(st.floats(-2, 3).filter(lambda x: abs(x) > 1e-3), min_size=1, max_size=60)


@settings(max_examples=25)
@given(totals=products, seed=st.integers(0, 9))
def test_it_is_the_ratio_of_weighted_means_and_knows_its_standard_error(totals, seed):
    kept = np.random.default_rng(seed).normal(size=len(totals))
    signal = MeanRatio()
    for total, product in zip(totals, kept, strict=True):
        signal.add({100.0: product}, total)
    n = len(totals)
    weights = np.array([WEIGHT * (1 - WEIGHT) ** (n - 1 - i) for i in range(n)])
    weights /= weights.sum()
    mean = float(weights @ totals)
    error = sqrt(float(weights @ (np.array(totals) - mean) ** 2) * float(weights @ weights))
    assert signal.value(100.0) == pytest.approx(float(weights @ kept) / mean, rel=1e-6, abs=1e-6)
    if error > 1e-6:
        assert signal.errors == pytest.approx(mean / error, rel=1e-4, abs=1e-6)
        if n >= LEAST and abs(mean / error - CLEAR) > 1e-3 and abs(mean / error - LOST) > 1e-3:
            if mean / error > CLEAR:
                assert signal.clear
            if mean / error < LOST:
                assert not signal.clear


@settings(max_examples=25)
@given(seed=st.integers(0, 999), steps=st.integers(5, 80), noise=st.floats(0.01, 3))
def test_the_doubt_between_two_cfs_is_that_of_their_ratio(seed, steps, noise):
    draw = np.random.default_rng(seed)
    totals = draw.normal(1, 0.5, steps)
    first, second = (g * totals + noise * draw.normal(0, 0.1, steps) for g in (0.8, 0.5))
    ratio = MeanRatio()
    for total, a, b in zip(totals, first, second, strict=True):
        ratio.add({10.0: a, 100.0: b}, total)
    weights = WEIGHT * (1 - WEIGHT) ** np.arange(steps)[::-1]
    weights /= weights.sum()
    for cfs, a, b in (((10.0, 100.0), first, second), ((DENSE, 10.0), totals, first)):
        expected = 1.0
        if min(weights @ a, weights @ b) > 0:
            relative = a / (weights @ a) - b / (weights @ b)
            expected = min(1.0, sqrt(weights @ relative**2 * (weights @ weights)))
        doubt = ratio.doubt
        assert doubt(*cfs) == pytest.approx(expected, rel=1e-3, abs=1e-6)
        assert doubt(*cfs[::-1]) == pytest.approx(doubt(*cfs), rel=1e-6, abs=1e-9)
    assert doubt(10.0, 77.0) == doubt(77.0, 10.0) == 1.0  # nothing is known


def test_the_doubt_between_two_cfs_is_how_much_their_ratio_varies():
    draw, ratios, doubts = np.random.default_rng(0), [], []
    for _ in range(150):
        ratio = MeanRatio()
        for total in draw.normal(1, 1, 60):
            own = draw.normal(0, 0.1, 2)
            ratio.add({10.0: 0.8 * total + own[0], 100.0: 0.5 * total + own[1]}, total)
        ratios.append(ratio.value(100.0) / ratio.value(10.0))
        doubts.append(ratio.doubt(10.0, 100.0))
    assert np.mean(doubts) == pytest.approx(np.std(ratios) / np.mean(ratios), rel=0.2)
    assert np.mean(doubts) < 0.5 / ratio.errors  # what they have in common cancels
