"""Layerwise: another policy's bytes, divided among the layers."""

from __future__ import annotations

import json
from itertools import product
from math import inf, nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import (
    Accordion,
    Context,
    Fixed,
    Goodput,
    GraVAC,
    LayerReport,
    Layerwise,
    StepReport,
    make_policy,
)
from policies.baselines import Schedule
from policies.layerwise import Option, allocate, hull

NUMELS = {"big": 10_000, "small": 100}
STEADY = {
    "big": {10.0: 0.5, 20.0: 0.3, 40.0: 0.2, 80.0: 0.1, 100.0: 0.08},
    "small": {10.0: 0.9, 20.0: 0.8, 40.0: 0.6, 80.0: 0.5, 100.0: 0.4},
}


def context(**other):
    def nbytes(layer, cf):
        return 4 * NUMELS[layer] if cf == 1 else 5 * NUMELS[layer] / cf

    return Context((10, 100), 2, **{"layers": NUMELS, "layer_bytes": nbytes, **other})


def layers(energy=None):
    energy = energy or {"big": 0.01, "small": 1.0}
    return {name: LayerReport(energy[name], steady=STEADY[name]) for name in NUMELS}


def run(policy, windows, energy=None):
    """Every plan; layers are reported when they were asked for."""
    plans = []
    for step in range(windows * policy.window + 1):
        plan = policy.plan()
        plans.append(plan)
        told = layers(energy) if plan.read_layers else {}
        policy.observe(StepReport(step, plan.send, layers=told))
    return plans


def nbytes(policy, plan, of=context()):  # noqa: B008 - never changed
    return sum(of.layer_bytes(name, plan.layers[plan.send].get(name, plan.send)) for name in NUMELS)


def test_alike_until_a_window_is_over_then_more_where_the_energy_is():
    policy = Layerwise(Fixed(cf=40), window=3)
    policy.start(context())
    plans = run(policy, 1)
    assert [plan.read_layers for plan in plans] == [False, False, True, False]
    assert all(not plan.layers for plan in plans[:3])
    after = plans[3]
    assert after.send == 40
    cfs = after.layers[40.0]
    assert cfs["small"] < 40 < cfs["big"]
    assert nbytes(policy, after) <= 5 * 10_100 / 40
    assert after.reason.startswith(f"layer CFs solved anew: {cfs['small']:g} to {cfs['big']:g}")


def test_solved_again_when_the_energy_has_moved():
    policy = Layerwise(Fixed(cf=40), window=2)
    policy.start(context())
    first = run(policy, 1, {"big": 0.01, "small": 1.0})[-1]
    second = run(policy, 1, {"big": 0.01, "small": 0.0})[-1]
    assert first.layers[40.0]["small"] < 40
    assert second.layers == {}  # nothing leaves less waiting than all alike


def test_a_layer_is_not_starved_for_the_energy_of_now():
    """Equal energies: to keep most now, all bytes would go to the small layer, and ten times as
    much would come to wait in the big one."""
    policy = Layerwise(Fixed(cf=40), window=2)
    policy.start(context())
    assert run(policy, 1, {"big": 1.0, "small": 1.0})[-1].layers == {}


def test_probed_cfs_are_divided_too_and_dense_is_not():
    policy = Layerwise(Fixed(cf=20, probe=(80,)), window=1)
    policy.start(context())
    plan = run(policy, 1)[-1]
    assert set(plan.layers) == {20.0, 80.0}
    dense = Layerwise(Fixed(cf=1), window=1)
    dense.start(context())
    assert run(dense, 2)[-1].layers == {}


@pytest.mark.parametrize("energy", [nan, inf, -1.0])
def test_a_layer_of_which_nothing_is_known_stays_where_it_is(energy):
    policy = Layerwise(Fixed(cf=40), window=1)
    policy.start(context())
    plan = run(policy, 1, {"big": 1.0, "small": energy})[-1]
    assert plan.layers.get(40.0, {}).get("small", 40.0) == 40.0


def test_the_inner_policy_decides_what_is_sent():
    alone, inside = GraVAC(window=8), Layerwise(GraVAC(window=8), window=4)
    for policy in (alone, inside):
        policy.start(context())
    assert inside.gain == alone.gain
    for step in range(60):
        theirs, ours = alone.plan(), inside.plan()
        assert (ours.send, ours.probe) == (theirs.send, theirs.probe)
        told = layers() if ours.read_layers else {}
        for policy in (alone, inside):
            policy.observe(StepReport(step, theirs.send, layers=told))
    assert set(inside.candidates()) >= set(alone.candidates())


def test_goes_on_from_its_state():
    def make():
        policy = Layerwise(Fixed(cf=40), window=3)
        policy.start(context())
        return policy

    straight = make()
    run(straight, 2)
    saved = make()
    run(saved, 2)
    again = make()
    again.load_state_dict(json.loads(json.dumps(saved.state_dict(), allow_nan=False)))
    assert run(again, 2) == run(straight, 2)


