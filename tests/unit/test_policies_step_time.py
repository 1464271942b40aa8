"""Step times from reports, the line of an exploration, and the line that follows a network."""

from __future__ import annotations

import json
from math import inf, isfinite, nan

import pytest

from policies.base import DENSE, StepReport
from policies.estimators import relative_change
from policies.step_time import CostModel, StepLine, seconds_without_compression, step_seconds


def one_step(cf, seconds, **more):
    return StepReport(0, cf, timed_cf=cf, seconds=seconds, **more)


def test_step_times():
    assert step_seconds(one_step(10.0, 0.5)) == 0.5
    assert step_seconds(StepReport(0, 10.0, median_seconds=0.4)) == 0.4
    assert step_seconds(one_step(10.0, -1.0)) is None
    assert seconds_without_compression(one_step(10.0, 0.5, compress_seconds=0.2)) == pytest.approx(
        0.3
    )
    assert seconds_without_compression(one_step(10.0, 0.5, compress_seconds=0.6)) == 0.5
    assert seconds_without_compression(one_step(10.0, 0.5)) == 0.5
    assert seconds_without_compression(one_step(10.0, nan)) is None
    assert isfinite(relative_change(2.0, 1.0))


# CostModel


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
    assert len(dict(model.state_dict()["since_forgotten"])[10.0]) == 32


def test_step_times_without_compression():
    model = cost_of((10.0, 0.5, 8.0, 0.1), (20.0, 0.4), (40.0, 0.1, 8.0, 0.3))
    assert model.without_compression() == pytest.approx({10.0: 0.4, 20.0: 0.4, 40.0: 0.1})


# StepLine


def line_at(*times):
    line = StepLine()
    for cf, seconds in times:
        line.restart(cf)
        for _ in range(3):
            line.observe(StepReport(0, 77.0, timed_cf=cf, seconds=seconds))
    return line


def test_a_line_from_two_cfs_then_followed_with_one():
    line = line_at((10.0, 0.3), (40.0, 0.15))
    assert line.solve(10.0, 2000.0, 40.0, 500.0)
    assert (line.a, line.b) == (pytest.approx(0.1), pytest.approx(1e-4))
    assert line.share(10.0, 2000.0) == pytest.approx(2 / 3)
    line.restart(10.0)
    assert line.seconds(10.0) is None
    for _ in range(3):
        line.observe(StepReport(0, 10.0, timed_cf=10.0, seconds=0.5))
    line.follow(10.0, 2000.0)
    assert (line.a, line.b) == (pytest.approx(0.1), pytest.approx(2e-4))


def test_a_line_cannot_be_found_from_equal_sizes_or_no_times():
    line = line_at((10.0, 0.3), (40.0, 0.15))
    assert not line.solve(10.0, 500.0, 40.0, 500.0)
    assert not line.solve(10.0, 500.0, 20.0, 300.0)
    assert line.a is None


def test_a_line_has_no_negative_parts():
    line = line_at((10.0, 0.3), (40.0, 0.4))
    assert line.solve(10.0, 2000.0, 40.0, 500.0)
    assert (line.a, line.b) == (pytest.approx(0.3), 0.0)
    line = line_at((10.0, 0.4), (40.0, 0.01))
    line.solve(10.0, 2000.0, 40.0, 500.0)
    assert line.a == 0.0


def test_a_small_change_of_a_counts_by_half_and_a_large_one_at_once():
    line = line_at((10.0, 0.3), (40.0, 0.15))
    line.solve(10.0, 2000.0, 40.0, 500.0)
    for more, a in [(0.02, 0.11), (0.5, 0.6)]:
        fresh = line_at((10.0, 0.3 + more), (40.0, 0.15 + more))
        fresh.a = line.a
        fresh.solve(10.0, 2000.0, 40.0, 500.0)
        assert fresh.a == pytest.approx(a)


def test_compression_is_part_of_a_compressed_step_only():
    line = line_at((10.0, 0.3), (40.0, 0.15))
    line.solve(10.0, 2000.0, 40.0, 500.0)
    line.observe(StepReport(0, 10.0, timed_cf=10.0, seconds=0.4, compress_seconds=0.1))
    assert line.share(DENSE, 1000.0) == pytest.approx(0.5)
    assert line.share(10.0, 1000.0) == pytest.approx(0.1 / 0.3)
