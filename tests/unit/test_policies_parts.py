"""The parts of the policies one by one: average, ladder, cost model, send rule, choice."""

from __future__ import annotations

import json
from math import inf, isnan, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.average import Average, weight_for
from policies.base import DENSE, Measurement, StepReport
from policies.choice import choose, nothing_lost, saturation
from policies.cost import CostModel
from policies.evidence import Evidence
from policies.ladder import MAX_RUNGS, make_ladder
from policies.reasons import change
from policies.send_rule import MAX_DOUBLINGS, SOON, Level, SendRule

# Average

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


def test_average_restarts_and_is_saved():
    average = Average(0.1)
    for value in (1.0, 2.0, 5.0):
        average.add(value)
    copy = Average(0.1)
    copy.load_state_dict(json.loads(json.dumps(average.state_dict())))
    for one in (average, copy):
        one.add(7.0)
    assert (copy.value, copy.count) == (average.value, 4)
    average.restart()
    assert (average.count, isnan(average.value)) == (0, True)
    average.add(7.0)
    assert average.value == pytest.approx(7.0)


@pytest.mark.parametrize(("ranks", "weight"), [(2, 0.02), (32, 0.32), (50, 0.5), (400, 0.5)])
def test_weight_grows_with_the_ranks(ranks, weight):
    assert weight_for(ranks) == weight


# Ladder


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


# Cost model


def timed(cf, seconds, nbytes=nan, compress=nan):
    return StepReport(
        step=0,
        cf=77.0,  # whatever is sent now: the times belong to timed_cf
        timed_cf=cf,
        median_seconds=seconds,
        timed_bytes=nbytes,
        compress_seconds=compress,
    )


def cost_of(*steps):
    model = CostModel()
    for step in steps:
        model.observe(timed(*step))
    return model


def test_cost_model_finds_the_line():
    # a = 0.1 s, b = 2e-6 s a byte, compression 0.03 and 0.02 s; dense pays 0.04 s for probes only
    model = cost_of(
        (DENSE, 0.1 + 2e-6 * 1e6 + 0.04, 1e6, 0.04),
        (10.0, 0.1 + 2e-6 * 2e5 + 0.03, 2e5, 0.03),
        (100.0, 0.1 + 2e-6 * 2e4 + 0.02, 2e4, 0.02),
    )
    assert model.fit() == pytest.approx((0.1, 2e-6))
    assert model.predict(5e4, 0.01) == pytest.approx(0.1 + 2e-6 * 5e4 + 0.01)
    assert model.seconds(DENSE) == pytest.approx(2.1)  # what dense would take without probes
    assert model.seconds(10.0) == pytest.approx(0.53)
    assert model.seconds(77.0) is None
    assert (model.compress(10.0), model.compress(77.0)) == (pytest.approx(0.03), 0.0)


def test_cost_model_says_that_it_does_not_know():
    assert CostModel().predict(0) is None
    model = cost_of((10.0, 0.5, 100.0), (20.0, 0.4, 100.0), (40.0, 0.3))
    assert model.fit() is None
    assert model.predict(100.0) is None
    assert model.seconds(40.0) == 0.3
    model.observe(timed(40.0, 0.3, 50.0))
    assert model.predict(100.0) == pytest.approx(0.45)


def test_cost_model_and_byte_counts_beyond_reason():
    assert cost_of((10.0, 1.0, 0.0), (20.0, 2.0, 1.0)).fit() == pytest.approx((1.0, 1.0))
    assert cost_of((10.0, 1.0, 1e200), (20.0, 2.0, 2e200)).fit() is None
    assert cost_of((10.0, 1.0, -5.0), (20.0, 2.0, 1.0)).fit() is None


def test_cost_model_averages_compression_with_steps_that_had_none():
    model = cost_of((10.0, 0.5, 8.0, 0.0), (10.0, 0.5, 8.0, 0.1))
    assert model.compress(10.0) == pytest.approx(0.1 * 0.1 / (0.1 * 0.9 + 0.1))


def test_cost_model_is_least_squares():
    model = cost_of((1.0, 1.0, 0.0), (2.0, 2.0, 1.0), (4.0, 4.0, 2.0))
    assert model.fit() == pytest.approx((5 / 6, 1.5))


def test_cost_model_never_has_negative_parts():
    a, b = cost_of((10.0, 0.2, 100.0), (20.0, 0.4, 50.0)).fit()
    assert (a, b) == (pytest.approx(0.3), 0.0)
    a, b = cost_of((10.0, 1.0, 100.0), (20.0, 0.1, 50.0)).fit()
    assert (a, b) == (0.0, pytest.approx((100 * 1.0 + 50 * 0.1) / (100**2 + 50**2)))
    assert cost_of((DENSE, 0.3, 10.0, 0.4)).seconds(DENSE) == 0.3  # nonsense is not subtracted


