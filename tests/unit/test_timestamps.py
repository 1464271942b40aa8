"""Steps of a device, by events of a stand-in for one: a GPU would have to be there for real ones.

The stand-in works off what it is given later than the host gives it, and fails whoever reads an
event that it has not passed, as CUDA does.
"""

from __future__ import annotations

import time
from math import isnan

import pytest
import torch

from adaptive.network.timing import Stopwatch, Timestamps


class _Stream:
    """What was given to it: events, and seconds of work between them."""

    def __init__(self) -> None:
        self.queue: list[_Event | float] = []
        self.now = 0.0
        self.reads = 0

    def catch_up(self, left: int = 0) -> None:
        """Work off all but the last so many."""
        while len(self.queue) > left:
            item = self.queue.pop(0)
            if isinstance(item, _Event):
                item.passed = self.now
            else:
                self.now += item


class _Event:
    def __init__(self, stream: _Stream) -> None:
        self._stream = stream
        self.passed: float | None = None

    def record(self) -> None:
        self._stream.queue.append(self)

    def query(self) -> bool:
        return self.passed is not None

    def elapsed_time(self, other: _Event) -> float:
        assert self.passed is not None, "read before the device came by"
        assert other.passed is not None, "read before the device came by"
        self._stream.reads += 1
        return 1000 * (other.passed - self.passed)


def _watch(stream: _Stream) -> Stopwatch:
    return Stopwatch(Timestamps(time.perf_counter, lambda: _Event(stream)))


def _step(watch: Stopwatch, stream: _Stream, cf: float, counts: bool = True) -> dict[str, float]:
    """A step as the hook has it. The device passes what the last step's statistics waited for when
    the host reads them; nothing of this step is done by then."""
    watch.stop(counts)
    stream.catch_up(left=1)  # all but the event that this step begins with
    told = watch.start(cf)
    with watch.held_up():
        entered = watch.timestamps()
        stream.queue.append(cf / 100)  # compressing
        watch.hook_left(entered, [])
    stream.queue.append(0.5)  # what is exchanged
    began = watch.timestamps()
    stream.queue.append(0.25)
    watch.bucket_done([(began, watch.timestamps())])
    watch.forward(torch.nn.Identity(), ())
    stream.queue.append(2.0)  # the next forward and backward
    return told


def test_on_a_device_calls_beside_backward_take_no_time() -> None:
    stream = _Stream()
    watch = _watch(stream)
    for _ in range(4):
        watch.stop(counts=True)
        stream.catch_up(left=1)
        told = watch.start(10.0)
        entered = watch.timestamps()
        stream.queue.append(1.0)  # backward, beside which the hook compresses, and waits
        watch.hook_left(entered, [(entered, watch.timestamps())])
        with watch.held_up():
            entered = watch.timestamps()
            stream.queue.append(0.25)  # waiting for the last round but one
            waited = watch.timestamps()
            stream.queue.append(0.5)  # compressing is not through when backward is
            watch.hook_left(entered, [(entered, waited)])
        watch.forward(torch.nn.Identity(), ())
        stream.queue.append(2.0)
    assert told["compute_seconds"] == pytest.approx(3.0)
    assert told["compress_seconds"] == pytest.approx(0.5)
    assert told["exchange_seconds"] == pytest.approx(0.25)


def test_a_device_is_told_of_one_step_later_and_never_waited_for() -> None:
    stream = _Stream()
    watch = _watch(stream)
    for _ in range(3):
        assert _step(watch, stream, 10.0, counts=False) == {}
    told = [_step(watch, stream, cf) for cf in (20.0, 30.0, 40.0)]
    assert told[0] == {}
    assert [each["seconds"] for each in told[1:]] == pytest.approx([2.85, 2.95])
    assert [each["compress_seconds"] for each in told[1:]] == pytest.approx([0.1, 0.2])
    for each in told[1:]:
        assert each["decode_seconds"] == pytest.approx(0.25)
        assert each["exchange_seconds"] == pytest.approx(0.5)
        assert each["compute_seconds"] == pytest.approx(2.0)
    assert watch.timed[0] == 20.0
    assert stream.reads


def test_a_device_that_is_further_behind_leaves_the_times_unknown() -> None:
    stream = _Stream()
    watch = _watch(stream)
    for _ in range(4):
        _step(watch, stream, 10.0)
    for _ in range(2):  # and nothing is worked off from here on
        reads = stream.reads
        watch.stop(counts=True)
        told = watch.start(10.0)
    assert isnan(told["seconds"])
    assert told["median_seconds"] == pytest.approx(2.85)  # of those before
    assert stream.reads == reads


def test_nothing_of_a_step_on_a_device_is_saved() -> None:
    stream = _Stream()
    watch = _watch(stream)
    for _ in range(5):
        _step(watch, stream, 10.0)
    state = watch.state_dict()
    assert state["timing"] is None
    later = _watch(stream)
    later.load_state_dict(state, same_clock=False)
    stream.catch_up()
    assert _step(later, stream, 10.0) == _step(later, stream, 10.0) == {}
    assert _step(later, stream, 10.0)["seconds"] == pytest.approx(2.85)


def test_events_are_for_devices_without_a_clock_of_somebodys_own() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    assert Timestamps.of(time.perf_counter, cpu).event is None
    assert Timestamps.of(time.perf_counter, gpu).event is not None
    assert Timestamps.of(lambda: 1.0, gpu).event is None
