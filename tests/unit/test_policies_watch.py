"""What notices that something has drifted, part by part."""

from __future__ import annotations

from math import isfinite, nan

import pytest

from policies.base import StepReport
from policies.drift import (
    MAX_COOLDOWN_DOUBLINGS,
    REFERENCE_WINDOWS,
    ChangeTest,
    ChoiceCooldown,
    DriftDetector,
    PeriodicProbe,
)
from policies.estimators import Backoff, relative_change
from policies.estimators import median as low_median
from policies.step_time import seconds_without_compression, step_seconds


@pytest.mark.parametrize(
    ("now", "before", "distance"),
    [(1, 1, 0), (1.3, 1, 0.3), (1, 1.3, 0.3), (2, 1, 1), (0, 0, 0), (0, 1, float("inf"))],
)
def test_relative_changes(now, before, distance):
    assert relative_change(now, before) == pytest.approx(distance)


@pytest.mark.parametrize(
    ("values", "drifts"),
    [
        ([1.3, 1.3], [False, True]),
        ([1.3, 1.2, 1.3], [False, False, True]),  # between the thresholds the count stands
        ([1.3, 1.1, 1.3], [False, False, False]),
        ([1.3, 0.7, 1.3, 0.7, 0.7], [False] * 4 + [True]),  # both sides of it: noise
        ([1.29, 1.29, 1.29], [False] * 3),
    ],
)
def test_a_signal_has_patience_and_hysteresis(values, drifts):
    test = ChangeTest(0.299, 2)
    test.references[10.0] = 1.0, REFERENCE_WINDOWS
    assert [test.changed_from(10.0, value) is not None for value in values] == drifts


def test_a_difference_too_small_to_matter_does_not_count():
    test = ChangeTest(1.0, 1)
    test.references[10.0] = 0.01, REFERENCE_WINDOWS
    assert test.changed_from(10.0, 0.04, least=0.05) is None
    assert test.changed_from(10.0, 0.07, least=0.05) == 0.01


def timed(cf, seconds, timed_cf=None, **more):
    return StepReport(0, cf, timed_cf=cf if timed_cf is None else timed_cf, seconds=seconds, **more)


def test_a_watch_compares_each_cf_with_itself():
    watch = DriftDetector(0.3, 1, 2, "gradient")
    watch.begin(40.0, {40.0: 1.0, 10.0: 3.0})
    for report in [timed(40.0, 1.0), timed(10.0, 3.0), timed(10.0, 3.0), timed(40.0, 1.0)]:
        assert watch.observe(report) is None
    assert watch.observe(timed(40.0, 9.0, timed_cf=10.0)) is None  # 10's time
    assert watch.observe(timed(40.0, 2.0)) is None
    assert watch.observe(timed(40.0, 2.0)).what == "time"


def test_a_watch_takes_its_first_window_where_there_is_no_reference():
    watch = DriftDetector(0.3, 1, 1, "gradient")
    watch.begin(40.0, {})
    assert watch.observe(timed(40.0, 5.0)) is None
    assert watch.observe(timed(40.0, 5.1)) is None
    assert watch.observe(timed(40.0, nan)) is None
    assert watch.observe(timed(40.0, 50.0)).what == "time"


def test_cooldowns_double_when_conclusions_do_not_last():
    def lasts(cooldown):
        steps = 1
        while not cooldown.step():
            steps += 1
        return steps - 1

    cooldown = ChoiceCooldown(10)
    lasted = []
    for _ in range(MAX_COOLDOWN_DOUBLINGS + 2):
        cooldown.begin()
        lasted.append(lasts(cooldown))
    assert lasted == [10, 20, 40, 80, 160, 160]
    for _ in range(Backoff.SOON * 160):
        cooldown.step()
    cooldown.begin()
    assert lasts(cooldown) == 10


def test_a_glance_waits_looks_and_waits_longer():
    glance = PeriodicProbe(4, 2)

    def cycle():
        seen = []
        while True:
            seen.append(glance.active)
            if glance.step():
                return seen

    glance.begin(changed=True)
    assert cycle() == [False] * 4 + [True] * 2
    glance.begin(changed=False)
    assert cycle() == [False] * 8 + [True] * 2
    glance.begin(changed=True)
    for _ in range(5):
        glance.step()
    glance.pause()  # a look that was broken off begins again
    assert cycle() == [True] * 2


def test_step_times():
    assert low_median([3.0, 1.0, 2.0, 9.0]) == 2.0
    assert step_seconds(timed(10.0, 0.5)) == 0.5
    assert step_seconds(StepReport(0, 10.0, median_seconds=0.4)) == 0.4
    assert step_seconds(timed(10.0, -1.0)) is None
    assert seconds_without_compression(timed(10.0, 0.5, compress_seconds=0.2)) == pytest.approx(0.3)
    assert seconds_without_compression(timed(10.0, 0.5, compress_seconds=0.6)) == 0.5
    assert seconds_without_compression(timed(10.0, 0.5)) == 0.5
    assert seconds_without_compression(timed(10.0, nan)) is None
    assert isfinite(relative_change(2.0, 1.0))