def test_refuses_what_cannot_be():
    assert isinstance(make_policy("layerwise"), Layerwise)
    with pytest.raises(TypeError, match="then"):
        Layerwise("gravac")
    with pytest.raises(ValueError, match="whole model"):
        Layerwise(Layerwise())
    with pytest.raises(ValueError, match="whole model"):
        Layerwise(Accordion(per_layer=True))
    with pytest.raises(ValueError, match="layers are not known"):
        Layerwise().start(context(layers={}))
    saved = Layerwise(Fixed(cf=40))
    saved.start(context())
    other = Layerwise(Fixed(cf=40), window=7)
    other.start(context())
    with pytest.raises(ValueError, match="window"):
        other.load_state_dict(saved.state_dict())


def test_the_reason_is_of_the_cfs_that_are_sent_and_given_whenever_they_change():
    """`then` moves the CF with the solution, between two, to dense and back."""
    policy = Layerwise(Schedule({0: 80, 3: 20, 5: 40, 6: 1, 7: 80}), window=3)
    policy.start(context())
    plans = run(policy, 3)
    told = [plan.reason for plan in plans]
    assert [bool(reason) for reason in told] == [False] * 3 + [True, False] + [True] * 3 + [
        False
    ] * 2
    moved = "scale down 80 -> 20: the schedule has CF 20 from step 3; layer CFs solved anew: "
    assert told[3].startswith(moved)
    assert told[5].startswith("scale up 20 -> 40: the schedule has CF 40 from step 5; layer CFs")
    assert told[6] == "back to dense from CF 40: the schedule has CF 1 from step 6"
    for step in (3, 5, 7):
        cf, cfs = plans[step].send, plans[step].layers[plans[step].send].values()
        assert f"{min(cfs):g} to {max(cfs):g} for the bytes of CF {cf:g}" in told[step]
    assert "solved anew" not in told[5] + told[7]


def test_layers_that_become_alike_again_are_told_too():
    policy = Layerwise(Fixed(cf=40), window=2)
    policy.start(context())
    run(policy, 1, {"big": 0.01, "small": 1.0})
    plans = run(policy, 1, {"big": 0.01, "small": 0.0})
    told = next(plan for plan in plans if plan.reason)
    assert (told.layers, told.reason) == (
        {},
        "layer CFs solved anew: 40 to 40 for the bytes of CF 40",
    )


def test_the_same_solution_again_is_not_told():
    policy = Layerwise(Fixed(cf=40), window=2)
    policy.start(context())
    told = [plan.reason for plan in run(policy, 3)]
    assert [bool(reason) for reason in told] == [False, False, True, False, False, False, False]


def test_next_move_and_verdict_are_those_of_the_policy_that_sets_the_cf():
    policy = Layerwise(Goodput(gain="error_fed", cooldown=1, opening=1), window=2)
    policy.start(context())
    anew = "the layers' CFs are solved anew in"
    assert policy.next_move() == f"nothing is known of the other CFs yet; {anew} 2 steps"
    slow = {"timed_cf": 10.0, "seconds": 1.0, "median_seconds": 1.0}
    policy.observe(StepReport(0, 10.0, **slow, compress_seconds=0.9, exchange_seconds=0.0))
    assert policy.next_move().endswith(f"; {anew} 1 step")
    assert (policy.plan().send, policy.verdict()) == (1.0, "")
    policy.observe(StepReport(1, 1.0))
    assert policy.verdict() == "dense is right: no CF promises more progress a second"
    assert policy.next_move().endswith(f"; {anew} 2 steps")


# Which layer gets which CF


numbers = st.floats(0, 100)
many_layers = st.lists(
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


@settings(max_examples=50)
@given(points=many_layers, budget=st.floats(0, 400))
def test_never_more_than_the_budget_and_never_more_than_the_best(points, budget):
    options = options_of(points)
    found = allocate(options, budget)
    assert found.keys() == options.keys()
    cheapest = sum(min(each.nbytes for each in of_layer) for of_layer in options.values())
    assert sum(each.nbytes for each in found.values()) <= max(budget, cheapest) * (1 + 1e-9)
    most = best(options, budget)
    if most is not None:
        assert sum(each.worth for each in found.values()) <= most * (1 + 1e-9)


@settings(max_examples=30)
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
    worth = sum(each.worth for each in allocate(options, spent).values())
    assert worth == best(options, spent)


def test_the_bytes_go_where_the_energy_is():
    options = {
        "flat": [Option(100, 1, 1), Option(10, 10, 2), Option(1, 100, 3)],
        "steep": [Option(100, 1, 10), Option(10, 10, 60), Option(1, 100, 100)],
    }

    def cfs(budget):
        return {name: each.cf for name, each in allocate(options, budget).items()}

    assert cfs(20) == {"flat": 10, "steep": 10}
    assert cfs(12) == {"flat": 100, "steep": 10}
    assert cfs(101) == {"flat": 100, "steep": 1}
    assert cfs(0) == {"flat": 100, "steep": 100}  # the least there is


def test_what_costs_more_and_is_worth_less_is_never_taken():
    points = [Option(1, 10, 5), Option(2, 4, 6), Option(3, 4, 2), Option(4, 1, 1), Option(5, 2, 1)]
    assert [each.cf for each in hull(points)] == [4, 2]