@pytest.mark.parametrize("bad", [nan, inf, 0.0, -1.0])
def test_cost_model_skips_times_that_are_none(bad):
    model = cost_of((10.0, 0.5), (10.0, bad), (bad if bad != inf else nan, 0.1))
    assert model.seconds(10.0) == 0.5


def test_cost_model_takes_the_latest_time_and_is_saved():
    model = cost_of((10.0, 0.5, 8.0, 0.1), (DENSE, 1.0, 80.0, 0.1), (10.0, 0.4, 8.0, 0.2))
    assert model.seconds(10.0) == 0.4
    copy = CostModel()
    copy.load_state_dict(json.loads(json.dumps(model.state_dict())))
    for one in (model, copy):
        one.observe(timed(10.0, 0.3, 9.0, 0.4))
    assert copy.fit() == model.fit()
    assert copy.compress(10.0) == model.compress(10.0)


def test_a_cost_model_that_forgets_makes_its_own_medians():
    model = cost_of((10.0, 0.5, 8.0, 0.1), (DENSE, 1.0, 80.0))
    model.forget()
    assert (model.seconds(10.0), model.fit(), model.compress(10.0)) == (None, None, 0.0)
    # The controller's median is still the old one; the steps tell.
    for seconds in (0.2, 0.9, 0.3):
        report = timed(10.0, 0.5)
        model.observe(StepReport(**{**vars(report), "seconds": seconds}))
    assert model.seconds(10.0) == 0.3
    model.observe(timed(20.0, 0.7))  # no time of the step alone
    assert model.seconds(20.0) == 0.7
    copy = CostModel()
    copy.load_state_dict(json.loads(json.dumps(model.state_dict())))
    for one in (model, copy):
        one.observe(StepReport(**{**vars(timed(10.0, 0.5)), "seconds": 0.25}))
    assert copy.seconds(10.0) == model.seconds(10.0) == 0.25
    for _ in range(100):
        model.observe(timed(10.0, 0.1))
    assert len(dict(model.state_dict()["since"])[10.0]) == 32


def test_step_times_without_compression():
    model = cost_of((10.0, 0.5, 8.0, 0.1), (20.0, 0.4), (40.0, 0.1, 8.0, 0.3))
    assert model.without_compression() == pytest.approx({10.0: 0.4, 20.0: 0.4, 40.0: 0.1})


# Evidence


def evidence(gains, times):
    """Of one measurement and one step each; times in seconds."""
    seen = Evidence("gradient", 0.5, 1)
    for cf, gain in gains.items():
        measured = {cf: Measurement(sample_error=1 - gain, sample_total=1)}
        seen.observe(StepReport(0, cf, measured), {cf})
    for cf, seconds in times.items():
        seen.observe(timed(cf, seconds), ())
    return seen


def test_a_network_that_changed_leaves_the_gains_known_until_they_are_measured():
    seen = evidence({10.0: 0.75, 20.0: 0.5}, {DENSE: 1.0, 10.0: 0.5})
    seen.judge(10.0, 20.0)
    seen.forget_all_but(())
    assert seen.gain(20.0) is None
    seen.forget_times()
    assert (seen.gain(10.0), seen.gain(20.0), seen.gain(40.0)) == (0.75, 0.5, None)
    assert (seen.t_sys(10.0), seen.t_comp(0.1)) == (None, {})
    measured = {20.0: Measurement(sample_error=0.75, sample_total=1)}
    seen.observe(StepReport(0, 20.0, measured), {20.0})
    assert seen.gain(20.0) == 0.25
    copy = Evidence("gradient", 0.5, 1)
    copy.load_state_dict(json.loads(json.dumps(seen.state_dict())))
    assert (copy.gain(10.0), copy.gain(20.0)) == (0.75, 0.25)


def test_gains_that_changed_leave_the_times_known():
    seen = evidence({10.0: 0.75}, {DENSE: 1.0, 10.0: 0.5})
    seen.judge(10.0)
    seen.forget_gains()
    assert (seen.gain(10.0), seen.t_comp(0.1)) == (None, {})
    assert (seen.t_sys(10.0), seen.t_sys(DENSE)) == (2.0, 1.0)


@pytest.mark.parametrize(
    ("gain", "seconds", "why"),
    [
        (0.6, {20.0: 0.4}, "CF 20 has gain 0.6 now, T_comp 1.5 > 1.1 x 1 of CF 10"),
        (0.42, {20.0: 0.4}, ""),  # 1.05, within omega
        (0.4, {20.0: 0.1}, ""),  # fast, but below what is sent again
        (0.6, {}, "CF 20 has not been sent and has gain 0.6 >= 0.41 now"),
        (0.4, {}, ""),
    ],
)
def test_what_promises_to_be_better(gain, seconds, why):
    seen = evidence({10.0: 0.5, 20.0: gain}, {10.0: 0.5, **seconds})
    assert seen.promising((20.0, 40.0), 10.0, 0.41, 0.1) == why


