"""The sink that calls a tracker's logging function."""

from __future__ import annotations

from typing import Any

import pytest

from adaptive import LogTimeline, MemoryTimeline, StepRecord, StepReport
from adaptive.network.pace import Pace
from adaptive.timeline import sinks
from adaptive.timeline.sinks import SafeTimeline
from policies import Measurement


def _record(step: int, cf: float) -> StepRecord:
    report = StepReport(
        step,
        cf,
        {cf: Measurement(0.5, 0.25, 1.0, 1.0)},
        seconds=0.1,
        median_seconds=0.1,
        wire_bytes=36.0 / cf,
        dense_wire_bytes=36.0,
    )
    pace = Pace(steps=step, seconds=step / 10)
    return StepRecord(
        report, 0.1 * step, 10.0, 7.5, {"floor": cf}, sent=100.0, dense=1000.0, pace=pace
    )


def _logged(interval: int | None) -> list[tuple[int, dict[str, float]]]:
    """Ten steps at CF 10 and one at CF 20: what the function was called with."""
    calls: list[tuple[int, dict[str, float]]] = []
    timeline = LogTimeline(lambda numbers, step: calls.append((step, numbers)), interval)
    for step in range(10):
        timeline.step(_record(step, 10.0))
    timeline.step(_record(10, 20.0))
    timeline.close()
    timeline.close()
    return calls


def test_a_function_gets_the_numbers_of_some_steps_and_the_final_ones() -> None:
    *steps, (last, final) = _logged(4)
    assert [(step, numbers["cf/sent"]) for step, numbers in steps] == [
        *((0, 10), (4, 10), (8, 10)),
        *((9, 10), (10, 20)),  # around the switch
    ]
    assert steps[0][1]["bytes/wire_factor"] == 10
    assert "gradient/norm" not in steps[0][1]  # nobody has measured it: nan
    assert last == 10
    assert final == pytest.approx(
        {"final/bytes_sent": 100, "final/wire_factor": 10, "final/steps_per_second": 10}
    )


def test_by_default_steps_keep_their_distance_in_time() -> None:
    assert [step for step, _ in _logged(None)] == [0, 9, 10, 10]


def test_a_clock_that_is_set_back_stops_no_records(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds, day = [1000.0], [2e9]
    monkeypatch.setattr(sinks.time, "monotonic", lambda: seconds[0])
    monkeypatch.setattr(sinks.time, "time", lambda: day[0] + seconds[0])
    calls: list[int] = []
    timeline = LogTimeline(lambda numbers, step: calls.append(step))
    for step in range(10):
        timeline.step(_record(step, 10.0))
        seconds[0] += LogTimeline.shortest / 2
        day[0] -= 3600 * (step == 4)
    assert calls == [0, 2, 4, 6, 8]


def test_a_function_is_a_sink_as_it_is() -> None:
    calls: list[tuple[int, dict[str, float]]] = []
    memory = MemoryTimeline()
    timeline = SafeTimeline([lambda numbers, step: calls.append((step, numbers)), memory])
    timeline.step(_record(0, 10.0))
    timeline.close()
    assert [step for step, _ in calls] == [0, 0]
    assert calls[1][1]["final/wire_factor"] == 10
    assert len(memory.steps) == 1


@pytest.mark.parametrize("timeline", ["log.jsonl", [MemoryTimeline(), 3], MemoryTimeline])
def test_what_is_no_sink_is_refused(timeline: Any) -> None:
    with pytest.raises(TypeError, match=r"timeline must be a Timeline .* a function"):
        SafeTimeline(timeline)


@pytest.mark.parametrize("log", [None, "print"])
def test_what_cannot_be_called_is_refused(log: Any) -> None:
    with pytest.raises(TypeError, match="log must be a function of numbers and a step, got"):
        LogTimeline(log)
