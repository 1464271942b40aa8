"""What notices that something has drifted, part by part."""

from __future__ import annotations

from math import isfinite, nan

import pytest

from policies.base import StepReport
from policies.drift import MAX_DOUBLINGS, SOON, Cooldown, Signal, Watch, apart
from policies.glance import Glance
from policies.step_times import median as low_median
from policies.step_times import single, without_compression


@pytest.mark.parametrize(
    ("now", "before", "distance"),
    [(1, 1, 0), (1.3, 1, 0.3), (1, 1.3, 0.3), (2, 1, 1), (0, 0, 0), (0, 1, float("inf"))],
)
def test_apart(now, before, distance):
    assert apart(now, before) == pytest.approx(distance)


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
    signal = Signal(0.299, 2)
    assert [signal.judge(value, 1.0) for value in values] == drifts


def test_a_difference_too_small_to_matter_does_not_count():
    signal = Signal(1.0, 1)
    assert not signal.judge(0.04, 0.01, least=0.05)
    assert signal.judge(0.07, 0.01, least=0.05)


def timed(cf, seconds, timed_cf=None, **more):
    return StepReport(0, cf, timed_cf=cf if timed_cf is None else timed_cf, seconds=seconds, **more)


def test_a_watch_compares_each_cf_with_itself():
    watch = Watch(0.3, 1, 2, "gradient")
    watch.begin(40.0, {40.0: 1.0, 10.0: 3.0})
    for report in [timed(40.0, 1.0), timed(10.0, 3.0), timed(10.0, 3.0), timed(40.0, 1.0)]:
        assert watch.observe(report) is None
    assert watch.observe(timed(40.0, 9.0, timed_cf=10.0)) is None  # 10's time
    assert watch.observe(timed(40.0, 2.0)) is None
    assert watch.observe(timed(40.0, 2.0)).what == "time"


def test_a_watch_takes_its_first_window_where_there_is_no_reference():
    watch = Watch(0.3, 1, 1, "gradient")
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

    cooldown = Cooldown(10)
    lasted = []
    for _ in range(MAX_DOUBLINGS + 2):
        cooldown.begin()
        lasted.append(lasts(cooldown))
    assert lasted == [10, 20, 40, 80, 160, 160]
    for _ in range(SOON * 160):
        cooldown.step()
    cooldown.begin()
    assert lasts(cooldown) == 10


def test_a_glance_waits_looks_and_waits_longer():
    glance = Glance(4, 2)

    def cycle():
        seen = []
        while True:
            seen.append(glance.looking)
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
    never = Glance(None, 2)
    assert not any(never.step() or never.looking for _ in range(100))


def test_step_times():
    assert low_median([3.0, 1.0, 2.0, 9.0]) == 2.0
    assert single(timed(10.0, 0.5)) == 0.5
    assert single(StepReport(0, 10.0, median_seconds=0.4)) == 0.4
    assert single(timed(10.0, -1.0)) is None
    assert without_compression(timed(10.0, 0.5, compress_seconds=0.2)) == pytest.approx(0.3)
    assert without_compression(timed(10.0, 0.5, compress_seconds=0.6)) == 0.5
    assert without_compression(timed(10.0, 0.5)) == 0.5
    assert without_compression(timed(10.0, nan)) is None
    assert isfinite(apart(2.0, 1.0))
