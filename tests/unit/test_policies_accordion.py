"""Accordion's regimes from hand-made norms and learning rates."""

from __future__ import annotations

import json
from itertools import pairwise
from math import cos, inf, nan, pi

import pytest

from policies.accordion import LATE, Accordion
from policies.base import Context, Plan, StepReport
from policies.gravac import GraVAC
from tests.unit.plans import reasons

RANGE = (10.0, 1000.0)


def started(**settings):
    policy = Accordion(**{"interval": 5, **settings})
    policy.start(Context(RANGE, 2))
    return policy


def drive(policy, norms=(), lrs=(), steps=None):
    """Run; norms[i] is what the i-th reading gives, lrs[i] the rate of step i. Returns the plans.

    Where norms or rates run out, the last one goes on (nan if there was none).
    """
    plans: list[Plan] = []
    readings = 0
    for step in range(len(norms) * policy.interval if steps is None else steps):
        plan = policy.plan()
        plans.append(plan)
        norm = nan
        if plan.read_sum:
            norm = norms[min(readings, len(norms) - 1)] if norms else nan
            readings += 1
        lr = lrs[min(step, len(lrs) - 1)] if lrs else nan
        policy.observe(StepReport(step, plan.send, sum_norm=norm, lr=lr))
    return plans


def by_interval(plans, interval=5):
    """The CF of each interval, which must be the same throughout it."""
    blocks = [plans[i : i + interval] for i in range(0, len(plans), interval)]
    assert all(len({plan.send for plan in block}) == 1 for block in blocks)
    return [block[0].send for block in blocks]


def test_it_sums_always_and_reads_at_each_intervals_end():
    plans = drive(started(), norms=[1, 1, 1])
    assert all(plan.accumulate for plan in plans)
    assert [i for i, plan in enumerate(plans) if plan.read_sum] == [4, 9, 14]


def test_every_step_may_be_an_interval():
    plans = drive(started(interval=1), norms=[1.0, 1.0, 1.0, 9.0, 9.0])
    assert all(plan.read_sum for plan in plans)
    assert [plan.send for plan in plans] == [10, 10, 1000, 1000, 10]


def test_critical_until_two_sums_can_be_compared_then_by_eta():
    plans = drive(started(), norms=[8.0, 6.0, 3.0, 1.6, 1.6, 1.6])
    assert by_interval(plans) == [10, 10, 1000, 10, 1000, 1000]
    assert reasons(plans) == [
        "critical regime over\nnorm of its accumulated gradient 8 to "
        "6, a change of 25%, less than eta 50%",
        "critical regime\nnorm of its accumulated gradient 6 to 3, a "
        "change of 50%, at least eta 50%",
        "critical regime over\nnorm of its accumulated gradient 3 to "
        "1.6, a change of 47%, less than eta 50%",
    ]
    for before, plan in pairwise(plans):
        assert bool(plan.reason) == (plan.send != before.send)


def test_a_norm_that_grows_is_critical_too():
    plans = drive(started(), norms=[4.0, 4.0, 6.0, 6.0])
    assert by_interval([*plans, started().plan()])[:4] == [10, 10, 1000, 10]


@pytest.mark.parametrize(
    ("norms", "cfs"),
    [
        ([4.0, 4.0, nan, 4.0, 4.0], [10, 10, 1000, 1000, 1000]),
        ([4.0, 4.0, inf, 1.0, 1.0], [10, 10, 1000, 1000, 10]),  # 1 is compared with the last 4
        ([4.0, nan, 4.0, 4.0], [10, 10, 10, 1000]),
        ([4.0, -1.0, 4.0, 4.0], [10, 10, 10, 1000]),  # no norm
        ([nan, nan, nan, nan], [10, 10, 10, 10]),
    ],
)
def test_a_sum_that_is_not_finite_keeps_the_regime(norms, cfs):
    policy = started()
    plans = drive(policy, norms=norms)
    assert by_interval(plans) == cfs
    started().load_state_dict(json.loads(json.dumps(policy.state_dict(), allow_nan=False)))


@pytest.mark.parametrize(
    ("norms", "last"),
    [([0.0, 0.0, 0.0], 10), ([0.0, 1.0, 1.0], 10), ([1.0, 0.0, 0.0], 10), ([2.0, 2.0, 1.1], 1000)],
)
def test_an_old_norm_of_zero_is_critical_as_a_change_to_zero_is(norms, last):
    assert by_interval(drive(started(), norms=norms))[-1] == last


def test_a_dropped_learning_rate_counts_at_once_and_for_the_next_interval():
    lrs = [0.1] * 17 + [0.01]
    plans = drive(started(), norms=[1.0], lrs=lrs, steps=40)
    # high from step 10; the rate drops in step 17, in the interval that ends with step 19
    assert [plan.send for plan in plans] == [10] * 10 + [1000] * 8 + [10] * 7 + [1000] * 15
    assert plans[18].reason == ("critical regime: learning rate 0.1 -> 0.01")
    assert "critical regime over" in plans[25].reason