# Send rule


def rule_at(level, epsilon=0.5, hysteresis=0.1, cooldown=10):
    rule = SendRule(epsilon, hysteresis, cooldown)
    rule.enter(level)
    return rule


@pytest.mark.parametrize(
    ("level", "floor", "candidate", "new", "why"),
    [
        (Level.CANDIDATE, 0.9, 0.5, Level.CANDIDATE, ""),
        (Level.CANDIDATE, 0.9, None, Level.CANDIDATE, ""),
        (Level.CANDIDATE, 0.5, 0.49, Level.FLOOR, "gain 0.49 < epsilon 0.5"),
        (Level.CANDIDATE, None, 0.49, Level.FLOOR, "gain 0.49 < epsilon 0.5"),
        (Level.CANDIDATE, 0.48, 0.49, Level.DENSE, "gain 0.49 < epsilon 0.5"),
        (Level.FLOOR, 0.5, 0.2, Level.FLOOR, ""),
        (Level.FLOOR, None, None, Level.FLOOR, ""),
        (Level.FLOOR, 0.49, 0.2, Level.DENSE, "gain 0.49 < epsilon 0.5"),
        (Level.FLOOR, 0.9, 0.54, Level.FLOOR, ""),
        (Level.FLOOR, 0.9, 0.56, Level.CANDIDATE, "gain 0.56 >= 0.55 (epsilon 0.5 and hysteresis)"),
        (Level.DENSE, 0.54, 0.2, Level.DENSE, ""),
        (Level.DENSE, None, None, Level.DENSE, ""),
        (Level.DENSE, 0.56, 0.2, Level.FLOOR, "gain 0.56 >= 0.55 (epsilon 0.5 and hysteresis)"),
        (Level.DENSE, 0.9, 0.9, Level.FLOOR, "gain 0.9 >= 0.55 (epsilon 0.5 and hysteresis)"),
        (Level.DENSE, 0.2, 0.9, Level.CANDIDATE, "gain 0.9 >= 0.55 (epsilon 0.5 and hysteresis)"),
    ],
)
def test_each_branch_of_the_send_rule(level, floor, candidate, new, why):
    rule = rule_at(level)
    assert rule.step(floor, candidate) == why
    assert rule.level == new


def test_hysteresis_asks_for_no_more_than_1():
    rule = rule_at(Level.DENSE, epsilon=0.95)
    assert rule.step(0.999, None) == ""
    assert rule.step(1.0, None) != ""
    assert rule.level == Level.FLOOR


def steps_until_up(rule, limit=10_000):
    for n in range(1, limit):
        if rule.step(0.9, None):
            assert rule.level == Level.FLOOR
            return n
    raise AssertionError("never went up")


def test_going_up_waits_for_the_cooldown_and_down_does_not():
    rule = rule_at(Level.FLOOR)
    rule.step(0.1, None)
    assert rule.level == Level.DENSE
    assert steps_until_up(rule) == 10
    rule.step(0.1, None)
    assert rule.level == Level.DENSE


def test_one_level_up_waits_for_the_next():
    rule = rule_at(Level.DENSE)
    levels = [(rule.step(0.9, 0.9), rule.level)[1] for _ in range(12)]
    assert levels == [Level.FLOOR] * 10 + [Level.CANDIDATE] * 2


def test_the_cooldown_doubles_with_each_mistake_up_to_a_bound():
    rule = rule_at(Level.FLOOR)
    waits = []
    for _ in range(MAX_DOUBLINGS + 3):
        rule.step(0.1, None)
        waits.append(steps_until_up(rule))
    assert waits == [10, 20, 40, 80, 160, 320, 640, 640, 640]


@pytest.mark.parametrize(("lasted", "wait"), [(1, 80), (100, 80), (160, 80), (161, 10)])
def test_an_up_move_that_lasted_makes_the_cooldown_what_it_was(lasted, wait):
    rule = rule_at(Level.FLOOR)
    for earlier in (10, 20, 40):
        rule.step(0.1, None)
        assert steps_until_up(rule) == earlier
    assert SOON * 40 == 160
    for _ in range(lasted - 1):
        assert rule.step(0.9, None) == ""
    rule.step(0.1, None)
    assert steps_until_up(rule) == wait


def test_both_steps_down_count_as_one_mistake():
    rule = rule_at(Level.DENSE)
    rule.step(0.1, None)
    rule.enter(Level.FLOOR)
    rule.step(0.1, None)
    assert steps_until_up(rule) == 10
    while rule.level != Level.CANDIDATE:
        rule.step(0.9, 0.9)
    rule.step(0.9, 0.1)
    assert rule.level == Level.FLOOR
    rule.step(0.1, 0.1)
    assert rule.level == Level.DENSE
    assert steps_until_up(rule) == 20


