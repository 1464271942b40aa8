"""A rank's step times, by a clock that moves when told to."""

from __future__ import annotations

from math import isnan

import pytest

from adaptive import LinkSpec
from adaptive.network.collectives import Traffic
from adaptive.network.timing import Stopwatch, Timestamps
from runs.modelled_clock import ModelledClock
from tests.distributed.setting import Clock


def _step(watch: Stopwatch, cf: float, seconds: float, counts: bool = True) -> dict[str, float]:
    """A step at `cf` that takes so long; the statistics that tell of the step before."""
    watch.stop(counts)
    told = watch.start(cf)
    watch.sent(Traffic(wire=100 * cf))
    assert isinstance(watch.clock, Clock)
    watch.clock.now += seconds
    return told


def test_a_step_is_told_of_with_the_next_and_its_median_is_of_its_own_cf() -> None:
    watch = Stopwatch(Timestamps(Clock()))
    first = _step(watch, 1.0, 9.0, counts=False)
    second = _step(watch, 10.0, 0.5, counts=False)  # the first of all is not counted
    assert first == second == {}
    assert all(map(isnan, watch.timed[:2]))
    told = [_step(watch, cf, seconds) for cf, seconds in ((10, 0.7), (20, 4.0), (10, 0.8), (1, 1))]
    assert [each["seconds"] for each in told] == pytest.approx([0.5, 0.7, 4.0, 0.8])
    assert [each["median_seconds"] for each in told] == pytest.approx([0.5, 0.6, 4.0, 0.7])
    assert watch.timed == (10, 1000, 1)


def test_the_pause_before_a_resumed_step_is_not_timed() -> None:
    clock = Clock()
    watch, later = Stopwatch(Timestamps(Clock())), Stopwatch(Timestamps(clock))
    for _ in range(3):
        _step(watch, 10.0, 0.5)
    clock.now = 100.0
    pause = later.load_state_dict(watch.state_dict(), same_clock=False)
    assert pause == pytest.approx(100 - 1.5)
    assert _step(later, 10.0, 0.9) == {}
    # Of those before, too.
    assert _step(later, 10.0, 0.9)["median_seconds"] == pytest.approx(0.5)


def test_by_a_modelled_clock_a_step_takes_what_its_bytes_do() -> None:
    watch = Stopwatch(Timestamps(ModelledClock(0.1, LinkSpec.parse("8mbit"))))
    watch.stop(counts=False)
    watch.start(10.0)
    watch.sent(Traffic(wire=1e6))
    assert watch.stop(counts=True) == pytest.approx(0.1 + 1.0)
    told = watch.start(10.0)
    assert (told["compute_seconds"], told["exchange_seconds"]) == pytest.approx((0.1, 1.0))


@pytest.mark.parametrize("clock", [ModelledClock(0.1, LinkSpec.parse("8mbit")), Clock()])
def test_when_a_step_ends_is_known_before_the_next_begins(clock: Clock | ModelledClock) -> None:
    watch = Stopwatch(Timestamps(clock))
    assert watch.ends() == clock()  # none is running
    for step in range(5):
        watch.stop(counts=step > 1)
        watch.start(10.0)
        watch.sent(Traffic(wire=1e5 * step, statistics=8.0))
        if isinstance(clock, Clock):
            clock.now += 0.3
        assert watch.ends() == watch.ends()  # nothing moves by it
        ends = watch.ends()
        assert Stopwatch(Timestamps(clock)).ends() == clock()
        watch.stop(counts=step > 1)
        assert clock() == ends
        watch.start(10.0)
        watch.sent(Traffic())
