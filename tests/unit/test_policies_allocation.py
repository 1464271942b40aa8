"""Bytes shared out among layers: within the budget, and worth as much as can be."""

from __future__ import annotations

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from policies.layerwise import Option, allocate, hull

numbers = st.floats(0, 100)
layers = st.lists(
    st.lists(st.tuples(numbers, numbers), min_size=1, max_size=4), min_size=1, max_size=4
)


def options_of(points):
    return {
        f"layer{i}": [Option(float(cf), *point) for cf, point in enumerate(of_layer, start=1)]
        for i, of_layer in enumerate(points)
    }


def best(options, budget):
    """By trying everything; None if nothing fits."""
    worth = [
        sum(option.worth for option in chosen)
        for chosen in product(*options.values())
        if sum(option.nbytes for option in chosen) <= budget
    ]
    return max(worth, default=None)


@settings(max_examples=200)
@given(points=layers, budget=st.floats(0, 400))
def test_never_more_than_the_budget_and_never_more_than_the_best(points, budget):
    options = options_of(points)
    found = allocate(options, budget)
    cheapest = sum(min(each.nbytes for each in of_layer) for of_layer in options.values())
    assert found.nbytes <= max(budget, cheapest) * (1 + 1e-9)
    chosen = [
        next(each for each in of_layer if each.cf == found.cfs[name])
        for name, of_layer in options.items()
    ]
    assert found.worth == sum(option.worth for option in chosen)
    most = best(options, budget)
    if most is not None:
        assert found.worth <= most * (1 + 1e-9)


@settings(max_examples=100)
@given(
    gains=st.lists(
        st.lists(st.integers(0, 20), min_size=4, max_size=4).map(lambda g: sorted(g)[::-1]),
        min_size=1,
        max_size=4,
    ),
    spent=st.integers(0, 16),
)
def test_exact_where_every_further_byte_adds_less(gains, spent):
    """Concave curves with steps of one byte: greedy is the best there is."""
    options = {
        f"layer{i}": [Option(5.0 - n, float(n), float(sum(steps[:n]))) for n in range(5)]
        for i, steps in enumerate(gains)
    }
    assert allocate(options, spent).worth == best(options, spent)


def test_the_bytes_go_where_the_energy_is():
    options = {
        "flat": [Option(100, 1, 1), Option(10, 10, 2), Option(1, 100, 3)],
        "steep": [Option(100, 1, 10), Option(10, 10, 60), Option(1, 100, 100)],
    }
    assert allocate(options, 20).cfs == {"flat": 10, "steep": 10}
    assert allocate(options, 12).cfs == {"flat": 100, "steep": 10}
    assert allocate(options, 101).cfs == {"flat": 100, "steep": 1}
    assert allocate(options, 0).cfs == {"flat": 100, "steep": 100}  # the least there is


def test_what_costs_more_and_is_worth_less_is_never_taken():
    points = [Option(1, 10, 5), Option(2, 4, 6), Option(3, 4, 2), Option(4, 1, 1), Option(5, 2, 1)]
    assert [each.cf for each in hull(points)] == [4, 2]