def test_a_drop_with_an_intervals_last_step_belongs_to_that_interval():
    plans = drive(started(), norms=[1.0], lrs=[0.1] * 14 + [0.01], steps=25)
    assert [plan.send for plan in plans] == [10] * 10 + [1000] * 5 + [10] * 5 + [1000] * 5


def test_a_drop_where_every_step_is_an_interval():
    plans = drive(started(interval=1), norms=[1.0], lrs=[0.1] * 4 + [0.01], steps=8)
    assert [plan.send for plan in plans] == [10, 10, 1000, 1000, 1000, 10, 1000, 1000]


def test_the_sum_read_with_a_drop_is_the_next_ones_yardstick():
    # norms 1, 1, 5 (read with the drop), 5: were the 5 not put down, the last would be a change
    plans = drive(started(), norms=[1.0, 1.0, 5.0, 5.0], lrs=[0.1] * 14 + [0.01], steps=25)
    assert by_interval(plans) == [10, 10, 1000, 10, 1000]


def test_a_drop_in_a_critical_regime_prolongs_it_silently():
    plans = drive(started(), norms=[1.0], lrs=[0.1] * 7 + [0.01], steps=20)
    assert by_interval(plans) == [10, 10, 10, 1000]
    assert len(reasons(plans)) == 1


@pytest.mark.parametrize(
    "lrs",
    [
        [0.05 * (1 + cos(pi * step / 400)) for step in range(300)],  # cosine
        [0.1 * 0.9**step for step in range(300)],  # exponential
        [0.1 * step for step in range(300)],  # warm-up, from zero
        [0.1 * (nan if step % 3 else 1) for step in range(300)],
        [0.1] * 150 + [0.06] * 150,  # a drop, but to more than half
        [0.0] * 150 + [-1e-18] * 150,  # as rounding makes it at the end of a cosine
    ],
)
def test_schedules_that_do_not_drop(lrs):
    plans = drive(started(), norms=[1.0], lrs=lrs, steps=300)
    assert {plan.send for plan in plans[10:]} == {1000}


@pytest.mark.parametrize(("rate_drop", "critical"), [(0.5, False), (0.6, True), (1.0, True)])
def test_how_much_a_rate_must_fall_is_a_setting(rate_drop, critical):
    plans = drive(started(rate_drop=rate_drop), norms=[1.0], lrs=[1.0] * 20 + [0.55], steps=23)
    assert plans[20].send == 1000
    assert (plans[22].send == 10) == critical


def test_a_rate_that_stays_or_rises_never_drops():
    plans = drive(started(rate_drop=1.0), norms=[1.0], lrs=[0.1, 0.1, 0.2] * 7 + [0.2], steps=15)
    assert plans[-1].send == 10  # 0.2 -> 0.1 is a drop
    plans = drive(started(rate_drop=1.0), norms=[1.0], lrs=[0.1] * 12 + [0.2], steps=30)
    assert {plan.send for plan in plans[10:]} == {1000}


@pytest.mark.parametrize("lrs", [[0.1] * 20 + [0.05], [0.1] * 20 + [0.0], [0.1] * 20 + [nan, 0.01]])
def test_rates_that_do(lrs):
    plans = drive(started(), norms=[1.0], lrs=lrs, steps=23)
    assert plans[20].send == 1000
    assert plans[22].send == 10


def test_low_and_high():
    policy = started(low=1, high=40.5)
    assert {plan.send for plan in drive(policy, norms=[1.0, 1.0, 1.0])} == {1.0, 40.5}
    policy = started(low=20, high=20)
    assert not reasons(drive(policy, norms=[1.0, 1.0, 9.0])[:10])


def test_status():
    policy = started()
    assert dict(policy.status()) == pytest.approx({"critical": 1, "sum_norm": nan}, nan_ok=True)
    drive(policy, norms=[8.0, 7.0])
    assert dict(policy.status()) == {"critical": 0, "sum_norm": 7.0}