def test_the_first_move_after_enter_is_free_and_no_mistake():
    rule = rule_at(Level.FLOOR)
    rule.step(0.9, 0.9)
    assert rule.level == Level.CANDIDATE
    rule.step(0.9, 0.1)
    waited = 0
    while rule.level != Level.CANDIDATE:
        rule.step(0.9, 0.9)
        waited += 1
    assert waited == 10  # not 20


def test_the_send_rule_is_saved():
    rule = rule_at(Level.FLOOR)
    for gain in (0.1, *[0.9] * 12, 0.1, 0.9, 0.9):
        rule.step(gain, None)
    copy = SendRule(0.5, 0.1, 10)
    copy.load_state_dict(json.loads(json.dumps(rule.state_dict())))
    waited = steps_until_up(copy)
    assert waited == steps_until_up(rule) == 18  # in the middle of a doubled cooldown


# Choice


@pytest.mark.parametrize(
    ("t_comp", "omega", "kept", "why"),
    [
        ({10: 1.0, 20: 2.0, 40: 3.0}, 0.1, 40, "largest at 40"),
        ({40: 1.0, 20: 2.0, 10: 3.0}, 0.1, 10, "largest at 10"),
        ({10: 1.0, 20: 3.0, 40: 2.0}, 0.1, 20, "largest at 20"),
        ({10: 1.0, 20: 2.0, 40: 2.1}, 0.1, 20, "saturates at 20, |2.1 - 2| / 2 = 0.050 <= omega"),
        ({10: 1.0, 20: 2.0, 40: 1.9}, 0.1, 20, "saturates at 20, |1.9 - 2| / 2 = 0.050 <= omega"),
        ({10: 1.0, 20: 2.0, 40: 2.1}, 0.01, 40, "largest at 40"),
        ({10: 1.0, 20: 1.05, 40: 9.0}, 0.1, 40, "largest at 40"),  # a plateau is not the end
        ({10: 1.0, 20: 1.08, 40: 1.16}, 0.1, 40, "largest at 40"),  # small steps add up
        ({10: 1.0, 20: 1.05, 40: 0.1}, 0.1, 10, "saturates at 10"),
        ({10: 1.0, 20: 1.5}, 0.5, 10, "saturates at 10"),
        ({64: 1.0}, 0.1, 64, "largest at 64"),
    ],
)
def test_saturation(t_comp, omega, kept, why):
    chosen, reason = saturation(t_comp, omega)
    assert chosen == kept
    assert why in reason
    for cf, value in t_comp.items():
        assert f"{value:.4g} at {cf}" in reason


def test_choice_against_dense():
    t_comp = {10.0: 0.98, 20.0: 1.05}
    assert choose(t_comp, None, 0.1)[0] == 10.0
    assert choose({10.0: 1.0, 20.0: 2.0}, 1.0, 1.0)[0] == 20.0  # as good as dense is not better
    # 10 is within omega of 20, but it does not beat dense
    assert choose(t_comp, 1.0, 0.1)[0] == 20.0
    assert choose(t_comp, 1.05, 0.1) == (1.0, "best T_comp 1.05 (CF 20) <= 1.05 of dense")


@pytest.mark.parametrize(
    ("floor_gain", "gain", "omega", "may", "why"),
    [
        (0.912, 0.906, 0.01, True, "|0.912 - 0.906| / 0.912 = 0.007 <= omega 0.01"),
        (0.9, 0.6, 0.1, False, "|0.9 - 0.6| / 0.9 = 0.333 > omega 0.1"),
        (1.0, 0.5, 0.5, True, "= 0.500 <= omega 0.5"),
        (0.3, 0.3, 0.1, True, "= 0.000 <= omega 0.1"),
        (0.6, 0.9, 0.1, False, "|0.6 - 0.9| / 0.6 = 0.500 > omega 0.1"),
        (0.31, 0.29, 0.1, False, "= 0.065 <= omega 0.1 but gain < epsilon 0.3"),
        (0.0, 0.5, 0.1, False, "> omega"),
        (None, 0.5, 0.1, False, "gains not known"),
        (0.5, None, 0.1, False, "gains not known"),
    ],
)
def test_when_the_floor_may_move(floor_gain, gain, omega, may, why):
    verdict, reason = nothing_lost(floor_gain, gain, omega, epsilon=0.3)
    assert verdict is may
    assert why in reason


def test_reasons():
    assert change(10, 20, "because") == "scale up 10 -> 20: because"
    assert change(160, 10, "because") == "scale down 160 -> 10: because"
    assert change(10, 1, "because") == "dense: 10 -> 1, because"
    assert change(1, 1.5, "because") == "scale up 1 -> 1.5: because"
    assert change(10, 10, "because") == "because"