def test_a_state_is_of_one_set_of_settings():
    state = json.loads(json.dumps(started().state_dict()))
    started().load_state_dict(state)
    with pytest.raises(ValueError, match=r"'accordion'.*eta=0\.5.*0\.4"):
        started(eta=0.4).load_state_dict(state)
    other = Accordion(interval=5)
    other.start(Context((20.0, 1000.0), 2))
    with pytest.raises(ValueError, match="candidates"):
        other.load_state_dict(state)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"eta": 0}, ValueError, "eta=0: must be a finite number > 0"),
        ({"eta": nan}, ValueError, "eta=nan"),
        ({"eta": "x"}, TypeError, "eta='x'"),
        ({"interval": 0}, ValueError, "interval=0"),
        ({"interval": 1.5}, TypeError, "interval=1.5"),
        ({"low": 0.5}, ValueError, "low=0.5: must be a finite number >= 1"),
        ({"low": nan}, ValueError, "low=nan"),
        ({"high": inf}, ValueError, "high=inf"),
        ({"high": "10"}, TypeError, "high='10'"),
        ({"high": GraVAC()}, TypeError, "high=GraVAC"),
        ({"epoch": 0}, ValueError, "epoch=0: must be an int >= 1"),
        ({"epoch": 100}, ValueError, "epoch=100: must be less than interval=100"),
        ({"rate_drop": 1.5}, ValueError, r"rate_drop=1.5: must be in \(0, 1\]"),
        ({"compress_vectors": False}, ValueError, "need per_layer=True"),
        ({"as_ranks": True, "low": 4, "high": 1}, ValueError, "need per_layer=True"),
        ({"as_ranks": True, "per_layer": True}, TypeError, "low=None: must be an int >= 1"),
        (
            {"as_ranks": True, "per_layer": True, "low": 1, "high": 4},
            ValueError,
            "low=1: must not be a smaller rank than high=4",
        ),
    ],
)
def test_settings_are_checked(settings, error, message):
    with pytest.raises(error, match=message):
        Accordion(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"low": 5}, r"low=5: must be 1 \(dense\) or inside cf_range \(10, 1000\)"),
        ({"high": 2000}, "high=2000"),
        ({"low": 100, "high": 50}, "low=100: must not exceed high=50"),
        ({"high": 1}, "low=10: must not exceed high=1"),
    ],
)
def test_settings_must_fit_the_range(settings, message):
    with pytest.raises(ValueError, match=message):
        Accordion(**settings).start(Context(RANGE, 2))


LAYERS = {"conv": (10, 30), "fc": (7, 100)}


def by_layer(low=10.0, high=100.0, **settings):
    policy = Accordion(low, high, per_layer=True, **{"interval": 2, **settings})
    policy.start(Context((10, 100), 2, layers=LAYERS))
    return policy


def interval(policy, conv, fc, lr=0.1):
    """One interval whose sums have these norms; returns the plan after it."""
    for _ in range(policy.interval):
        plan = policy.plan()
        told = {"conv": conv, "fc": fc} if plan.read_sum else {}
        policy.observe(StepReport(0, plan.send, sum_norm=nan, lr=lr, layer_norms=told))
    return policy.plan()


def test_each_layer_has_a_regime_of_its_own():
    policy = by_layer()
    assert policy.plan().send == 10
    assert interval(policy, 1.0, 1.0).send == 10  # one sum tells nothing
    plan = interval(policy, 1.0, 9.0)
    assert plan.layers == {"conv": 100.0, "fc": 10.0}
    assert plan.send == pytest.approx(1000 / (300 / 100 + 700 / 10))  # all elements / elements kept
    assert "critical regime over\nconv: norm of its accumulated gradient 1 to 1" in plan.reason
    plan = interval(policy, 1.0, 9.0)
    assert (plan.send, plan.layers) == (100, {})
    plan = interval(policy, 9.0, 9.0)
    assert plan.layers == {"conv": 10.0, "fc": 100.0}
    assert policy.status()["critical"] == 0.5


def test_a_rate_that_drops_makes_every_layer_critical():
    policy = by_layer()
    for _ in range(2):
        interval(policy, 1.0, 1.0)
    assert policy.plan().send == 100
    assert interval(policy, 1.0, 1.0, lr=0.01).send == 10  # and for the next interval
    assert interval(policy, 1.0, 1.0, lr=0.01).send == 100


def test_by_layer_goes_on_from_its_state():
    saved, straight = by_layer(), by_layer()
    for policy in (saved, straight):
        interval(policy, 1.0, 1.0)
        interval(policy, 1.0, 9.0)
    again = by_layer()
    again.load_state_dict(json.loads(json.dumps(saved.state_dict())))
    assert again.plan() == straight.plan()
    assert interval(again, 9.0, 9.0) == interval(straight, 9.0, 9.0)
    other = Accordion(10.0, 100.0, per_layer=True, interval=2)
    other.start(Context((10, 100), 2, layers={"conv": (10, 30)}))
    with pytest.raises(ValueError, match="layers"):
        other.load_state_dict(saved.state_dict())


def test_layers_must_be_known():
    with pytest.raises(ValueError, match="layers are not known"):
        Accordion(per_layer=True).start(Context((10, 100), 2))


@pytest.mark.parametrize("interval", [5, 20])
@pytest.mark.parametrize("before_its_end", range(5))
def test_a_state_that_is_saved_in_every_interval_changes_no_regime(before_its_end, interval):
    """To be saved, all reports that are on their way are taken in at once. Gradients are alike."""
    policy, late, readings, summed = started(interval=interval), [], [], 0
    for step in range(20 * interval):
        plan = policy.plan()
        summed += 1
        norm = nan
        if plan.read_sum:
            norm, summed = float(summed), 0
            readings.append(step)
        late.append(StepReport(step, plan.send, sum_norm=norm))
        saved = step % interval == interval - 1 - before_its_end
        for report in late[: len(late) if saved else len(late) - 1]:
            policy.observe(report)
            late = late[1:]
    assert not policy.critical
    assert max(b - a for a, b in pairwise([0, *readings])) <= 2 * interval + 2 * LATE
    assert len(readings) <= 40
